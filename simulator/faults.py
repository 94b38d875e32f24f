"""Instances that are lost for a while: a plan of failures, and what becomes of the requests that they had.

A data-parallel rank that dies takes its instance with it, since its ranks step together: queues, running requests, KV
and prefix caches are gone. It comes back empty after its start-up time, and takes no request before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rackplan.simulator import sequence
from rackplan.simulator.clock import Clock
from rackplan.simulator.failures import Failure
from rackplan.simulator.instance import Instance
from rackplan.simulator.lossy_transfer import LossyTransfers
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.request import NS_PER_S, Request


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
            transfers.watch(self._lost)
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
