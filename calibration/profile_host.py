"""What a served step takes beyond the GPU time of its batch: from step logs where there are some, else from clients.

Differences of two measured times, so each needs the GPU fit first: engine loop and scheduler (one rank), what several
ranks add, launches that the host bounds, and the front end.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from rackplan.calibration.batch import Batch, gpu_terms_ms
from rackplan.calibration.lockstep import gpu_ms, joint_steps, prefills, requests_of
from rackplan.calibration.physics import PhysicalCost
from rackplan.calibration.readers.profile_folder import ProfileRun
from rackplan.calibration.records import StepLog
from rackplan.calibration.served import (
    Launches,
    decode_intervals_ms,
    launch_at_no_tokens_ms,
    launch_correlation,
    launch_quantiles,
    prompt_steps,
    token_launch_ms,
)
from rackplan.engine import Pool

LEAST_STEPS = 5
"""Steps of one batch size before their median counts."""
LEAST_LAUNCHES = 5
LAUNCHES_FOR_SPREAD = 60
"""Launches before their quantiles say something of one in twenty."""
HOST_BOUND = 1.15
"""A launch that took this much longer than the GPU work of its step was bound by the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedStep:
    """One step as it was served. `gpu_ms`: what exact batches say that its batch takes."""

    dep: int
    requests: int
    prefill: bool
    gpu_ms: float
    wall_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Host work of a step and of a request; `shorter_ms`: how much less a served step took than its exact batch."""

    step_ms: float
    request_ms: float
    shorter_ms: float


def server_pools(run: ProfileRun) -> list[tuple[Pool, tuple[StepLog, ...]]]:
    """The pools that logged steps, each with its ranks' logs; servers are named by their pool's role."""
    roles = {p.role: p for p in run.deployment.pools}
    named = [(server.partition("-")[0], logs) for server, logs in run.logs.items()]
    pairs = [(roles[role] if role in roles else run.deployment.pools[0], logs) for role, logs in named]
    return [(pool, logs) for pool, logs in pairs if len(logs) == pool.dep and logs[0].steps]


def served_steps(run: ProfileRun, cost_of: dict[int, PhysicalCost]) -> list[ServedStep]:
    """Steps of one run in which something decodes. `cost_of`: GPU costs by number of ranks; others are left out."""
    found = []
    for pool, logs in server_pools(run):
        if pool.dep not in cost_of:
            continue
        for step, together in joint_steps(logs):
            assert step.gap_ms is not None
            found.append(
                ServedStep(
                    dep=pool.dep,
                    requests=requests_of(together),
                    prefill=prefills(together),
                    gpu_ms=gpu_ms(cost_of[pool.dep], together, 1 + run.deployment.speculation.draft_tokens),
                    wall_ms=step.gap_ms,
                )
            )
    return found


def client_steps(run: ProfileRun, cost: PhysicalCost) -> list[ServedStep]:
    """Decode steps of one aggregated rank as its clients saw them: one for each batch size, a median of many."""
    if run.deployment.gpus > 1 or not run.served.token_s:
        return []
    context = run.served.mean_context
    return [
        ServedStep(
            dep=1,
            requests=batch,
            prefill=False,
            gpu_ms=sum(gpu_terms_ms(cost, Batch(decodes=batch, context_tokens=context), dep=1).values()),
            wall_ms=ms,
        )
        for batch, ms in decode_intervals_ms([run.served]).items()
        for _ in range(LEAST_STEPS)
    ]


def fit_loop(steps: Iterable[ServedStep]) -> Loop | None:
    """Least squares over the medians of pure decode steps by batch size; None where no size has enough steps."""
    beyond: dict[int, list[float]] = defaultdict(list)
    wall: dict[int, list[float]] = defaultdict(list)
    for s in steps:
        if not s.prefill:
            beyond[s.requests].append(s.wall_ms - s.gpu_ms)
            wall[s.requests].append(s.wall_ms)
    sizes = [n for n, v in beyond.items() if len(v) >= LEAST_STEPS]
    if not sizes:
        return None
    extra = np.array([np.median(beyond[n]) for n in sizes])
    weight = np.array([np.sqrt(len(wall[n])) / np.median(wall[n]) for n in sizes])
    (step_ms, request_ms), _ = nnls(np.stack([weight, weight * np.array(sizes)], axis=1), weight * extra)
    shorter = 0.0 if step_ms + request_ms > 0 else max(0.0, -float(np.average(extra, weights=weight)))
    return Loop(step_ms=float(step_ms), request_ms=float(request_ms), shorter_ms=shorter)


def several_ranks_ms(steps: Sequence[ServedStep], loop: Loop) -> float | None:
    """What a decode step of several ranks takes beyond its GPU time as predicted and the loop of one rank."""
    extra = [
        s.wall_ms - s.gpu_ms - loop.step_ms - loop.request_ms * s.requests + loop.shorter_ms
        for s in steps
        if s.dep > 1 and not s.prefill
    ]
    return max(0.0, float(np.median(extra))) if len(extra) >= LEAST_STEPS else None


def launch_terms(runs: Iterable[ProfileRun], cost: PhysicalCost) -> dict[str, Any]:
    """Coefficients of launches that enough steps of aggregated runs on one GPU with async scheduling tell: means within
    the captured sizes and past them, what tokens add, and the spread. Of means only launches count that took longer
    than the GPU work of their step."""
    found = [_launches(run, cost) for run in runs if _tells_launches(run)]
    within = [w for w, _ in found if len(w.ms) >= LEAST_LAUNCHES]
    past = [e for _, e in found if len(e.ms) >= LEAST_LAUNCHES]
    terms: dict[str, Any] = {}
    if within:
        terms["piecewise_floor_ms"] = launch_at_no_tokens_ms(within, 0.0)
    if past:
        token_ms = token_launch_ms(past)
        terms |= {"eager_floor_ms": launch_at_no_tokens_ms(past, token_ms), "eager_token_launch_ms": token_ms}
        if sum(len(e.ms) for e in past) >= LAUNCHES_FOR_SPREAD:
            terms["launch_quantiles"] = launch_quantiles(past, token_ms)
            terms["launch_correlation"] = launch_correlation(past)
    return terms


def _tells_launches(run: ProfileRun) -> bool:
    return run.deployment.gpus == 1 and run.deployment.pools[0].async_scheduling and bool(run.served.token_s)


def _launches(run: ProfileRun, cost: PhysicalCost) -> tuple[Launches, Launches]:
    """Host-bound launches of one run: within the captured sizes, and past them."""
    steps = prompt_steps(run.served)
    work = [
        sum(gpu_terms_ms(cost, Batch(chunks=1, new_tokens=new), dep=1).values())
        for new in steps.new_tokens.astype(int).tolist()
    ]
    bound = steps.launch_ms > HOST_BOUND * np.array(work)
    past = steps.new_tokens > run.deployment.pools[0].max_cudagraph_capture_size
    return tuple(Launches(ms=steps.launch_ms[k], tokens=steps.tokens[k]) for k in (bound & ~past, bound & past))  # type: ignore[return-value]
