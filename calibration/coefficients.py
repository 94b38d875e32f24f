"""What a fit finds of an engine's speed: the coefficients of the physical terms (physics.py)."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_EFFICIENCY = 1e3
"""Of a GPU's peak no share is above 1; the rates of a CPU are nominal."""


class EngineFix(BaseModel):
    """A prefill cost that a later engine removed: 0 in the calibrated engine, added back where the fix is undone.

    `per_token_ms`: ms per new token. `per_pair_ms`: ms per new token x context token. `full_layers`: layers that ran on
    all new tokens before and run on the replay window since; they still read their weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    per_token_ms: float = 0.0
    per_pair_ms: float = 0.0
    full_layers: int = 0


class Coefficients(BaseModel):
    """What a fit finds. Efficiencies are shares of the hardware's peak; the rest is ms."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    # GPU, shared by the ranks
    step_fixed_ms: float = Field(ge=0)
    dense_read_efficiency: float = Field(gt=0, le=MOST_EFFICIENCY)
    dense_flop_efficiency: float = Field(gt=0, le=MOST_EFFICIENCY)
    moe_read_efficiency: float = Field(gt=0, le=MOST_EFFICIENCY)
    moe_flop_efficiency: float = Field(gt=0, le=MOST_EFFICIENCY)
    roofline_sharpness: float = Field(4.0, ge=1)
    # log-normal skew of the experts' popularity: skewed tokens touch fewer experts; 0 is even
    routing_sigma: float = Field(0.0, ge=0)
    link_efficiency: float = Field(1.0, gt=0, le=MOST_EFFICIENCY)
    comm_fixed_ms: float = Field(0.0, ge=0)
    comm_rank_ms: float = Field(0.0, ge=0)
    all_to_all: bool = False
    dispatch_bytes: float = Field(2.0, gt=0)
    combine_bytes: float = Field(2.0, gt=0)
    draft_fixed_ms: float = Field(0.0, ge=0)
    draft_token_ms: float = Field(0.0, ge=0)
    # share of what as many layers of the target take, beside experts, that the draft's layers take
    draft_layer_share: float = Field(0.0, ge=0)
    # mapping tokens to replicas and recording their load, a step, where EPLB is on
    eplb_record_ms: float = Field(0.0, ge=0)
    # GPU, each rank's own
    decode_request_ms: float = Field(0.0, ge=0)
    decode_query_ms: float = Field(0.0, ge=0)
    kv_read_efficiency: float = Field(gt=0, le=MOST_EFFICIENCY)
    # of the context's time what each draft adds again: 0 where it is the read, 1 where arithmetic of many heads binds
    context_query_share: float = Field(0.0, ge=0, le=1)
    prefill_pair_ms: float = Field(ge=0)
    prefill_context_ms: float = Field(0.0, ge=0)
    prefill_chunk_ms: float = Field(0.0, ge=0)
    # chunks of so many new tokens or fewer go the way of decodes, where a pair costs as so many of a longer chunk's
    short_chunk_tokens: int = Field(0, ge=0)
    short_chunk_pairs: float = Field(1.0, gt=0)
    # a pair within a chunk beyond one with a cached token: causal attention fills its tiles less
    prefill_causal_ms: float = Field(0.0, ge=0)
    # host
    host_step_ms: float = Field(ge=0)
    host_request_ms: float = Field(0.0, ge=0)
    host_jitter_ms: float = Field(0.0, ge=0)
    piecewise_floor_ms: float = Field(0.0, ge=0)
    eager_floor_ms: float = Field(0.0, ge=0)
    # eager_floor_ms is a prompt's alone; decodes beside it (attention of a second kind) add, as do dispatch and combine
    eager_decode_launch_ms: float = Field(0.0, ge=0)
    eager_ep_launch_ms: float = Field(0.0, ge=0)
    # each token of the fullest rank: where kernels take longer than their launch they hold up the ones behind
    eager_token_launch_ms: float = Field(0.0, ge=0)
    # quantiles of launch / mean launch of steps with prompts; empty: always the mean. Correlation of one with the next
    launch_quantiles: tuple[Annotated[float, Field(gt=0)], ...] = ()
    launch_correlation: float = Field(0.0, ge=0, lt=1)
    admission_fixed_ms: float = Field(0.0, ge=0)
    admission_token_ms: float = Field(0.0, ge=0)
    # DP sync: ring per hop, recursive doubling per round, NCCL whole
    ring_hop_ms: float = Field(ge=0)
    doubling_round_ms: float = Field(ge=0)
    nccl_sync_ms: float = Field(ge=0)
