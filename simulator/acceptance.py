"""How many decode steps a request takes when each step yields 1 + accepted drafts."""

import math

import numpy as np

from rackplan.simulator.streams import Streams


class Acceptance:
    """Steps to yield a number of tokens, drawn once per request.

    Each draft is accepted with one probability until the first rejection, so a step yields 1 to k + 1 tokens with mean
    `acceptance_length`. The number of steps to pass n tokens is then a renewal count: its mean and variance are exact
    in the limit of long outputs, and its law is taken as normal.
    """

    def __init__(self, draft_tokens: int, acceptance_length: float, streams: Streams) -> None:
        if not 1.0 <= acceptance_length <= draft_tokens + 1:
            raise ValueError(f"acceptance length {acceptance_length}: must lie in 1 to {draft_tokens + 1}")
        self.draft_tokens = draft_tokens
        self.acceptance_length = acceptance_length
        self._rng = streams["acceptance"]
        self._normal = np.empty(0)
        second = _second_moment(draft_tokens, acceptance_length)
        self._variance = second - acceptance_length**2
        self._overshoot = second / (2 * acceptance_length) - 0.5

    def steps(self, request_id: int, tokens: int) -> int:
        """Decode steps of request `request_id` for `tokens` further tokens; the same for every deployment."""
        if tokens <= 0:
            return 0
        if self.draft_tokens == 0:
            return tokens
        mean = (tokens + self._overshoot) / self.acceptance_length
        sd = math.sqrt(tokens * self._variance / self.acceptance_length**3)
        least = -(-tokens // (self.draft_tokens + 1))
        return min(tokens, max(least, round(mean + sd * self._draw(request_id))))

    def _draw(self, request_id: int) -> float:
        while request_id >= len(self._normal):
            more = self._rng.standard_normal(max(4096, len(self._normal)))
            self._normal = np.concatenate([self._normal, more])
        return float(self._normal[request_id])


def _second_moment(draft_tokens: int, acceptance_length: float) -> float:
    """E[yield^2] of a step whose mean yield is `acceptance_length`."""
    powers = np.arange(draft_tokens + 1)

    def mean(p: float) -> float:
        return float((p**powers).sum())

    if acceptance_length <= 1.0:
        return 1.0
    if acceptance_length >= draft_tokens + 1:
        return float((draft_tokens + 1) ** 2)
    from scipy.optimize import brentq  # slow to import, and not needed without drafts

    p = brentq(lambda x: mean(x) - acceptance_length, 0.0, 1.0)
    # E[Y^2] = sum over j >= 0 of (2j + 1) P(Y > j)
    return float(((2 * powers + 1) * p**powers).sum())
