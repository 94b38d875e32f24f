"""Launches that spread: of each step with prompts one draw, from its instance's own random stream."""

from bisect import bisect_right
from collections.abc import Iterator
from math import erf, sqrt

import numpy as np

from rackplan.simulator.cost import PassedOn, PoolCost


class DrawnLaunches(PassedOn):
    """A `PoolCost` whose launch floor of a step with prompts is drawn: that of the latest of the ranks that prefill,
    each drawn about the mean. Draws follow one another as slow moments of a machine do: normal, `launch_correlation`
    from each to the next.

    Steps with prompts are never passed in runs, so that runs and single steps draw alike.
    """

    def __init__(self, cost: PoolCost, rng: np.random.Generator) -> None:
        super().__init__(cost)
        self._mean_ms, self.launch_floor_ms = cost.launch_floor_ms, self._drawn_ms
        self._shares: list[float] = np.linspace(0.0, 1.0, len(cost.launch_quantiles)).tolist()
        self._normals = _normals(rng)
        self._news = sqrt(1.0 - cost.launch_correlation**2)
        self._slowness = next(self._normals)

    def _drawn_ms(self, widest_tokens: int, prefill_ranks: int) -> float:
        mean_ms = self._mean_ms(widest_tokens, prefill_ranks)
        if not (prefill_ranks and mean_ms):
            return mean_ms
        self._slowness = self.launch_correlation * self._slowness + self._news * next(self._normals)
        share = (1.0 + erf(self._slowness / sqrt(2.0))) / 2.0
        latest = share ** (1.0 / prefill_ranks)  # the largest of so many draws from 0 to 1
        return mean_ms * self._quantile(latest)

    def _quantile(self, share: float) -> float:
        """The quantile at `share`, 0 to 1, straight between those that are given: np.interp of one number."""
        shares, quantiles = self._shares, self.launch_quantiles
        i = bisect_right(shares, share) - 1
        if i + 1 == len(shares):
            return quantiles[i]
        slope = (quantiles[i + 1] - quantiles[i]) / (shares[i + 1] - shares[i])
        return slope * (share - shares[i]) + quantiles[i]


def _normals(rng: np.random.Generator) -> Iterator[float]:
    """What `rng.standard_normal()` gives, drawn many at a time."""
    while True:
        yield from rng.standard_normal(256).tolist()
