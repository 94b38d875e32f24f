"""What a broad set of runs gives, as digests: for seeing that a change of speed changes no result.

    python bench/digests.py save before.json       the runs as they are now; a minute or two
    python bench/digests.py compare before.json    run again and name every run that differs
    RACKPLAN_WORKLOADS=FOLDER                      adds the recorded traces that lie there

Random small deployments (every policy, push and pull, little KV, drafts, a synchronous EPLB, caps) on a cost with known
answers, then the embedded calibrations on fixed, lognormal and agentic workloads. A digest covers the integer times of
every request, GPU time by cause to the last bit, and every metric. `integers` is the same on every machine; `floats` is
compared on one alone, since numpy's sums depend on the processor.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from random_runs import POLICIES, digest_of, one, random_run  # noqa: E402

from rackplan.calibration.library import default_calibration, load_calibration  # noqa: E402
from rackplan.engine import Deployment, parse_deployment  # noqa: E402
from rackplan.simulator.load import (
    Load,
    Workload,  # noqa: E402
)
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate  # noqa: E402
from rackplan.simulator.workloads import parse_workload  # noqa: E402

RANDOM_RUNS = 400


def h200(*pools: dict[str, Any], **top: Any) -> Deployment:
    return parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": list(pools), **top})


def gb300(*pools: dict[str, Any], **top: Any) -> Deployment:
    return parse_deployment({"model": "deepseek-v4.1-flash", "gpu": "gb300", "pools": list(pools), **top})


def real_runs() -> Iterator[tuple[str, Deployment, Workload, Load, RunOptions]]:
    """(name, deployment, workload, load, options) of the runs on the embedded calibrations."""
    pd = (one("prefill"), one("decode"))
    rack = (
        one("prefill", instances=20, dep=2, max_num_batched_tokens=16384),
        one("decode", dep=32, max_num_batched_tokens=1024, max_num_seqs=128, max_new_kv_loads_per_step=4),
    )
    dep8 = one(dep=8, max_num_batched_tokens=4096, instances=2)
    speculative = {"eplb": {"enabled": True, "redundant_experts": 32}, "speculation": {"draft_tokens": 5}}
    sync = {"eplb": {"enabled": True, "redundant_experts": 32, "use_async": False, "interval_steps": 200}}
    open_20, drained = Load(rate_req_s=20.0), RunOptions(duration_s=60.0)
    cut, warm = RunOptions(duration_s=60.0, drain=False), RunOptions(duration_s=60.0, drain=False, warmup_s=20.0)

    def of(text: str) -> Workload:
        return parse_workload(text)

    yield "aggregated open", h200(one()), of("fixed:512/128"), open_20, drained
    yield "aggregated long", h200(one()), of("fixed:2048/256"), Load(rate_req_s=6.0), drained
    yield "aggregated closed", h200(one()), of("lognormal:1500/200"), Load(concurrency=200), warm
    yield "aggregated synchronous host", h200(one(async_scheduling=False)), of("lognormal:900/90"), open_20, drained
    yield "aggregated dep8", h200(one(dep=8)), of("lognormal:900/300"), Load(rate_req_s=80.0, cv=3.0), drained
    for policy in POLICIES:
        router = {"router": {"policy": policy}}
        yield f"agentx {policy}", gb300(dep8, **router, **speculative), of("agentx"), Load(concurrency=200), cut
    yield "agentx synchronous EPLB", gb300(dep8, **sync), of("agentx"), Load(concurrency=300), warm
    for mode in ("push", "pull"):
        transfer = {"kv_transfer": {"mode": mode}}
        yield f"P/D {mode}", h200(*pd, **transfer), of("fixed:512/128"), open_20, drained
        yield f"P/D bursts {mode}", h200(*pd, **transfer), of("lognormal:900/90"), Load(rate_req_s=20, cv=3), drained
        yield f"rack {mode}", gb300(*rack, **transfer, **speculative), of("agentx"), Load(concurrency=1500), cut
    yield "rack open", gb300(*rack, **speculative), of("lognormal:9000/900"), Load(rate_req_s=60.0), drained
    folder = Path(os.environ.get("RACKPLAN_WORKLOADS", "-"))
    for name in ("mooncake_conversation.jsonl.gz", "azure2023_code.csv.gz", "agentic_requests.csv.gz"):
        if (folder / name).is_file():
            load = Load(concurrency=60) if name.startswith("agentic") else Load()
            options = RunOptions(duration_s=300.0, drain=load.concurrency is None)
            yield f"trace {name}", gb300(dep8, **speculative), of(str(folder / name)), load, options


def all_digests() -> dict[str, dict[str, str]]:
    """By name, in the order of running."""
    found = {f"random {seed}": digest_of(random_run(seed)) for seed in range(RANDOM_RUNS)}
    for seed in range(0, RANDOM_RUNS, 5):
        found[f"step by step {seed}"] = digest_of(random_run(seed, coalesce=False))
    for name, deployment, workload, load, options in real_runs():
        calibration = load_calibration(default_calibration(deployment.model, deployment.gpu))
        found[name] = digest_of(simulate(deployment, workload, load, calibration, options))
        print(name, found[name], file=sys.stderr)
    return found


def main(action: str, path: Path) -> int:
    found = all_digests()
    if action == "save":
        path.write_text(json.dumps(found, indent=0) + "\n")
        return 0
    before = json.loads(path.read_text())
    wrong = [f"{n}: {kind}" for n, d in before.items() for kind in d if found.get(n, {}).get(kind) != d[kind]]
    print("\n".join(wrong) or f"{len(before)} runs, all as before")
    return bool(wrong)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("save", "compare"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
