"""What simulating costs: CPU and wall seconds, peak memory, requests per CPU second.

Usage: python bench/simulate_bench.py [CASE]. Without CASE every case runs, each in a process of its own, so that a peak
is a case's own. Takes about a minute. Times are of the simulation alone, without imports.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rackplan.calibration.library import default_calibration, load_calibration
from rackplan.engine import Deployment, parse_deployment
from rackplan.simulator.request import Load
from rackplan.simulator.simulate import RunOptions, SimResult, simulate
from rackplan.simulator.workloads import parse_workload

REQUESTS = 10_000
MIB = 1024
"""ru_maxrss counts KiB on Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. `drain`: until all have ended (an open loop), or for its time (a closed one)."""

    deployment: Callable[[], Deployment]
    workload: str
    load: Load
    duration_s: float
    drain: bool


def aggregated() -> Deployment:
    """One H200 that prefills and decodes."""
    pool = {"role": "aggregated", "instances": 1, "dep": 1, "max_num_seqs": 512}
    return parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": [pool]})


def disaggregated() -> Deployment:
    """One H200 that prefills and one that decodes."""
    pools = [{"role": role, "instances": 1, "dep": 1, "max_num_seqs": 512} for role in ("prefill", "decode")]
    return parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": pools})


def rack() -> Deployment:
    """72 GB300: 20 prefill instances of DEP2 and one decode instance of DEP32, EPLB and five drafts."""
    decode = {"role": "decode", "instances": 1, "dep": 32, "max_num_batched_tokens": 1024, "max_num_seqs": 128}
    return parse_deployment(
        {
            "model": "deepseek-v4.1-flash",
            "gpu": "gb300",
            "pools": [
                {"role": "prefill", "instances": 20, "dep": 2, "max_num_batched_tokens": 16384},
                {**decode, "max_new_kv_loads_per_step": 4},
            ],
            "eplb": {"enabled": True, "redundant_experts": 32},
            "speculation": {"draft_tokens": 5},
        }
    )


def open_loop(deployment: Callable[[], Deployment], workload: str, rate_req_s: float) -> Case:
    """REQUESTS Poisson arrivals in the mean."""
    load = Load(rate_req_s=rate_req_s)
    return Case(deployment=deployment, workload=workload, load=load, duration_s=REQUESTS / rate_req_s, drain=True)


CASES = {
    "aggregated 512/128 at 20/s": open_loop(aggregated, "fixed:512/128", 20.0),
    "aggregated 2048/256 at 6/s": open_loop(aggregated, "fixed:2048/256", 6.0),
    "P/D 512/128 at 20/s": open_loop(disaggregated, "fixed:512/128", 20.0),
    "P/D 2048/256 at 6/s": open_loop(disaggregated, "fixed:2048/256", 6.0),
    "P/D AgentX, 3072 sessions, 60 s": Case(
        deployment=rack, workload="agentx", load=Load(concurrency=3072), duration_s=60.0, drain=False
    ),
}


def run(case: Case) -> SimResult:
    """Simulate `case` once, with seed 0."""
    deployment = case.deployment()
    calibration = load_calibration(default_calibration(deployment.model, deployment.gpu))
    options = RunOptions(duration_s=case.duration_s, drain=case.drain)
    return simulate(deployment, parse_workload(case.workload), case.load, calibration, options)


def measure(name: str) -> None:
    """Print one row."""
    began_cpu, began = time.process_time(), time.perf_counter()
    result = run(CASES[name])
    cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    ended = len(result.finish_ns)
    print(f"{name:32s} {ended:8d} {cpu_s:8.2f} {wall_s:8.2f} {peak_mib:10.0f} {ended / cpu_s:14,.0f}", flush=True)


def main() -> None:
    """All cases, one process each."""
    print(
        f"{'case':32s} {'requests':>8s} {'CPU s':>8s} {'wall s':>8s} {'peak MiB':>10s} {'requests/CPU s':>14s}",
        flush=True,
    )
    for name in CASES:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
