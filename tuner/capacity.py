"""Closed-form estimate of a deployment's capacity from the step costs that the simulator uses: screening, not answers.

It knows means only: no queues, no bursts, no imbalance between ranks. `Corrections` stand for what it leaves out; they
are learned from pilot simulations of the workload at hand. Whatever it ranks high is simulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rackplan.calibration.batch import Batch, gpu_terms_ms
from rackplan.engine import Deployment, Pool
from rackplan.simulator.cost import Calibration
from rackplan.simulator.step import step_wall_ms
from rackplan.tuner.demand import Demand
from rackplan.tuner.slo import Slo

BATCH_GROWTH = 1.25
DEFAULT_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """What means leave out. `prefill_share`: of a prefill pool's ideal rate, what imbalance between ranks and evicted
    prefixes leave, by DEP width; `tail`: P90 of TPOT over its mean; `aggregated_share`: of an aggregated pool's ideal
    rate."""

    prefill_share: Mapping[int, float] = field(default_factory=dict)
    tail: float = 1.15
    aggregated_share: float = DEFAULT_SHARE

    def share_of(self, dep: int) -> float:
        return self.prefill_share.get(dep, DEFAULT_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Request rates (req/s) that each pool's SLO and capacity admit; `rate_req_s` is the least. `why`: what binds."""

    rate_req_s: float
    by_role: dict[str, float]
    tpot_ms: float
    ttft_ms: float
    why: str

    def e2e_s(self, demand: Demand) -> float:
        return (self.ttft_ms + self.tpot_ms * demand.output_tokens) / 1e3


def estimate(
    deployment: Deployment, demand: Demand, calibration: Calibration, slo: Slo, corrections: Corrections
) -> Estimate:
    """The highest mean request rate that meets `slo`. A rate of 0 means that not even one request does."""
    most_tpot_ms = slo.p90_tpot_ms / corrections.tail
    if not deployment.disaggregated:
        pool = deployment.pools[0]
        rate, tpot = _decode_rate(deployment, pool, demand, calibration, most_tpot_ms, prefill_too=True)
        rate *= corrections.aggregated_share
        ttft = 2 * tpot + _prefill_s_per_request(deployment, pool, demand, calibration) * 1e3
        return Estimate(rate_req_s=rate, by_role={"aggregated": rate}, tpot_ms=tpot, ttft_ms=ttft, why="aggregated")
    rates: dict[str, float] = {}
    ttft = tpot = 0.0
    for pool in deployment.pools:
        if pool.role == "prefill":
            own_s = _prefill_s_per_request(deployment, pool, demand, calibration)
            rates["prefill"] = rates.get("prefill", 0.0) + corrections.share_of(pool.dep) * pool.instances * pool.dep / own_s
            ttft = max(ttft, 2 * own_s * 1e3)
        else:
            rate, tpot = _decode_rate(deployment, pool, demand, calibration, most_tpot_ms, prefill_too=False)
            rates["decode"] = rates.get("decode", 0.0) + rate
    least = min(rates, key=lambda r: rates[r])
    return Estimate(rate_req_s=rates[least], by_role=rates, tpot_ms=tpot, ttft_ms=ttft, why=least)


def _prefill_s_per_request(deployment: Deployment, pool: Pool, demand: Demand, calibration: Calibration) -> float:
    """Rank-seconds that one prompt takes in full steps of the pool."""
    replay = deployment.model_spec.replay_tokens_per_hit if demand.new_tokens < demand.input_tokens else 0
    new = demand.new_tokens + replay
    together = max(1, round(pool.max_num_batched_tokens / new))
    tokens = min(pool.max_num_batched_tokens, new)  # a long prompt takes several steps
    batch = Batch(chunks=together, new_tokens=round(tokens), cached_tokens=round(max(0.0, demand.input_tokens - new)))
    return _step_ms(deployment, pool, batch, calibration) / 1e3 / together * (new / tokens)


def _decode_rate(
    deployment: Deployment,
    pool: Pool,
    demand: Demand,
    calibration: Calibration,
    most_tpot_ms: float,
    *,
    prefill_too: bool,
) -> tuple[float, float]:
    """(req/s of the pool, mean TPOT in ms) at the largest batch per rank whose mean TPOT is at most `most_tpot_ms`."""
    drafts = deployment.speculation.draft_tokens
    steps = max(1.0, demand.output_tokens / deployment.model_spec.acceptance_length(drafts))
    context = round(demand.input_tokens + demand.output_tokens / 2)
    prefill_s = _prefill_s_per_request(deployment, pool, demand, calibration) if prefill_too else 0.0
    most = min(pool.max_num_seqs, pool.max_num_batched_tokens // (1 + drafts))
    best = (0.0, 0.0)
    size = 1
    while size <= most:
        step_ms = _step_ms(deployment, pool, Batch(decodes=size, context_tokens=context), calibration)
        # A rank makes `size` requests in steps x step_ms of decoding and size x prefill_s of prefill.
        cycle_s = steps * step_ms / 1e3 + size * prefill_s
        tpot_ms = cycle_s * 1e3 / max(1.0, demand.output_tokens)
        if tpot_ms > most_tpot_ms:
            break
        best = (size * pool.dep * pool.instances / cycle_s, tpot_ms)
        size = max(size + 1, round(size * BATCH_GROWTH))
    return best


def _step_ms(deployment: Deployment, pool: Pool, batch: Batch, calibration: Calibration) -> float:
    """Wall time of a step in which all ranks run `batch`, among its like."""
    drafts = deployment.speculation.draft_tokens if pool.role != "prefill" else 0
    cost = calibration.pool_cost(deployment, pool)
    tokens = batch.tokens(drafts)
    even = calibration.balancedness(deployment, pool, tokens)
    gpu_ms = sum(gpu_terms_ms(cost, batch, dep=pool.dep, drafts=drafts, balancedness=even).values())
    floor_ms = cost.launch_floor_ms(tokens, batch.chunks > 0)
    host_ms = cost.host_ms(batch.chunks + batch.decodes)
    wall = step_wall_ms(np.array([gpu_ms]), floor_ms, host_ms, cost.dp_sync_ms(), 0.0, pool.async_scheduling)
    return float(wall[0])
