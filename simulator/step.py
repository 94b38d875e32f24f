"""How long one lockstep step takes on the wall, and where its time went. Pure functions of a `PoolCost`."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rackplan.simulator.cost import FloatArray, PoolCost, SharedTime
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.step_load import NO_PREFILL, StepLoad

CAUSES = (
    "compute",
    "dp_imbalance",
    "ep_imbalance",
    "dp_sync",
    "host",
    "transfer_wait",
    "kv_full",
    "admission_cap",
    "idle",
)
"""Where GPU time goes; the shares add up to 1. All but `compute` are lost."""

FEW_RANKS = 8
"""Up to here numbers one by one take less time than vectors; the results are the same."""
MOST_STEPS = 256
"""Of one run of steps."""
_AHEAD = np.arange(float(MOST_STEPS))

Times = TypeVar("Times", float, FloatArray)


class StepTimes:
    """Times of a run of equal steps, ms, (steps,) each but for `launch_ms`; of one step, numbers.

    `wall_ms`: from the end of the step before to the end of this one. `lead_ms`: how long before the end of the step
    before the host began this one (0 without async scheduling); `next_lead_ms`: the same of the step that follows.
    `seen_ms`, `next_seen_ms`: likewise, how long before it the scheduler last looked at its queue.
    `launch_ms`: host time of a step. `attention_mean_ms` is the mean over ranks, so that attention_ms less it is lost
    to imbalance.
    """

    __slots__ = (
        "attention_mean_ms",
        "attention_ms",
        "gpu_ms",
        "launch_ms",
        "lead_ms",
        "next_lead_ms",
        "next_seen_ms",
        "seen_ms",
        "shared",
        "wall_ms",
        "wall_without_sync_ms",
    )

    def __init__(
        self,
        wall_ms: Any,
        wall_without_sync_ms: Any,
        lead_ms: Any,
        next_lead_ms: Any,
        seen_ms: Any,
        next_seen_ms: Any,
        launch_ms: float,
        gpu_ms: Any,
        attention_ms: Any,
        attention_mean_ms: Any,
        shared: SharedTime,
    ) -> None:
        self.wall_ms, self.wall_without_sync_ms = wall_ms, wall_without_sync_ms
        self.lead_ms, self.next_lead_ms = lead_ms, next_lead_ms
        self.seen_ms, self.next_seen_ms = seen_ms, next_seen_ms
        self.launch_ms, self.gpu_ms = launch_ms, gpu_ms
        self.attention_ms, self.attention_mean_ms, self.shared = attention_ms, attention_mean_ms, shared


def step_wall_ms(
    gpu_ms: Times,
    floor_ms: float,
    host_ms: float,
    sync_ms: float,
    admission_ms: float,
    async_scheduling: bool,
) -> Times:
    """Wall time of a step among its like. With async scheduling the host prepares the next step under this one's GPU
    time and shows only where it is longer; without, it follows the GPU. The launch floor overlaps the GPU either way.
    """
    host_all = host_ms + sync_ms + admission_ms
    longest = max if isinstance(gpu_ms, float) else np.maximum
    if async_scheduling:
        return longest(gpu_ms, max(floor_ms, host_all))
    return longest(gpu_ms, floor_ms) + host_all


def overlap_ms(
    gpu_ms: FloatArray, floor_ms: float, host_ms: float, lead_ms: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(wall, lead, next lead) of equal steps under async scheduling, each (steps,).

    The host begins a step once it has launched the one before and the GPU has ended the one before that, so it is
    `lead` ahead of the GPU. A step's kernels start after `host_ms` of preparing it and end no earlier than `floor_ms`
    after the host began, as they are launched one by one. In a run of its like a step takes `step_wall_ms`.
    """
    if floor_ms <= host_ms:
        lead = _later(lead_ms, gpu_ms)
        return np.maximum(0.0, host_ms - lead) + gpu_ms, lead, gpu_ms
    wall, leads = np.empty(len(gpu_ms)), np.empty(len(gpu_ms) + 1)
    leads[0] = lead_ms
    for i, gpu in enumerate(gpu_ms.tolist()):
        wall[i], _, leads[i + 1] = overlap_one_ms(gpu, floor_ms, host_ms, float(leads[i]))
    return wall, leads[:-1], leads[1:]


def _later(first: float, of_steps: FloatArray) -> FloatArray:
    """By step, what the one before it had; `first`: of the first one. (steps,)."""
    shifted = np.empty_like(of_steps)
    shifted[0] = first
    shifted[1:] = of_steps[:-1]
    return shifted


def overlap_one_ms(
    gpu_ms: Any, floor_ms: float, host_ms: float, lead_ms: float, after_ms: float = 0.0
) -> tuple[Any, Any, Any]:
    """(wall, lead, next lead) of one step, numbers, as in `overlap_ms`. `after_ms`: work of the host once the step is
    launched, while the GPU runs it; where it is longer the next lead is negative: the GPU waits."""
    wall = host_ms - lead_ms + gpu_ms if host_ms > lead_ms else gpu_ms
    if wall < floor_ms - lead_ms:
        wall = floor_ms - lead_ms
    if after_ms:
        return wall, lead_ms, lead_ms + wall - max(floor_ms + after_ms, host_ms + after_ms, lead_ms)
    if floor_ms <= host_ms:
        return wall, lead_ms, gpu_ms
    return wall, lead_ms, lead_ms + wall - max(floor_ms, lead_ms)


def time_steps(
    cost: PoolCost,
    load: StepLoad,
    batch: DecodeBatch,
    steps: int,
    balancedness: float,
    *,
    extra_host_ms: float,
    after_ms: float,
    sync_ms: float,
    async_scheduling: bool,
    lead_ms: float,
    seen_ms: float,
    own_worker: bool,
) -> StepTimes:
    """The times of `steps` equal steps that differ only in their growing context; more than one only without prefill.

    `extra_host_ms`: work of the host before the launch, `after_ms` behind it, both of one step alone.
    `lead_ms`, `seen_ms`: as the step before left them. `own_worker`: the worker is a process of its own, as vLLM's is
    where an instance has several GPUs. Then a launch does not hold up the scheduler: it plans the next step, and hands
    on tokens, as soon as a step ends on the GPU.
    """
    one = steps == 1
    slowest: Any  # numbers of one step, arrays of several, and so is all that follows from them
    slowest, mean = _attention_of_step(cost, load, batch) if one else _attention_of_run(cost, batch, steps)
    widest, prefill = load.widest_tokens, load.prefill_tokens
    shared = cost.shared_ms(widest, load.total_tokens, prefill, load.prefill_chunks, balancedness)
    gpu = slowest + sum(shared)
    floor = cost.launch_floor_ms(widest, len(load.prefills))
    host = cost.host_ms(load.requests) + (load.admission_ms + extra_host_ms)
    if not async_scheduling:
        wall = step_wall_ms(gpu, max(floor, after_ms), host, sync_ms, 0.0, async_scheduling)
        none = 0.0 if one else np.zeros(steps)
        return StepTimes(wall, wall - sync_ms, none, none, none, none, 0.0, gpu, slowest, mean, shared)
    work = host + sync_ms
    if one:
        wall, lead, next_lead = overlap_one_ms(gpu, floor, work, lead_ms, after_ms)
        shows = sync_ms and work > lead_ms  # else the host is ahead even with the sync
        without_sync = overlap_one_ms(gpu, floor, host, lead_ms)[0] if shows else wall
    else:
        wall, lead, next_lead = overlap_ms(gpu, floor, work, lead_ms)
        without_sync = np.maximum(np.maximum(0.0, host - lead) + gpu, floor - lead) if sync_ms else wall
    if own_worker:
        seen: Any = seen_ms if one else _later(seen_ms, wall)
        return StepTimes(wall, without_sync, lead, next_lead, seen, wall, 0.0, gpu, slowest, mean, shared)
    launch = max(floor, work) + after_ms
    return StepTimes(wall, without_sync, lead, next_lead, lead, next_lead, launch, gpu, slowest, mean, shared)


def _attention_of_step(cost: PoolCost, load: StepLoad, batch: DecodeBatch) -> tuple[float, float]:
    """(slowest rank's, mean over ranks) attention time of one step, ms."""
    n = len(batch.requests)
    attention_ms: Callable[..., Any] = cost.attention_ms  # of numbers too
    if n == 1:
        ms = _attention_of_rank(attention_ms, load, batch, 0) if batch.occupants[0] else 0.0
        return ms, ms
    if n > FEW_RANKS:
        prefill: Any = np.zeros((3, n)) if load.prefills else (0.0, 0.0, 0.0)
        for r, own in load.prefills.items():
            prefill[:, r] = own
        times = attention_ms(*prefill, batch.request_vector, batch.contexts())
        return times.item(times.argmax()), float(np.add.reduce(times)) / n  # several times as fast as its maximum
    each = [0.0] * n
    if not batch.running:
        for r, own in load.prefills.items():
            each[r] = attention_ms(*own, 0.0, 0.0)
    else:
        for r in range(n):
            if batch.occupants[r]:
                each[r] = _attention_of_rank(attention_ms, load, batch, r)
    return max(each), _sum_of_few(each) / n


def _attention_of_rank(attention_ms: Callable[..., float], load: StepLoad, batch: DecodeBatch, r: int) -> float:
    return attention_ms(*load.prefills.get(r, NO_PREFILL), batch.requests[r], batch.context(r))


def _sum_of_few(each: list[float]) -> float:
    """The sum of at most FEW_RANKS numbers as numpy adds them, to the last bit: eight as pairs of pairs."""
    if len(each) == FEW_RANKS:
        a, b, c, d, e, f, g, h = each
        return ((a + b) + (c + d)) + ((e + f) + (g + h))
    total = 0.0
    for ms in each:
        total += ms
    return total


def _attention_of_run(cost: PoolCost, batch: DecodeBatch, steps: int) -> tuple[FloatArray, FloatArray]:
    """The same of `steps` steps of decoding requests, (steps,) each."""
    n, ahead = len(batch.requests), _AHEAD[:steps]
    attention_ms: Callable[..., Any] = cost.attention_ms
    if n == 1:
        own = attention_ms(0.0, 0.0, 0.0, batch.requests[0], batch.context(0) + batch.growth[0] * ahead)
        return own, own
    context = batch.contexts() + batch.growth_vector * ahead[:, None]
    times = attention_ms(0.0, 0.0, 0.0, batch.request_vector, context)
    # Reductions by their ufuncs: the methods' wrappers cost as much as small arrays do.
    return np.maximum.reduce(times, axis=1), np.add.reduce(times, axis=1) / n
