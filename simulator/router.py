"""Which instance and rank a request goes to. One class a policy, one method each.

Ranks of a pool's instances are numbered through: instance = rank // dep. `requests` (ranks of the pool,) counts the
requests that are queued or running on each, `tokens` their prompt and output tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rackplan.engine.deployment import RouterPolicy
from rackplan.simulator.request import Request

AFFINITY_SLACK_REQUESTS = 8
"""A rank that holds a session's prefix is left when it has this many requests more than the least loaded one: past
that, queueing costs more than a prefill of the prefix saves. A factor; routers make it an option."""


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Read-only view of a pool for a router."""

    requests: np.ndarray
    tokens: np.ndarray


class Router(Protocol):
    def choose(self, request: Request, loads: RankLoads) -> int:
        """The rank of the pool that takes `request`. Ties go to the lowest rank."""
        ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, loads: RankLoads) -> int:
        self._next = (self._next + 1) % len(loads.requests)
        return self._next


class LeastRequests:
    def choose(self, request: Request, loads: RankLoads) -> int:
        return int(loads.requests.argmin())


class LeastTokens:
    def choose(self, request: Request, loads: RankLoads) -> int:
        return int(loads.tokens.argmin())


class PrefixAffinity:
    """The rank that served the session's last turn, unless it is crowded; else the least requests."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def choose(self, request: Request, loads: RankLoads) -> int:
        least = int(loads.requests.argmin())
        if request.session < 0:
            return least
        home = self._home.get(request.session, least)
        if loads.requests[home] > loads.requests[least] + AFFINITY_SLACK_REQUESTS:
            home = least
        self._home[request.session] = home
        return home


_POLICIES: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affinity": PrefixAffinity,
}


def make_router(policy: RouterPolicy) -> Router:
    return _POLICIES[policy]()
