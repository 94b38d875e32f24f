"""Dual-batch overlap: a step in two halves, each one's exchange of tokens behind the other's computing.

Source: vLLM's --enable-dbo, which splits a step where the tokens of a rank reach a threshold.
"""

from collections.abc import Callable

from rackplan.engine.flags import DBO_DECODE_TOKENS, DBO_PREFILL_TOKENS
from rackplan.simulator.cost import SharedTime

Shared = Callable[[int, int, int, int, float], SharedTime]


def overlapped(whole: Shared) -> Shared:
    """`PoolCost.shared_ms` of steps that run in two halves where they are large enough; `whole`: of one batch."""

    def shared(widest: int, total: int, prefill_tokens: int, prefill_chunks: int, balancedness: float) -> SharedTime:
        one = whole(widest, total, prefill_tokens, prefill_chunks, balancedness)
        if widest < (DBO_PREFILL_TOKENS if prefill_tokens else DBO_DECODE_TOKENS):
            return one
        half = whole(_half(widest), _half(total), _half(prefill_tokens), _half(prefill_chunks), balancedness)
        return in_two_halves(half, one.weight_wait)

    return shared


def _half(n: int) -> int:
    """The larger one."""
    return -(-n // 2)


def in_two_halves(half: SharedTime, weight_wait_ms: float) -> SharedTime:
    """A step of two like halves. Both compute on one GPU and send over one link, and a half does not overlap itself: so
    it takes the longest of both halves' computing, both halves' exchange, and all of one half. `communication` is what
    shows of the exchange. Attention would hide more of it and is not counted, so the step is an upper bound."""
    computing = half.dense + half.moe + half.ep_imbalance
    step = max(2 * computing, 2 * half.communication, computing + half.communication)
    return SharedTime(
        2 * half.dense, 2 * half.moe, 2 * half.ep_imbalance, step - 2 * computing, half.draft, weight_wait_ms
    )
