"""What a rearrangement of EPLB moves between GPUs: the replicas that the new placement has where the old had none.

Both placements are those of `eplb_placement`, of two windows an interval apart, or the first of a window after the
start of the engine. docs/model/expert_load.md has the equations, their sources and limits.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rackplan.simulator.eplb import Placement, eplb_placement, start_placement
from rackplan.simulator.expert_load import Balancing, ExpertLoad

SAMPLED_LAYERS = 8
"""Layers are alike: so many tell the mean of all to 1 %."""
WINDOW_TOKENS_PER_GPU = 96
"""Routed tokens of a step that windows are sampled with: 16 requests of 6 tokens."""


class Rearrangement(NamedTuple):
    """`total_ms`: from the start to the end; of it the moving replicas fill the link of a GPU for `link_ms`."""

    total_ms: float
    link_ms: float

    @property
    def link_share(self) -> float:
        """Share of the link that it takes while it lasts, 0 to 1."""
        return self.link_ms / self.total_ms if self.total_ms else 0.0


def most_moved(before: Placement, after: Placement, gpus: int) -> np.ndarray:
    """Replicas that the GPU with most of them receives or sends, by layer (layers,).

    A GPU receives each expert once that it did not hold; the GPUs that held it share the sending."""
    held, wanted = _on_gpus(before, gpus), _on_gpus(after, gpus)
    new = wanted & ~held
    sends = held * (new.sum(axis=1, keepdims=True) / held.sum(axis=1, keepdims=True))
    return np.maximum(new.sum(axis=2), sends.sum(axis=2)).max(axis=1)


def _on_gpus(placement: Placement, gpus: int) -> np.ndarray:
    """Which experts lie on which GPU: bool (layers, gpus, experts)."""
    layers, experts = placement.replicas.shape
    there = np.zeros((layers, gpus, experts), dtype=bool)
    there[np.arange(layers)[:, None], placement.gpu_of_slot, placement.expert_of_slot] = True
    return there


@lru_cache(maxsize=256)
def moved_per_layer(load: ExpertLoad, gpus: int, balancing: Balancing, *, first: bool) -> float:
    """Mean over layers of `most_moved` in one rearrangement. `first`: from the blocks that the engine starts with, else
    from the placement of an interval before, since when popularity has drifted."""
    rng = np.random.default_rng([load.seed, gpus])
    tokens = WINDOW_TOKENS_PER_GPU * gpus * balancing.window_steps

    def placed(age_steps: float) -> Placement:
        window = rng.binomial(tokens, load.probability(age_steps)[:SAMPLED_LAYERS])
        return eplb_placement(window, redundant_experts=balancing.redundant_experts, gpus=gpus)

    if first:
        layers = min(SAMPLED_LAYERS, load.models * load.layers)
        before = start_placement(layers, load.experts, balancing.redundant_experts, gpus)
    else:
        before = placed(0.0)
    return float(most_moved(before, placed(balancing.interval_steps), gpus).mean())
