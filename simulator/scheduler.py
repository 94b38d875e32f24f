"""vLLM's scheduler for one data-parallel rank: what runs in the next step. Decisions only; it knows no clock.

Order, as in vLLM: running before waiting; the running requests' decodes, then their prefill chunks; then those that
hold KV, in the order in which their loads began; then waiting requests first come, first served, while tokens,
sequences and KV last. The head of the line is never overtaken. One with KV elsewhere or in host memory begins its load
when its turn comes: it takes KV and no more, so that loads begin while there is a seat, as many as leave KV for the
rest of all prompts under way. vLLM goes through the running requests in order of admission; a request behind a chunk
was admitted with what that chunk left over, which never shrinks, so decodes before chunks is the same.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from rackplan.engine import Pool
from rackplan.simulator.host_tier import HostTier
from rackplan.simulator.prefix_cache import PrefixCache, usable_hit
from rackplan.simulator.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside one instance. `prompt_tokens`: what has to be in the KV cache before it decodes;
    `load_tokens`: what the router counts it with; `shared_tokens`: of its hit, what others held when it was admitted;
    `kv_elsewhere`: its prompt's KV is loaded from a prefill instance; `loaded_tokens`: of its prompt in KV once a load
    has ended, before it is admitted; `is_loading`: the load is under way; `place`: in its rank's order of admission;
    `done_tokens`: decoded since it began to, before `start_step`."""

    request: Request
    rank: int
    ready_ns: int
    prompt_tokens: int
    load_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    loaded_tokens: int = 0
    generated_tokens: int = 0
    kv_elsewhere: bool = False
    is_loading: bool = False
    finish_step: int = -1
    start_step: int = 0
    start_context: float = 0
    done_tokens: float = 0.0
    growth: float = 0.0
    first_token_ns: int = -1
    scheduled_ns: int = -1
    preemptions: int = 0
    prefill_done_ns: int = -1
    place: int = -1


class RankPlan(NamedTuple):
    """One rank's next step: prefill chunks (`started`: those that are a request's first), loaded requests that start to
    decode, and what held the others back."""

    started: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    loads: list[Sequence]
    blocked_by: str | None


class Given(NamedTuple):
    """What a step is planned with. `visible_before_ns`: requests that became ready at or after it are not seen yet;
    `room_tokens`: KV that no running request holds or will need in this step, to which the prefix cache gives way;
    `width`: tokens of a decode, 1 + drafts; `replay_tokens`: recomputed after a hit; `defers`: the step computes the
    last token of a prompt at most (`prefill_schedule_interval`).
    """

    now_ns: int
    visible_before_ns: int
    room_tokens: float
    width: int
    replay_tokens: int
    defers: bool


class Rank:
    """Queues and prefix cache of one data-parallel rank. `holding`: requests that hold KV for what is loaded of their
    prompt and do not run yet, in the order in which their loads began; `partial`: prompts in prefill, in order of
    admission; `decoding`: in order of their first decode; `admitted`: how many were, ever; `is_saturated`: the last
    step that might admit a prompt left one waiting; `begun`: requests whose load the last plan began."""

    __slots__ = ("admitted", "begun", "cache", "decoding", "holding", "host", "is_saturated", "partial", "waiting")

    def __init__(self, cache: PrefixCache, host: HostTier | None = None) -> None:
        self.cache, self.host = cache, host
        self.begun: list[Sequence] = []
        self.holding: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.partial: list[Sequence] = []
        self.decoding: dict[Sequence, None] = {}
        self.admitted = 0
        self.is_saturated = False

    def has_work(self, visible_before_ns: int) -> bool:
        """Is there a prompt in prefill, or a request that came before?"""
        if self.partial:
            return True
        return self.has_waiting(visible_before_ns) or bool(self.holding and self.resumable(visible_before_ns))

    def has_waiting(self, visible_before_ns: int) -> bool:
        """Is there a request without KV that came before?"""
        waiting = self.waiting
        return bool(waiting and waiting[0].ready_ns < visible_before_ns)

    @property
    def only_decodes(self) -> bool:
        return not (self.waiting or self.partial or self.has_kv_in_line)

    @property
    def has_kv_in_line(self) -> bool:
        """Is there a request that is to start with KV that it holds?"""
        return not all([seq.is_loading for seq in self.holding])

    def resumable(self, visible_before_ns: int) -> list[Sequence]:
        """Those of `holding` whose load has ended."""
        return [seq for seq in self.holding if not seq.is_loading and seq.ready_ns < visible_before_ns]

    def reserved_tokens(self, chunks: list[tuple[Sequence, int]]) -> int:
        """KV that prompts in prefill and `holding` still need, once `chunks` are computed."""
        if not (self.partial or self.holding):
            return 0
        partial = sum([seq.prompt_tokens - seq.computed_tokens for seq in self.partial])
        loading = sum([seq.prompt_tokens - seq.loaded_tokens for seq in self.holding])
        return partial + loading - sum([new for _, new in chunks])

    def last_admitted(self) -> Sequence:
        """The running request that vLLM preempts first. Raises ValueError if none runs."""
        return max((*self.decoding, *self.partial), key=lambda seq: seq.place)

    def is_shared(self, visible_before_ns: int) -> bool:
        """Is there more than one request? Those whose KV is on its way count."""
        seen = len(self.decoding) + len(self.partial) + len(self.holding)
        return seen + sum(seq.ready_ns < visible_before_ns for seq in islice(self.waiting, 2)) > 1

    def begin_load(self, seq: Sequence, cached: int, tokens: int) -> None:
        """`seq` takes KV for the first `tokens` of its prompt, and waits for what follows the `cached` ones."""
        seq.computed_tokens, seq.loaded_tokens, seq.is_loading = cached, tokens, True
        self.holding.append(seq)
        self.begun.append(seq)


def running_chunks(rank: Rank, pool: Pool, *, visible_before_ns: int, width: int) -> list[tuple[Sequence, int]]:
    """Chunks of the prompts in prefill, in order of admission; a decoding request takes `width` tokens of the budget.
    """
    budget = pool.max_num_batched_tokens - len(rank.decoding) * width
    limit, chunks = _chunk_limit(rank, pool, visible_before_ns), []
    for seq in rank.partial:
        new = min(seq.prompt_tokens - seq.computed_tokens, limit, budget)
        if new > 0:
            chunks.append((seq, new))
            budget -= new
    return chunks


def plan_rank(rank: Rank, pool: Pool, chunks: list[tuple[Sequence, int]], given: Given) -> RankPlan:
    """Decide what joins one rank's next step, beside the `chunks` of its prompts in prefill, and move it out of the
    rank's queues."""
    budget = pool.max_num_batched_tokens - len(rank.decoding) * given.width - sum([new for _, new in chunks])
    seats = pool.max_num_seqs - len(rank.decoding) - len(rank.partial)
    loads: list[Sequence] = []
    started: list[Sequence] = []
    blocked_by = why = None
    if rank.holding:  # what holds KV already drains first
        loads, blocked_by = _take_loaded(rank, pool, given, seats, budget)
        budget -= len(loads) * given.width
        seats -= len(loads)
    if rank.waiting or rank.holding:
        started, why = _take_waiting(rank, pool, chunks, given, seats, budget)
        blocked_by = why or blocked_by
    if given.defers:
        return RankPlan(started, chunks, loads, None)  # what is held back is asked again in the next step
    # As in vLLM, what holds KV is not among those that were left waiting.
    rank.is_saturated = why is not None and rank.has_waiting(given.visible_before_ns)
    return RankPlan(started, chunks, loads, blocked_by)


def _take_loaded(
    rank: Rank, pool: Pool, given: Given, seats: int, budget: int
) -> tuple[list[Sequence], str | None]:
    """Move out of those whose whole prompt was loaded what may start to decode, each with `width` tokens; what held the
    others back."""
    loads: list[Sequence] = []
    cap, width = pool.max_new_kv_loads_per_step, given.width
    for seq in rank.resumable(given.visible_before_ns):
        if not seq.kv_elsewhere:
            continue
        blocked_by = _no_place(seats - len(loads), budget - len(loads) * width, width)
        if blocked_by is None and cap is not None and len(loads) >= cap:
            blocked_by = "admission_cap"
        if blocked_by:
            return loads, blocked_by
        rank.holding.remove(seq)
        _admit(rank, seq, given.now_ns)
        loads.append(seq)
    return loads, None


def _take_waiting(
    rank: Rank, pool: Pool, chunks: list[tuple[Sequence, int]], given: Given, seats: int, budget: int
) -> tuple[list[Sequence], str | None]:
    """Begin loads, and move out what starts its prefill, those with a part of it loaded first, and append its first
    chunks; what held the others back."""
    started: list[Sequence] = []
    waiting, room_tokens = rank.waiting, given.room_tokens
    limit = _chunk_limit(rank, pool, given.visible_before_ns)
    resumed = [seq for seq in rank.resumable(given.visible_before_ns) if not seq.kv_elsewhere] if rank.holding else []
    while resumed or rank.has_waiting(given.visible_before_ns):
        seq = resumed[0] if resumed else waiting[0]
        if blocked_by := _no_place(seats, budget, 1):
            return started, blocked_by
        cached = _cached_tokens(rank, seq, given.replay_tokens, pool.enable_prefix_caching)
        over = seq.prompt_tokens - room_tokens
        if over > 0 and over > (seq.loaded_tokens or rank.cache.held_tokens(seq.request, cached)):
            return started, "kv_full"
        if not resumed and (to_load := _tokens_to_load(rank, seq, given.replay_tokens)) > cached:
            takes = to_load - rank.cache.held_tokens(seq.request, cached)
            if takes > room_tokens - rank.reserved_tokens(chunks):
                return started, "kv_full"
            _begin_load(rank, waiting.popleft(), cached, to_load)
            room_tokens -= takes
            continue
        if given.defers and cached < seq.prompt_tokens - 1:
            break
        if resumed:
            rank.holding.remove(resumed.pop(0))
        else:
            waiting.popleft()
        new = min(seq.prompt_tokens - cached, limit, budget)
        _start_prefill(rank, seq, given.now_ns, cached, new, pool.enable_prefix_caching)
        started.append(seq)
        chunks.append((seq, new))
        budget -= new
        seats -= 1
        room_tokens -= cached + new - seq.shared_tokens  # the rest of the prompt is not allocated yet
    return started, None


def _chunk_limit(rank: Rank, pool: Pool, visible_before_ns: int) -> int:
    """Most tokens of one prompt in one step; the threshold spares others, so one alone is not held to it."""
    threshold = pool.long_prefill_token_threshold
    return threshold if threshold and rank.is_shared(visible_before_ns) else pool.max_num_batched_tokens


def _admit(rank: Rank, seq: Sequence, now_ns: int) -> None:
    if seq.scheduled_ns < 0:
        seq.scheduled_ns = now_ns
    seq.place = rank.admitted
    rank.admitted += 1


def _no_place(seats: int, budget: int, tokens: int) -> str | None:
    if seats <= 0:
        return "max_num_seqs"
    return "token_budget" if budget < tokens else None


def _cached_tokens(rank: Rank, seq: Sequence, replay_tokens: int, caching: bool) -> int:
    """Tokens of the prompt that need no prefill."""
    request = seq.request
    if seq.loaded_tokens:
        return seq.loaded_tokens
    if seq.kv_elsewhere:
        return 0
    if request.cached_tokens is not None and seq.preemptions == 0:
        return min(request.cached_tokens, request.input_tokens - 1)
    return usable_hit(request, rank.cache.match(request), replay_tokens) if caching else 0


def _start_prefill(rank: Rank, seq: Sequence, now_ns: int, cached: int, new: int, caching: bool) -> None:
    _admit(rank, seq, now_ns)
    if seq.loaded_tokens:
        seq.shared_tokens = seq.loaded_tokens  # held since the load began
    elif caching:
        seq.shared_tokens = rank.cache.begin(seq.request, cached)
    if caching:
        rank.cache.grow(seq.request, cached + new)
    seq.computed_tokens = cached
    if seq.preemptions == 0:
        seq.cached_tokens = cached
    rank.partial.append(seq)


def _tokens_to_load(rank: Rank, seq: Sequence, replay_tokens: int) -> int:
    """Tokens of the prompt in KV once a load of it has ended: all that a prefill instance has, or what host memory has;
    0 where there is nothing to load."""
    if seq.kv_elsewhere:
        return seq.prompt_tokens
    return rank.host.hit(seq.request, replay_tokens) if rank.host else 0


def _begin_load(rank: Rank, seq: Sequence, cached: int, tokens: int) -> None:
    """`seq` takes KV for the first `tokens` of its prompt, and waits for what follows the `cached` ones."""
    if not seq.kv_elsewhere:
        seq.shared_tokens = rank.cache.begin(seq.request, cached)
    rank.begin_load(seq, cached, tokens)
