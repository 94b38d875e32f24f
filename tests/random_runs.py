"""Small random runs, the same on every machine, and digests of what runs give."""

import hashlib
import random
from typing import Any

from models import FakeCalibration, GivenRequests, LinearCost, with_kv_tokens

from rackplan.engine import Deployment, parse_deployment
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import Measured, gpu_time_share, metrics_of
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import SimResult, simulate

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


def with_tier(deployment: Deployment, rng: random.Random) -> Deployment:
    """`deployment` with a KV tier in host memory, of one prompt to many, beside KV for two or three prompts or for all.
    """
    tier_gib, kv_tokens = rng.choice([0.05, 0.3, 2.0]), rng.choice([None, 4300, 6000, 9000])
    entry = deployment.pools[0].model_copy(update={"kv_offloading_gib": tier_gib, "enable_prefix_caching": True})
    tiered = deployment.model_copy(update={"pools": (entry, *deployment.pools[1:])})
    return with_kv_tokens(tiered, entry.role, kv_tokens) if kv_tokens else tiered


def random_run(seed: int, *, coalesce: bool = True, tier: bool = False) -> SimResult:
    """Run `seed`: the same on every machine, as only exact operations make it."""
    rng = random.Random(seed)
    cost = LinearCost(
        host=rng.choice([0.0, 0.8, 5.0]), sync=rng.choice([0.0, 0.3]), admission=0.2, floor=rng.choice([0.0, 7.0])
    )
    deployment, requests = random_deployment(rng), random_requests(rng)
    if tier:
        deployment = with_tier(deployment, random.Random(f"tier {seed}"))
    primed = [(s, rng.randint(1, 3000)) for s in range(rng.choice([0, 6]))]
    options = RunOptions(coalesce=coalesce, warmup_s=rng.choice([0.0, 0.0, 0.5]), drain=True)
    return simulate(deployment, GivenRequests(requests, primed), Load(), FakeCalibration(cost, balance=0.8), options)
