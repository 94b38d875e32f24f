"""vLLM's scheduler for one data-parallel rank: what runs in the next step. Decisions only; it knows no clock.

Order, as in vLLM: running before waiting; the running requests' decodes, then their prefill chunks; then waiting
requests first come, first served, while tokens, sequences and KV last. The head of the line is never overtaken.
"""

from collections import deque
from dataclasses import dataclass, field

from rackplan.engine import Pool
from rackplan.simulator.prefix_cache import PrefixCache, usable_hit
from rackplan.simulator.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside one instance. `prompt_tokens`: what has to be in the KV cache before it decodes;
    `load_tokens`: what the router counts it with."""

    request: Request
    rank: int
    ready_ns: int
    prompt_tokens: int
    load_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    kv_loaded: bool = False
    finish_step: int = -1
    start_step: int = 0
    start_context: int = 0
    growth: float = 0.0
    first_token_ns: int = -1
    scheduled_ns: int = -1
    preemptions: int = 0
    prefill_done_ns: int = -1


@dataclass(slots=True)
class RankPlan:
    """One rank's next step: prefill chunks (`started`: those that are a request's first), loaded requests that start to
    decode, and what held the others back."""

    started: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)
    blocked_by: str | None = None

    @property
    def admitted(self) -> list[Sequence]:
        """Requests that this step is the first of."""
        return self.started + self.loads


class Rank:
    """Queues and prefix cache of one data-parallel rank. `loaded`: requests whose KV came from a prefill instance;
    `partial`: prompts in prefill; `decoding` is in order of admission."""

    __slots__ = ("cache", "decoding", "loaded", "partial", "waiting")

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.loaded: deque[Sequence] = deque()
        self.waiting: deque[Sequence] = deque()
        self.partial: list[Sequence] = []
        self.decoding: dict[Sequence, None] = {}

    def has_work(self, visible_before_ns: int) -> bool:
        """Is there a prompt in prefill, or a request that came before?"""
        if self.partial:
            return True
        loaded, waiting = self.loaded, self.waiting
        return bool(
            (loaded and loaded[0].ready_ns < visible_before_ns) or (waiting and waiting[0].ready_ns < visible_before_ns)
        )

    @property
    def only_decodes(self) -> bool:
        return not (self.loaded or self.waiting or self.partial)


def plan_rank(
    rank: Rank,
    pool: Pool,
    *,
    now_ns: int,
    visible_before_ns: int,
    room_tokens: float,
    draft_tokens: int,
    replay_tokens: int,
) -> RankPlan:
    """Decide one rank's next step and move the admitted requests out of its queues.

    `visible_before_ns`: requests that became ready at or after it are not seen yet. `room_tokens`: KV that no running
    request holds or will need in this step; the prefix cache gives way to it.
    """
    plan = RankPlan()
    width = 1 + draft_tokens
    budget = pool.max_num_batched_tokens - len(rank.decoding) * width
    seats = pool.max_num_seqs - len(rank.decoding) - len(rank.partial)
    chunk_limit = pool.long_prefill_token_threshold or pool.max_num_batched_tokens
    for seq in rank.partial:
        new = min(seq.prompt_tokens - seq.computed_tokens, chunk_limit, budget)
        if new > 0:
            plan.chunks.append((seq, new))
            budget -= new
    # Requests that hold KV already drain first.
    while rank.loaded and rank.loaded[0].ready_ns < visible_before_ns:
        plan.blocked_by = _no_place(seats, budget, width) or _over_cap(pool, plan)
        if plan.blocked_by:
            break
        seq = rank.loaded.popleft()
        seq.scheduled_ns = now_ns if seq.scheduled_ns < 0 else seq.scheduled_ns
        plan.loads.append(seq)
        budget -= width
        seats -= 1
    while rank.waiting and rank.waiting[0].ready_ns < visible_before_ns:
        seq = rank.waiting[0]
        no_room = "kv_full" if seq.prompt_tokens > room_tokens else None
        plan.blocked_by = _no_place(seats, budget, 1) or no_room or plan.blocked_by
        if no_room or seats <= 0 or budget <= 0:
            break
        rank.waiting.popleft()
        _start_prefill(rank, seq, now_ns, replay_tokens, pool.enable_prefix_caching)
        new = min(seq.prompt_tokens - seq.computed_tokens, chunk_limit, budget)
        plan.started.append(seq)
        plan.chunks.append((seq, new))
        budget -= new
        seats -= 1
        room_tokens -= seq.prompt_tokens
    return plan


def _no_place(seats: int, budget: int, tokens: int) -> str | None:
    if seats <= 0:
        return "max_num_seqs"
    return "token_budget" if budget < tokens else None


def _over_cap(pool: Pool, plan: RankPlan) -> str | None:
    cap = pool.max_new_kv_loads_per_step
    return "admission_cap" if cap is not None and len(plan.loads) >= cap else None


def _start_prefill(rank: Rank, seq: Sequence, now_ns: int, replay_tokens: int, caching: bool) -> None:
    request = seq.request
    seq.scheduled_ns = now_ns if seq.scheduled_ns < 0 else seq.scheduled_ns
    cached = 0
    if request.cached_tokens is not None and seq.preemptions == 0:
        cached = min(request.cached_tokens, request.input_tokens - 1)
    elif caching:
        cached = usable_hit(request, rank.cache.match(request), replay_tokens)
        rank.cache.take(request)
    seq.computed_tokens = cached
    if seq.preemptions == 0:
        seq.cached_tokens = cached
    rank.partial.append(seq)
