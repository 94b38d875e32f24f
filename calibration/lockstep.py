"""Engine steps as logs have them, put to a step cost: what a step that was served should have taken.

Ranks of a DP group step together, each with a log of its own; the steps that began together are one.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rackplan.calibration.records import Step, StepLog
from rackplan.simulator.cost import PoolCost

Together = tuple[Step | None, ...]
"""What the ranks ran in one step, None for a rank that ran a dummy batch."""


def joint_steps(logs: Sequence[StepLog]) -> Iterator[tuple[Step, Together]]:
    """(a step of the first rank, the ranks' steps that began with it). Steps that cannot have idle time before them:
    something decodes, and the log has the step before."""
    times = [np.array([s.t_s for s in log.steps]) for log in logs[1:]]
    for before, step in zip(logs[0].steps, logs[0].steps[1:], strict=False):
        if not step.decode_requests or step.gap_ms is None or step.number != before.number + 1:
            continue
        yield step, (step, *(_at(log, t, step) for log, t in zip(logs[1:], times, strict=True)))


def _at(log: StepLog, times: np.ndarray, step: Step) -> Step | None:
    """The step of `log` that began with `step`: the nearest, if it is nearer than half a step."""
    assert step.gap_ms is not None
    if not len(times):
        return None
    after = int(np.searchsorted(times, step.t_s))
    near = min((i for i in (after - 1, after) if 0 <= i < len(times)), key=lambda i: abs(times[i] - step.t_s))
    return log.steps[near] if abs(times[near] - step.t_s) < step.gap_ms / 2e3 else None


def requests_of(steps: Together) -> int:
    """Requests of the rank with most."""
    return max(s.requests for s in steps if s)


def prefills(steps: Together) -> bool:
    """Does any rank prefill?"""
    return any(s.prefill for s in steps if s)


def gpu_ms(cost: PoolCost, steps: Together, width: int) -> float:
    """GPU time of one step with even routing, ms. `width`: tokens of a dummy batch, 1 + drafts."""

    def per_rank(of_step: Callable[[Step], float]) -> np.ndarray:
        return np.array([float(of_step(s)) if s else 0.0 for s in steps])

    new = per_rank(lambda s: sum(new for new, _ in s.prefill))
    attention = cost.attention_ms(
        new,
        per_rank(lambda s: sum(new * (cached + new / 2) for new, cached in s.prefill)),
        per_rank(lambda s: sum(cached for _, cached in s.prefill)),
        per_rank(lambda s: s.decode_requests),
        per_rank(lambda s: s.decode_context_tokens),
    )
    tokens = new + per_rank(lambda s: s.decode_tokens)
    tokens = np.where(tokens > 0, tokens, width)
    chunks = sum(len(s.prefill) for s in steps if s)
    shared = cost.shared_ms(int(tokens.max()), int(tokens.sum()), int(new.sum()), chunks, 1.0)
    return float(attention.max()) + sum(shared)
