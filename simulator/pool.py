"""A pool: the instances of one role behind one router."""

from array import array
from collections.abc import Callable

import numpy as np

from rackplan.simulator.clock import Clock
from rackplan.simulator.instance import Instance
from rackplan.simulator.instance_model import InstanceModel
from rackplan.simulator.request import Request
from rackplan.simulator.router import RankLoads, Router
from rackplan.simulator.sequence import Sequence


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
        self.router = router
        n = sum(m.pool.dep for m in models)
        # Counted one by one, and looked at as vectors. Each instance counts in its own slice.
        self._requests, self._tokens = array("q", bytes(8 * n)), array("q", bytes(8 * n))
        requests, tokens = memoryview(self._requests), memoryview(self._tokens)
        self.instances: list[Instance] = []
        self._places: list[tuple[Instance, int]] = []
        for model in models:
            own = slice(len(self._places), len(self._places) + model.pool.dep)
            instance = Instance(env, model, requests[own], tokens[own], on_prefilled, on_finished)
            self.instances.append(instance)
            self._places += [(instance, r) for r in range(model.pool.dep)]
        self.down: set[Instance] = set()
        self._computes_prompts, self._decodes = models[0].pool.role != "decode", models[0].pool.role != "prefill"
        self._home: dict[int, int] = {}
        self.loads = RankLoads(np.frombuffer(requests, np.int64), np.frombuffer(tokens, np.int64), self._home)

    def choose(self, request: Request) -> tuple[Instance, int, int]:
        """(instance, rank, tokens that it is counted with there from now on) for `request`."""
        place = self._place_up(request) if self.down else self.router.choose(request, self.loads)
        tokens = request.input_tokens
        if self._computes_prompts and request.session >= 0:
            home, session, like = self._home, request.session, request.prefix_session
            if home.get(session) == place or (like >= 0 and home.get(like) == place):
                tokens -= request.reuse_tokens
            home[session] = place
        instance, r = self._places[place]
        if self._decodes:
            tokens += request.output_tokens
        self._requests[place] += 1
        self._tokens[place] += tokens
        return instance, r, tokens

    @property
    def all_down(self) -> bool:
        """Is no instance up?"""
        return len(self.down) == len(self.instances)

    def _place_up(self, request: Request) -> int:
        """The router's choice among the ranks of instances that are up, at least one."""
        up = [place for place, (instance, _) in enumerate(self._places) if instance not in self.down]
        number = {place: i for i, place in enumerate(up)}
        sessions = (request.session, request.prefix_session)
        home = {s: number[self._home[s]] for s in sessions if self._home.get(s) in number}
        return up[self.router.choose(request, RankLoads(self.loads.requests[up], self.loads.tokens[up], home))]

    def prime(self, turn: int, request: Request) -> None:
        """Put the whole prompt of `request` into the prefix cache of the rank whose `turn` it is, at no cost."""
        place = turn % len(self._places)
        self._home[request.session] = place
        instance, r = self._places[place]
        instance.prime(r, request)
