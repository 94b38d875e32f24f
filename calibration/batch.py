"""One exact batch on every data-parallel rank, and the GPU time that a `PoolCost` gives it, term by term.

What profiles measure and what fits compare is this: all ranks alike, no queue, no scheduler. The simulator sums the
same terms over batches that differ by rank.
"""

from dataclasses import dataclass

import numpy as np

from rackplan.engine import Deployment, Pool, parse_deployment
from rackplan.simulator.cost import PoolCost, chunk_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What each rank runs in a step: `chunks` prefill chunks of `new_tokens` after `cached_tokens` each, and
    `decodes` requests of `context_tokens` each."""

    chunks: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0

    @property
    def prefill_tokens(self) -> int:
        return self.chunks * self.new_tokens

    def tokens(self, drafts: int) -> int:
        """Tokens of one rank, drafts counted."""
        return self.prefill_tokens + self.decodes * (1 + drafts)


def deployment_of(
    model: str,
    gpu: str,
    *,
    dep: int,
    tokens: int = 65536,
    drafts: int = 0,
    redundant_experts: int | None = None,
    algorithm: str = "recursive_doubling",
) -> tuple[Deployment, Pool]:
    """One instance of `dep` ranks that runs `tokens` a step, and its pool: what a profile ran on.

    EPLB runs where `redundant_experts` is given, 0 included. Raises InputError on what does not deploy.
    """
    pool = {"role": "aggregated", "instances": 1, "dep": dep, "max_num_batched_tokens": max(tokens, 512)}
    eplb = {"enabled": redundant_experts is not None, "redundant_experts": redundant_experts or 0}
    deployment = parse_deployment(
        {
            "model": model,
            "gpu": gpu,
            "pools": [pool],
            "eplb": eplb,
            "speculation": {"draft_tokens": drafts},
            "dp_sync": {"algorithm": algorithm},
        }
    )
    return deployment, deployment.pools[0]


def gpu_terms_ms(
    cost: PoolCost, batch: Batch, *, dep: int, drafts: int = 0, balancedness: float = 1.0
) -> dict[str, float]:
    """GPU time of `batch` on each of `dep` ranks, ms by term; the values add up to the step's GPU time."""
    pairs, context = chunk_work(cost.short_chunks, batch.new_tokens, batch.cached_tokens)
    attention = cost.attention_ms(
        np.array([float(batch.prefill_tokens)]),
        np.array([float(batch.chunks * pairs)]),
        np.array([float(batch.chunks * context)]),
        np.array([float(batch.decodes)]),
        np.array([float(batch.decodes * batch.context_tokens)]),
    )
    tokens = batch.tokens(drafts)
    shared = cost.shared_ms(tokens, tokens * dep, batch.prefill_tokens * dep, batch.chunks * dep, balancedness)
    return {"attention": float(attention[0]), **{k: float(v) for k, v in shared._asdict().items()}}
