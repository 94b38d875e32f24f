"""How long one lockstep step takes on the wall, and where its time went. Pure functions of a `PoolCost`."""

from dataclasses import dataclass

import numpy as np

from rackplan.simulator.cost import FloatArray, PoolCost, SharedTime

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What the ranks of an instance run in one step. Arrays are (ranks,); tokens count drafts.

    `decode_context` is at the first step of a run of steps, and grows by `context_growth` each step.
    """

    prefill_tokens: FloatArray
    prefill_pairs: FloatArray
    prefill_context: FloatArray
    prefill_chunks: int
    decode_requests: FloatArray
    decode_context: FloatArray
    context_growth: FloatArray
    tokens: FloatArray
    admission_ms: float
    requests: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a run of equal steps, ms: `wall_ms` and `attention_ms` (steps,), the rest scalars.

    `attention_mean_ms` (steps,) is the mean over ranks, so that attention_ms - attention_mean_ms is lost to imbalance.
    """

    wall_ms: FloatArray
    wall_without_sync_ms: FloatArray
    gpu_ms: FloatArray
    attention_ms: FloatArray
    attention_mean_ms: FloatArray
    shared: SharedTime

    def first(self, steps: int) -> "StepTimes":
        """The times of the first `steps` of the run."""
        return StepTimes(
            self.wall_ms[:steps],
            self.wall_without_sync_ms[:steps],
            self.gpu_ms[:steps],
            self.attention_ms[:steps],
            self.attention_mean_ms[:steps],
            self.shared,
        )


def step_wall_ms(
    gpu_ms: FloatArray,
    floor_ms: float,
    host_ms: float,
    sync_ms: float,
    admission_ms: float,
    async_scheduling: bool,
) -> FloatArray:
    """Wall time of a step. With async scheduling the host prepares the next step under this one's GPU time and shows
    only where it is longer; without, it follows the GPU. The launch floor overlaps the GPU either way.
    """
    host_all = host_ms + sync_ms + admission_ms
    if async_scheduling:
        return np.maximum(gpu_ms, max(floor_ms, host_all))
    return np.maximum(gpu_ms, floor_ms) + host_all


def time_steps(cost: PoolCost, load: StepLoad, steps: int, balancedness: float, async_scheduling: bool) -> StepTimes:
    """The times of `steps` equal steps that differ only in their growing context."""
    context = load.decode_context + load.context_growth * np.arange(steps)[:, None]
    attention = cost.attention_ms(
        load.prefill_tokens, load.prefill_pairs, load.prefill_context, load.decode_requests, context
    )
    widest = int(load.tokens.max())
    prefill = int(load.prefill_tokens.sum())
    shared = cost.shared_ms(widest, int(load.tokens.sum()), prefill, load.prefill_chunks, balancedness)
    slowest = attention.max(axis=1)
    gpu = slowest + sum(shared)
    floor = cost.launch_floor_ms(widest, prefill > 0)
    host, sync = cost.host_ms(load.requests), cost.dp_sync_ms()
    wall = step_wall_ms(gpu, floor, host, sync, load.admission_ms, async_scheduling)
    without_sync = step_wall_ms(gpu, floor, host, 0.0, load.admission_ms, async_scheduling) if sync else wall
    return StepTimes(wall, without_sync, gpu, slowest, attention.mean(axis=1), shared)
