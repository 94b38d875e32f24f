"""Starts, awaits and stops the servers of plans.py. Run: `servers.py {start,wait,stop} [NAME...] --out DIR`.

Each server leads its own process group, logs to DIR/NAME.log and leaves its group's number in DIR/NAME.pid; `stop` ends
those groups and no others. The proxy of a prefill/decode pair counts as a server named `proxy`, and order.py's routers
are servers too.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from order import router_config, routers
from parts import SERVE_ARGS
from plans import PROXY_PORT, servers
from record import record

PROXY = Path(__file__).with_name("proxy.py")


def port_of(name: str, gpus: int) -> int:
    if name == "proxy":
        return PROXY_PORT
    router = routers(gpus).get(name)
    return router.port if router else servers(gpus)[name].port


def command(name: str, gpus: int, models: str, out: Path) -> tuple[list[str], dict[str, str]]:
    """Command and added environment of one server."""
    if name == "proxy":
        pair = [str(servers(gpus)[role].port) for role in ("prefill", "decode")]
        return [sys.executable, str(PROXY), str(PROXY_PORT), *pair, str(out / "proxy.csv")], {}
    if name in routers(gpus):
        return [sys.executable, "-m", "rackplan.engine.router", str(out / f"{name}.json")], {}
    server = servers(gpus)[name]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", f"{models}/dsv2lite", "--host", "127.0.0.1"]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, server.gpus))}
    steps = {"RACKPLAN_STEP_LOG_DIR": str(out), "RACKPLAN_SERVER_NAME": name}
    return [*serve, "--port", str(server.port), *SERVE_ARGS.split(), *server.args], {**visible, **steps, **server.env}


def start(name: str, gpus: int, models: str, out: Path) -> None:
    line, env = command(name, gpus, models, out)
    if router := routers(gpus).get(name):
        (out / f"{name}.json").write_text(router_config(router, gpus))
    record(out / "servers.run.json", name, line, env)
    with (out / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            line, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (out / f"{name}.pid").write_text(str(process.pid))


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def alive(pid: int) -> bool:
    """False too for a process that has ended and was not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait(names: list[str], gpus: int, out: Path, timeout_s: float) -> bool:
    """True if all are healthy in time; a server that died is reported at once and not waited for."""
    begin, pending, failed = time.monotonic(), set(names), set()
    while pending and time.monotonic() - begin < timeout_s:
        for name in sorted(pending):
            if healthy(port_of(name, gpus)):
                print(f"{name} healthy after {time.monotonic() - begin:.0f} s", flush=True)
                pending.discard(name)
            elif not (pid := out / f"{name}.pid").exists() or not alive(int(pid.read_text())):
                failed.add(name)
                pending.discard(name)
        time.sleep(1)
    for name in sorted(failed | pending):
        log = out / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else ["never started"]
        errors = [x for x in lines if "rror" in x][-12:]
        print(f"{name} {'died' if name in failed else 'is late'}:", *(errors or lines[-12:]), sep="\n  ", flush=True)
    return not (failed | pending)


def stop(names: list[str], out: Path) -> None:
    """Terminates, and after 8 s kills, the process groups of these servers."""
    groups = {n: int((out / f"{n}.pid").read_text()) for n in names if (out / f"{n}.pid").exists()}
    for sign, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 3)):
        for group in groups.values():
            try:
                os.killpg(group, sign)
            except ProcessLookupError:
                continue
        end = time.monotonic() + patience_s
        while any(map(alive, groups.values())) and time.monotonic() < end:
            time.sleep(0.3)
    for name in groups:
        (out / f"{name}.pid").unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("start", "wait", "stop"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="/tmp/models")
    parser.add_argument("--out", type=Path, default=Path("/tmp/results"))
    parser.add_argument("--timeout", type=float, default=280)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.action == "wait":
        return 0 if wait(args.names, args.gpus, args.out, args.timeout) else 1
    if args.action == "stop":
        stop(args.names, args.out)
        return 0
    for name in args.names:
        if args.dry_run:
            line, env = command(name, args.gpus, args.models, args.out)
            print(*(f"{k}={shlex.quote(v)}" for k, v in env.items()), shlex.join(line))
        else:
            start(name, args.gpus, args.models, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
