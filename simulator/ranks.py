"""The data-parallel ranks of one instance: their queues, running requests and prefix caches, and what a step changes of
them. Knows no clock: it is told the time, and says what a step hands on.
"""

from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.instance_model import InstanceModel
from rackplan.simulator.rank import Chunk, Rank, chunk_tokens
from rackplan.simulator.request import Request
from rackplan.simulator.scheduler import Caps, Given, RankPlan, plan_rank, running_chunks
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.step import MOST_STEPS


class Ranks:
    """`batch`: the running requests; `load`, `load_tokens` (ranks,): requests on each rank and their tokens, for the
    router. `started`, `ended`: requests of which the last step made the first token here, and the last one; of a
    prefill pool, those whose prompt it ended. `blocked`: by rank, what held its requests back in the last plan.
    `begun_loads`: requests whose load is to begin.
    """

    def __init__(self, model: InstanceModel, load: memoryview, load_tokens: memoryview) -> None:
        self.model = model
        self.load, self.load_tokens = load, load_tokens
        self.queues = [Rank(model.make_cache(), model.make_host_tier()) for _ in range(model.pool.dep)]
        self.begun_loads: list[Sequence] = []
        self.batch = DecodeBatch(self.queues, model.kv_tokens, model.acceptance)
        self.started: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.blocked: dict[int, str] = {}
        self.most_admitted = self.preemptions = 0
        self._busy: set[int] = set()  # ranks with waiting or partly prefilled requests
        self._preempted: set[int] = set()  # ranks that admit nothing in the step that is planned next
        self._wave_began = 0
        self._caps = Caps(model.pool, width=1 + model.acceptance.draft_tokens, replay_tokens=model.replay_tokens)
        self._prefills = model.pool.role == "prefill"
        self._interval = model.pool.prefill_schedule_interval

    # -- what comes from outside ----------------------------------------------------------------------------------
    def add(self, seq: Sequence) -> None:
        """Queue a request on its rank."""
        self.queues[seq.rank].waiting.append(seq)
        self._busy.add(seq.rank)

    def end_load(self, seq: Sequence) -> None:
        """What was to be loaded of a request's prompt is in KV: it is in line before what waits."""
        seq.is_loading = False
        self._busy.add(seq.rank)

    def release(self, seq: Sequence) -> bool:
        """The KV of a prompt that has been handed over may be evicted from now on. True if a request waited for it."""
        r = seq.rank
        self.batch.held[r] -= seq.prompt_tokens
        self._leave_cached(seq, seq.prompt_tokens)
        if r in self._busy and self.blocked.get(r) == "kv_full":
            del self.blocked[r]
            return True
        return False

    def drop_load(self, seq: Sequence) -> bool:
        """`seq`, whose KV was to be loaded, is gone, queued by now or not. True if a request waited behind it."""
        r, rank = seq.rank, self.queues[seq.rank]
        self.leave(seq)
        if seq.is_loading:
            rank.holding.remove(seq)
            self.batch.held[r] -= seq.prompt_tokens
        elif seq in rank.waiting:
            rank.waiting.remove(seq)
        if rank.only_decodes():
            self._busy.discard(r)
        return self.blocked.pop(r, None) is not None

    def prime(self, r: int, request: Request) -> None:
        """Put the whole prompt of `request` into a rank's prefix cache."""
        if self._caps.enable_prefix_caching:
            cache = self.queues[r].cache
            cache.begin(request, 0)
            cache.end(request, request.input_tokens)
            cache.evict_to(self.model.kv_tokens)

    def load_beside(self, seq: Sequence, steps: int) -> bool:
        """Begin the load of `seq` if the scheduler will for certain when it next looks. `steps`: that it is to have KV
        for."""
        r, caps, batch = seq.rank, self._caps, self.batch
        if r in self._busy:
            return False
        rank, tokens = self.queues[r], seq.prompt_tokens
        most = len(rank.decoding) + len(rank.holding)
        if most >= caps.max_num_seqs or most * caps.width >= caps.max_num_batched_tokens:
            return False
        if not batch.hold_if_room(r, tokens, batch.step + steps):
            return False
        seq.loaded_tokens, seq.is_loading = tokens, True
        rank.holding.append(seq)
        if rank.cache.tokens:
            self._make_room(r, batch.step)
        return True

    def is_blocked(self, r: int, kv_loaded: bool) -> bool:
        """Can a request that comes to rank `r` not start before another ends? One with its KV needs no more of it, or
        less (`kv_loaded`)."""
        reason = self.blocked.get(r)
        return reason is not None and not (kv_loaded and reason == "kv_full")

    def begin_wave(self) -> None:
        """Nothing runs: `prefill_schedule_interval` counts from the next step on."""
        self._wave_began = self.batch.step

    # -- planning a step ------------------------------------------------------------------------------------------
    def plan(self, now_ns: int, visible_before_ns: int) -> dict[int, RankPlan]:
        """Plans of the ranks on which something other than decoding happens; what they admit has then begun."""
        plans: dict[int, RankPlan] = {}
        blocked = self.blocked
        if blocked:
            blocked.clear()
        if not self._busy:
            return plans
        between = (self.batch.step - self._wave_began) % self._interval != 0
        given = Given(self._caps, now_ns, visible_before_ns)
        for r in sorted(self._busy):
            rank = self.queues[r]
            resumed = rank.resumable(visible_before_ns) if rank.holding else []
            if not (resumed or rank.partial or rank.has_waiting(visible_before_ns)):
                continue
            defers = between and not rank.is_saturated and bool(rank.decoding)
            chunks = self._running_chunks(r, visible_before_ns) if rank.partial and not defers else []
            for seq, new in chunks:
                rank.cache.grow(seq.request, seq.computed_tokens + new)
            started: list[Sequence]
            loads: list[Sequence]
            if self._preempted and r in self._preempted:
                started, loads, blocked_by = [], [], None
            else:
                # What has its KV takes no more, so only the others and what may be evicted are asked for.
                asks = rank.waiting or (rank.holding and (rank.host or rank.cache.tokens))
                room = self._room_to_admit(r, chunks) if asks else 0.0
                started, loads, blocked_by = plan_rank(rank, chunks, resumed, given, room, defers)
                if rank.begun:
                    self._hold_loads(r)
            if blocked_by:
                blocked[r] = blocked_by
            if chunks or loads:
                plans[r] = plan = started, chunks, loads
                self._admit(r, plan)
        self._preempted.clear()
        return plans

    def _running_chunks(self, r: int, visible_before_ns: int) -> list[Chunk]:
        """Chunks of the prompts in prefill; where they find no KV, the last admitted give theirs back."""
        rank, batch = self.queues[r], self.batch
        chunks = running_chunks(rank, self._caps, visible_before_ns)
        while chunks and batch.room(r, batch.step) < chunk_tokens(chunks):
            last = self._preempt_last(r)
            chunks = [chunk for chunk in chunks if chunk[0] is not last]
        return chunks

    def _room_to_admit(self, r: int, chunks: list[Chunk]) -> float:
        """KV tokens for what waits; the prefix cache holds no more than that."""
        room = self.batch.room(r, self.batch.step)
        if chunks:
            room -= chunk_tokens(chunks)
        cache = self.queues[r].cache
        if cache.tokens > room:
            cache.evict_to(int(room))
        return room

    def _hold_loads(self, r: int) -> None:
        """KV for what is loaded, from the start of the load on."""
        rank, batch = self.queues[r], self.batch
        tokens = 0
        for seq in rank.begun:
            tokens += seq.loaded_tokens - seq.shared_tokens
        batch.hold(r, tokens)
        if rank.cache.tokens:
            self._make_room(r, batch.step)
        self.begun_loads += rank.begun
        rank.begun.clear()
        if rank.only_decodes():
            self._busy.discard(r)

    def _admit(self, r: int, plan: RankPlan) -> None:
        batch, rank = self.batch, self.queues[r]
        started, chunks, loads = plan
        if admitted := len(started) + len(loads):
            batch.enter(r, admitted)
            if admitted > self.most_admitted:
                self.most_admitted = admitted
        if chunks:
            tokens = chunk_tokens(chunks)
            for seq in started:
                tokens += seq.computed_tokens - seq.shared_tokens
            batch.hold(r, tokens)
        for seq in loads:
            batch.held[r] -= seq.prompt_tokens
            batch.start(seq, seq.request.output_tokens, seq.prompt_tokens)
        if rank.cache.tokens:
            self._make_room(r, batch.step)
        if not rank.partial and rank.only_decodes():
            self._busy.discard(r)

    def steps_ahead(self) -> int:
        """Steps in which nothing changes but the context, if nothing comes and none of them is planned."""
        batch, queues = self.batch, self.queues
        if not self.model.coalesce or any([not self.is_blocked(r, queues[r].has_kv_in_line()) for r in self._busy]):
            return 1
        ahead = min(batch.steps_to_next_end(), MOST_STEPS)
        return max(1, batch.steps_with_room(ahead))

    def idle_cause(self) -> str:
        """Why ranks run dummy batches."""
        if self.blocked:
            reasons = {why for r, why in self.blocked.items() if not self.batch.occupants[r]}
            for cause in ("admission_cap", "kv_full"):
                if cause in reasons:
                    return cause
        return "dp_imbalance"

    def preempt_for_growth(self) -> None:
        """No KV for the next tokens: the last admitted give theirs back until there is."""
        batch = self.batch
        for r in batch.ranks_short_of_room():
            while self.queues[r].decoding and batch.room(r, batch.step) < 0:
                self._preempt_last(r)

    def _preempt_last(self, r: int) -> Sequence:
        """The rank's last admitted request gives its KV back and starts anew, first in line but not in this step."""
        batch, rank = self.batch, self.queues[r]
        seq = rank.last_admitted()
        rank.cache.evict_to(0)
        if seq in rank.decoding:
            seq.generated_tokens += round(seq.done_tokens + seq.growth * (batch.step - seq.start_step))
            seq.prompt_tokens = seq.request.input_tokens + seq.generated_tokens
            batch.stop(seq)
        else:
            rank.partial.remove(seq)
            batch.held[r] -= seq.computed_tokens
            batch.leave(r)
        batch.held[r] += rank.cache.end(seq.request, 0)
        seq.computed_tokens, seq.kv_elsewhere, seq.loaded_tokens, seq.shared_tokens = 0, False, 0, 0
        seq.preemptions += 1
        self.preemptions += 1
        rank.waiting.appendleft(seq)
        self._busy.add(r)
        self._preempted.add(r)
        return seq

    # -- what a step did ------------------------------------------------------------------------------------------
    def commit(self, plans: dict[int, RankPlan], steps: int) -> None:
        """`steps` have passed, of which the first ran `plans`."""
        batch = self.batch
        batch.step += steps
        for _, chunks, loads in plans.values():
            for seq, new in chunks:
                computed = seq.computed_tokens + new
                seq.computed_tokens = computed
                if computed >= seq.prompt_tokens:
                    self._prefilled(seq)
            if loads:
                self.started += loads
        for seq in batch.pop_ended():
            if self.queues[seq.rank].cache.tokens:  # what grew took its room, before this end gives any back
                self._make_room(seq.rank, batch.step - 1)
            self._end(seq, round(batch.stop(seq)) - 1)  # the last token's KV is never computed

    def _prefilled(self, seq: Sequence) -> None:
        r, batch = seq.rank, self.batch
        rank = self.queues[r]
        rank.partial.remove(seq)
        if rank.host:
            rank.host.store(seq.request, seq.request.input_tokens)
        if rank.only_decodes():
            self._busy.discard(r)
        if self._prefills:
            batch.leave(r)
            self.ended.append(seq)
            return
        batch.held[r] -= seq.prompt_tokens
        self.started.append(seq)
        left = seq.request.output_tokens - seq.generated_tokens - 1
        if left > 0:
            batch.start(seq, left, seq.prompt_tokens + 1)
        else:
            batch.leave(r)
            self._end(seq, seq.prompt_tokens)

    def _end(self, seq: Sequence, tokens: int) -> None:
        self.leave(seq)
        self._leave_cached(seq, tokens)
        self.ended.append(seq)

    def leave(self, seq: Sequence) -> None:
        """The router counts `seq` no more."""
        self.load[seq.rank] -= 1
        self.load_tokens[seq.rank] -= seq.load_tokens

    def _leave_cached(self, seq: Sequence, tokens: int) -> None:
        """`seq` holds its KV no more: what others share with it stays theirs, its first `tokens` may be hit."""
        cache, batch = self.queues[seq.rank].cache, self.batch
        if not seq.kv_elsewhere and (shared := cache.end(seq.request, tokens)):  # else it was never in there
            batch.held[seq.rank] += shared
        if cache.tokens and batch.growth[seq.rank]:  # else the cache takes no more than what was held
            self._make_room(seq.rank, batch.step)

    def _make_room(self, r: int, step: int) -> None:
        """The prefix cache of rank `r` gives way to what its requests need in the step that follows `step` steps."""
        cache, room = self.queues[r].cache, self.batch.room(r, step)
        if cache.tokens > room:
            cache.evict_to(int(room))
