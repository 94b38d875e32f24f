"""What the ranks of an instance run in one step, summed up as the cost of a step needs it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rackplan.simulator.cost import FloatArray, PoolCost
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.scheduler import RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Arrays are (ranks,); tokens count drafts. `requests`: of the rank with most.

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


def load_of(
    plans: Mapping[int, RankPlan], batch: DecodeBatch, prefilling: FloatArray, width: int, cost: PoolCost
) -> StepLoad:
    """The load of the step that `plans` (by rank) and the decoding requests make.

    `prefilling` (ranks,): prompts in prefill; `width`: tokens of a decoding request, 1 + drafts. Admissions on one rank
    follow one another, ranks admit side by side.
    """
    n = len(prefilling)
    tokens, pairs, cached = np.zeros((3, n))
    chunks, admission_ms = 0, 0.0
    for r, plan in plans.items():
        for seq, new in plan.chunks:
            tokens[r] += new
            pairs[r] += new * (seq.computed_tokens + 0.5 * new)
            cached[r] += seq.computed_tokens
        chunks += len(plan.chunks)
        admission_ms = max(admission_ms, sum(cost.admission_ms(s.prompt_tokens) for s in plan.admitted))
    step_tokens = tokens + batch.requests * width
    if n > 1:  # a rank with nothing to run executes a dummy batch
        step_tokens[step_tokens == 0] = width
    return StepLoad(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        prefill_context=cached,
        prefill_chunks=chunks,
        decode_requests=batch.requests,
        decode_context=batch.contexts(),
        context_growth=batch.growth,
        tokens=step_tokens,
        admission_ms=admission_ms,
        requests=int(np.maximum.reduce(batch.requests + prefilling)),
    )
