"""Hand-overs of KV in a run in which instances are lost.

What vLLM's NIXL connectors do (read in 0.32): a decode instance whose load fails gives the request up, since
`kv_load_failure_policy` is "fail" by default. A prefill instance keeps a prompt's KV under a lease of
`kv_lease_duration` (30 s) from the prompt's end. A decode instance that has the request renews it every sixth of that,
to two thirds of it; when it dies, what is left of the last renewal runs out.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from rackplan.simulator.instance import Instance
from rackplan.simulator.kv_transfer import KvTransfers
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.request import NS_PER_S
from rackplan.simulator.scheduler import Sequence

LEASE_S = 30.0
RENEWED_S = LEASE_S * 2 / 3 - LEASE_S / 6 / 2
"""Left of a renewal when a decode instance dies, on the mean: renewals come every LEASE_S / 6."""


class LossyTransfers(KvTransfers):
    """`on_lost`: told of a request whose prompt no decode instance can take."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_lost: Callable[[Sequence], None]
        self._under_way: dict[Sequence, tuple[Sequence, Instance, Instance]] = {}

    def hand_over(self, seq: Sequence, source: Instance) -> None:
        if self.decode.all_down:
            self._keep_for_lease(seq, source, 0.0)
            self.on_lost(seq)
        else:
            super().hand_over(seq, source)

    def lose(self, lost: Instance) -> list[Sequence]:
        """`lost` is gone, at either end of hand-overs: their requests, those that wait for room first."""
        waited = self._take_waiting(lost)
        began = [target for target, (_, *ends) in self._under_way.items() if lost in ends]
        taken = [(target, *self._under_way.pop(target)) for target in began]
        for target, _, _, instance in taken:
            if instance is not lost:
                instance.release(target)
                instance.kv_loading -= 1
        for target, _, _, instance in waited:
            if instance is not lost:
                instance.ranks.leave(target)
        for _, seq, source, _ in [*waited, *taken]:
            if source is not lost:
                self._keep_for_lease(seq, source, RENEWED_S)
        for instance, rank in dict.fromkeys((i, t.rank) for t, _, _, i in [*waited, *taken] if i is not lost):
            self.room_freed(instance, rank)
        return [seq for _, seq, _, _ in [*waited, *taken]]

    def _take_waiting(self, lost: Instance) -> list[tuple[Sequence, Sequence, Instance, Instance]]:
        """(target, seq, source, instance) of the hand-overs from or to `lost` that wait for room; they wait no more."""
        taken = []
        for (instance, rank), queue in self._waiting.items():
            stay: deque[tuple[Sequence, Instance, Sequence]] = deque()
            for seq, source, target in queue:
                if lost in (source, instance):
                    taken.append((target, seq, source, instance))
                else:
                    stay.append((seq, source, target))
            self._waiting[instance, rank] = stay
        return taken

    def _keep_for_lease(self, seq: Sequence, source: Instance, renewed_s: float) -> None:
        """`source` holds the prompt until its lease ends; `renewed_s`: left of the last renewal."""
        source.ranks.leave(seq)
        end_ns = max(seq.prefill_done_ns + round(LEASE_S * NS_PER_S), self.env.now + round(renewed_s * NS_PER_S))
        self.env.after(end_ns - self.env.now, self._lease_ended, (seq, source, source.ranks))

    @staticmethod
    def _lease_ended(lease: tuple[Sequence, Instance, Ranks]) -> None:
        seq, source, ranks = lease
        if source.ranks is ranks:  # else it was lost since
            source.give_back(seq)

    def _start(self, seq: Sequence, source: Instance, target: Sequence, instance: Instance) -> None:
        self._under_way[target] = (seq, source, instance)
        super()._start(seq, source, target, instance)

    def _arrive(self, hand_over: tuple[Sequence, Instance, Sequence, Instance]) -> None:
        if self._under_way.pop(hand_over[2], None):  # else an end of it was lost
            super()._arrive(hand_over)
