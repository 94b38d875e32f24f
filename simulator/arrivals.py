"""When requests come: open loop (Poisson, gamma), closed loop (clients), as recorded.

A source here takes `bodies`, requests in order whose `arrival_ns` is still to be set, so that request i is the same
under every load.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from rackplan.engine import InputError
from rackplan.simulator.load import Load, Source
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.streams import Streams

MOONCAKE_BLOCK_TOKENS = 512
_CHUNK = 4096


def check_load(load: Load, name: str, *, recorded: bool = False) -> None:
    """Raise InputError where `load` says nothing or two things. `recorded`: the workload has arrival times itself."""
    if load.concurrency is not None and load.rate_req_s is not None:
        raise InputError(
            f"--concurrency={load.concurrency} with --rate={load.rate_req_s:g}: a load is closed or open; give one"
        )
    if load.concurrency is None and load.rate_req_s is None and not recorded:
        raise InputError(f"workload={name}: has no arrival times of its own; give one of --concurrency, --rate")
    if load.concurrency is not None and load.concurrency < 1:
        raise InputError(f"--concurrency={load.concurrency}: must be at least 1")
    if load.rate_req_s is not None and not 0 < load.rate_req_s < float("inf"):
        raise InputError(f"--rate={load.rate_req_s:g}: must be above 0 requests/s")
    if not 0 <= load.cv < float("inf"):
        raise InputError(f"--cv={load.cv:g}: must be 0 (even) or more; 1 is Poisson")
    if load.cv != 1 and (load.rate_req_s is None or recorded):
        raise InputError(f"--cv={load.cv:g}: has no effect without drawn arrivals; remove it or give --rate")


def gamma_times(rate_per_s: float, cv: float, duration_s: float, rng: np.random.Generator) -> Iterator[int]:
    """Arrival times, ns, of a renewal process with gamma gaps up to `duration_s`; cv 1 is Poisson, 0 even.

    Gaps are drawn with mean 1 and stretched, so that one seed gives one pattern at every rate.
    """
    end_ns = duration_s * NS_PER_S
    last_ns = 0.0
    while last_ns < end_ns:
        gaps = rng.gamma(1 / cv**2, cv**2, _CHUNK) if cv else np.ones(_CHUNK)
        times_ns = last_ns + np.cumsum(gaps) * (NS_PER_S / rate_per_s)
        last_ns = float(times_ns[-1])
        yield from times_ns[times_ns < end_ns].astype(np.int64).tolist()


class OpenLoop:
    """Requests come at `times_ns`, whatever becomes of them."""

    def __init__(self, bodies: Iterable[Request], times_ns: Iterable[int]) -> None:
        self._bodies, self._times_ns = bodies, times_ns

    def arrivals(self) -> Iterator[Request]:
        # Times first: zip takes no request that has no time.
        for time_ns, request in zip(self._times_ns, self._bodies, strict=False):
            request.arrival_ns = time_ns
            yield request

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        return []

    def primed(self) -> list[tuple[int, int]]:
        return []


class ClosedLoop:
    """`clients` clients: each sends its next request the moment its last one ended, until `duration_s` or no more."""

    def __init__(self, bodies: Iterable[Request], clients: int, duration_s: float) -> None:
        self._bodies = iter(bodies)
        self._clients = clients
        self._end_ns = duration_s * NS_PER_S

    def arrivals(self) -> Iterator[Request]:
        yield from islice(self._bodies, self._clients)

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        if now_ns >= self._end_ns:
            return []
        following = next(self._bodies, None)
        if following is None:
            return []
        following.arrival_ns = now_ns
        return [following]

    def primed(self) -> list[tuple[int, int]]:
        return []


class Row(NamedTuple):
    """One recorded request; a tuple, because a file holds a million. `time_s`: since any origin. The rest as in
    `Request`."""

    time_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """Requests as recorded, sorted by time. `notes`: what the reader left out or assumed, for the report."""

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def runs_out(self) -> bool:
        """May it have no request left before a run ends?"""
        return True

    @property
    def hashed(self) -> bool:
        """Do the requests state the blocks of their prompts?"""
        return self.rows[0].hash_ids is not None

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        """As recorded; with a rate, time stretched to that mean; with a concurrency, a closed loop in recorded order.

        Each request is sent once at most: a file shorter than `duration_s` is not repeated.
        """
        check_load(load, self.name, recorded=True)
        if load.concurrency is not None:
            return ClosedLoop(self._bodies(), load.concurrency, duration_s)
        times_s = np.array([row.time_s for row in self.rows]) - self.rows[0].time_s
        if load.rate_req_s is not None:
            if not times_s[-1]:
                raise InputError(
                    f"--rate={load.rate_req_s:g}: {self.name} spans no time to stretch; give --concurrency"
                )
            times_s *= (len(times_s) - 1) / (load.rate_req_s * times_s[-1])
        return OpenLoop(self._bodies(), (times_s[times_s < duration_s] * NS_PER_S).astype(np.int64).tolist())

    def _bodies(self) -> Iterator[Request]:
        for i, r in enumerate(self.rows):
            yield Request(
                i,
                0,
                r.input_tokens,
                r.output_tokens,
                hash_ids=r.hash_ids,
                block_tokens=MOONCAKE_BLOCK_TOKENS,
                cached_tokens=r.cached_tokens,
            )
