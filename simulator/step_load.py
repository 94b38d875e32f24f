"""What the ranks of an instance run in one step, summed up as the cost of a step needs it."""

from collections.abc import Mapping

from rackplan.simulator.cost import PoolCost, ShortChunks, chunk_work
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.rank import Chunk
from rackplan.simulator.scheduler import RankPlan

Prefill = tuple[float, float, float]
"""What one rank prefills: new tokens, and the sums of `chunk_work`: pairs and context."""
NO_PREFILL = (0.0, 0.0, 0.0)


class StepLoad:
    """Tokens count drafts. `prefills`: by rank, where there is one; `requests`: of the rank with most."""

    __slots__ = (
        "admission_ms",
        "prefill_chunks",
        "prefill_tokens",
        "prefills",
        "requests",
        "total_tokens",
        "widest_tokens",
    )

    def __init__(
        self,
        prefills: dict[int, Prefill],
        prefill_tokens: int,
        prefill_chunks: int,
        widest_tokens: int,
        total_tokens: int,
        requests: int,
        admission_ms: float,
    ) -> None:
        self.prefills, self.prefill_tokens, self.prefill_chunks = prefills, prefill_tokens, prefill_chunks
        self.widest_tokens, self.total_tokens, self.requests = widest_tokens, total_tokens, requests
        self.admission_ms = admission_ms


def load_of(plans: Mapping[int, RankPlan], batch: DecodeBatch, width: int, cost: PoolCost) -> StepLoad:
    """The load of the step that `plans` (by rank) and the decoding requests make.

    `width`: tokens of a decoding request, 1 + drafts. Admissions on one rank follow one another, ranks admit side by
    side. A rank without a request runs a dummy batch where an instance has several ranks.
    """
    prefills: dict[int, Prefill] = {}
    chunks, prefill_tokens, admission_ms = 0, 0, 0.0
    widest = batch.most_requests() * width if batch.running else 0.0
    for r, (started, new_chunks, loads) in plans.items():
        if new_chunks:
            prefills[r] = prefill = _prefill_of(new_chunks, cost.short_chunks)
            tokens = prefill[0]
            prefill_tokens += int(tokens)
            chunks += len(new_chunks)
            tokens += batch.requests[r] * width
            if tokens > widest:
                widest = tokens
        own_ms = 0.0
        for seq in started:
            own_ms += cost.admission_ms(seq.prompt_tokens)
        for seq in loads:
            own_ms += cost.admission_ms(seq.prompt_tokens)
        if own_ms > admission_ms:
            admission_ms = own_ms
    dummies = batch.idle_ranks if len(batch.occupants) > 1 else 0
    return StepLoad(
        prefills,
        prefill_tokens,
        chunks,
        max(int(widest), width) if dummies else int(widest),
        prefill_tokens + (batch.running + dummies) * width,
        max(batch.occupants),
        admission_ms,
    )


def _prefill_of(chunks: list[Chunk], short: ShortChunks) -> Prefill:
    tokens, pairs, context = 0, 0.0, 0
    for seq, new in chunks:
        own_pairs, own_context = chunk_work(short, new, seq.computed_tokens)
        tokens += new
        pairs += own_pairs
        context += own_context
    return float(tokens), pairs, float(context)
