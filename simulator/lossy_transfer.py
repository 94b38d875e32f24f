"""Hand-overs of KV in a run in which instances are lost.

What vLLM's NIXL connectors do (read in 0.32): a decode instance whose load fails gives the request up, since
`kv_load_failure_policy` is "fail" by default. A prefill instance keeps a prompt's KV under a lease of
`kv_lease_duration` (30 s) from the prompt's end. A decode instance that has the request renews it every sixth of that,
to two thirds of it; when it dies, what is left of the last renewal runs out.
"""

from collections.abc import Callable

from rackplan.simulator.instance import Instance
from rackplan.simulator.kv_transfer import KvTransfers
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.request import NS_PER_S
from rackplan.simulator.sequence import Sequence

LEASE_S = 30.0
RENEWED_S = LEASE_S * 2 / 3 - LEASE_S / 6 / 2
"""Left of a renewal when a decode instance dies, on the mean: renewals come every LEASE_S / 6."""


class LossyTransfers(KvTransfers):
    """Those of a deployment of which instances are lost; `watch` comes before the run begins."""

    on_lost: Callable[[Sequence], None]

    def watch(self, on_lost: Callable[[Sequence], None]) -> None:
        """`on_lost` is told of a request whose prompt no decode instance can take."""
        self.on_lost = on_lost
        for instance in self.decode.instances:
            instance.kv_loads.in_runs = False  # a loss may end a run before the step that a load would begin with

    def hand_over(self, seq: Sequence, source: Instance) -> None:
        seq.prefill_done_ns = self.env.now_ns
        if self.decode.all_down:
            self._keep_for_lease(seq, source, 0.0)
            self.on_lost(seq)
        else:
            super().hand_over(seq, source)

    def lose(self, lost: Instance) -> list[Sequence]:
        """`lost` is gone, at either end of hand-overs: the prompts that it had, which decode instances wait for."""
        gone = []
        for target, (seq, source, instance) in list(self._under_way.items()):
            if lost is source:
                instance.drop_load(target)
                gone.append(seq)
            elif lost is instance:
                self._keep_for_lease(seq, source, RENEWED_S)
            else:
                continue
            del self._under_way[target]
        return gone

    def _keep_for_lease(self, seq: Sequence, source: Instance, renewed_s: float) -> None:
        """`source` holds the prompt until its lease ends; `renewed_s`: left of the last renewal."""
        source.ranks.leave(seq)
        end_ns = max(seq.prefill_done_ns + round(LEASE_S * NS_PER_S), self.env.now_ns + round(renewed_s * NS_PER_S))
        self.env.after(end_ns - self.env.now_ns, self._lease_ended, (seq, source, source.ranks))

    @staticmethod
    def _lease_ended(lease: tuple[Sequence, Instance, Ranks]) -> None:
        seq, source, ranks = lease
        if source.ranks is ranks:  # else it was lost since
            source.give_back(seq)

    # What was on its way when an end of it was lost goes on no more.
    def _queue(self, target: Sequence) -> None:
        if target in self._under_way:
            super()._queue(target)

    def _start(self, planned: tuple[Sequence, int]) -> None:
        if planned[0] in self._under_way:
            super()._start(planned)

    def _arrive(self, target: Sequence) -> None:
        if target in self._under_way:
            super()._arrive(target)
