"""Processes of servers: started, found again, awaited, ended for sure.

A server and all that it starts carry the deployment's id in their environment (`MARK`), and stand in a session of their
own. So they are found again after this tool has died, whatever it had written down, and no other process is touched.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from rackplan.engine.errors import DeployError

MARK = "RACKPLAN_DEPLOYMENT"
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Without it vLLM, which renames its processes, would write over their environment, and with it the mark."""
GRACE_S = 20.0
"""How long a server has to end its requests and its workers; vLLM takes 2 to 10 s."""
POLL_S = 0.1
ERROR_LINES = 3

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A started server. `created_s`: when its first process began, by the machine's clock; with `pid` it tells the
    process from a later one of the same number. `url`: where it answers, None where it does not."""

    name: str
    pid: int
    created_s: float
    url: str | None
    log: str

    @property
    def alive(self) -> bool:
        """Does its first process still run?"""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def start(
    name: str, argv: Sequence[str], env: Mapping[str, str], *, mark: str, url: str | None, log_dir: Path
) -> Server:
    """Start `argv` with `env` added to this process's environment; its output goes to `log_dir`/NAME.log.

    Raises DeployError where the program cannot be run.
    """
    log = log_dir / f"{name}.log"
    with log.open("ab") as out:
        try:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **env, **KEEP_ENVIRONMENT, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        except OSError as e:
            raise DeployError(f"{name}: {argv[0]} cannot be run ({e.strerror}); give its path with --python") from None
    _children.append(process)
    created_s = psutil.Process(process.pid).create_time()
    return Server(name=name, pid=process.pid, created_s=created_s, url=url, log=str(log))


_children: list[subprocess.Popen[bytes]] = []
"""What this process started, so that what has ended is reaped and not left a zombie."""


def processes_of(mark: str) -> list[psutil.Process]:
    """Every running process of this user that carries `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def stop(mark: str, grace_s: float = GRACE_S) -> int:
    """End all processes that carry `mark`: asked first, killed after `grace_s`. Returns how many there were.

    Raises DeployError where one outlives being killed.
    """
    first = processes_of(mark)
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + grace_s
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        # Leaders end their own workers; workers whose leader is gone lead themselves and are asked in their turn.
        for process in set(_leaders(left)) - asked:
            _send(process, signal.SIGTERM)
            asked.add(process)
        time.sleep(POLL_S)
        _reap()
    for process in left:
        _send(process, signal.SIGKILL)
    _, stuck = psutil.wait_procs(left, timeout=5)
    _reap()
    if stuck := [p for p in stuck if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        raise DeployError(f"process {stuck[0].pid} does not end; look at it with ps and end it by hand")
    return len(first)


def _leaders(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those whose parent is not among them: they end their own workers."""
    pids = {p.pid for p in processes}
    leaders = []
    for process in processes:
        try:
            if process.ppid() not in pids:
                leaders.append(process)
        except psutil.NoSuchProcess:
            continue
    return leaders


def _send(process: psutil.Process, sign: signal.Signals) -> None:
    try:
        process.send_signal(sign)
    except psutil.NoSuchProcess:
        return


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def answers(url: str, path: str = "/health") -> bool:
    """Does a server say at `url` that it is well?"""
    try:
        return httpx.get(f"{url}{path}", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_healthy(servers: Iterable[Server], timeout_s: float, report: Report) -> None:
    """Return when every server that has a URL is well.

    Raises DeployError, with the last errors of its log, for one that ends or is late.
    """
    begin, pending = time.monotonic(), list(servers)
    while pending:
        _reap()
        for server in pending:
            if not server.alive:
                raise DeployError(f"{server.name} ended while starting: {last_error(Path(server.log))}")
        if time.monotonic() - begin > timeout_s:
            server = pending[0]
            raise DeployError(
                f"{server.name} is not healthy after {timeout_s:g} s: {last_error(Path(server.log))}; "
                f"give it longer with --start-timeout"
            )
        well = [s for s in pending if s.url is None or answers(s.url)]
        for server in well:
            report(f"{server.name} healthy after {time.monotonic() - begin:.0f} s")
        pending = [s for s in pending if s not in well]
        if pending:
            time.sleep(POLL_S)


def last_error(log: Path) -> str:
    """The last lines of a log that name an error, else its last line, in one line with the log's path."""
    try:
        lines = [x.strip() for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    except OSError:
        lines = []
    told = [x for x in lines if "Error" in x or "error:" in x][-ERROR_LINES:] or lines[-1:] or ["(empty)"]
    return f"{' | '.join(line[-200:] for line in told)} (see {log})"
