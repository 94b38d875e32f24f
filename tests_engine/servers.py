"""Starts real vLLM servers, puts `vllm bench serve` on them, reads what the plug-in wrote."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
START_S = 420
"""A start takes 40 s on two idle cores; this machine may be busy."""
CORES = sorted(os.sched_getaffinity(0))
SCHEDULER = "rackplan.engine.vllm_plugin.scheduler.RackplanScheduler"
FLAGS = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--max-model-len": "2048",
    "--max-num-seqs": "32",
    "--max-num-batched-tokens": "512",
    "--scheduler-cls": SCHEDULER,
}
SWITCHES = ("--enforce-eager", "--no-enable-prefix-caching")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass(frozen=True)
class Server:
    name: str
    model: Path
    port: int
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def config(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"config_{self.name}.dp{rank}.json").read_text())

    def step_log(self, rank: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"steps_{self.name}.dp{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        return self.step_log(rank)[1:]

    def post(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Answer of /v1/completions."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps({"model": str(self.model), "ignore_eos": True, "temperature": 0, **body}).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)

    def bench(self, **options: Any) -> dict[str, Any]:
        """Result of `vllm bench serve` with random prompts."""
        path = self.folder / f"bench_{self.name}.json"
        options = {"seed": 1, **options}
        line = [*VLLM, "bench", "serve", "--backend=vllm", "--host=127.0.0.1", f"--port={self.port}", "--ignore-eos",
                f"--model={self.model}", "--dataset-name=random", "--save-result", "--save-detailed",
                f"--result-dir={path.parent}", f"--result-filename={path.name}",
                *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]  # fmt: skip
        done = subprocess.run(line, capture_output=True, text=True, timeout=START_S, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(path.read_text())


@contextlib.contextmanager
def serving(
    name: str, model: Path, folder: Path, *args: str, cores: str, flags: Mapping[str, str] | None = None, **env: str
) -> Iterator[Server]:
    """A server that is healthy; its processes are ended afterwards. `cores`: VLLM_CPU_OMP_THREADS_BIND."""
    server = Server(name, model, free_port(), folder)
    start = launch(server, *args, cores=cores, flags=flags, **env)
    try:
        wait_healthy(server, start)
        yield server
    finally:
        stop(start)


def launch(
    server: Server, *args: str, cores: str, flags: Mapping[str, str] | None = None, **env: str
) -> subprocess.Popen[bytes]:
    options = [part for item in {**FLAGS, **(flags or {})}.items() for part in item]
    line = [*VLLM, "serve", str(server.model), "--host=127.0.0.1", f"--port={server.port}", *options, *SWITCHES, *args]
    own = {"VLLM_CPU_OMP_THREADS_BIND": cores, "RACKPLAN_STEP_LOG_DIR": str(server.folder),
           "RACKPLAN_SERVER_NAME": server.name, "VLLM_LOGGING_LEVEL": "INFO"}  # fmt: skip
    with (server.folder / f"{server.name}.log").open("wb") as log:
        return subprocess.Popen(
            line, env={**os.environ, **own, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def wait_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"{server.name} did not start:\n{server.log[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server's own process group."""
    for sign, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
