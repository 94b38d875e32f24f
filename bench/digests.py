"""What a broad set of runs gives, as digests: for seeing that a change of speed changes no result.

    python bench/digests.py save before.json       the runs as they are now; a minute or two
    python bench/digests.py compare before.json    run again and name every run that differs
    RACKPLAN_WORKLOADS=FOLDER                      adds the recorded traces that lie there

Random small deployments (every policy, push and pull, little KV, drafts, a synchronous EPLB, caps) on a cost with known
answers, then the embedded calibrations on fixed, lognormal and agentic workloads. A digest covers the integer times of
every request, GPU time by cause to the last bit, and every metric. `integers` is the same on every machine; `floats` is
compared on one alone, since numpy's sums depend on the processor.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from models import FakeCalibration, GivenRequests, LinearCost  # noqa: E402

from rackplan.calibration.library import default_calibration, load_calibration  # noqa: E402
from rackplan.engine import Deployment, parse_deployment, plan_memory  # noqa: E402
from rackplan.simulator.metrics import Measured, gpu_time_share, metrics_of  # noqa: E402
from rackplan.simulator.request import Load, Request, Workload  # noqa: E402
from rackplan.simulator.simulate import RunOptions, SimResult, simulate  # noqa: E402
from rackplan.simulator.workloads import parse_workload  # noqa: E402

RANDOM_RUNS = 400
POLICIES = ("round_robin", "least_requests", "least_tokens", "prefix_affinity")
ARRAYS = ("arrival_ns", "first_token_ns", "finish_ns", "input_tokens", "cached_tokens", "scheduled_ns", "request_id")
COUNTS = ("submitted", "rejected", "unfinished", "measured_to_ns", "transfers", "transfer_wait_ns", "transfer_ns")


def digest_of(result: SimResult) -> dict[str, str]:
    """Digests of a run: of its integers, and of its floats to the last bit."""
    integers, floats = hashlib.sha256(), hashlib.sha256()
    for name in ARRAYS:
        integers.update(getattr(result, name).astype("<i8").tobytes())
    integers.update(repr([int(getattr(result, name)) for name in COUNTS]).encode())
    measured = Measured(result)
    for pool in result.pools:
        integers.update(repr((int(pool.preemptions), int(pool.most_admitted_in_a_step))).encode())
        floats.update(repr({cause: float(ns) for cause, ns in pool.gpu_ns.items()}).encode())
    floats.update(measured.itl_ms.astype("<f8").tobytes() + measured.itl_weight.astype("<f8").tobytes())
    floats.update(repr((metrics_of(result), gpu_time_share(result))).encode())
    return {"integers": integers.hexdigest()[:16], "floats": floats.hexdigest()[:16]}


def with_kv_tokens(deployment: Deployment, role: str, tokens: int) -> Deployment:
    """The deployment with a share of memory at which a rank of `role` holds about `tokens` of KV."""
    pools = []
    for pool in deployment.pools:
        if pool.role == role:
            spare_gib = plan_memory(deployment, pool).kv_pool_gib
            spare = spare_gib * 2**30 - tokens * deployment.model_spec.kv_bytes_per_token
            share = pool.gpu_memory_utilization - spare / (deployment.gpu_spec.hbm_gb * 1e9)
            pool = pool.model_copy(update={"gpu_memory_utilization": share})
        pools.append(pool)
    return deployment.model_copy(update={"pools": tuple(pools)})


def one(role: str = "aggregated", **pool: Any) -> dict[str, Any]:
    return {"role": role, "instances": 1, "dep": 1, "max_num_seqs": 512, **pool}


def random_deployment(rng: random.Random) -> Deployment:
    """Any of the policies, roles, caps and memory sizes."""
    drafts = rng.choice([0, 0, 3])
    model, gpu = ("deepseek-v4.1-flash", "gb300") if drafts else ("deepseek-v2-lite", "h200")
    ranks = (4, 8, 16) if drafts else (1, 1, 2, 4, 8)
    common: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([512, 2048, 8192]),
        "max_num_seqs": rng.choice([1, 4, 64]),
        "async_scheduling": rng.random() < 0.6,
        "long_prefill_token_threshold": rng.choice([0, 0, 300]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    top: dict[str, Any] = {"model": model, "gpu": gpu, "speculation": {"draft_tokens": drafts}}
    top["router"] = {"policy": rng.choice(POLICIES)}
    if rng.random() < 0.5:
        role = "aggregated"
        top["pools"] = [one("aggregated", **common, instances=rng.choice([1, 2, 3]), dep=rng.choice(ranks))]
    else:
        role = "decode"
        cap = rng.choice([None, 1, 4])
        top["pools"] = [
            one("prefill", **common, instances=rng.choice([1, 2, 3]), dep=rng.choice(ranks)),
            one(role, **common, instances=rng.choice([1, 2]), dep=rng.choice(ranks), max_new_kv_loads_per_step=cap),
        ]
        top["kv_transfer"] = {"mode": rng.choice(["push", "pull"])}
    if rng.random() < 0.5:
        top["eplb"] = {"enabled": True, "interval_steps": 7, "use_async": False}
    deployment = parse_deployment(top)
    return with_kv_tokens(deployment, role, rng.choice([4500, 9000])) if rng.random() < 0.5 else deployment


def random_requests(rng: random.Random) -> list[Request]:
    """Up to 120 requests, bursty or apart, some of them turns of sessions, some with blocks or recorded hits."""
    gap_ms, kind = rng.choice([0.0, 1.0, 20.0, 200.0]), rng.choice(["plain", "sessions", "sessions", "cached"])
    out, now_ms = [], 0.0
    for i in range(rng.randint(1, 120)):
        now_ms += rng.random() * 2 * gap_ms
        request = Request(i, round(now_ms * 1e6), rng.randint(1, 4000), rng.randint(1, 200))
        if kind == "sessions" and rng.random() < 0.5:
            request.session = rng.randrange(6)
            request.reuse_tokens = rng.randint(0, request.input_tokens)
            request.prefix_session = rng.choice([-1, rng.randrange(6)])
        elif kind == "cached":
            request.cached_tokens = rng.choice([None, rng.randint(0, request.input_tokens)])
        out.append(request)
    return out


def random_run(seed: int, *, coalesce: bool = True) -> SimResult:
    """Run `seed`: the same on every machine, as only exact operations make it."""
    rng = random.Random(seed)
    cost = LinearCost(
        host=rng.choice([0.0, 0.8, 5.0]), sync=rng.choice([0.0, 0.3]), admission=0.2, floor=rng.choice([0.0, 7.0])
    )
    deployment, requests = random_deployment(rng), random_requests(rng)
    primed = [(s, rng.randint(1, 3000)) for s in range(rng.choice([0, 6]))]
    options = RunOptions(coalesce=coalesce, warmup_s=rng.choice([0.0, 0.0, 0.5]), drain=True)
    return simulate(deployment, GivenRequests(requests, primed), Load(), FakeCalibration(cost, balance=0.8), options)


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
