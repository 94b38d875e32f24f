"""A pool: the instances of one role behind one router."""

from collections.abc import Callable

import numpy as np
import simpy

from rackplan.simulator.instance import Instance, InstanceModel
from rackplan.simulator.request import Request
from rackplan.simulator.router import RankLoads, Router
from rackplan.simulator.scheduler import Sequence


class PoolOfInstances:
    """Routes requests to ranks and keeps count of what each rank has."""

    def __init__(
        self,
        env: simpy.Environment,
        models: list[InstanceModel],
        router: Router,
        on_prefilled: Callable[[Sequence, Instance], None],
        on_finished: Callable[[Sequence, Instance], None],
    ) -> None:
        self.env = env
        self.instances = [Instance(env, m, on_prefilled, on_finished) for m in models]
        self.router = router
        ranks = [(i, r) for i, m in enumerate(models) for r in range(m.pool.dep)]
        self._places = ranks
        self._requests = np.zeros(len(ranks), dtype=np.int64)
        self._tokens = np.zeros(len(ranks), dtype=np.int64)
        self.loads = RankLoads(self._requests, self._tokens)
        first = 0
        for instance in self.instances:  # each instance counts in its own slice
            n = instance.pool.dep
            instance.load, instance.load_tokens = self._requests[first : first + n], self._tokens[first : first + n]
            first += n

    def choose(self, request: Request) -> tuple[Instance, int]:
        """Instance and rank for `request`; it is counted there from now on."""
        i, r = self._places[self.router.choose(request, self.loads)]
        instance = self.instances[i]
        instance.load[r] += 1
        instance.load_tokens[r] += request.input_tokens + request.output_tokens
        return instance, r
