"""Hand-over of KV from prefill to decode ranks.

Bytes share links: a rank's link carries one hand-over after the other, at the sender and at the receiver, so the total
rate is the link's and a burst queues. Orchestration (`setup_ms`) and descriptor work (per block) come on top: beside
the transfer in push mode, on the decode worker's thread behind its next launch in pull mode. A hand-over starts
when the decode rank has KV room for it; until then the prompt stays on the prefill rank, which so feels a full pool.

An engine turns to hand-overs once a step, so they wait for steps of the decode engine (`steps_waited`).
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


def steps_waited(pulls: bool, async_scheduling: bool) -> float:
    """Steps of the decode engine that a hand-over waits for before the one that runs it can be planned, on the mean.

    A pull is posted by the step that the request is first planned with: half a step until that begins. A worker asks
    what has arrived as it launches a step, and the scheduler hears of it with that step's output: one step later, and
    one more where the step between is planned already (async scheduling). The wait for the launch that asks and the
    step that runs the request are those of any request that arrives, so they are simulated and not counted here.
    """
    return (0.5 if pulls else 0.0) + (2.0 if async_scheduling else 1.0)


class KvTransfers:
    """All hand-overs of a deployment. `transfer_ns`: (waiting for room, on the way) sums; `count`: hand-overs done."""

    def __init__(
        self, env: Clock, cost: TransferCost, model: ModelSpec, mode: str, decode: PoolOfInstances
    ) -> None:
        self.env, self.decode = env, decode
        self._pulls = mode == "pull"
        self._setup_ms, self._block_ms, self._block_tokens = cost.setup_ms, cost.per_block_ms, cost.block_tokens
        self._token_bytes, self._state_bytes = model.kv_bytes_per_token, model.state_bytes_per_sequence
        self._bytes_per_ns, self._counts_steps = cost.gb_per_s, cost.counts_steps
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
        link = (instance, rank)
        if self._waiting.get(link) or not instance.can_load(rank, seq.prompt_tokens):
            self._waiting.setdefault(link, deque()).append((seq, source, target))
        else:
            self._start(seq, source, target, instance)

    def room_freed(self, instance: Instance, rank: int) -> None:
        """A request ended on a decode rank: start what waits for its KV, first come, first served."""
        queue = self._waiting.get((instance, rank))
        while queue and instance.can_load(rank, queue[0][0].prompt_tokens):
            self._start(*queue.popleft(), instance)

    def _start(self, seq: Sequence, source: Instance, target: Sequence, instance: Instance) -> None:
        tokens, now = seq.prompt_tokens, self.env.now
        instance.hold(target.rank, tokens)
        blocks = -(-tokens // self._block_tokens)
        delay_ms = self._setup_ms
        if self._pulls:
            instance.charge_host_ms(blocks * self._block_ms)
        else:
            delay_ms += blocks * self._block_ms
        if self._counts_steps:
            delay_ms += steps_waited(self._pulls, instance.pool.async_scheduling) * instance.step_ms()
        bytes_ns = round((tokens * self._token_bytes + self._state_bytes) / self._bytes_per_ns)
        out, link, free_at = (source, seq.rank), (instance, target.rank), self._free_at
        end = max(now, free_at.get(out, 0), free_at.get(link, 0)) + bytes_ns
        free_at[out] = free_at[link] = end
        self.count += 1
        self.wait_ns += now - seq.prefill_done_ns
        arrive = end + round(delay_ms * NS_PER_MS)
        self.transfer_ns += arrive - now
        self.env.after(arrive - now, self._arrive, (seq, source, target, instance))

    def _arrive(self, hand_over: tuple[Sequence, Instance, Sequence, Instance]) -> None:
        seq, source, target, instance = hand_over
        source.release(seq)
        instance.take_over(target)
