"""How many decode steps a request takes when each step yields 1 + accepted drafts."""

import math

import numpy as np

from rackplan.engine.errors import InputError
from rackplan.simulator.streams import Streams

QUANTILES = 512
"""Equal shares of requests over which means are taken when the spread is set."""

class _Renewal:
    """What the number of steps depends on, of steps that yield `length` tokens on average and `second` as mean square.
    """

    __slots__ = ("cube", "excess", "length", "variance")

    def __init__(self, length: float, second: float) -> None:
        self.length, self.cube = length, length**3
        self.excess, self.variance = second / (2 * length) - 0.5, second - length**2


class Acceptance:
    """Steps to yield a number of tokens, drawn once per request.

    Each draft of a request is accepted with one probability until the first rejection, so a step yields 1 to k + 1
    tokens. The number of steps to pass n tokens is then a renewal count: its mean and variance are exact in the limit
    of long outputs, and its law is taken as normal.

    `spread`: standard deviation over requests of that probability, which is beta distributed; 0 gives all requests one.
    Tokens over steps of all requests together are `acceptance_length` either way, so the mean TPOT stays and its
    percentiles move apart. Raises InputError for a spread that no beta distribution has at that acceptance length.
    """

    def __init__(self, draft_tokens: int, acceptance_length: float, streams: Streams, spread: float = 0.0) -> None:
        if not 1.0 <= acceptance_length <= draft_tokens + 1:
            raise ValueError(f"acceptance length {acceptance_length}: must lie in 1 to {draft_tokens + 1}")
        self.draft_tokens = draft_tokens
        self.acceptance_length = acceptance_length
        self._rng, self._share_rng = streams["acceptance"], streams["acceptance per request"]
        self._normal: list[float] = []
        self._spread = spread if draft_tokens else 0.0
        self._mean = mean_probability(draft_tokens, acceptance_length, spread) if self._spread else 0.0
        self._lengths = self._seconds = np.empty(0)
        second = 1.0 if self._spread else _second_moment(draft_tokens, acceptance_length)
        self._alike = _Renewal(acceptance_length, second)  # each request's, without a spread

    def steps(self, request_id: int, tokens: int) -> int:
        """Decode steps of request `request_id` for `tokens` further tokens; the same for every deployment."""
        if tokens <= 0:
            return 0
        if self.draft_tokens == 0:
            return tokens
        if request_id >= len(self._normal):
            self._draw(request_id)
        normal = self._normal[request_id]
        law = self._alike
        if self._spread:
            law = _Renewal(float(self._lengths[request_id]), float(self._seconds[request_id]))
        mean = (tokens + law.excess) / law.length
        steps = round(mean + math.sqrt(tokens * law.variance / law.cube) * normal)
        least = -(-tokens // (self.draft_tokens + 1))
        return tokens if steps > tokens else least if steps < least else steps

    def _draw(self, request_id: int) -> None:
        """Have draws for the requests up to `request_id`."""
        while request_id >= len(self._normal):
            count = max(4096, len(self._normal))
            self._normal += self._rng.standard_normal(count).tolist()
            if self._spread:
                p = _beta_quantiles(self._mean, self._spread, self._share_rng.random(count))
                lengths, seconds = moments(self.draft_tokens, p)
                self._lengths = np.concatenate([self._lengths, lengths])
                # Rounding may leave a variance just below 0 where a draft is all but certain.
                self._seconds = np.concatenate([self._seconds, np.maximum(seconds, lengths**2)])


def moments(draft_tokens: int, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, mean square) of what a step yields where each draft is accepted with probability `p`; each of p's shape.
    """
    powers = np.arange(draft_tokens + 1)
    survival = p[..., None] ** powers  # P(yield > j)
    return survival.sum(axis=-1), ((2 * powers + 1) * survival).sum(axis=-1)


def mean_probability(draft_tokens: int, acceptance_length: float, spread: float) -> float:
    """The mean over requests of the acceptance probability at which all their tokens over all their steps, outputs
    being alike, are `acceptance_length`: the mean of 1 / a request's own length is 1 / `acceptance_length`."""
    from scipy.optimize import brentq  # slow to import, and not needed without a spread

    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES

    def excess(mean: float) -> float:
        lengths, _ = moments(draft_tokens, _beta_quantiles(mean, spread, shares))
        return float((1 / lengths).mean() - 1 / acceptance_length)

    half = math.sqrt(max(0.0, 0.25 - spread**2))
    low, high = 0.5 - half + 1e-6, 0.5 + half - 1e-6
    if low >= high or excess(low) <= 0 or excess(high) >= 0:
        raise InputError(
            f"--acceptance-spread {spread:g}: too wide for {acceptance_length:g} tokens a step of {draft_tokens} "
            "drafts; give less"
        )
    return float(brentq(excess, low, high))


def _beta_quantiles(mean: float, sd: float, shares: np.ndarray) -> np.ndarray:
    from scipy.special import betaincinv

    concentration = mean * (1 - mean) / sd**2 - 1
    return betaincinv(mean * concentration, (1 - mean) * concentration, shares)


def _second_moment(draft_tokens: int, acceptance_length: float) -> float:
    """E[yield^2] of a step whose mean yield is `acceptance_length`."""
    if acceptance_length <= 1.0:
        return 1.0
    if acceptance_length >= draft_tokens + 1:
        return float((draft_tokens + 1) ** 2)
    from scipy.optimize import brentq

    powers = np.arange(draft_tokens + 1)
    p = brentq(lambda x: float((x**powers).sum()) - acceptance_length, 0.0, 1.0)
    # E[Y^2] = sum over j >= 0 of (2j + 1) P(Y > j)
    return float(((2 * powers + 1) * p**powers).sum())
