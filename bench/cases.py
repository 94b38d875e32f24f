"""The cases of bench/speed.py, and one of them simulated from start to end: `python bench/cases.py CASE FILE`.

A file of its own, because a measured run pays for all that it imports.
"""

import gc
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cProfile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`requests` of `input_tokens` / `output_tokens` at `rate_req_s`, on one instance or on one of each role; or, where
    `prefill` and `decode` give (instances, DEP), AgentX with `concurrency` sessions for a simulated hour."""

    disaggregated: bool = False
    requests: int = 10_000
    input_tokens: int = 512
    output_tokens: int = 128
    rate_req_s: float = 20.0
    concurrency: int = 0
    prefill: tuple[int, int] = (1, 1)
    decode: tuple[int, int] = (1, 1)


AGENTX_S = 3600.0
CASES = {
    "aggregated 10k x 512/128 at 20/s": Case(),
    "aggregated 10k x 2048/256 at 6/s": Case(input_tokens=2048, output_tokens=256, rate_req_s=6.0),
    "P/D 10k x 512/128 at 20/s": Case(disaggregated=True),
    "P/D 10k x 2048/256 at 6/s": Case(disaggregated=True, input_tokens=2048, output_tokens=256, rate_req_s=6.0),
    "aggregated 100k x 512/128 at 20/s": Case(requests=100_000),
    "aggregated 1M x 512/128 at 20/s": Case(requests=1_000_000),
    "AgentX hour, 1P1D DEP32, 3072 sessions": Case(concurrency=3072, prefill=(1, 32), decode=(1, 32)),
    "AgentX hour, 8P1D DEP32, 3072 sessions": Case(concurrency=3072, prefill=(8, 32), decode=(1, 32)),
    "AgentX hour, 5 x DEP8 + DEP32, 4800 sessions": Case(concurrency=4800, prefill=(5, 8), decode=(1, 32)),
    "AgentX hour, 10 x DEP4 + DEP32, 4800 sessions": Case(concurrency=4800, prefill=(10, 4), decode=(1, 32)),
    "AgentX hour, 20 x DEP2 + DEP32, 4800 sessions": Case(concurrency=4800, prefill=(20, 2), decode=(1, 32)),
}


def simulate_case(name: str, path: str, agentx_s: float = AGENTX_S, profile: "Profile | None" = None) -> None:
    """Simulate a case in this process and print how many requests ended. `profile`: of the simulation alone."""
    from rackplan.calibration.library import default_calibration, load_calibration
    from rackplan.engine import parse_deployment
    from rackplan.simulator.load import Load
    from rackplan.simulator.metrics import metrics_of
    from rackplan.simulator.run_options import RunOptions
    from rackplan.simulator.simulate import simulate
    from rackplan.simulator.workloads import parse_workload

    case = CASES[name]
    agentx = case.concurrency > 0
    deployment = parse_deployment(_rack(case) if agentx else _small(case))
    workload = parse_workload("agentx" if agentx else path)
    load = Load(concurrency=case.concurrency or None)
    options = RunOptions(duration_s=agentx_s if agentx else 1e9, drain=not agentx)
    calibration = load_calibration(default_calibration(deployment.model, deployment.gpu))
    with profile or nullcontext():
        result = simulate(deployment, workload, load, calibration, options)
    print(metrics_of(result)["requests"]["finished"])


def _small(case: Case) -> dict[str, Any]:
    roles = ("prefill", "decode") if case.disaggregated else ("aggregated",)
    pools = [{"role": role, "instances": 1, "dep": 1, "max_num_seqs": 512} for role in roles]
    return {"model": "deepseek-v2-lite", "gpu": "h200", "pools": pools}


def _rack(case: Case) -> dict[str, Any]:
    sizes = {"prefill": case.prefill, "decode": case.decode}
    pools: list[dict[str, Any]] = [{"role": r, "instances": n, "dep": dep} for r, (n, dep) in sizes.items()]
    pools[0] |= {"max_num_batched_tokens": 32768}
    pools[1] |= {"max_num_batched_tokens": 1024, "max_num_seqs": 128, "max_new_kv_loads_per_step": 4}
    eplb, drafts = {"enabled": True, "redundant_experts": 64}, {"draft_tokens": 4}
    return {"model": "deepseek-v4.1-flash", "gpu": "gb300", "pools": pools, "eplb": eplb, "speculation": drafts}


if __name__ == "__main__":
    simulate_case(*sys.argv[1:3])
    gc.freeze()  # as the command line does before it ends
