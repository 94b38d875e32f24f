"""Hand-over of KV from prefill to decode ranks.

Bytes share links: a rank's link carries one hand-over after the other, at the sender and at the receiver, so the total
rate is the link's and a burst queues. Orchestration (`setup_ms`) and descriptor work (per block) come on top: beside
the transfer in push mode, on the decode worker's thread, where its next step waits, in pull mode. A hand-over starts
when the decode rank has KV room for it; until then the prompt stays on the prefill rank, which so feels a full pool.
"""

from collections import deque

from rackplan.engine import ModelSpec
from rackplan.simulator.clock import Clock
from rackplan.simulator.cost import TransferCost
from rackplan.simulator.instance import Instance
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.request import NS_PER_MS
from rackplan.simulator.scheduler import Sequence

Link = tuple[Instance, int]


class KvTransfers:
    """All hand-overs of a deployment. `transfer_ns`: (waiting for room, on the way) sums; `count`: hand-overs done."""

    def __init__(
        self, env: Clock, cost: TransferCost, model: ModelSpec, mode: str, decode: PoolOfInstances
    ) -> None:
        self.env, self.cost, self.model, self.mode, self.decode = env, cost, model, mode, decode
        self._free_at: dict[Link, int] = {}
        self._waiting: dict[Link, deque[tuple[Sequence, Instance, Sequence]]] = {}
        self.count = 0
        self.wait_ns = 0
        self.transfer_ns = 0

    def hand_over(self, seq: Sequence, source: Instance) -> None:
        """`seq` is prefilled on `source`: choose its decode rank and start, or wait for room there."""
        instance, rank, load_tokens = self.decode.choose(seq.request)
        target = Sequence(
            seq.request,
            rank,
            -1,
            seq.prompt_tokens,
            load_tokens,
            cached_tokens=seq.cached_tokens,
            scheduled_ns=seq.scheduled_ns,
            prefill_done_ns=seq.prefill_done_ns,
            kv_loaded=True,
        )
        queue = self._waiting.setdefault((instance, rank), deque())
        if queue or not instance.can_load(rank, seq.prompt_tokens):
            queue.append((seq, source, target))
        else:
            self._start(seq, source, target, instance)

    def room_freed(self, instance: Instance, rank: int) -> None:
        """A request ended on a decode rank: start what waits for its KV, first come, first served."""
        queue = self._waiting.get((instance, rank))
        while queue and instance.can_load(rank, queue[0][0].prompt_tokens):
            self._start(*queue.popleft(), instance)

    def _start(self, seq: Sequence, source: Instance, target: Sequence, instance: Instance) -> None:
        link = (instance, target.rank)
        instance.hold(target.rank, seq.prompt_tokens)
        blocks = -(-seq.prompt_tokens // self.cost.block_tokens)
        delay_ms = self.cost.setup_ms
        if self.mode == "pull":
            instance.charge_host_ms(blocks * self.cost.per_block_ms)
        else:
            delay_ms += blocks * self.cost.per_block_ms
        size = seq.prompt_tokens * self.model.kv_bytes_per_token + self.model.state_bytes_per_sequence
        bytes_ns = round(size / self.cost.gb_per_s)
        out, now = (source, seq.rank), self.env.now
        start = max(now, self._free_at.get(out, 0), self._free_at.get(link, 0))
        end = start + bytes_ns
        self._free_at[out] = self._free_at[link] = end
        self.count += 1
        self.wait_ns += now - seq.prefill_done_ns
        arrive = end + round(delay_ms * NS_PER_MS)
        self.transfer_ns += arrive - now
        done = self.env.timeout(arrive - now)
        assert done.callbacks is not None
        done.callbacks.append(lambda _: self._arrive(seq, source, target, instance))

    def _arrive(self, seq: Sequence, source: Instance, target: Sequence, instance: Instance) -> None:
        source.release(seq)
        instance.kv_loading -= 1
        target.ready_ns = self.env.now
        instance.submit(target)
