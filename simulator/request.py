"""A request, and the two ways in which requests come: a `Load`, and the `Source` that a workload makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rackplan.simulator.streams import Streams

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(slots=True, eq=False)
class Request:
    """One request as the front end sees it. Tokens are counts, `arrival_ns` integer nanoseconds.

    Prefix reuse is stated in one of three ways: `session` >= 0 with `reuse_tokens` (the leading tokens that are the
    session's previous turn, or those of `prefix_session`, a session that begins alike), `hash_ids` (one id per
    `block_tokens` tokens of the prompt, equal ids meaning equal blocks behind equal prefixes), or `cached_tokens` (what
    a measured run hit, replayed as it was).
    """

    id: int
    arrival_ns: int
    input_tokens: int
    output_tokens: int
    session: int = -1
    reuse_tokens: int = 0
    prefix_session: int = -1
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = 512
    cached_tokens: int | None = None


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
