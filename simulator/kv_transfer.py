"""Hand-over of KV from prefill to decode ranks.

Bytes share links: a rank's link carries one hand-over after the other, at the sender and at the receiver, so the total
rate is the link's and a burst queues. Orchestration comes before (`setup_ms`: until the decode rank's scheduler has the
request), descriptor work (per block) on top: beside the transfer in push mode, on the decode worker's thread behind the
launch in pull mode. A hand-over begins when that scheduler comes to it with a seat and KV room (scheduler.py); until
then the prompt stays on the prefill rank, which so feels a full pool.

An engine turns to hand-overs once a step, so they wait for further steps of the decode engine (`steps_waited`).
"""

from rackplan.engine import ModelSpec
from rackplan.simulator.clock import LAST, Clock
from rackplan.simulator.cost import TransferCost
from rackplan.simulator.instance import Instance
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.request import NS_PER_MS
from rackplan.simulator.sequence import Sequence


def steps_waited(async_scheduling: bool) -> float:
    """Steps of the decode engine that a hand-over which has begun waits for before the one that runs it can be planned.

    A worker asks what has arrived as it launches a step, and the scheduler hears of it with that step's output: one
    step later, and one more where the step between is planned already (async scheduling). The step that the hand-over
    begins with, the wait for the launch that asks and the step that runs the request are simulated and not counted
    here.
    """
    return 2.0 if async_scheduling else 1.0


class KvTransfers:
    """All hand-overs of a deployment. `wait_ns`, `transfer_ns`: sums of the waits for room and a step to begin
    with, and of set-up and transfer; `count`: hand-overs begun."""

    def __init__(
        self, env: Clock, cost: TransferCost, model: ModelSpec, mode: str, decode: PoolOfInstances
    ) -> None:
        self.env, self.decode = env, decode
        self._pulls = mode == "pull"
        self._setup_ns = round(cost.setup_ms * NS_PER_MS)
        self._block_ms, self._block_tokens = cost.per_block_ms, cost.block_tokens
        self._token_bytes, self._state_bytes = model.kv_bytes_per_token, model.state_bytes_per_sequence
        self._bytes_per_ns = cost.gb_per_s
        is_async = decode.instances[0].pool.async_scheduling
        self._waits_steps = steps_waited(is_async) if cost.counts_steps else 0.0
        self._under_way: dict[Sequence, tuple[Sequence, Instance, Instance]] = {}
        for instance in decode.instances:
            instance.kv_loads.start, instance.kv_loads.in_runs = self._begin, not self._pulls
        self.count = 0
        self.wait_ns = 0
        self.transfer_ns = 0

    def hand_over(self, seq: Sequence, source: Instance) -> None:
        """`seq` is prefilled on `source`: have its decode rank queue it after the set-up."""
        instance, rank, load_tokens = self.decode.choose(seq.request)
        target = Sequence(seq.request, rank, self.env.now_ns + self._setup_ns, seq.prompt_tokens, load_tokens)
        target.cached_tokens, target.scheduled_ns = seq.cached_tokens, seq.scheduled_ns
        target.kv_elsewhere = True
        self._under_way[target] = seq, source, instance
        if not instance.expect_load(target):
            self.env.after(self._setup_ns, self._queue, target)

    def _queue(self, target: Sequence) -> None:
        self._under_way[target][2].submit(target)

    def _begin(self, target: Sequence, step_ns: int, planned_ns: int) -> None:
        """Start it as its step is planned. Links are given out when the step begins, behind all else of that time and
        in order of requests, so that the order is the same however steps are passed."""
        if self._pulls:
            self._under_way[target][2].charge_host_ms(self._work_ms(target))
        self.env.after(step_ns - self.env.now_ns, self._start, (target, planned_ns), LAST + target.request.id)

    def _work_ms(self, target: Sequence) -> float:
        return -(-target.prompt_tokens // self._block_tokens) * self._block_ms

    def _start(self, planned: tuple[Sequence, int]) -> None:
        target, planned_ns = planned
        seq, source, instance = self._under_way[target]
        tokens = seq.prompt_tokens
        delay_ms = 0.0 if self._pulls else self._work_ms(target)
        if self._waits_steps:
            delay_ms += self._waits_steps * instance.step_ms()
        bytes_ns = round((tokens * self._token_bytes + self._state_bytes) / self._bytes_per_ns)
        out, into = source.links_free_ns, instance.links_free_ns
        end, out_ns, into_ns = planned_ns, out[seq.rank], into[target.rank]
        if out_ns > end:
            end = out_ns
        if into_ns > end:
            end = into_ns
        end += bytes_ns
        out[seq.rank] = into[target.rank] = end
        self.count += 1
        self.wait_ns += planned_ns - target.ready_ns
        arrive = end + round(delay_ms * NS_PER_MS)
        self.transfer_ns += arrive - planned_ns + self._setup_ns
        target.ready_ns = arrive
        left_ns = arrive - self.env.now_ns
        self.env.after(left_ns if left_ns > 0 else 0, self._arrive, target)

    def _arrive(self, target: Sequence) -> None:
        seq, source, instance = self._under_way.pop(target)
        source.release(seq)
        instance.end_load(target)
