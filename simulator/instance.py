"""One instance: a DP group that steps in lockstep. The SimPy process that everything else feeds.

A decoding request's last step is known when it starts, so a step touches only what changes, and steps in which nothing
can change are advanced together: their times are computed as one array, and an arrival cuts the run at the step it
falls in. Coalesced and step-by-step runs are the same, request by request.
"""

from array import array
from collections.abc import Callable

from rackplan.simulator.accounting import GpuTime
from rackplan.simulator.clock import Clock, Process, Sleeps
from rackplan.simulator.eplb_run import Eplb
from rackplan.simulator.frontend import TURNS, FrontEnd
from rackplan.simulator.instance_model import InstanceModel
from rackplan.simulator.kv_loads import KvLoads
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.request import NS_PER_MS, Request
from rackplan.simulator.scheduler import RankPlan
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.step import time_steps
from rackplan.simulator.step_load import load_of
from rackplan.simulator.step_run import OneStep, StepRun


class TokenGaps:
    """Every step with decoding requests: how long it took (`walls_ns`), and how many had a token before (`sequences`).
    """

    def __init__(self) -> None:
        self.walls_ns, self.sequences = array("q"), array("q")

    def add(self, walls_ns: list[int], sequences: int) -> None:
        """Steps of `sequences` each."""
        for wall_ns in walls_ns:
            self.walls_ns.append(wall_ns)
            self.sequences.append(sequences)


class Instance:
    """`on_prefilled(seq, instance)`: a prompt is in a prefill pool's KV cache; `on_finished(seq, instance)`: an end.

    `ranks`: its queues and running requests; `token_gaps`, `time`: what was measured; `kv_loads`: where they begin;
    `kv_loading`: how many are under way; `links_free_ns` (ranks,): when each rank's link is. `load`, `load_tokens`: see
    Ranks.
    """

    # Python 3.11 finds attributes of a class with more than 30 the slow way, where they are not named here.
    __slots__ = (
        "_after_ms", "_async_scheduling", "_batch", "_cause", "_dep", "_down", "_extra_host_ms", "_frontend",
        "_idle_since", "_is_idle", "_is_still", "_lead_ms", "_own_worker", "_prefills", "_present", "_process", "_run",
        "_seen_ms", "_step_since", "_sync_ms", "_under_way", "env", "eplb", "kv_loading", "kv_loads", "links_free_ns",
        "model", "on_finished", "on_prefilled", "pool", "ranks", "time", "token_gaps"
    )

    def __init__(
        self,
        env: Clock,
        model: InstanceModel,
        load: memoryview,
        load_tokens: memoryview,
        on_prefilled: Callable[[Sequence, "Instance"], None],
        on_finished: Callable[[Sequence, "Instance"], None],
    ) -> None:
        self.env = env
        self.model = model
        self.pool, self._dep = model.pool, model.pool.dep
        self._prefills = model.pool.role == "prefill"
        self.on_prefilled, self.on_finished = on_prefilled, on_finished
        self.ranks = Ranks(model, load, load_tokens)
        self.kv_loads = KvLoads(env, self.submit)
        self.links_free_ns = [0] * model.pool.dep
        self.kv_loading = 0
        self._batch = self.ranks.batch
        self._run: StepRun | None = None  # the run of steps under way, where an arrival may cut it
        token_ms = model.frontend_token_ms
        ranks, chunk = model.pool.dep, model.pool.output_proc_chunk_size
        self._frontend = FrontEnd(token_ms, model.frontend_turn_ms, ranks, chunk) if token_ms else None
        self._lead_ms = 0.0  # how far the host is ahead of the GPU
        self._seen_ms = 0.0  # how long before the step's end the scheduler looks at its queue
        self._sync_ms = model.cost.dp_sync_ms()
        self._async_scheduling = model.pool.async_scheduling
        self._own_worker = model.pool.gpus_per_instance > 1
        self._is_idle = self._is_still = False  # still: idle or down
        self._extra_host_ms = self._after_ms = 0.0
        self._under_way: OneStep | StepRun | None = None
        self._present: dict[Sequence, None] | None = None  # requests here, where it may be lost
        self._down = False
        self._cause = ""  # why ranks run dummy batches in the steps under way, as their scheduler had it
        self.eplb = self._new_eplb()
        self.start_measuring()
        self._process = Process(env, self._live(self.ranks))

    def _new_eplb(self) -> Eplb | None:
        model = self.model
        return Eplb(model.eplb, self.env, model.cost, self._cut_run) if model.eplb else None

    # -- what others do to it ------------------------------------------------------------------------------------
    def submit(self, seq: Sequence) -> None:
        """Queue a request on its rank, now; a hand-over may be taken into the steps under way."""
        run, loads = self._under_way, self.kv_loads
        if loads.in_runs and run and loads.take(seq, self.ranks, run, self.env.now_ns, self.eplb is not None):
            return
        self.ranks.add(seq)
        self._stir(seq.rank, seq.ready_ns)

    def receive(self, seq: Sequence) -> None:
        """Take a request in at the front end, which queues it on its rank when it has had its turns."""
        if self._present is not None:
            self._present[seq] = None
        if self._frontend:  # who called may have more for this instance: no turn after the first is foreseen yet
            self.env.after(self._frontend.turn_done_ns(self.env.now_ns), self._turn, (seq, TURNS - 1))
        else:
            self.submit(seq)

    def _turn(self, waiting: tuple[Sequence, int]) -> None:
        seq, turns = waiting
        if self._present is not None and seq not in self._present:
            return
        env = self.env
        now = env.now_ns
        if turns and self._frontend:
            next_ns, at_ns = env.next_ns, now
            while True:
                at_ns += self._frontend.turn_done_ns(at_ns)
                turns -= 1
                if not turns or at_ns >= next_ns:
                    break  # else nothing comes before the next turn, which would find all as it is
            env.after(at_ns - now, self._turn, (seq, turns))
            return
        seq.ready_ns = now
        self.submit(seq)

    def release(self, seq: Sequence) -> None:
        """A hand-over is done: the prompt's KV on this prefill instance may be evicted from now on."""
        self.ranks.leave(seq)
        self.give_back(seq)

    def give_back(self, seq: Sequence) -> None:
        """The KV of a prompt that the router counts no more may be evicted from now on."""
        if self._is_still:
            self._book_idle()
        if self.ranks.release(seq):
            self._stir(seq.rank, self.env.now_ns)

    def expect_load(self, seq: Sequence) -> bool:
        """A request is on its way here whose KV will be loaded. Does it come by itself?"""
        if self._present is not None:
            self._present[seq] = None
        if self._is_still:
            self._book_idle()
        self.kv_loading += 1
        if not self.kv_loads.in_runs:
            return False
        self.kv_loads.expect(seq, self._under_way)
        return True

    def end_load(self, seq: Sequence) -> None:
        """KV that was loaded for a request has arrived, at its `ready_ns`."""
        if self._present is not None and seq not in self._present:
            return
        if self._is_still:
            self._book_idle()
        self.kv_loading -= 1
        self.ranks.end_load(seq)
        self._stir(seq.rank, seq.ready_ns, kv_loaded=True)

    def drop_load(self, seq: Sequence) -> None:
        """The KV that `expect_load` was told of will not come."""
        if self._present is not None:
            del self._present[seq]
        if self._is_still:
            self._book_idle()
        self.kv_loading -= 1
        if self.ranks.drop_load(seq):
            if self._is_idle:
                self._process.wake()
            self._cut_run()

    def charge_host_ms(self, ms: float) -> None:
        """Work on the worker's thread for a load that begins: it follows the launch of the step that is planned, and
        the step behind that may have to wait. Where nothing runs it holds up nothing."""
        self._after_ms += ms

    def step_ms(self) -> float:
        """How long the step takes that is under way or has just ended, ms; 0 where none is."""
        run = self._under_way
        return run.wall_ns_at(self.env.now_ns) / NS_PER_MS if run else 0.0

    def prime(self, rank: int, request: Request) -> None:
        """Put the whole prompt of `request` into a rank's prefix cache, at no cost."""
        self.ranks.prime(rank, request)

    def watch(self) -> None:
        """Keep a list of the requests here from now on, for `lose`; call it before the run begins."""
        self._present = {}
        self.start_measuring()

    def lose(self) -> list[Sequence]:
        """All that is here is gone, and nothing runs until `recover`. The requests, in order of arrival."""
        if self._is_still:
            self._book_idle()
        assert self._present is not None
        lost, self._present = list(self._present), {}
        old, ranks = self.ranks, self.ranks
        if not self._is_idle:
            self._book_done()
            self.time.book_idle("failed", self.env.now_ns - self._step_since)
        load, load_tokens = old.load, old.load_tokens
        for r in range(self.pool.dep):
            load[r] = load_tokens[r] = 0
        self.ranks = ranks = Ranks(self.model, load, load_tokens)
        ranks.preemptions, ranks.most_admitted = old.preemptions, old.most_admitted
        self._batch, self._run, self._is_idle = ranks.batch, None, False
        self._lead_ms = self._seen_ms = self._extra_host_ms = self._after_ms = 0.0
        self._under_way, self.kv_loading, self.eplb = None, 0, self._new_eplb()
        self._down = self._is_still = True
        self._idle_since = self.env.now_ns
        return lost

    def recover(self) -> None:
        """It is up again, with nothing in it."""
        self._book_idle()
        self._down = self._is_still = False
        self._process = Process(self.env, self._live(self.ranks))

    def start_measuring(self) -> None:
        """Forget what was booked so far (the warm-up)."""
        self.time = GpuTime(self.pool.gpus_per_instance)
        if self._present is not None:
            self.time.book_idle("failed", 0)
        self.token_gaps = TokenGaps()
        self._idle_since = self._step_since = self.env.now_ns

    def stop_measuring(self) -> None:
        """Book the idle time that is still under way."""
        if self._is_still:
            self._book_idle()

    # -- the process ---------------------------------------------------------------------------------------------
    def _live(self, ranks: Ranks) -> Sleeps:
        env, batch, kv_loads = self.env, ranks.batch, self.kv_loads
        while ranks is self.ranks:  # else it was lost, and this process belongs to what it was
            if batch.step >= batch.roomy_until:
                ranks.preempt_for_growth()
            now = env.now_ns
            planned_ns = now - round(self._seen_ms * NS_PER_MS)
            if kv_loads.unseen:
                kv_loads.queue_seen(ranks, planned_ns)
            plans = ranks.plan(now, planned_ns)
            if not plans and not batch.running:
                self._lead_ms = self._seen_ms = 0.0
                self._deliver(0)
                if kv_loads.unseen:
                    kv_loads.queue_seen(ranks, now + 1)
                plans, planned_ns = ranks.plan(now, now + 1), now  # nothing runs: all that is here is seen
                if not plans:
                    self._under_way = None
            if ranks.begun_loads:
                self._begin_loads(planned_ns)
            if not plans and not batch.running:
                yield from self._wait_for_work()
                continue
            self._step_since = now
            run = self._next_run(plans)
            self._under_way = run
            self._cause = ranks.idle_cause() if batch.idle_ranks else "dp_imbalance"
            self._run = run if isinstance(run, StepRun) else None
            if kv_loads.unseen:
                kv_loads.take_unseen(ranks, run, now, self.eplb is not None)
            if kv_loads.coming:
                kv_loads.foresee(run)
            if self._frontend:
                self._frontend.passing(run, batch.running)
            self._deliver(run.delivery_ns)
            while (left_ns := run.end_ns - env.now_ns) > 0:
                yield left_ns  # interrupted where the run is shorter by now
            if ranks is not self.ranks:
                return
            self._run = None
            self._lead_ms, self._seen_ms = run.next_lead_ms, run.next_seen_ms
            if self._lead_ms < 0:
                self._be_late()
            self._book(plans, run)
            ranks.commit(plans, run.steps)

    def _next_run(self, plans: dict[int, RankPlan]) -> OneStep | StepRun:
        """The step that runs `plans`, or as many steps as nothing changes in."""
        model, batch, eplb = self.model, self._batch, self.eplb
        if eplb:
            self._extra_host_ms += eplb.begin(batch.step)
        experts = eplb or model
        extra_ms, self._extra_host_ms = self._extra_host_ms, 0.0
        after_ms, self._after_ms = self._after_ms, 0.0
        drafts = model.verification.settle(batch) if model.verification else model.acceptance.draft_tokens
        load = load_of(plans, batch, 1 + drafts, experts.cost)
        steps = 1 if plans or extra_ms or after_ms else self.ranks.steps_ahead()
        if eplb and steps > 1:
            steps = min(steps, eplb.steps_ahead(batch.step))
        times = time_steps(
            experts.cost,
            load,
            batch,
            steps,
            experts.balancedness(load.total_tokens / self._dep),
            extra_host_ms=extra_ms,
            after_ms=after_ms,
            sync_ms=self._sync_ms,
            async_scheduling=self._async_scheduling,
            lead_ms=self._lead_ms,
            seen_ms=self._seen_ms,
            own_worker=self._own_worker,
        )
        return OneStep(times, self.env.now_ns) if steps == 1 else StepRun(times, self.env.now_ns)

    def _be_late(self) -> None:
        """The host is still at work when the step ends on the GPU: the next one starts so much later."""
        self._extra_host_ms -= self._lead_ms
        self._lead_ms, self._seen_ms = 0.0, max(0.0, self._seen_ms)

    def _deliver(self, delay_ns: int) -> None:
        """Hand on what the last step made: with async scheduling the host looks at it once the next is launched."""
        ranks = self.ranks
        if not (ranks.started or ranks.ended):
            return
        if self._frontend:
            delay_ns += self._frontend.work_ns(max(1, self._batch.running))
        if ranks.started:
            first_token_ns = self.env.now_ns + delay_ns
            for seq in ranks.started:
                if seq.first_token_ns < 0:
                    seq.first_token_ns = first_token_ns
            ranks.started.clear()
        if ranks.ended:
            ends, ranks.ended = ranks.ended, []
            if delay_ns:
                self.env.after(delay_ns, self._hand_on, ends)
            else:
                self._hand_on(ends)

    def _hand_on(self, ends: list[Sequence]) -> None:
        for seq in ends:
            if self._present is not None:
                if seq not in self._present:
                    continue
                del self._present[seq]
            if self._prefills:
                self.on_prefilled(seq, self)  # its KV stays held until `release`
            else:
                self.on_finished(seq, self)

    def _begin_loads(self, planned_ns: int) -> None:
        for seq in self.ranks.begun_loads:
            if seq.kv_elsewhere:
                self.kv_loads.start(seq, self.env.now_ns, planned_ns)
                continue
            self.kv_loading += 1
            tier = self.ranks.queues[seq.rank].host
            assert tier is not None
            load_ns = tier.load_ns(seq.loaded_tokens - seq.computed_tokens, self.env.now_ns)
            seq.ready_ns = self.env.now_ns + load_ns
            self.env.after(load_ns, self.end_load, seq)
        self.ranks.begun_loads.clear()

    def _wait_for_work(self) -> Sleeps:
        self._idle_since = self.env.now_ns
        self._extra_host_ms = self._after_ms = 0.0
        self.ranks.begin_wave()
        self.kv_loads.foresee(None)
        self._is_idle = self._is_still = True
        yield None
        self._is_idle = self._is_still = False
        self._book_idle()

    def _stir(self, rank: int, since_ns: int, *, kv_loaded: bool = False) -> None:
        """Something came to `rank` at `since_ns`: wake up, or end the run of steps at the first boundary at which it
        can be seen."""
        if self._is_idle:
            self._process.wake()
            return
        run = self._run
        if run and not self.ranks.is_blocked(rank, kv_loaded) and run.end_before_next_begin(since_ns):
            self._notice()

    def _cut_run(self) -> None:
        """End the run of steps under way with the current step."""
        if self._run and self._run.end_with_current(self.env.now_ns):
            self._notice()

    def _notice(self) -> None:
        """Have the process see that its run is shorter; while it is still handing on the last step's, it will."""
        if not self._process.is_active:
            self._process.interrupt()

    # -- what a step did -----------------------------------------------------------------------------------------
    def _book_idle(self) -> None:
        """Book the idle time up to now: what the instance waits for is about to change."""
        waits = "transfer_wait" if self.kv_loading else "kv_full" if self.ranks.blocked else "idle"
        cause = "failed" if self._down else waits
        self.time.book_idle(cause, self.env.now_ns - self._idle_since)
        self._idle_since = self.env.now_ns

    def _book_done(self) -> None:
        """Book the steps that have ended of the run under way."""
        run = self._run
        if run and run.steps_done(self.env.now_ns):
            run.end_with_done(self.env.now_ns)
            self._book({}, run)
            self._step_since = run.end_ns

    def _book(self, plans: dict[int, RankPlan], run: OneStep | StepRun) -> None:
        batch = self._batch
        self.time.book_steps(run.sums(), batch.idle_ranks / self._dep, self._cause)
        sequences = batch.running
        for _, _, loads in plans.values():
            sequences -= len(loads)
        if sequences:
            self.token_gaps.add(run.walls_ns, sequences)
