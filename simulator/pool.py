"""A pool: the instances of one role behind one router."""

from collections.abc import Callable

import numpy as np

from rackplan.simulator.clock import Clock
from rackplan.simulator.instance import Instance, InstanceModel
from rackplan.simulator.request import Request
from rackplan.simulator.router import RankLoads, Router
from rackplan.simulator.scheduler import Sequence


class PoolOfInstances:
    """Routes requests to ranks and keeps count of what each rank has."""

    def __init__(
        self,
        env: Clock,
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
        self._home: dict[int, int] = {}
        self.loads = RankLoads(self._requests, self._tokens, self._home)
        first = 0
        for instance in self.instances:  # each instance counts in its own slice
            n = instance.pool.dep
            instance.load, instance.load_tokens = self._requests[first : first + n], self._tokens[first : first + n]
            first += n

    def choose(self, request: Request) -> tuple[Instance, int, int]:
        """(instance, rank, tokens that it is counted with there from now on) for `request`."""
        place = self.router.choose(request, self.loads)
        tokens = request.input_tokens
        if request.session >= 0:
            if place in (self._home.get(request.session), self._home.get(request.prefix_session)):
                tokens -= request.reuse_tokens
            self._home[request.session] = place
        i, r = self._places[place]
        instance = self.instances[i]
        if instance.pool.role != "prefill":
            tokens += request.output_tokens
        instance.load[r] += 1
        instance.load_tokens[r] += tokens
        return instance, r, tokens

    def prime(self, turn: int, request: Request) -> None:
        """Put the whole prompt of `request` into the prefix cache of the rank whose `turn` it is, at no cost."""
        place = turn % len(self._places)
        self._home[request.session] = place
        i, r = self._places[place]
        self.instances[i].prime(r, request)
