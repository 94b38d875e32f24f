"""Workloads of independent requests: fixed lengths, and lognormal ones.

Lengths come from streams["lengths"] and arrivals from streams["arrivals"], so request i has the same lengths under
every load.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rackplan.engine import InputError
from rackplan.simulator.arrivals import ClosedLoop, OpenLoop, check_load, gamma_times
from rackplan.simulator.load import Load, Source
from rackplan.simulator.request import Request
from rackplan.simulator.streams import Streams

_CHUNK = 4096
_MOST_TOKENS = 100_000_000
# A lognormal has no longest request, an engine has: draws keep within this many sigma of the median (99.7 % of them).
_SIGMAS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsWorkload:
    """Input and output tokens, lognormal about their medians and independent; `sigma` 0 makes them fixed.

    `sigma` is the standard deviation of the logarithm; draws past 3 sigma are set to 3 sigma.
    """

    name: str
    input_p50: int
    output_p50: int
    sigma: float = 0.0

    def __post_init__(self) -> None:
        for what, tokens in (("ISL", self.input_p50), ("OSL", self.output_p50)):
            if not 1 <= tokens <= _MOST_TOKENS:
                raise InputError(f"workload={self.name}: {what}={tokens} tokens; give 1 to {_MOST_TOKENS:,}")
        if not 0 <= self.sigma <= 3:
            raise InputError(f"workload={self.name}: SIGMA={self.sigma:g}; give 0 to 3")

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        """Open loop with a rate, closed loop with a concurrency; InputError with neither."""
        check_load(load, self.name)
        bodies = self._bodies(streams["lengths"])
        if load.rate_req_s is not None:
            return OpenLoop(bodies, gamma_times(load.rate_req_s, load.cv, duration_s, streams["arrivals"]))
        assert load.concurrency is not None  # check_load has seen to it
        return ClosedLoop(bodies, load.concurrency, duration_s)

    def _bodies(self, rng: np.random.Generator) -> Iterator[Request]:
        medians = np.array([self.input_p50, self.output_p50])
        request_id = 0
        while True:
            z = rng.standard_normal((_CHUNK, 2)).clip(-_SIGMAS, _SIGMAS) if self.sigma else np.zeros((_CHUNK, 2))
            tokens = np.maximum(1, np.rint(medians * np.exp(self.sigma * z))).astype(np.int64)
            for input_tokens, output_tokens in tokens.tolist():
                yield Request(request_id, 0, input_tokens, output_tokens)
                request_id += 1
