"""Adaptive verification: how many of a step's drafts an instance verifies, by its load.

DSpark in vLLM drafts `draft_tokens` in every step and verifies as many of them as give most tokens for the time, by a
table of step times that it measures at its start (docs/model/speculation.md). Here all requests of an instance verify
the same number, which the fullest rank's number of requests decides; so it changes only where that does.
"""

from functools import cache

import numpy as np

from rackplan.engine import Deployment, Pool
from rackplan.engine.deployment import Speculation
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.cost import STEADY, Calibration, PassedOn, PlacedAt, PoolCost, SharedTime
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.eplb_run import Served, served_by
from rackplan.simulator.run_options import Drafting
from rackplan.simulator.streams import Streams

PROFILE_CONTEXT_TOKENS = 8192
"""Context of each request in vLLM's table: VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN's default."""


class Verification:
    """Of the instances of one pool. `acceptances`: of steps that verify 0, 1, ... all drafts; `served`: what steps
    take, by placement, if `verified_drafts` of each request are verified. `settle` sets that before a step is timed,
    since instances share their costs."""

    def __init__(
        self, calibration: Calibration, deployment: Deployment, pool: Pool, drafting: Drafting, seed: int
    ) -> None:
        model, thinking, spread = deployment.model_spec, drafting.thinking, drafting.acceptance_spread
        counts = range(deployment.speculation.draft_tokens + 1)
        # Each has streams of its own, so that a request draws the same luck whatever is verified.
        self.acceptances = [
            Acceptance(n, model.acceptance_length(n, thinking=thinking), Streams(seed), spread) for n in counts
        ]
        fixed = [deployment.model_copy(update={"speculation": Speculation(draft_tokens=n)}) for n in counts]
        each = [served_by(calibration, one, pool) for one in fixed]

        @cache
        def served(placed: PlacedAt) -> Served:
            own = [one(placed) for one in each]
            return Served(VerifiedCost(self, [one.cost for one in own]), own[-1].balancedness)

        self.served = served
        self.verified_drafts = deployment.speculation.draft_tokens
        self._dep = pool.dep
        self._balancedness = served_by(calibration, fixed[-1], pool)(STEADY).balancedness  # steps ask for their own
        self._best: dict[int, int] = {0: self.verified_drafts}

    def settle(self, batch: DecodeBatch) -> int:
        """Drafts to verify of each request in the step that comes next; the requests of `batch` go on at that rate."""
        requests = int(max(batch.requests))
        if requests not in self._best:
            self._best[requests] = self._best_of(requests)
        drafts = self.verified_drafts = self._best[requests]
        if batch.acceptance is not self.acceptances[drafts]:
            batch.change_acceptance(self.acceptances[drafts])
        return drafts

    def _best_of(self, requests: int) -> int:
        """Most tokens over GPU time with so many requests on every rank; the fewest drafts of equal ones, as vLLM."""
        cost = self.served(STEADY).cost
        none, context = np.zeros(1), np.full(1, float(requests * PROFILE_CONTEXT_TOKENS))
        rates = []
        for acceptance in self.acceptances:
            self.verified_drafts = acceptance.draft_tokens
            tokens = requests * (1 + self.verified_drafts)
            shared = cost.shared_ms(tokens, tokens * self._dep, 0, 0, self._balancedness(tokens))
            attention_ms = cost.attention_ms(none, none, none, np.full(1, float(requests)), context)
            rates.append(acceptance.acceptance_length / (float(attention_ms[0]) + sum(shared)))
        return rates.index(max(rates))


class VerifiedCost(PassedOn):
    """A `PoolCost` of steps that draft all and verify some: the cost at as many, and the draft's time at all.
    `costs`: with 0, 1, ... all drafts."""

    def __init__(self, verification: Verification, costs: list[PoolCost]) -> None:
        super().__init__(costs[-1])
        self._now, self._costs = verification, costs
        self.attention_ms, self.shared_ms = self._attention_ms, self._shared_ms

    def _attention_ms(
        self,
        prefill_tokens: np.ndarray,
        prefill_pairs: np.ndarray,
        prefill_context: np.ndarray,
        decode_requests: np.ndarray,
        decode_context: np.ndarray,
    ) -> np.ndarray:
        attention_ms = self._costs[self._now.verified_drafts].attention_ms
        return attention_ms(prefill_tokens, prefill_pairs, prefill_context, decode_requests, decode_context)

    def _shared_ms(
        self, widest_tokens: int, total_tokens: int, prefill_tokens: int, prefill_chunks: int, balancedness: float
    ) -> SharedTime:
        own, drafts = self._costs[self._now.verified_drafts], self._now.verified_drafts
        shared = own.shared_ms(widest_tokens, total_tokens, prefill_tokens, prefill_chunks, balancedness)
        if own is self._costs[-1]:
            return shared
        more = len(self._costs) / (1 + drafts)
        widest, total = round(widest_tokens * more), prefill_tokens + round((total_tokens - prefill_tokens) * more)
        full = self._costs[-1].shared_ms(widest, total, prefill_tokens, prefill_chunks, balancedness)
        return shared._replace(draft=full.draft)
