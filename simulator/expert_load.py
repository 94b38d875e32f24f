"""How evenly the GPUs of an instance share a step's routed tokens: skewed expert popularity, placement, sampling.

Balancedness of a step is the sum over layers of the mean tokens per GPU over the sum of the largest. Popularity is
lognormal with one skew parameter per model part (target, draft), fitted to a balancedness measured without EPLB; what
EPLB makes of it is then predicted. docs/model/expert_load.md has the equations, their sources and limits.
"""

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

import numpy as np

from rackplan.engine import InputError
from rackplan.simulator.eplb import Placement, eplb_placement, linear_placement

FloatArray = np.ndarray

SEED = 0
"""Popularity and routing draws belong to the model, not to a run: the same for every deployment and run seed."""
LONG_WINDOW_STEPS = 500
"""From here on a window measures loads to within what a step draws."""
MAX_SIGMA = 6.0
"""Past it every token of a layer chooses the same top_k experts: balancedness changes no more."""
_SAMPLED_STEPS = 16
_SAMPLED_LAYERS = 40
"""A part of fewer layers (a draft) is averaged over several popularity draws until about this many are sampled."""
_BUCKETS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Which experts the tokens of one model part choose.

    skew_sigma: standard deviation of the log popularity over the experts of a layer, 0 is uniform routing.
    drift_per_step: rate at which log popularity forgets itself; after `a` steps it correlates exp(-drift x a) with what
    it was, equally skewed. Raises InputError on values out of range.
    """

    experts: int
    top_k: int
    layers: int
    skew_sigma: float
    drift_per_step: float = 0.0
    seed: int = SEED

    def __post_init__(self) -> None:
        if not 1 <= self.top_k < self.experts:
            raise InputError(f"top_k={self.top_k}: must be 1 to {self.experts - 1} for {self.experts} experts")
        if self.layers < 1:
            raise InputError(f"layers={self.layers}: must be at least 1")
        if not 0 <= self.skew_sigma <= MAX_SIGMA:
            raise InputError(f"skew_sigma={self.skew_sigma}: must be 0 to {MAX_SIGMA:g}")
        if not self.drift_per_step >= 0:
            raise InputError(f"drift_per_step={self.drift_per_step}: must be 0 or more")

    @property
    def models(self) -> int:
        """Popularity draws that stand side by side, each of `layers` layers."""
        return max(1, round(_SAMPLED_LAYERS / self.layers))

    def probability(self, age_steps: float = 0.0) -> FloatArray:
        """Chance that a token chooses an expert, `age_steps` after the first look: (models x layers, experts).

        Rows sum to top_k.
        """
        rng = np.random.default_rng([self.seed, self.layers, self.experts])
        then, since = rng.standard_normal((2, self.models * self.layers, self.experts))
        kept = math.exp(-self.drift_per_step * age_steps)
        weights = np.exp(self.skew_sigma * (kept * then + math.sqrt(1 - kept**2) * since))
        return _inclusion(weights / weights.sum(axis=1, keepdims=True), self.top_k)


def _inclusion(weights: FloatArray, top_k: int) -> FloatArray:
    """1 - exp(-weight x t), t of each row such that it sums to top_k: bisection on log t, all rows at once.

    Of top_k draws without replacement by weight (Gumbel top-k) this is the large-sample inclusion probability.
    """
    low = np.full((len(weights), 1), math.log(top_k))
    # At 50 over the (top_k + 1)th heaviest weight all of these are certain: the sum is past top_k.
    high = np.log(50.0 / np.partition(weights, -top_k - 1, axis=1)[:, [-top_k - 1]])
    for _ in range(50):
        middle = (low + high) / 2
        short = -np.expm1(-weights * np.exp(middle)).sum(axis=1, keepdims=True) < top_k
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return -np.expm1(-weights * np.exp(high))


def expert_balancedness(
    *,
    experts: int,
    top_k: int,
    layers: int,
    gpus: int,
    redundant_experts: int,
    eplb: bool,
    skew_sigma: float,
    tokens_per_gpu: float,
    window_steps: int = 1000,
    interval_steps: int = 3000,
    drift_per_step: float = 0.0,
) -> float:
    """Expected mean / max of routed tokens per GPU in one step, over 0 to 1; 1 on one GPU. The same on every call.

    tokens_per_gpu: tokens that a step routes, over all GPUs of the instance, divided by `gpus` (drafts counted).
    Without `eplb` the experts lie in contiguous blocks and `redundant_experts` must be 0. Raises InputError on values
    out of range and where experts + redundant experts do not divide over the GPUs.
    """
    load = ExpertLoad(experts=experts, top_k=top_k, layers=layers, skew_sigma=skew_sigma, drift_per_step=drift_per_step)
    if not eplb and redundant_experts:
        raise InputError(f"eplb.redundant_experts={redundant_experts} has no effect without EPLB; enable it or set 0")
    if not 0 < tokens_per_gpu < math.inf:
        raise InputError(f"tokens_per_gpu={tokens_per_gpu}: must be more than 0")
    if not drift_per_step and window_steps >= LONG_WINDOW_STEPS:
        # What was measured stays true: neither the age of a placement nor more than a long window changes it.
        window_steps, interval_steps = LONG_WINDOW_STEPS, LONG_WINDOW_STEPS
    balancing = Balancing(redundant_experts=redundant_experts, window_steps=window_steps, interval_steps=interval_steps)
    return _interpolated(load, gpus, balancing if eplb else None, tokens_per_gpu)


def fit_skew(
    *, experts: int, top_k: int, layers: int, gpus: int, tokens_per_gpu: float, balancedness: float, seed: int = SEED
) -> float:
    """The skew_sigma at which contiguous blocks without EPLB show `balancedness`.

    Raises InputError where no skew does: it lies above uniform routing's or below that of one fixed choice of experts.
    """
    from scipy.optimize import brentq  # slow to import, and not needed to run

    def excess(sigma: float) -> float:
        load = ExpertLoad(experts=experts, top_k=top_k, layers=layers, skew_sigma=sigma, seed=seed)
        return _interpolated(load, gpus, None, tokens_per_gpu) - balancedness

    uniform, steepest = excess(0.0), excess(MAX_SIGMA)
    if not steepest <= 0 <= uniform:
        raise InputError(
            f"balancedness={balancedness}: no skew makes it; {experts} experts top-{top_k} on {gpus} GPUs at "
            f"{tokens_per_gpu:g} tokens per GPU show {steepest + balancedness:.3f} to {uniform + balancedness:.3f}"
        )
    return float(brentq(excess, 0.0, MAX_SIGMA, xtol=1e-4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """EPLB as it runs: every `interval_steps`, on the load of the last `window_steps`."""

    redundant_experts: int
    window_steps: int
    interval_steps: int

    def __post_init__(self) -> None:
        if self.window_steps < 1:
            raise InputError(f"eplb.window_steps={self.window_steps}: must be at least 1")
        if self.interval_steps < 1:
            raise InputError(f"eplb.interval_steps={self.interval_steps}: must be at least 1")

    @property
    def mean_age_steps(self) -> float:
        """From the middle of the window to the middle of the placement's use."""
        return (self.window_steps + self.interval_steps) / 2


def _interpolated(load: ExpertLoad, gpus: int, balancing: Balancing | None, tokens_per_gpu: float) -> float:
    """Between buckets of the step's tokens, two to an octave: linear in their logarithm."""
    if gpus == 1:
        return 1.0
    place = _BUCKETS_PER_OCTAVE * math.log2(max(1.0, tokens_per_gpu * gpus))
    below = math.floor(place)
    low = _at_bucket(load, gpus, balancing, below)
    return low + (place - below) * (_at_bucket(load, gpus, balancing, below + 1) - low)


@lru_cache(maxsize=4096)
def _at_bucket(load: ExpertLoad, gpus: int, balancing: Balancing | None, bucket: int) -> float:
    """Mean balancedness of sampled steps of 2^(bucket / 2) tokens: tabulated where it is, else sampled now."""
    known = _tabulated().get(table_key(load, gpus, balancing), {}).get(str(bucket))
    return sample_balancedness(load, gpus, balancing, bucket) if known is None else known


@cache
def _tabulated() -> dict[str, dict[str, float]]:
    """What bench/tabulate_balancedness.py sampled before, so that a plan need not wait for it."""
    return json.loads((files("rackplan.simulator") / "data" / "balancedness.json").read_text())


def table_key(load: ExpertLoad, gpus: int, balancing: Balancing | None) -> str:
    """One row of the table: everything that balancedness depends on but the tokens."""
    eplb = "off" if balancing is None else f"{balancing.redundant_experts}+{balancing.window_steps}"
    age = f"{balancing.mean_age_steps:g}" if balancing and load.drift_per_step else "0"
    return (
        f"{load.experts}/{load.top_k}/{load.layers}/{load.skew_sigma!r}/{load.drift_per_step!r}/{load.seed}"
        f"/{gpus}/{eplb}/{age}"
    )


def sample_balancedness(load: ExpertLoad, gpus: int, balancing: Balancing | None, bucket: int) -> float:
    """Mean balancedness of sampled steps of 2^(bucket / 2) tokens over all GPUs. Some 50 ms for a large model."""
    tokens = round(2 ** (bucket / _BUCKETS_PER_OCTAVE))
    rng = np.random.default_rng([load.seed, tokens])
    placement, age_steps = _place(load, gpus, balancing, tokens, rng)
    loads = _step_loads(load.probability(age_steps), placement, tokens, rng)
    loads = loads.reshape(_SAMPLED_STEPS, load.models, load.layers, gpus)
    return float((loads.mean(axis=-1).sum(axis=-1) / loads.max(axis=-1).sum(axis=-1)).mean())


def _place(
    load: ExpertLoad, gpus: int, balancing: Balancing | None, tokens: int, rng: np.random.Generator
) -> tuple[Placement, float]:
    """The placement, by the counts of a window of such steps where EPLB runs, and its mean age in steps."""
    probability = load.probability()
    if balancing is None:
        return linear_placement(len(probability), load.experts, gpus), 0.0
    window = rng.binomial(tokens * balancing.window_steps, probability)
    placement = eplb_placement(window, redundant_experts=balancing.redundant_experts, gpus=gpus)
    return placement, balancing.mean_age_steps


def _step_loads(probability: FloatArray, placement: Placement, tokens: int, rng: np.random.Generator) -> FloatArray:
    """Routed tokens per GPU of sampled steps: (steps, layers, gpus), each layer summing to tokens x top_k.

    A replica serves its share of the tokens, so its count is binomial, apart from the others'. That every token
    chooses exactly top_k experts is met to second order: the excess of a layer's sum is taken back from the slots in
    proportion to their variance, which is what conditioning on the sum does.
    """
    chance = np.take_along_axis(probability, placement.expert_of_slot, axis=1)
    replicas = np.take_along_axis(placement.replicas, placement.expert_of_slot, axis=1)
    # The first tokens mod replicas of them serve one token more.
    served = (tokens + replicas - 1 - placement.replica_of_slot) // replicas
    expected, variance = served * chance, served * chance * (1 - chance)
    counts = rng.binomial(served, chance, size=(_SAMPLED_STEPS, *chance.shape))
    excess = (counts - expected).sum(axis=2, keepdims=True)
    share = variance / (variance.sum(axis=1, keepdims=True) + np.finfo(float).tiny)
    return placement.gpu_loads(counts - excess * share)
