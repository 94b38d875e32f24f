"""How long one lockstep step takes on the wall, and where its time went. Pure functions of a `PoolCost`."""

from dataclasses import dataclass

import numpy as np

from rackplan.simulator.cost import FloatArray, PoolCost, SharedTime
from rackplan.simulator.step_load import StepLoad

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


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a run of equal steps, ms, each (steps,) but for `launch_ms`.

    `wall_ms`: from the end of the step before to the end of this one. `lead_ms`: how long before the end of the step
    before the host began this one (0 without async scheduling); `next_lead_ms`: the same of the step that follows.
    `seen_ms`, `next_seen_ms`: likewise, how long before it the scheduler last looked at its queue.
    `launch_ms`: host time of a step. `attention_mean_ms` is the mean over ranks, so that attention_ms less it is lost
    to imbalance.
    """

    wall_ms: FloatArray
    wall_without_sync_ms: FloatArray
    lead_ms: FloatArray
    next_lead_ms: FloatArray
    seen_ms: FloatArray
    next_seen_ms: FloatArray
    launch_ms: float
    gpu_ms: FloatArray
    attention_ms: FloatArray
    attention_mean_ms: FloatArray
    shared: SharedTime

    def first(self, steps: int) -> "StepTimes":
        """The times of the first `steps` of the run."""
        return StepTimes(
            self.wall_ms[:steps],
            self.wall_without_sync_ms[:steps],
            self.lead_ms[:steps],
            self.next_lead_ms[:steps],
            self.seen_ms[:steps],
            self.next_seen_ms[:steps],
            self.launch_ms,
            self.gpu_ms[:steps],
            self.attention_ms[:steps],
            self.attention_mean_ms[:steps],
            self.shared,
        )

    @property
    def delivery_ms(self) -> float:
        """How long after its end the step before hands on its tokens: the first step's launch comes first."""
        return max(0.0, self.launch_ms - float(self.lead_ms[0]))


def step_wall_ms(
    gpu_ms: FloatArray,
    floor_ms: float,
    host_ms: float,
    sync_ms: float,
    admission_ms: float,
    async_scheduling: bool,
) -> FloatArray:
    """Wall time of a step among its like. With async scheduling the host prepares the next step under this one's GPU
    time and shows only where it is longer; without, it follows the GPU. The launch floor overlaps the GPU either way.
    """
    host_all = host_ms + sync_ms + admission_ms
    if async_scheduling:
        return np.maximum(gpu_ms, max(floor_ms, host_all))
    return np.maximum(gpu_ms, floor_ms) + host_all


def overlap_ms(
    gpu_ms: FloatArray, floor_ms: float, host_ms: float, lead_ms: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(wall, lead, next lead) of equal steps under async scheduling, each (steps,).

    The host begins a step once it has launched the one before and the GPU has ended the one before that, so it is
    `lead` ahead of the GPU. A step's kernels start after `host_ms` of preparing it and end no earlier than `floor_ms`
    after the host began, as they are launched one by one. In a run of its like a step takes `step_wall_ms`.
    """
    if floor_ms <= host_ms:
        lead = np.concatenate([[lead_ms], gpu_ms[:-1]])
        return np.maximum(0.0, host_ms - lead) + gpu_ms, lead, gpu_ms
    wall, leads = np.empty(len(gpu_ms)), np.empty(len(gpu_ms) + 1)
    leads[0] = lead_ms
    for i, gpu in enumerate(gpu_ms.tolist()):
        ahead = float(leads[i])
        wall[i] = max(max(0.0, host_ms - ahead) + gpu, floor_ms - ahead)
        leads[i + 1] = ahead + wall[i] - max(floor_ms, ahead)
    return wall, leads[:-1], leads[1:]


def time_steps(
    cost: PoolCost,
    load: StepLoad,
    steps: int,
    balancedness: float,
    async_scheduling: bool,
    lead_ms: float,
    seen_ms: float,
    own_worker: bool,
) -> StepTimes:
    """The times of `steps` equal steps that differ only in their growing context. `lead_ms`: as in `overlap_ms`.

    `own_worker`: the worker is a process of its own, as vLLM's is where an instance has several GPUs. Then a launch
    does not hold up the scheduler: it plans the next step, and hands on tokens, as soon as a step ends on the GPU.
    """
    context = load.decode_context + load.context_growth * np.arange(steps)[:, None]
    attention = cost.attention_ms(
        load.prefill_tokens, load.prefill_pairs, load.prefill_context, load.decode_requests, context
    )
    # Reductions by their ufuncs: this is the hot path, and the methods' wrappers cost as much as small arrays do.
    widest = int(np.maximum.reduce(load.tokens))
    prefill = int(np.add.reduce(load.prefill_tokens)) if load.prefill_chunks else 0
    shared = cost.shared_ms(widest, int(np.add.reduce(load.tokens)), prefill, load.prefill_chunks, balancedness)
    slowest = np.maximum.reduce(attention, axis=1)
    mean = np.add.reduce(attention, axis=1) / attention.shape[1]
    gpu = slowest + sum(shared)
    floor = cost.launch_floor_ms(widest, load.prefill_chunks)
    host, sync = cost.host_ms(load.requests) + load.admission_ms, cost.dp_sync_ms()
    if async_scheduling:
        wall, lead, next_lead = overlap_ms(gpu, floor, host + sync, lead_ms)
        without_sync = np.maximum(np.maximum(0.0, host - lead) + gpu, floor - lead)
    else:
        wall = step_wall_ms(gpu, floor, host, sync, 0.0, async_scheduling)
        without_sync, lead = wall - sync, np.zeros(steps)
        next_lead = lead
    seen, next_seen = lead, next_lead
    launch = max(floor, host + sync) if async_scheduling else 0.0
    if own_worker and async_scheduling:
        seen, next_seen, launch = np.concatenate([[seen_ms], wall[:-1]]), wall, 0.0
    return StepTimes(wall, without_sync, lead, next_lead, seen, next_seen, launch, gpu, slowest, mean, shared)
