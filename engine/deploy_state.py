"""What a machine serves, what it served before, and how far a change has come: one file that outlives this tool.

Every step of a deployment is written down before it is taken, so that whatever is found later can be ended or undone.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rackplan.engine.deployment import Deployment
from rackplan.engine.errors import InputError
from rackplan.engine.files import write_all
from rackplan.engine.parser_table import EngineVersion
from rackplan.engine.servers import Server, processes_of
from rackplan.engine.specs import Device

Phase = Literal["starting", "checking", "serving", "stopped", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Launch(_Part):
    """What is started and where. `device`: cuda or cpu; `engine_version`: 0.32 or 0.33; `model`: what vLLM loads;
    `python`: the interpreter that has vLLM; `port`: where the deployment answers."""

    deployment: Deployment
    device: Device
    engine_version: EngineVersion
    model: str
    python: str
    host: str = "127.0.0.1"
    port: int = 8000


class Record(_Part):
    """One deployment on this machine. `id`: also the revision that its engines report; `result`: what was measured of
    it; `reason`: why it failed."""

    id: str
    phase: Phase
    launch: Launch
    folder: str
    servers: tuple[Server, ...] = ()
    started: str
    result: dict[str, Any] = {}
    reason: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.launch.host}:{self.launch.port}"


class State(_Part):
    """`current`: what serves, or what a deploy that was cut left; `previous`: what a rollback brings back; `last`: the
    newest deployment that did not come to serve."""

    format: Literal[1] = 1
    current: Record | None = None
    previous: Record | None = None
    last: Record | None = None

    def running(self) -> int:
        """Processes of `current`."""
        return len(processes_of(self.current.id)) if self.current else 0


def default_folder() -> Path:
    """Where the state is kept unless told otherwise: one for each user of the machine."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "rackplan"


class StateFolder:
    """The state file and the folders of deployments beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "state.json"

    def read(self) -> State:
        """The state; an empty one where nothing was deployed. Raises InputError on a damaged file."""
        try:
            return State.model_validate_json(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return State()
        except OSError as e:
            raise InputError(f"{self.file}: cannot be read ({e.strerror}); give another folder with --state") from None
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise InputError(
                f"{self.file}: {where}: {first['msg'].lower()}; end what runs with `rackplan stop --all`, "
                f"then remove the file"
            ) from None

    def write(self, state: State) -> None:
        """Whole or not at all."""
        write_all({self.file: state.model_dump_json(indent=1) + "\n"})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One tool at a time changes a machine. Raises InputError where another does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a")
        except OSError as e:
            raise InputError(
                f"{self.folder}: cannot be written ({e.strerror}); give another folder with --state"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.folder}: another rackplan is at work on it; wait until it has ended") from None
            yield
