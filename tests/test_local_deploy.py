"""Deploying on this machine: all or nothing, with real processes of a pretended vLLM; nothing outlives its end."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_model_folder import QWEN3_MOE, save

from rackplan.engine import DeployError, InfeasibleError, InputError, parse_deployment
from rackplan.engine.deploy_state import Launch, StateFolder
from rackplan.engine.local import Machine, Verdict
from rackplan.engine.local_status import status_document
from rackplan.engine.servers import MARK, answers, processes_of

FAKE = Path(__file__).with_name("fake_engine.py")
NARROW = {"role": "aggregated", "max_num_seqs": 8}


def keep(record):
    return Verdict(keep=True, result={"seen": record.id})


class Rack:
    """A machine with a pretended engine, and the deployments that a test puts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        shutil.copy(FAKE, folder / "fake_engine.py")
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "fake_engine.py"}" "$@"\n')
        self.python.chmod(0o755)
        self.model = save(folder / "model", QWEN3_MOE)
        self.state = StateFolder(folder / "state")
        self.said: list[str] = []
        self.port = free_ports(110)

    def machine(self, timeout_s: float = 20.0) -> Machine:
        return Machine(self.state, self.said.append, timeout_s)

    def faults(self, *words: str) -> None:
        (self.folder / "faults").write_text("\n".join(words))

    def launch(self, *pools: dict, **parts) -> Launch:
        sizes = {"instances": 1, "dep": 1, "max_num_batched_tokens": 512, "max_num_seqs": 16}
        pools = pools or ({"role": "aggregated"},)
        data = {
            "model": self.model,
            "gpu": "cpu",
            "max_model_len": 1024,
            "pools": [{**sizes, "gpu_memory_utilization": 0.45, **p} for p in pools],
            **parts,
        }
        return Launch(
            deployment=parse_deployment(data),
            device="cpu",
            engine_version="0.32",
            model=self.model,
            python=str(self.python),
            port=self.port,
        )

    def running(self) -> list[psutil.Process]:
        """Every process that carries the mark of a deployment of this state folder."""
        ids = {p.name for p in self.state.folder.glob("2*")}
        return [p for id in ids for p in processes_of(id)]

    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(20000 + os.getpid() % 20000, 60000, count):
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", first))
                b.bind(("127.0.0.1", first + 100))
                return first
            except OSError:
                continue
    raise AssertionError("no free ports")


@pytest.fixture
def rack(tmp_path):
    rack = Rack(tmp_path)
    yield rack
    for process in rack.running():
        process.kill()


def test_a_deployment_serves_reads_back_what_was_planned_and_stops_without_a_trace(rack):
    record = rack.machine().deploy(rack.launch(), keep)
    assert record.phase == "serving"
    assert answers(rack.url())
    assert len(rack.running()) == 2  # the server and its worker, which has a session of its own
    status = status_document(rack.state)
    assert status["current"]["phase"] == "serving"
    assert [s["healthy"] for s in status["current"]["servers"]] == [True]
    assert rack.machine().stop() == 2
    assert rack.running() == []
    assert status_document(rack.state)["current"] is None
    assert rack.machine().stop() == 0


def test_prefill_and_decode_are_reached_through_one_router(rack):
    import httpx

    launch = rack.launch({"role": "prefill"}, {"role": "decode"}, kv_transfer={"mode": "pull"})
    record = rack.machine().deploy(launch, keep)
    assert [s.name for s in record.servers] == ["prefill-0", "decode-0", "router"]
    asked = httpx.post(f"{rack.url()}/v1/completions", json={"prompt": "p", "max_tokens": 5}, trust_env=False).json()
    assert asked["asked"]["kv_transfer_params"] == {"from": "fake"}
    assert asked["asked"]["max_tokens"] == 5


def test_what_is_not_kept_is_undone_and_the_old_one_serves_again(rack):
    old = rack.machine().deploy(rack.launch(), keep)
    with pytest.raises(DeployError, match=f"too slow; rolled back, {old.id} serves again as"):
        rack.machine().deploy(rack.launch(NARROW), lambda r: Verdict(keep=False, reason="too slow"))
    status = status_document(rack.state)
    assert status["current"]["phase"] == "serving"
    assert "too slow" in status["last"]["reason"]
    assert rack.state.read().current.launch == old.launch
    assert answers(rack.url())
    assert len(rack.running()) == 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("die", "aggregated-0 ended while starting: RuntimeError: no memory for the KV pool"),
        ("sick", "aggregated-0 is not healthy after 2 s"),
        ("ignore-seqs", "max_num_seqs was planned as 16, the engine has 8"),
        ("old-pod", 'revision was planned as "2.*", the engine has "an older one"'),
    ],
)
def test_an_engine_that_does_not_do_what_was_planned_leaves_nothing(rack, fault, told):
    rack.faults(fault)
    with pytest.raises(DeployError, match=told) as e:
        rack.machine(timeout_s=2).deploy(rack.launch(), keep)
    assert "nothing serves" in str(e.value)
    assert "\n" not in str(e.value)
    assert rack.running() == []
    assert rack.state.read().current is None
    assert rack.state.read().last.phase == "failed"


def test_a_server_that_ignores_being_asked_is_killed_with_its_workers(rack, monkeypatch):
    from rackplan.engine import local, servers

    rack.faults("stubborn")
    rack.machine().deploy(rack.launch(), keep)
    monkeypatch.setattr(local, "stop", lambda mark: servers.stop(mark, grace_s=0.5))
    assert rack.machine().stop() == 2
    assert rack.running() == []


def test_an_interrupt_in_the_middle_undoes_it_and_passes_on(rack):
    def interrupted(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rack.machine().deploy(rack.launch(), interrupted)
    assert rack.running() == []
    assert rack.state.read().current is None


def test_a_tool_that_was_killed_leaves_nothing_that_the_next_deploy_does_not_end(rack):
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from rackplan.engine.deploy_state import Launch, StateFolder; from rackplan.engine.local import Machine;"
        "import os, signal;"
        "launch = Launch.model_validate_json(sys.argv[3]);"
        "Machine(StateFolder(Path(sys.argv[2])), print, 20).deploy(launch, lambda r: os.kill(os.getpid(), 9))"
    )
    args = [str(FAKE.parent), str(rack.state.folder), rack.launch().model_dump_json()]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=False)
    assert done.returncode == -9
    left = rack.state.read().current
    assert left.phase == "checking"
    assert len(processes_of(left.id)) == 2
    assert status_document(rack.state)["current"]["phase"] == "checking"
    record = rack.machine().deploy(rack.launch(), keep)
    assert processes_of(left.id) == []
    assert record.phase == "serving"
    assert len(rack.running()) == 2


def test_a_rollback_brings_the_one_before_back_and_another_undoes_it(rack):
    first = rack.machine().deploy(rack.launch(), keep)
    second = rack.machine().deploy(rack.launch(NARROW), keep)
    assert rack.state.read().previous.launch == first.launch
    with pytest.raises(DeployError, match="rolled back"):
        rack.machine().deploy(rack.launch(), lambda r: Verdict(keep=False, reason="no"))
    assert rack.state.read().current.launch == second.launch
    back = rack.machine().rollback()
    assert back.launch == first.launch
    assert len(rack.running()) == 2
    assert rack.machine().rollback().launch == second.launch


def test_a_stopped_deployment_can_be_brought_back(rack):
    first = rack.machine().deploy(rack.launch(), keep)
    rack.machine().stop()
    assert rack.machine().rollback().launch == first.launch
    assert answers(rack.url())


def test_there_is_nothing_to_roll_back_to_at_first(rack):
    with pytest.raises(DeployError, match="nothing to roll back to"):
        rack.machine().rollback()


def test_a_port_in_use_touches_nothing(rack):
    old = rack.machine().deploy(rack.launch(), keep)
    other = Rack.launch(rack)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: 127.0.0.1:{port} is in use"):
            rack.machine().deploy(other.model_copy(update={"port": port}), keep)
    assert rack.state.read().current == old
    assert answers(rack.url())


def test_memory_that_is_not_there_touches_nothing(rack, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 2**30})())
    with pytest.raises(InfeasibleError, match="the machine has 1.0 GiB free"):
        rack.machine().deploy(rack.launch(), keep)
    assert not list(rack.state.folder.glob("2*"))


def test_another_release_than_the_launch_is_for_is_refused(rack):
    launch = rack.launch().model_copy(update={"engine_version": "0.33"})
    with pytest.raises(InputError, match="has vLLM 0.32"):
        rack.machine().deploy(launch, keep)


def test_one_tool_at_a_time(rack):
    with rack.state.locked(), pytest.raises(InputError, match="another rackplan is at work"):
        rack.machine().stop()


def test_a_damaged_state_file_is_said(rack):
    rack.state.folder.mkdir(parents=True)
    rack.state.file.write_text('{"format": 1, "current": {"id": 3}}')
    with pytest.raises(InputError, match=r"state.json: current.*remove the file"):
        rack.machine().stop()


def test_servers_die_and_status_says_so(rack):
    rack.machine().deploy(rack.launch(), keep)
    for process in rack.running():
        process.kill()
    deadline = time.monotonic() + 5
    while status_document(rack.state)["current"]["servers"][0]["alive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert status_document(rack.state)["current"]["phase"] == "failed"


def test_a_mark_names_its_own_processes_alone(rack):
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], env={**os.environ, MARK: "other"})
    record = rack.machine().deploy(rack.launch(), keep)
    rack.machine().stop()
    assert processes_of(record.id) == []
    assert mine.poll() is None
    mine.kill()
    mine.wait()


def test_the_state_is_whole_json_at_every_step(rack, monkeypatch):
    seen = []
    write = StateFolder.write

    def noted(self, state):
        write(self, state)
        seen.append(json.loads(self.file.read_text())["current"]["phase"])

    monkeypatch.setattr(StateFolder, "write", noted)
    rack.machine().deploy(rack.launch(), keep)
    assert seen == ["starting", "starting", "checking", "serving"]
