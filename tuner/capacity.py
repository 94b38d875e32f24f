"""Closed-form estimate of a deployment's capacity from the step costs that the simulator uses: screening, not answers.

It knows means only: no queues, no bursts, no imbalance between ranks. `Corrections` stand for what it leaves out; they
are learned from pilot simulations of the workload at hand. Whatever it ranks high is simulated.
"""

import math
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
PREFILL_OVERLAP = 0.5
"""Of a decode step's time, what a chunk in the same step shares (weights are read once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """What means leave out. `prefill_share`: of a prefill pool's ideal rate, what imbalance between ranks and evicted
    prefixes leave, by DEP width; `tail`: P90 of TPOT over its mean; `aggregated_share`: of an aggregated pool's ideal
    rate."""

    prefill_share: Mapping[int, float] = field(default_factory=dict)
    tail: float = 1.15
    aggregated_share: float = DEFAULT_SHARE

    def share_of(self, dep: int) -> float:
        """The share of its ideal rate that a prefill pool of width `dep` keeps; DEFAULT_SHARE where no pilot ran."""
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
        """Time of a mean request from arrival to its last token, s."""
        return (self.ttft_ms + self.tpot_ms * demand.output_tokens) / 1e3


def estimate(
    deployment: Deployment, demand: Demand, calibration: Calibration, slo: Slo, corrections: Corrections
) -> Estimate:
    """The highest mean request rate that meets `slo`. A rate of 0 means that not even one request does."""
    if not deployment.disaggregated:
        pool = deployment.pools[0]
        rate, tpot = _decode_rate(deployment, pool, demand, calibration, slo, corrections.tail)
        rate *= corrections.aggregated_share
        ttft = 2 * tpot + _prefill_s_per_request(deployment, pool, demand, calibration) * 1e3
        return Estimate(rate_req_s=rate, by_role={"aggregated": rate}, tpot_ms=tpot, ttft_ms=ttft, why="aggregated")
    rates: dict[str, float] = {}
    ttft = tpot = 0.0
    for pool in deployment.pools:
        if pool.role == "prefill":
            own_s = _prefill_s_per_request(deployment, pool, demand, calibration)
            usable = corrections.share_of(pool.dep) * pool.instances * pool.dep
            rates["prefill"] = rates.get("prefill", 0.0) + usable / own_s
            ttft = max(ttft, 2 * own_s * 1e3)
        else:
            rate, tpot = _decode_rate(deployment, pool, demand, calibration, slo, corrections.tail)
            rates["decode"] = rates.get("decode", 0.0) + rate
    least = min(rates, key=lambda r: rates[r])
    return Estimate(rate_req_s=rates[least], by_role=rates, tpot_ms=tpot, ttft_ms=ttft, why=least)


def least_ttft_ms(deployment: Deployment, calibration: Calibration) -> float:
    """Front end and one step of one token: no request sees its first token sooner, whatever the load."""
    pool = deployment.pools[0]
    return calibration.frontend_ms + _step_ms(deployment, pool, Batch(chunks=1, new_tokens=1), calibration)


def _prefill_s_per_request(deployment: Deployment, pool: Pool, demand: Demand, calibration: Calibration) -> float:
    """Rank-seconds that one prompt takes where all ranks run full steps of prompts."""
    new, cached = _prompt(deployment, demand)
    together = max(1, round(pool.max_num_batched_tokens / new))
    tokens = min(pool.max_num_batched_tokens, new)  # a long prompt takes several steps
    batch = Batch(chunks=together, new_tokens=round(tokens), cached_tokens=cached)
    return _step_ms(deployment, pool, batch, calibration) / 1e3 * new / tokens / together


def _prompt(deployment: Deployment, demand: Demand) -> tuple[float, int]:
    """(tokens to compute, cached tokens) of a mean prompt."""
    replay = deployment.model_spec.replay_tokens_per_hit if demand.new_tokens < demand.input_tokens else 0
    new = demand.new_tokens + replay
    return new, round(max(0.0, demand.input_tokens - new))


def _decode_rate(
    deployment: Deployment, pool: Pool, demand: Demand, calibration: Calibration, slo: Slo, tail: float
) -> tuple[float, float]:
    """(req/s of the pool, mean TPOT in ms) at the largest batch per rank whose P90 of TPOT meets the SLO."""
    drafts = deployment.speculation.draft_tokens
    accepted = deployment.model_spec.acceptance_length(drafts, thinking=demand.thinking)
    context = round(demand.input_tokens + demand.output_tokens / 2)
    steps = max(1.0, demand.output_tokens / accepted)
    most = min(pool.max_num_seqs, pool.max_num_batched_tokens // (1 + drafts))
    best = (0.0, 0.0)
    size = 1
    while size <= most:
        step_ms = _step_ms(deployment, pool, Batch(decodes=size, context_tokens=context), calibration)
        stall = _stalls(deployment, pool, demand, calibration, size, steps, step_ms)
        if stall is None:
            break
        # A request alone meets nobody's steps but its own.
        p90_ms = (tail if size > 1 else 1.0) * step_ms / accepted + _p90_of_stalls_ms(demand, steps, *stall)
        if p90_ms > slo.p90_tpot_ms:
            break
        cycle_s = steps * (step_ms + stall[0] * stall[1]) / 1e3
        best = (size * pool.dep * pool.instances / cycle_s, cycle_s * 1e3 / max(1.0, demand.output_tokens))
        size = max(size + 1, round(size * BATCH_GROWTH))
    return best


def _stalls(
    deployment: Deployment,
    pool: Pool,
    demand: Demand,
    calibration: Calibration,
    size: int,
    steps: float,
    step_ms: float,
) -> tuple[float, float] | None:
    """(share of steps with prompts, ms that these take longer) in an aggregated pool; (0, 0) in a decode pool; None
    where prompts come faster than steps.

    A rank that keeps `size` requests decoding admits as many prompts while one decodes; a chunk on any rank makes the
    step of all ranks longer.
    """
    if pool.role != "aggregated":
        return 0.0, 0.0
    new, cached = _prompt(deployment, demand)
    per_step = size / steps  # prompts that come to a rank in a step, on average
    if per_step * new > pool.max_num_batched_tokens:
        return None
    pieces = max(1.0, new / pool.max_num_batched_tokens)
    own = 1.0 - math.exp(-per_step * pieces)
    batch = Batch(chunks=1, new_tokens=max(1, round(per_step * new / own)), cached_tokens=cached)
    longer = _step_ms(deployment, pool, batch, calibration)
    return 1.0 - (1.0 - own) ** pool.dep, max(0.0, longer - step_ms * PREFILL_OVERLAP)


def _p90_of_stalls_ms(demand: Demand, steps: float, share: float, stall_ms: float) -> float:
    """P90 over requests of the time per output token that they wait for prompts. A request sees a Poisson number of
    such steps in proportion to its output, and a short one that meets one has few tokens to spread it on."""
    if share == 0.0:
        return 0.0
    outputs = np.array(demand.outputs, dtype=float)
    seen = np.random.default_rng(0).poisson(share * steps * outputs / demand.output_tokens)
    return float(np.percentile(seen * stall_ms / np.maximum(1.0, outputs - 1), 90))


def _step_ms(deployment: Deployment, pool: Pool, batch: Batch, calibration: Calibration) -> float:
    """Wall time of a step in which all ranks run `batch`, among its like."""
    drafts = deployment.speculation.draft_tokens if pool.role != "prefill" else 0
    cost = calibration.pool_cost(deployment, pool)
    tokens = batch.tokens(drafts)
    even = calibration.balancedness(deployment, pool, tokens)
    gpu_ms = sum(gpu_terms_ms(cost, batch, dep=pool.dep, drafts=drafts, balancedness=even).values())
    floor_ms = cost.launch_floor_ms(tokens, 1 if batch.chunks else 0)
    host_ms = cost.host_ms(batch.chunks + batch.decodes)
    wall = step_wall_ms(np.array([gpu_ms]), floor_ms, host_ms, cost.dp_sync_ms(), 0.0, pool.async_scheduling)
    return float(wall[0])
