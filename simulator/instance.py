"""One instance: a DP group that steps in lockstep. The SimPy process that everything else feeds.

Ranks are rows of arrays. A decoding request's last step is known when it starts, so a step touches only what changes,
and steps in which nothing can change are advanced together: their times are computed as one array, and an arrival cuts
the run at the step it falls in. Coalesced and step-by-step runs are the same, request by request.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from rackplan.engine import Pool
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.accounting import GpuTime
from rackplan.simulator.clock import Clock
from rackplan.simulator.cost import PoolCost
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.prefix_cache import PrefixCache
from rackplan.simulator.request import NS_PER_MS, Request
from rackplan.simulator.scheduler import Rank, RankPlan, Sequence, plan_rank
from rackplan.simulator.step import StepTimes, time_steps
from rackplan.simulator.step_load import load_of
from rackplan.simulator.step_run import StepRun

MOST_COALESCED_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """What an instance knows of itself. `kv_tokens`: KV pool of one rank. `balancedness`: by tokens per rank.
    `rearrange_every_steps`: a synchronous EPLB stops all ranks for `rearrange_ms` that often; None for no stop."""

    pool: Pool
    cost: PoolCost
    kv_tokens: int
    acceptance: Acceptance
    replay_tokens: int
    balancedness: Callable[[float], float]
    make_cache: Callable[[], PrefixCache]
    rearrange_every_steps: int | None = None
    rearrange_ms: float = 0.0
    coalesce: bool = True


class Instance:
    """`on_prefilled(seq, instance)`: a prompt is in a prefill pool's KV cache; `on_finished(seq, instance)`: an end.

    `load`, `load_tokens` (ranks,): requests on each rank and their tokens, for the router. `token_gaps`: (steps,
    sequences, step times in ns) of every run of steps with decoding requests. `kv_loading`: hand-overs under way to
    this instance.
    """

    def __init__(
        self,
        env: Clock,
        model: InstanceModel,
        on_prefilled: Callable[[Sequence, "Instance"], None],
        on_finished: Callable[[Sequence, "Instance"], None],
    ) -> None:
        self.env = env
        self.model = model
        self.pool = model.pool
        self.on_prefilled, self.on_finished = on_prefilled, on_finished
        n = model.pool.dep
        self.ranks = [Rank(model.make_cache()) for _ in range(n)]
        self.load = np.zeros(n, dtype=np.int64)
        self.load_tokens = np.zeros(n, dtype=np.int64)
        self.kv_loading = 0
        self.most_admitted = 0
        self.preemptions = 0
        self._batch = DecodeBatch(self.ranks, model.kv_tokens, model.acceptance)
        self._prefilling = np.zeros(n)
        self._busy_ranks: set[int] = set()  # ranks with waiting or partly prefilled requests
        self._blocked: dict[int, str] = {}
        self._run: StepRun | None = None  # the run of steps under way, where an arrival may cut it
        self._lead_ms = 0.0  # how far the host is ahead of the GPU
        self._seen_ms = 0.0  # how long before the step's end the scheduler looks at its queue
        self._outputs: list[tuple[Sequence, bool]] = []  # first tokens and ends (True) of the last step
        self._wake: simpy.Event | None = None
        self._extra_host_ms = 0.0
        self.start_measuring()
        self._process = env.process(self._live())

    # -- what others do to it ------------------------------------------------------------------------------------
    def submit(self, seq: Sequence) -> None:
        """Queue a request on its rank, now."""
        rank = self.ranks[seq.rank]
        (rank.loaded if seq.kv_loaded else rank.waiting).append(seq)
        self._busy_ranks.add(seq.rank)
        self._stir(seq.rank, seq.kv_loaded)

    def release(self, seq: Sequence) -> None:
        """A hand-over is done: the prompt's KV on this prefill instance may be evicted from now on."""
        self._batch.held[seq.rank] -= seq.prompt_tokens
        self._store(seq, seq.prompt_tokens)
        self._leave(seq)
        if self.ranks[seq.rank].waiting and self._blocked.get(seq.rank) == "kv_full":
            del self._blocked[seq.rank]
            self._stir(seq.rank, kv_loaded=False)

    def can_load(self, rank: int, tokens: int) -> bool:
        """Is there KV for a hand-over of `tokens`?"""
        done = self._run.steps_done(self.env.now) if self._run else 0
        return tokens <= self._batch.room(rank, self._batch.step + done + 1)

    def hold(self, rank: int, tokens: int) -> None:
        """Allocate KV for a hand-over that starts."""
        self._batch.held[rank] += tokens
        self.kv_loading += 1
        if self._run and self._batch.room(rank, self._batch.step + len(self._run)) < 0:
            self._cut_run()

    def charge_host_ms(self, ms: float) -> None:
        """Work put on the worker's thread from outside; the next step waits for it."""
        self._extra_host_ms += ms
        self._cut_run()

    def prime(self, rank: int, request: Request) -> None:
        """Put the whole prompt of `request` into a rank's prefix cache, at no cost."""
        if self.pool.enable_prefix_caching:
            cache = self.ranks[rank].cache
            cache.store(request, request.input_tokens)
            cache.evict_to(self.model.kv_tokens)

    def start_measuring(self) -> None:
        """Forget what was booked so far (the warm-up)."""
        self.time = GpuTime(self.pool.gpus_per_instance)
        self.token_gaps: list[tuple[int, int, np.ndarray]] = []
        self._idle_since = self.env.now

    def stop_measuring(self) -> None:
        """Book the idle time that is still under way."""
        if self._wake is not None:
            self._book_idle()

    # -- the process ---------------------------------------------------------------------------------------------
    def _live(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._preempt_for_growth()
            plans = self._plan(int(self.env.now) - round(self._seen_ms * NS_PER_MS))
            if not plans and not self._batch.running:
                self._lead_ms = self._seen_ms = 0.0
                self._deliver(0)
                plans = self._plan(int(self.env.now) + 1)  # nothing runs: all that is here is seen
            if not plans and not self._batch.running:
                yield from self._wait_for_work()
                continue
            times = self._time(plans)
            wall_ns = np.maximum(1, np.rint(times.wall_ms * NS_PER_MS)).astype(np.int64)
            ends = self.env.now + np.cumsum(wall_ns)
            begins = ends - wall_ns - np.rint(times.seen_ms * NS_PER_MS).astype(np.int64)
            run = StepRun(begins, ends)
            self._run = run if len(run) > 1 else None
            self._deliver(round(times.delivery_ms * NS_PER_MS))  # may start hand-overs, which take KV from this run
            steps = yield from self._pass(run)
            self._lead_ms = float(times.next_lead_ms[steps - 1])
            self._seen_ms = float(times.next_seen_ms[steps - 1])
            if steps < len(wall_ns):
                times, wall_ns = times.first(steps), wall_ns[:steps]
            self._book(plans, times, wall_ns)
            self._commit(plans, steps)

    def _deliver(self, delay_ns: int) -> None:
        """Hand on what the last step made: with async scheduling the host looks at it once the next is launched."""
        outputs, self._outputs = self._outputs, []
        for seq, ended in outputs:
            if seq.first_token_ns < 0 and self.pool.role != "prefill":
                seq.first_token_ns = self.env.now + delay_ns
            if not ended:
                continue
            if not delay_ns:
                self._hand_on(seq)
                continue
            event = self.env.timeout(delay_ns, value=seq)
            assert event.callbacks is not None
            event.callbacks.append(lambda e: self._hand_on(e.value))

    def _hand_on(self, seq: Sequence) -> None:
        if self.pool.role == "prefill":
            seq.prefill_done_ns = self.env.now
            self.on_prefilled(seq, self)  # its KV stays held until `release`
        else:
            self.on_finished(seq, self)

    def _wait_for_work(self) -> Generator[simpy.Event, Any, None]:
        self._idle_since = self.env.now
        self._wake = self.env.event()
        yield self._wake
        self._wake = None
        self._book_idle()

    def _pass(self, run: StepRun) -> Generator[simpy.Event, Any, int]:
        """Let the steps pass; what comes meanwhile may cut them short. Returns how many were run."""
        while True:
            try:
                yield self.env.timeout(run.end_ns - self.env.now)
            except simpy.Interrupt:  # the run is shorter by now
                continue
            self._run = None
            return len(run)

    def _stir(self, rank: int, kv_loaded: bool) -> None:
        """Something came to `rank`: wake up, or end the run of steps at the first boundary at which it can be seen."""
        if self._wake is not None:
            if not self._wake.triggered:
                self._wake.succeed()
        elif self._run and not self._is_blocked(rank, kv_loaded) and self._run.end_before_next_begin(self.env.now):
            self._notice()

    def _is_blocked(self, rank: int, kv_loaded: bool) -> bool:
        """Can a request that comes to `rank` not start before another ends? One that has its KV needs no more of it."""
        reason = self._blocked.get(rank)
        return reason is not None and not (kv_loaded and reason == "kv_full")

    def _cut_run(self) -> None:
        """End the run of steps under way with the current step."""
        if self._run and self._run.end_with_current(self.env.now):
            self._notice()

    def _notice(self) -> None:
        """Have the process see that its run is shorter; while it is still handing on the last step's, it will."""
        if self.env.active_process is not self._process:
            self._process.interrupt()

    # -- planning a step -----------------------------------------------------------------------------------------
    def _plan(self, visible_before_ns: int) -> dict[int, RankPlan]:
        """Plans of the ranks on which something other than decoding happens."""
        plans: dict[int, RankPlan] = {}
        self._blocked.clear()
        for r in sorted(self._busy_ranks):
            rank = self.ranks[r]
            plan = plan_rank(
                rank,
                self.pool,
                now_ns=self.env.now,
                visible_before_ns=visible_before_ns,
                room_tokens=self._batch.room(r, self._batch.step + 1),
                draft_tokens=self.model.acceptance.draft_tokens,
                replay_tokens=self.model.replay_tokens,
            )
            if plan.blocked_by:
                self._blocked[r] = plan.blocked_by
            if plan.chunks or plan.loads:
                plans[r] = plan
                self._admit(r, plan)
        return plans

    def _admit(self, r: int, plan: RankPlan) -> None:
        self._batch.held[r] += sum(seq.prompt_tokens for seq in plan.started)
        self._prefilling[r] += len(plan.started)
        for seq in plan.loads:
            self._batch.held[r] -= seq.prompt_tokens
            self._batch.start(seq, seq.request.output_tokens, seq.prompt_tokens)
        rank = self.ranks[r]
        rank.cache.evict_to(int(self._batch.room(r, self._batch.step)))
        if rank.only_decodes:
            self._busy_ranks.discard(r)

    def _steps_ahead(self, plans: dict[int, RankPlan]) -> int:
        """Steps in which nothing changes but the context."""
        unseen = any(not self._is_blocked(r, bool(self.ranks[r].loaded)) for r in self._busy_ranks)
        if plans or unseen or not self.model.coalesce or self._extra_host_ms:
            return 1
        ahead = min(self._batch.steps_to_next_end(), MOST_COALESCED_STEPS)
        if every := self.model.rearrange_every_steps:
            ahead = min(ahead, every - self._batch.step % every)
        return max(1, self._batch.steps_with_room(ahead))

    def _time(self, plans: dict[int, RankPlan]) -> StepTimes:
        model = self.model
        every = model.rearrange_every_steps
        if every and self._batch.step and self._batch.step % every == 0:
            self._extra_host_ms += model.rearrange_ms
        for plan in plans.values():
            self.most_admitted = max(self.most_admitted, len(plan.admitted))
        load = load_of(plans, self._batch, self._prefilling, 1 + model.acceptance.draft_tokens, model.cost)
        steps = self._steps_ahead(plans)
        extra, self._extra_host_ms = self._extra_host_ms, 0.0
        return time_steps(
            model.cost,
            replace(load, admission_ms=load.admission_ms + extra) if extra else load,
            steps,
            model.balancedness(float(np.add.reduce(load.tokens)) / len(self.ranks)),
            self.pool.async_scheduling,
            self._lead_ms,
            self._seen_ms,
            self.pool.gpus_per_instance > 1,
        )

    # -- what a step did -----------------------------------------------------------------------------------------
    def _book_idle(self) -> None:
        cause = "transfer_wait" if self.kv_loading else "kv_full" if self._blocked else "idle"
        self.time.book_idle(cause, self.env.now - self._idle_since)
        self._idle_since = self.env.now

    def _book(self, plans: dict[int, RankPlan], times: StepTimes, wall_ns: np.ndarray) -> None:
        idle = (self._batch.requests + self._prefilling) == 0
        idle_ranks = int(idle.sum())
        cause = "dp_imbalance"
        if idle_ranks and self._blocked:
            reasons = {why for r, why in self._blocked.items() if idle[r]}
            cause = next((c for c in ("admission_cap", "kv_full") if c in reasons), cause)
        self.time.book_steps(times, wall_ns, idle_ranks / len(idle), cause)
        sequences = self._batch.running - sum(len(plan.loads) for plan in plans.values())
        if sequences:
            self.token_gaps.append((len(wall_ns), sequences, wall_ns))

    def _commit(self, plans: dict[int, RankPlan], steps: int) -> None:
        self._batch.step += steps
        for plan in plans.values():
            for seq, new in plan.chunks:
                seq.computed_tokens += new
                if seq.computed_tokens >= seq.prompt_tokens:
                    self._prefilled(seq)
            self._outputs += [(seq, False) for seq in plan.loads]
        while (ended := self._batch.pop_ended()) is not None:
            self._end(ended, round(self._batch.stop(ended)))

    def _prefilled(self, seq: Sequence) -> None:
        r = seq.rank
        rank = self.ranks[r]
        rank.partial.remove(seq)
        self._prefilling[r] -= 1
        if rank.only_decodes:
            self._busy_ranks.discard(r)
        if self.pool.role == "prefill":
            self._outputs.append((seq, True))
            return
        self._batch.held[r] -= seq.prompt_tokens
        self._outputs.append((seq, False))
        left = seq.request.output_tokens - seq.generated_tokens - 1
        if left > 0:
            self._batch.start(seq, left, seq.prompt_tokens + 1)
        else:
            self._end(seq, seq.prompt_tokens)

    def _end(self, seq: Sequence, tokens: int) -> None:
        self._leave(seq)
        if self.pool.role == "aggregated":
            self._store(seq, tokens)
        self._outputs.append((seq, True))

    def _leave(self, seq: Sequence) -> None:
        self.load[seq.rank] -= 1
        self.load_tokens[seq.rank] -= seq.load_tokens

    def _store(self, seq: Sequence, tokens: int) -> None:
        if self.pool.enable_prefix_caching:
            cache = self.ranks[seq.rank].cache
            cache.store(seq.request, tokens)
            cache.evict_to(int(self._batch.room(seq.rank, self._batch.step)))

    def _preempt_for_growth(self) -> None:
        """No KV for the next tokens: the rank's last request gives its KV back and starts anew, first in line."""
        for r in self._batch.ranks_short_of_room():
            rank = self.ranks[r]
            while rank.decoding and self._batch.room(r, self._batch.step + 1) < 0:
                seq = next(reversed(rank.decoding))
                seq.generated_tokens += round(seq.growth * (self._batch.step - seq.start_step))
                seq.prompt_tokens = seq.request.input_tokens + seq.generated_tokens
                self._batch.stop(seq)
                seq.computed_tokens, seq.kv_loaded = 0, False
                seq.preemptions += 1
                self.preemptions += 1
                rank.waiting.appendleft(seq)
                self._busy_ranks.add(r)
