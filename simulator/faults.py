"""Instances that are lost for a while: a plan of failures, and what becomes of the requests that they had.

A data-parallel rank that dies takes its instance with it, since its ranks step together: queues, running requests, KV
and prefix caches are gone. It comes back empty after its start-up time, and takes no request before.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rackplan.engine import Deployment, InputError
from rackplan.simulator import sequence
from rackplan.simulator.clock import Clock
from rackplan.simulator.instance import Instance
from rackplan.simulator.lossy_transfer import LossyTransfers
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.request import NS_PER_S, Request

START_UP_S = 160.0
"""Until a server answers again: the middle of 130 to 190 s, vLLM 0.33 on H200 with weights that it fills at random
(bench/h200/README.md). Reading weights from disk comes on top."""

_TIME = r"(\d+(?:\.\d+)?)(ms|s|m|h)"
_FORM = re.compile(rf"(aggregated|prefill|decode):(\d+)@{_TIME}(?:\+{_TIME})?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Instance number `instance` of a role is lost at `at_s` and back `down_s` later."""

    role: str
    instance: int
    at_s: float
    down_s: float = START_UP_S

    def __str__(self) -> str:
        return f"{self.role}:{self.instance}@{self.at_s:g}s+{self.down_s:g}s"


def parse_failure(text: str) -> Failure:
    """A failure from `decode:0@60s+180s`; without `+180s` it takes START_UP_S. Raises InputError on any other form."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--fail {text}: write ROLE:INSTANCE@AT or ROLE:INSTANCE@AT+DOWN, as decode:0@60s+180s")
    role, instance, at, at_unit, down, down_unit = found.groups()
    down_s = float(down) * _SECONDS[down_unit] if down else START_UP_S
    return Failure(role=role, instance=int(instance), at_s=float(at) * _SECONDS[at_unit], down_s=down_s)


def check_failures(failures: Sequence[Failure], deployment: Deployment, duration_s: float) -> None:
    """Raises InputError on a role or an instance that there is not, on one that is down already, and on one that is
    lost when arrivals have ended."""
    back_s: dict[tuple[str, int], float] = {}
    for f in sorted(failures, key=lambda f: f.at_s):
        instances, place = sum(p.instances for p in deployment.pools if p.role == f.role), (f.role, f.instance)
        if not instances:
            roles = " and ".join(dict.fromkeys(p.role for p in deployment.pools))
            raise InputError(f"--fail {f}: the deployment has no {f.role} pool; name an instance of {roles}")
        if f.instance >= instances:
            raise InputError(f"--fail {f}: the pool has {instances} instances; number them from 0")
        if f.at_s < back_s.get(place, 0.0):
            raise InputError(f"--fail {f}: it is down until {back_s[place]:g} s; fail it later")
        if f.at_s >= duration_s:
            raise InputError(f"--fail {f}: arrivals end at {duration_s:g} s; fail it before, or raise --duration")
        back_s[place] = f.at_s + f.down_s


class Faults:
    """Lets `failures` happen. A lost request that has no token yet is sent again where `resubmit` says so; one whose
    answer was under way has failed: `on_failed`. While a role has no instance up, requests wait at the router.

    `pools`: by role; `transfers`: None where nothing is handed over.
    """

    def __init__(
        self,
        env: Clock,
        pools: dict[str, PoolOfInstances],
        transfers: LossyTransfers | None,
        failures: Sequence[Failure],
        *,
        resubmit: bool,
        send: Callable[[Request], None],
        on_failed: Callable[[Request], None],
    ) -> None:
        self.env, self.pools, self.transfers, self.resubmit = env, pools, transfers, resubmit
        self.send, self.on_failed = send, on_failed
        self._waiting: list[Request] = []
        if transfers:
            transfers.on_lost = self._lost
        for failure in failures:
            pools[failure.role].instances[failure.instance].watch()
            env.after(round(failure.at_s * NS_PER_S), self._lose, failure)

    def holds(self, request: Request) -> bool:
        """Has a role no instance up? Then `request` is sent when each has."""
        if not any(pool.all_down for pool in self.pools.values()):
            return False
        self._waiting.append(request)
        return True

    def _lose(self, failure: Failure) -> None:
        pool = self.pools[failure.role]
        instance = pool.instances[failure.instance]
        pool.down.add(instance)
        self.env.after(round(failure.down_s * NS_PER_S), self._recover, (pool, instance))
        lost = instance.lose()
        if self.transfers:
            lost += self.transfers.lose(instance)
        for seq in lost:
            self._lost(seq)

    def _lost(self, seq: sequence.Sequence) -> None:
        if self.resubmit and seq.first_token_ns < 0:
            # Another object: what the first attempt holds of a prefix cache is its own until it is given back.
            self.send(replace(seq.request))
        else:
            self.on_failed(seq.request)

    def _recover(self, place: tuple[PoolOfInstances, Instance]) -> None:
        pool, instance = place
        pool.down.discard(instance)
        instance.recover()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.send(request)
