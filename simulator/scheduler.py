"""vLLM's scheduler for one data-parallel rank: what runs in the next step. Decisions only; it knows no clock.

Order, as in vLLM: running before waiting; the running requests' decodes, then their prefill chunks; then those that
hold KV, in the order in which their loads began; then waiting requests first come, first served, while tokens,
sequences and KV last. The head of the line is never overtaken. One with KV elsewhere or in host memory begins its load
when its turn comes: it takes KV and no more, so that loads begin while there is a seat, as many as leave KV for the
rest of all prompts under way. vLLM goes through the running requests in order of admission; a request behind a chunk
was admitted with what that chunk left over, which never shrinks, so decodes before chunks is the same.
"""

from rackplan.engine import Pool
from rackplan.simulator.prefix_cache import usable_hit
from rackplan.simulator.rank import Chunk, Rank, chunk_tokens
from rackplan.simulator.sequence import Sequence


class Caps:
    """What a pool's knobs and model hold each of its ranks to, as plain numbers: asked for in every step. `width`:
    tokens of a decode, 1 + drafts; `replay_tokens`: recomputed after a hit; the rest as in Pool."""

    __slots__ = (
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "max_new_kv_loads_per_step",
        "max_num_batched_tokens",
        "max_num_seqs",
        "replay_tokens",
        "width",
    )

    def __init__(self, pool: Pool, *, width: int, replay_tokens: int) -> None:
        self.max_num_batched_tokens, self.max_num_seqs = pool.max_num_batched_tokens, pool.max_num_seqs
        self.long_prefill_token_threshold = pool.long_prefill_token_threshold
        self.max_new_kv_loads_per_step = pool.max_new_kv_loads_per_step
        self.enable_prefix_caching = pool.enable_prefix_caching
        self.width, self.replay_tokens = width, replay_tokens


RankPlan = tuple[list[Sequence], list[Chunk], list[Sequence]]
"""One rank's next step: requests that start their prefill, prefill chunks (theirs too), and loaded requests that start
to decode. A tuple: one is made of each rank and step."""


class Given:
    """What a step is planned with. `visible_before_ns`: requests that became ready at or after it are not seen yet."""

    __slots__ = ("caps", "now_ns", "visible_before_ns")

    def __init__(self, caps: Caps, now_ns: int, visible_before_ns: int) -> None:
        self.caps, self.now_ns, self.visible_before_ns = caps, now_ns, visible_before_ns


def running_chunks(rank: Rank, caps: Caps, visible_before_ns: int) -> list[Chunk]:
    """Chunks of the prompts in prefill, in order of admission; decodes have their tokens of the budget before."""
    budget = caps.max_num_batched_tokens - len(rank.decoding) * caps.width
    limit, chunks = _chunk_limit(rank, caps, visible_before_ns), []
    for seq in rank.partial:
        new = min(seq.prompt_tokens - seq.computed_tokens, limit, budget)
        if new > 0:
            chunks.append((seq, new))
            budget -= new
    return chunks


def plan_rank(
    rank: Rank, chunks: list[Chunk], resumed: list[Sequence], given: Given, room_tokens: float, defers: bool
) -> tuple[list[Sequence], list[Sequence], str | None]:
    """Decide what joins one rank's next step, beside the `chunks` of its prompts in prefill, and move it out of the
    rank's queues: (what starts its prefill, whose first chunks are appended, loads that start to decode, what held the
    others back).

    `resumed`: those whose load has ended; `room_tokens`: KV that no running request holds or will need in this step, to
    which the prefix cache gives way; `defers`: the step computes the last token of a prompt at most
    (`prefill_schedule_interval`).
    """
    caps, decoding = given.caps, len(rank.decoding)
    budget = caps.max_num_batched_tokens - decoding * caps.width
    if chunks:
        budget -= chunk_tokens(chunks)
    seats = caps.max_num_seqs - decoding - len(rank.partial)
    loads: list[Sequence] = []
    started: list[Sequence] = []
    blocked_by = why = None
    if resumed:  # what holds KV already drains first
        loads, blocked_by = _take_loaded(rank, resumed, given, seats, budget)
        budget -= len(loads) * caps.width
        seats -= len(loads)
        resumed = [seq for seq in resumed if not seq.kv_elsewhere] if len(loads) < len(resumed) else []
    if resumed or rank.waiting:
        started, why = _take_waiting(rank, resumed, chunks, given, seats, budget, room_tokens, defers)
        blocked_by = why or blocked_by
    if defers:
        return started, loads, None  # what is held back is asked again in the next step
    # As in vLLM, what holds KV is not among those that were left waiting.
    rank.is_saturated = why is not None and rank.has_waiting(given.visible_before_ns)
    return started, loads, blocked_by


def _take_loaded(
    rank: Rank, resumed: list[Sequence], given: Given, seats: int, budget: int
) -> tuple[list[Sequence], str | None]:
    """Move out of those that `resumed` what may start to decode, each with `width` tokens, where the whole prompt was
    loaded; what held the others back."""
    loads: list[Sequence] = []
    caps = given.caps
    cap, width = caps.max_new_kv_loads_per_step, caps.width
    for seq in resumed:
        if not seq.kv_elsewhere:
            continue
        if seats <= 0 or budget < width:
            return loads, _no_place(seats)
        if cap is not None and len(loads) >= cap:
            return loads, "admission_cap"
        rank.holding.remove(seq)
        _admit(rank, seq, given.now_ns)
        loads.append(seq)
        seats -= 1
        budget -= width
    return loads, None


def _take_waiting(
    rank: Rank,
    resumed: list[Sequence],
    chunks: list[Chunk],
    given: Given,
    seats: int,
    budget: int,
    room_tokens: float,
    defers: bool,
) -> tuple[list[Sequence], str | None]:
    """Begin loads, and move out what starts its prefill, those with a part of it loaded (`resumed`) first, and append
    its first chunks; what held the others back."""
    started: list[Sequence] = []
    waiting, caps, visible_before_ns = rank.waiting, given.caps, given.visible_before_ns
    limit = caps.max_num_batched_tokens
    if caps.long_prefill_token_threshold:
        limit = _chunk_limit(rank, caps, visible_before_ns)
    while resumed or (waiting and waiting[0].ready_ns < visible_before_ns):
        seq = resumed[0] if resumed else waiting[0]
        if seats <= 0 or budget < 1:
            return started, _no_place(seats)
        cached = _cached_tokens(rank, seq, caps)
        over = seq.prompt_tokens - room_tokens
        if over > 0 and over > (seq.loaded_tokens or rank.cache.held_tokens(seq.request, cached)):
            return started, "kv_full"
        if (
            (seq.kv_elsewhere or rank.host)
            and not resumed
            and (to_load := _tokens_to_load(rank, seq, caps)) > cached
        ):
            takes = to_load - rank.cache.held_tokens(seq.request, cached) if cached else to_load
            if takes > room_tokens - rank.reserved_tokens(chunks):
                return started, "kv_full"
            _begin_load(rank, waiting.popleft(), cached, to_load)
            room_tokens -= takes
            continue
        if defers and cached < seq.prompt_tokens - 1:
            break
        if resumed:
            rank.holding.remove(resumed.pop(0))
        else:
            waiting.popleft()
        new = seq.prompt_tokens - cached  # `min` of three takes longer
        if new > limit:
            new = limit
        if new > budget:
            new = budget
        _start_prefill(rank, seq, given.now_ns, cached, new, caps.enable_prefix_caching)
        started.append(seq)
        chunks.append((seq, new))
        budget -= new
        seats -= 1
        room_tokens -= cached + new - seq.shared_tokens  # the rest of the prompt is not allocated yet
    return started, None


def _chunk_limit(rank: Rank, caps: Caps, visible_before_ns: int) -> int:
    """Most tokens of one prompt in one step; the threshold spares others, so one alone is not held to it."""
    threshold = caps.long_prefill_token_threshold
    return threshold if threshold and rank.is_shared(visible_before_ns) else caps.max_num_batched_tokens


def _admit(rank: Rank, seq: Sequence, now_ns: int) -> None:
    if seq.scheduled_ns < 0:
        seq.scheduled_ns = now_ns
    seq.place = rank.admitted
    rank.admitted += 1


def _no_place(seats: int) -> str:
    """What a request lacks where seats or tokens are all taken."""
    return "max_num_seqs" if seats <= 0 else "token_budget"


def _cached_tokens(rank: Rank, seq: Sequence, caps: Caps) -> int:
    """Tokens of the prompt that need no prefill."""
    request = seq.request
    if seq.loaded_tokens:
        return seq.loaded_tokens
    if seq.kv_elsewhere:
        return 0
    if request.cached_tokens is not None and seq.preemptions == 0:
        return min(request.cached_tokens, request.input_tokens - 1)
    return usable_hit(request, rank.cache.match(request), caps.replay_tokens) if caps.enable_prefix_caching else 0


def _start_prefill(rank: Rank, seq: Sequence, now_ns: int, cached: int, new: int, caching: bool) -> None:
    _admit(rank, seq, now_ns)
    if seq.loaded_tokens:
        seq.shared_tokens = seq.loaded_tokens  # held since the load began
        if caching:
            rank.cache.grow(seq.request, cached + new)
    elif caching:
        seq.shared_tokens = rank.cache.begin(seq.request, cached, cached + new)
    seq.computed_tokens = cached
    if seq.preemptions == 0:
        seq.cached_tokens = cached
    rank.partial.append(seq)


def _tokens_to_load(rank: Rank, seq: Sequence, caps: Caps) -> int:
    """Tokens of the prompt in KV once a load of it has ended: all that a prefill instance has, or what host memory has;
    0 where there is nothing to load."""
    if seq.kv_elsewhere:
        return seq.prompt_tokens
    return rank.host.hit(seq.request, caps.replay_tokens) if rank.host else 0


def _begin_load(rank: Rank, seq: Sequence, cached: int, tokens: int) -> None:
    """`seq` takes KV for the first `tokens` of its prompt, and waits for what follows the `cached` ones."""
    if not seq.kv_elsewhere:
        seq.shared_tokens = rank.cache.begin(seq.request, cached)
    rank.begin_load(seq, cached, tokens)
