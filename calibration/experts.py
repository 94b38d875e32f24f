"""How many experts a batch touches, and so reads."""

from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from rackplan.simulator.eplb import replicate

_BELOW_ROUNDING = 2.0**-55
"""1 less a chance of this is 1."""


@lru_cache(maxsize=256)
def _choice_shares(experts: int, top_k: int, sigma: float) -> np.ndarray:
    """Chance that a token chooses each expert (experts,), adding up to `top_k`: log-normal weights, none above 1."""
    # The standard library's quantile: scipy.special takes as long to import as a small run takes.
    normal = NormalDist()
    weights = np.exp(sigma * np.array([normal.inv_cdf((i + 0.5) / experts) for i in range(experts)]))
    sure = np.zeros(experts, dtype=bool)
    while True:
        shares = np.where(sure, 1.0, weights * (top_k - sure.sum()) / weights[~sure].sum())
        if not (shares > 1.0).any():
            return shares
        sure |= shares >= 1.0


@lru_cache(maxsize=65536)
def experts_touched(tokens: float, experts: int, top_k: int, sigma: float = 0.0) -> float:
    """Expected number of experts that at least one of `tokens` chooses; `sigma`: skew of their popularity."""
    if sigma == 0.0:
        return experts * (1.0 - (1.0 - top_k / experts) ** tokens)
    return float((1.0 - (1.0 - _choice_shares(experts, top_k, sigma)) ** tokens).sum())


class _Replicas(NamedTuple):
    """Replicas that EPLB gives each expert, coldest first: `number` (experts,), `most` of one; `shares`, `others`
    (experts,): the chance that a token chooses the expert, and that it does not. `minus_sure_from` (experts,), rising:
    from that many tokens on the replicas of this expert and of all behind it have one each, to the last bit."""

    number: np.ndarray
    most: int
    shares: np.ndarray
    others: np.ndarray
    minus_sure_from: np.ndarray


@lru_cache(maxsize=256)
def _replicas(experts: int, top_k: int, sigma: float, redundant: int) -> _Replicas:
    shares = _choice_shares(experts, top_k, sigma)
    number = replicate(shares[None], experts + redundant)[2][0]
    with np.errstate(divide="ignore"):  # an expert that every token chooses
        until = np.maximum(1.0, np.log(_BELOW_ROUNDING) / np.log1p(-shares)) * number
    minus_sure_from = -np.maximum.accumulate(until[::-1])[::-1]
    return _Replicas(number.astype(float), int(number.max()), shares, 1.0 - shares, minus_sure_from)


@lru_cache(maxsize=65536)
def replicas_touched(tokens: float, experts: int, top_k: int, sigma: float, redundant: int) -> float:
    """Expected number of replicas with a token, where EPLB gives `redundant` more to the hottest experts: each serves
    an equal share of its expert's tokens, and each is read."""
    if not redundant:
        return experts_touched(tokens, experts, top_k, sigma)
    replicas, most, shares, others, minus_sure_from = _replicas(experts, top_k, sigma, redundant)
    # Powers take most of the time, and ten times as long where they come near to 0, so only those that count are taken.
    unsure = int(minus_sure_from.searchsorted(-tokens))
    if not unsure:
        return float(experts + redundant)
    served = tokens / replicas[:unsure]
    touched: np.ndarray = others[:unsure] ** served
    np.subtract(1.0, touched, touched)
    if tokens < most:  # some replica serves less than one
        touched = np.where(served < 1.0, shares[:unsure] * served, touched)
    number = replicas.copy()
    number[:unsure] *= touched
    return float(np.add.reduce(number))
