"""Which instance and rank a request goes to. One class a policy, one method each.

Ranks of a pool's instances are numbered through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rackplan.engine import deployment
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.streams import Streams


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Read-only view of a pool for a router.

    `requests` (ranks,): queued or running; `tokens` (ranks,): what they asked for when they came, new prompt tokens
    and, where the pool decodes, output; `home`: the rank of a session's last turn.
    """

    requests: np.ndarray
    tokens: np.ndarray
    home: Mapping[int, int]


class Router(Protocol):
    """A policy: it sees the ranks' loads and changes nothing of them."""

    def choose(self, request: Request, loads: RankLoads) -> int:
        """The rank of the pool that takes `request`. Ties go to the lowest rank."""
        ...


class RoundRobin:
    """Ranks in turn, whatever they hold."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, loads: RankLoads) -> int:
        self._next = (self._next + 1) % len(loads.requests)
        return self._next


class Random:
    """Any rank. `draw(n)`: one of the numbers below n at random."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, request: Request, loads: RankLoads) -> int:
        return self._draw(len(loads.requests))


class LeastRequests:
    """The rank with the fewest requests, as vLLM's front end balances; long prompts count like short ones."""

    def choose(self, request: Request, loads: RankLoads) -> int:
        return int(loads.requests.argmin())


class LeastTokens:
    """The rank with the fewest tokens asked for."""

    def choose(self, request: Request, loads: RankLoads) -> int:
        return int(loads.tokens.argmin())


class PrefixAffinity:
    """The session's home, unless what is queued there outweighs its prefix; then the rank with the fewest tokens.

    Leaving costs twice: the request waits for its prefix to be computed again, and so does all that comes behind it.
    So home is left when its queue is longer by twice the prefix. A factor: routers make the weight an option.
    """

    def choose(self, request: Request, loads: RankLoads) -> int:
        tokens = loads.tokens
        home = loads.home.get(request.session)
        if home is None:
            home = loads.home.get(request.prefix_session)
        over = 0 if home is None else tokens.item(home) - 2 * request.reuse_tokens
        if home is not None and over <= 0:  # no rank has less than no tokens
            return home
        least = int(tokens.argmin())
        return least if home is None or over > tokens.item(least) else home


class SessionAffinity:
    """The session's home, whatever waits there, until it has sent nothing for `timeout_s`; else any rank.

    A session is its own: one that begins like another is not sent after it.
    """

    def __init__(self, timeout_s: float | None, draw: Callable[[int], int]) -> None:
        self._timeout_ns = None if timeout_s is None else round(timeout_s * NS_PER_S)
        self._draw = draw
        self._used_ns: dict[int, int] = {}

    def choose(self, request: Request, loads: RankLoads) -> int:
        home = loads.home.get(request.session)
        last_ns = self._used_ns.get(request.session, 0)
        if request.session >= 0:
            self._used_ns[request.session] = request.arrival_ns
        late = self._timeout_ns is not None and request.arrival_ns - last_ns > self._timeout_ns
        return self._draw(len(loads.requests)) if home is None or late else home


_BY_LOAD: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affinity": PrefixAffinity,
}


def make_router(router: deployment.Router, streams: Streams) -> Router:
    """A fresh router of that policy; each pool has its own. What is random comes from the stream "router"."""

    def draw(n: int) -> int:
        return int(streams["router"].integers(n))

    if router.policy == "random":
        return Random(draw)
    if router.policy == "session_affinity":
        return SessionAffinity(router.affinity_timeout_s, draw)
    return _BY_LOAD[router.policy]()
