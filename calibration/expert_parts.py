"""The parts of a model that route tokens to experts, target and draft, as a deployment runs them: how evenly they do,
and what a rearrangement of EPLB takes."""

from typing import NamedTuple

from rackplan.engine import Deployment, Pool
from rackplan.simulator.cost import STEADY, PlacedAt

REARRANGE_LAYER_MS = 23.0
"""Of a layer beside its bytes: plan, maps, launches of the transfers. At most 1 s was published for a rearrangement of
40 + 3 layers on 32 GPUs (F35), of which the bytes take some 20 ms. A bound, taken for every engine: users report 0.65
to 1.7 s with 32 GPUs."""


class Part(NamedTuple):
    """Routed experts of the target or the draft. `skew_sigma`: of their popularity."""

    experts: int
    top_k: int
    layers: int
    skew_sigma: float
    bytes_per_expert: float


def target_part(deployment: Deployment, skew_sigma: float) -> Part:
    """The routed experts of the model itself."""
    model = deployment.model_spec
    return Part(model.routed_experts, model.top_k, model.moe_layers, skew_sigma, model.bytes_per_routed_expert)


def draft_part(deployment: Deployment, pool: Pool, skew_sigma: float) -> Part | None:
    """Those of the draft, where `pool` drafts."""
    draft = deployment.model_spec.draft
    if draft is None or not deployment.speculation.draft_tokens or pool.role == "prefill":
        return None
    return Part(draft.experts, draft.top_k, draft.layers, skew_sigma, draft.bytes / (draft.layers * draft.experts))


def part_balancedness(
    part: Part, deployment: Deployment, pool: Pool, tokens_per_rank: float, placed: PlacedAt = STEADY
) -> float:
    """Mean / max of the part's routed tokens per GPU in a step; `tokens_per_rank`: those that it routes."""
    from rackplan.simulator.expert_load import expert_balancedness

    if pool.gpus_per_instance == 1 or tokens_per_rank <= 0:
        return 1.0
    eplb = deployment.eplb
    balanced = eplb.enabled and not placed.linear
    interval_steps = eplb.interval_steps
    if placed.age_steps is not None:
        interval_steps = max(1, round(2 * placed.age_steps - eplb.window_steps))  # whose mean age that is
    return float(
        expert_balancedness(
            experts=part.experts,
            top_k=part.top_k,
            layers=part.layers,
            gpus=pool.gpus_per_instance,
            redundant_experts=deployment.redundant_experts(pool) if balanced else 0,
            eplb=balanced,
            skew_sigma=part.skew_sigma,
            tokens_per_gpu=tokens_per_rank * pool.dep / pool.gpus_per_instance,
            window_steps=eplb.window_steps,
            interval_steps=interval_steps,
            drift_per_step=placed.drift_per_step,
        )
    )


def rearrange_ms(
    parts: list[Part], deployment: Deployment, pool: Pool, *, link_gb_per_s: float, first: bool, drift_per_step: float
) -> tuple[float, float]:
    """(whole, of it the link's) time of one rearrangement: what its layers take, one after the other, and their bytes
    over one GPU's link, in one direction."""
    from rackplan.simulator.expert_load import Balancing, ExpertLoad
    from rackplan.simulator.rearrange import moved_per_layer

    eplb = deployment.eplb
    balancing = Balancing(
        redundant_experts=deployment.redundant_experts(pool),
        window_steps=eplb.window_steps,
        interval_steps=eplb.interval_steps,
    )
    link_ms = 0.0
    for part in parts:
        load = ExpertLoad(
            experts=part.experts,
            top_k=part.top_k,
            layers=part.layers,
            skew_sigma=part.skew_sigma,
            drift_per_step=drift_per_step,
        )
        moved = part.layers * moved_per_layer(load, pool.gpus_per_instance, balancing, first=first)
        link_ms += moved * part.bytes_per_expert / (link_gb_per_s * 1e6)
    return REARRANGE_LAYER_MS * sum(part.layers for part in parts) + link_ms, link_ms
