"""Deploying on this machine, as a transaction: check, replace, start, verify; keep it, or bring the old one back.

What runs is found by the id in its environment (servers.py), so a tool that died in the middle leaves nothing that
`stop`, `rollback` or the next deploy does not find.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rackplan.engine.deploy_state import Launch, Record, State, StateFolder
from rackplan.engine.errors import DeployError, RackplanError
from rackplan.engine.local_servers import local_commands, preflight
from rackplan.engine.readback import differences
from rackplan.engine.servers import Report, start, stop, wait_healthy


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a look at a running deployment found. `keep`: False rolls back; `reason`: why; `result`: for the record."""

    keep: bool
    reason: str | None = None
    result: dict[str, Any] = field(default_factory=dict)


Verify = Callable[[Record], Verdict]


class Machine:
    """This machine's deployments. `start_timeout_s`: how long servers may take to be healthy."""

    def __init__(self, state: StateFolder, report: Report, start_timeout_s: float = 600.0) -> None:
        self.state, self.report, self.start_timeout_s = state, report, start_timeout_s

    # -- commands ------------------------------------------------------------------------------------------------
    def deploy(self, launch: Launch, verify: Verify) -> Record:
        """Replace what serves by `launch`, if `verify` says so once it runs.

        Raises InputError or InfeasibleError where it cannot start, with nothing touched; DeployError where it did not
        come up or was not kept, with the old deployment serving again.
        """
        with self.state.locked():
            before = self._settled(self.state.read())
            preflight(launch, before.current)
            return self._replace(before, self._new(launch), verify)

    def rollback(self) -> Record:
        """End what serves and bring the previous deployment back. Raises DeployError where there is none."""
        with self.state.locked():
            state = self.state.read()
            if state.previous is None:
                raise DeployError("nothing to roll back to: no earlier deployment has served on this machine")
            back = self._new(state.previous.launch)
            self.report(f"rolling back to {state.previous.id}")
            if state.current:
                stop(state.current.id)
            return self._bring_up(state.current, back, lambda record: Verdict(keep=True), earlier=state.previous)

    def stop(self) -> int:
        """End all that serves; returns how many processes there were. A rollback can bring it back."""
        with self.state.locked():
            state = self.state.read()
            if state.current is None:
                return 0
            count = stop(state.current.id)
            ended = state.current.model_copy(update={"phase": "stopped", "servers": ()})
            kept = ended if state.current.phase == "serving" else state.previous
            self.state.write(State(previous=kept, last=ended))
            return count

    # -- steps ---------------------------------------------------------------------------------------------------
    def _settled(self, state: State) -> State:
        """The state with what a cut deploy left ended, and what died no longer called serving."""
        current = state.current
        if current is None or (current.phase == "serving" and state.running()):
            return state
        self.report(f"{current.id} was left {current.phase} and does not serve: ending what is left of it")
        stop(current.id)
        left = current.model_copy(update={"phase": "failed", "reason": "the tool or its servers ended", "servers": ()})
        back = current if current.phase == "serving" else state.previous
        settled = State(previous=back, last=left)
        self.state.write(settled)
        return settled

    def _new(self, launch: Launch) -> Record:
        now = datetime.now(UTC)
        id = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = self.state.folder / id
        return Record(id=id, phase="starting", launch=launch, folder=str(folder), started=now.isoformat("T", "seconds"))

    def _replace(self, before: State, new: Record, verify: Verify) -> Record:
        old = before.current
        if old is not None:
            self.report(f"ending {old.id}, which serves now")
        # Written first: from here on a tool that dies leaves `new` as what is to be cleaned up.
        self.state.write(State(current=new, previous=old or before.previous))
        if old is not None:
            stop(old.id)
        return self._bring_up(old, new, verify, earlier=before.previous)

    def _bring_up(self, old: Record | None, new: Record, verify: Verify, *, earlier: Record | None) -> Record:
        """`new` serving; or, on any failure, ended and `old` serving again, with `earlier` as what served before it.
        Raises DeployError then."""
        previous = old or earlier
        try:
            running = self._start(new, previous)
            verdict = verify(running)
            if not verdict.keep:
                raise DeployError(verdict.reason or "it was not kept")
            kept = running.model_copy(update={"phase": "serving", "result": verdict.result})
            self.state.write(State(current=kept, previous=previous))
            return kept
        except BaseException as e:
            self._undo(old, new, earlier, e)
            raise

    def _start(self, new: Record, previous: Record | None) -> Record:
        folder = Path(new.folder)
        folder.mkdir(parents=True, exist_ok=True)
        servers = tuple(
            start(c.name, c.argv, c.env, mark=new.id, url=c.url, log_dir=folder)
            for c in local_commands(new.launch, new.id, folder)
        )
        started = new.model_copy(update={"servers": servers})
        self.state.write(State(current=started, previous=previous))
        self.report(f"starting {', '.join(s.name for s in servers)}")
        wait_healthy(servers, self.start_timeout_s, self.report)
        checking = started.model_copy(update={"phase": "checking"})
        self.state.write(State(current=checking, previous=previous))
        if found := differences(checking):
            raise DeployError(f"what runs is not what was planned: {found[0]}" + _more(len(found) - 1))
        self.report("the running configuration is the planned one")
        return checking

    def _undo(self, old: Record | None, new: Record, earlier: Record | None, error: BaseException) -> None:
        """End `new`; bring `old` back. Turns an error of the engine into one that says what became of it all."""
        stop(new.id)
        failed = new.model_copy(update={"phase": "failed", "reason": _told(error), "servers": ()})
        self.state.write(State(previous=old or earlier, last=failed))
        if old is None:
            if isinstance(error, RackplanError):
                raise DeployError(f"{error}; {new.id} was ended, nothing serves") from None
            return
        self.report(f"not kept ({_told(error)}); bringing {old.id} back")
        again = self._new(old.launch)
        try:
            back = self._start(again, earlier)
            kept = back.model_copy(update={"phase": "serving", "result": old.result})
            self.state.write(State(current=kept, previous=earlier, last=failed))
        except RackplanError as e:
            stop(again.id)
            self.state.write(State(previous=old, last=failed))
            raise DeployError(f"{_told(error)}; {old.id} did not come back either ({e}); nothing serves") from None
        if isinstance(error, RackplanError):
            raise DeployError(f"{error}; rolled back, {old.id} serves again as {again.id}") from None


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
