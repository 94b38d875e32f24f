"""CPU seconds, wall seconds and peak memory of this simulator and its peers on the same request files.

    python bench/speed.py [--peers FOLDER] [--only TEXT]
    python bench/speed.py --profile CASE           this simulator's time by function

Every run is a process of its own, measured from its start to its end: interpreter, imports, reading the file, metrics.
`net CPU s` is less what the same command takes for one request. FOLDER is what bench/peers.sh has filled; without it
this simulator runs alone. TEXT keeps the cases whose name holds it. All cases take some 10 minutes of CPU time.
The peers time steps with formulas of their own and are asked for no accuracy here: what is compared is the cost of
simulating as many requests of the same lengths and arrivals, on as many instances.
"""

import argparse
import cProfile
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cases import CASES, Case, simulate_case

MIB = 1024
"""ru_maxrss counts KiB on Linux."""
BLOCK_TOKENS = 512
PEER_MODEL = "Qwen/Qwen3-30B-A3B"
"""A model whose configuration the peer ships; the times of its steps do not matter here."""


def write_requests(case: Case, requests: int, path: Path) -> None:
    """Poisson arrivals in Mooncake's format (ms), no two prompts with a block in common."""
    rng, now_s, blocks = random.Random(0), 0.0, -(-case.input_tokens // BLOCK_TOKENS)
    with path.open("w") as file:
        for i in range(requests):
            now_s += rng.expovariate(case.rate_req_s)
            row = {"timestamp": round(now_s * 1e3), "input_length": case.input_tokens}
            hashes = list(range(i * blocks, (i + 1) * blocks))
            file.write(json.dumps({**row, "output_length": case.output_tokens, "hash_ids": hashes}) + "\n")


def profile_case(name: str) -> None:
    """Share of time by function, with the built-in functions that it calls itself; AgentX runs for 300 s."""
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.jsonl"
        write_requests(CASES[name], CASES[name].requests, requests)
        simulate_case(name, str(requests), agentx_s=300.0, profile=profile)
    own: Counter[str] = Counter()
    for (file, _, function), (_, _, seconds, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file != "~":
            own[f"{Path(file).parent.name}/{Path(file).name} {function}"] += seconds
        for (by_file, _, by), (_, _, part, _) in callers.items() if file == "~" else ():
            own[f"{Path(by_file).parent.name}/{Path(by_file).name} {by}"] += part
    for function, seconds in own.most_common(30):
        print(f"| {function} | {100 * seconds / own.total():.1f} % |")


# -- peers -----------------------------------------------------------------------------------------------------------
def dynamo_command(case: Case, peers: Path, requests: Path, folder: Path) -> list[str]:
    """`dynamo.replay`, its Rust core offline."""
    workers = ["--num-workers", "1"]
    if case.disaggregated:
        workers = ["--num-prefill-workers", "1", "--num-decode-workers", "1"]
        for role in ("prefill", "decode"):
            workers += [f"--{role}-engine-args", json.dumps({"worker_type": role})]
    report = ["--report-json", str(folder / "dynamo.json")]
    python = str(peers / "dynamo" / "bin" / "python")
    return [python, "-m", "dynamo.replay", str(requests), "--replay-mode", "offline", *workers, *report]


def aisimulate_command(case: Case, peers: Path, requests: Path, folder: Path) -> list[str]:
    """`aisimulate predict`, its Rust engine with built-in step times."""
    one = ("replicas", "tensor", "pipeline", "attention_data", "moe_tensor", "moe_expert")
    worker = {"timing": {"type": "polynomial"}, "parallelism": dict.fromkeys(one, 1)}
    roles = ("prefill", "decode") if case.disaggregated else ("aggregated",)
    engine = {
        "mode": "disaggregated" if case.disaggregated else "aggregated",
        "model": PEER_MODEL,
        "hardware": "h200_sxm",
        "backend": "vllm",
        "context_length": 8192,
        "workers": dict.fromkeys(roles, worker),
    }
    if case.disaggregated:
        engine["kv_transfer"] = {"bandwidth_gb_per_second": 50}
    source = {"type": "trace", "paths": [str(requests)], "format": "mooncake"}
    config = folder / "aisimulate.yaml"
    # JSON is YAML.
    traffic = {"source": source, "load": {"type": "trace_timestamps"}}
    config.write_text(json.dumps({"traffic": traffic, "engine": engine}))
    out = ["--output-dir", str(folder / "aisimulate"), "--overwrite"]
    return [str(peers / "aisimulate" / "bin" / "aisimulate"), "predict", "-c", str(config), *out]


Command = Callable[[Case, Path, Path, Path], list[str]]
PEERS: dict[str, Command] = {"dynamo.replay 1.3.1": dynamo_command, "aisimulate 0.13.0.dev": aisimulate_command}


# -- measuring -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one process took; `output`: what it printed."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    output: str


def measure(command: list[str], folder: Path) -> Cost | None:
    """Run to the end; None where it fails, whose last words go to stderr."""
    # As a user runs it: Python keeps what it compiled at the first start.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        out.seek(0)
        err.seek(0)
        if process.returncode:
            print(f"{' '.join(command[:3])} … failed: {err.read()[-300:]}", file=sys.stderr)
            return None
        return Cost(cpu_s=_cpu_s(used), wall_s=wall_s, peak_mib=used.ru_maxrss / MIB, output=out.read())


def _cpu_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def show(who: str, requests: int, cost: Cost | None, first: Cost | None, ours_s: float | None) -> None:
    """One row; `first`: the same command for one request, `ours_s`: CPU seconds of this simulator, for the ratio."""
    if cost is None:
        print(f"| {who} | failed | | | | | |", flush=True)
        return
    net = f"{cost.cpu_s - first.cpu_s:.2f}" if first else ""
    ratio = f"{ours_s / cost.cpu_s:.2f}" if ours_s else ""
    numbers = f"{cost.cpu_s:.2f} | {net} | {cost.wall_s:.2f} | {cost.peak_mib:.0f}"
    print(f"| {who} | {numbers} | {requests / cost.cpu_s:,.0f} | {ratio} |", flush=True)


def run_case(name: str, case: Case, peers: Path | None, folder: Path) -> None:
    """All that can run a case, row by row."""
    print(f"\n{name}\n\n| | CPU s | net CPU s | wall s | peak MiB | requests/CPU s | rackplan / it |")
    print("|---|---|---|---|---|---|---|", flush=True)
    many, one = folder / "requests.jsonl", folder / "one.jsonl"
    command = [sys.executable, str(Path(__file__).resolve().parent / "cases.py"), name]
    if case.concurrency:
        cost = measure([*command, "-"], folder)
        show("rackplan", int(cost.output) if cost else 0, cost, None, None)
        for who in PEERS if peers else ():
            print(f"| {who} | does not read this workload: it generates its sessions | | | | | |", flush=True)
        return
    write_requests(case, case.requests, many)
    write_requests(case, 1, one)
    for _ in range(2):  # the first start compiles
        first = measure([*command, str(one)], folder)
    ours = measure([*command, str(many)], folder)
    show("rackplan", case.requests, ours, first, None)
    for who, command_of in PEERS.items() if peers else ():
        assert peers is not None
        first = measure(command_of(case, peers, one, folder), folder)
        cost = measure(command_of(case, peers, many, folder), folder)
        show(who, case.requests, cost, first, ours.cpu_s if ours else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--profile", metavar="CASE")
    given = parser.parse_args()
    if given.profile:
        profile_case(given.profile)
        return
    for name, case in CASES.items():
        if given.only in name:
            with tempfile.TemporaryDirectory() as folder:
                run_case(name, case, given.peers and given.peers.resolve(), Path(folder))


if __name__ == "__main__":
    main()
