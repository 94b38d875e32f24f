"""Instances that are lost for a while: a plan of failures, and what becomes of the requests that they had.

A data-parallel rank that dies takes its instance with it, since its ranks step together: queues, running requests and
prefix caches are gone. It comes back empty after its start-up time, and takes no request before.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rackplan.engine import Deployment, InputError
from rackplan.simulator.clock import Clock
from rackplan.simulator.instance import Instance
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.scheduler import Sequence

_FORM = re.compile(r"aggregated:(\d+)@(\d+(?:\.\d+)?)s\+(\d+(?:\.\d+)?)s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Instance number `instance` is lost at `at_s` and back `down_s` later."""

    instance: int
    at_s: float
    down_s: float


def parse_failure(text: str) -> Failure:
    """A failure from `aggregated:0@60s+180s`. Raises InputError on any other form."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise InputError(f"--fail {text}: write ROLE:INSTANCE@AT+DOWN of an aggregated pool, as aggregated:0@60s+180s")
    return Failure(instance=int(found[1]), at_s=float(found[2]), down_s=float(found[3]))


def check_failures(failures: tuple[Failure, ...], deployment: Deployment) -> None:
    """Raises InputError on what is not modelled, and on an instance that there is not or that is down already."""
    if failures and deployment.disaggregated:
        raise InputError("--fail: failures are modelled for an aggregated pool alone; remove it")
    back_s: dict[int, float] = {}
    for f in sorted(failures, key=lambda f: f.at_s):
        where, instances = f"--fail aggregated:{f.instance}@{f.at_s:g}s+{f.down_s:g}s", deployment.pools[0].instances
        if f.instance >= instances:
            raise InputError(f"{where}: the pool has {instances} instances, numbered from 0")
        if f.at_s < back_s.get(f.instance, 0.0):
            raise InputError(f"{where}: it is down until {back_s[f.instance]:g} s; fail it later")
        back_s[f.instance] = f.at_s + f.down_s


class Faults:
    """Lets `failures` happen. A lost request that has no token yet is sent again where `resubmit` says so; one whose
    answer was under way has failed: `on_failed`. While no instance is up, requests wait at the router."""

    def __init__(
        self,
        env: Clock,
        pool: PoolOfInstances,
        failures: tuple[Failure, ...],
        *,
        resubmit: bool,
        send: Callable[[Request], None],
        on_failed: Callable[[Request], None],
    ) -> None:
        self.env, self.pool, self.resubmit = env, pool, resubmit
        self.send, self.on_failed = send, on_failed
        self._waiting: list[Request] = []
        for failure in failures:
            pool.instances[failure.instance].watch()
            env.after(round(failure.at_s * NS_PER_S), self._lose, failure)

    def holds(self, request: Request) -> bool:
        """Is no instance up? Then `request` is sent when one is."""
        if not self.pool.all_down:
            return False
        self._waiting.append(request)
        return True

    def _lose(self, failure: Failure) -> None:
        instance = self.pool.instances[failure.instance]
        self.pool.down.add(instance)
        self.env.after(round(failure.down_s * NS_PER_S), self._recover, instance)
        for seq in instance.lose():
            self._lost(seq)

    def _lost(self, seq: Sequence) -> None:
        if self.resubmit and seq.first_token_ns < 0:
            self.send(seq.request)
        else:
            self.on_failed(seq.request)

    def _recover(self, instance: Instance) -> None:
        self.pool.down.discard(instance)
        instance.recover()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.send(request)
