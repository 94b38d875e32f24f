"""Which instance and rank a request goes to. One class a policy, one method each.

Ranks of a pool's instances are numbered through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rackplan.engine.deployment import RouterPolicy
from rackplan.simulator.request import Request


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
        least = int(loads.tokens.argmin())
        home = loads.home.get(request.session, loads.home.get(request.prefix_session))
        if home is None or loads.tokens[home] - loads.tokens[least] > 2 * request.reuse_tokens:
            return least
        return home


_POLICIES: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affinity": PrefixAffinity,
}


def make_router(policy: RouterPolicy) -> Router:
    """A fresh router of `policy`; each pool has its own."""
    return _POLICIES[policy]()
