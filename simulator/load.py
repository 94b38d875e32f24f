"""How hard a `Workload` presses: a `Load`, and the `Source` of requests that it makes of that."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rackplan.simulator.request import Request
from rackplan.simulator.streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How hard a workload presses: `concurrency` (closed loop), `rate_req_s` (open loop), or neither: as recorded.

    `cv`: coefficient of variation of the open loop's inter-arrival times; 1 is Poisson, 3 bursty (gamma).
    """

    concurrency: int | None = None
    rate_req_s: float | None = None
    cv: float = 1.0


class Source(Protocol):
    """Requests in time: `arrivals` yields what comes by itself, in order; `finished` what follows from an end."""

    def arrivals(self) -> Iterator[Request]:
        """Requests that come by themselves, in order of `arrival_ns`."""
        ...

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        """Requests that the end of `request` causes, each with `arrival_ns` >= `now_ns`."""
        ...

    def primed(self) -> list[tuple[int, int]]:
        """(session, tokens) whose prefixes are in the cache before time 0."""
        ...


class Workload(Protocol):
    """What is asked of the deployment, apart from how hard."""

    @property
    def name(self) -> str: ...

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        """The requests that `load` makes of it for `duration_s`. Raises InputError on a load that it cannot take."""
        ...
