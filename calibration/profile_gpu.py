"""Which coefficients the exact batches of a profile can tell, and where their search starts.

What they cannot tell is carried: from physics, or per layer from the embedded calibration that measured it.
"""

import math
from collections.abc import Sequence

import numpy as np

from rackplan.calibration.experts import experts_touched
from rackplan.calibration.fit import Unknown
from rackplan.calibration.gpu_fit import PROFILE_FIXED, GpuFit
from rackplan.calibration.library import calibration_file
from rackplan.calibration.rows import Row
from rackplan.engine import GpuSpec, InputError, ModelSpec, gpu_spec, model_spec

CARRIED_FROM = "h200-v2-lite"
LEAST_DECODE_ROWS, LEAST_PREFILL_ROWS = 3, 2
SERVED_WEIGHT = 0.25
"""Served rows lie close together, at one context and one prompt length: four count as one exact batch."""
NOISE_PCT = 5.0
"""A row whose samples spread by this counts half."""
PRIOR_WEIGHT = 0.01
"""A prior's residual for one e-fold of an efficiency, or for a constant as long as its scale: a hundredth of the row
that is off by its own length. It decides only what the rows leave open."""
ROWS_FOR_SHARPNESS = 30
LENGTHS_FOR_CAUSAL = 5
"""Lengths of prefill before pairs within a chunk are told from pairs with cached tokens."""
SHORT_CHUNK_TOKENS = {"h200": 512}
"""vLLM's threshold for latent attention on Hopper: chunks up to it take the way of decodes (FlashAttnMLA)."""
SHORT_ROWS = 4
"""Exact batches of short chunks over cached tokens before they tell what their pairs cost."""
SERVED_ROWS_FOR_ROUTING = 8
MOST_EFFICIENCY = 1.2
MOST_CPU_EFFICIENCY = 500.0
"""The rates of a CPU are nominal: a share of them may be far above 1."""


def gpu_fit_of(model: str, gpu: str, rows: Sequence[Row], capture_size: int) -> GpuFit:
    """The fit that suits `rows`. Raises InputError where they are too few for any."""
    _check_enough(rows)
    spec, on = model_spec(model, gpu), gpu_spec(gpu)
    unknowns = _unknowns(spec, on, rows)
    assumed = {k: v for k, v in _carried(spec, on, unknowns).items() if k not in unknowns}
    scales = {k: u.start for k, u in unknowns.items()}
    logs = [k for k in unknowns if k.endswith("_efficiency")]
    constants = [k for k in unknowns if k.endswith("_ms") and k != PROFILE_FIXED]

    def prior(values: dict[str, float]) -> np.ndarray:
        found = [math.log(values[k] / scales[k]) for k in logs] + [values[k] / scales[k] for k in constants]
        return PRIOR_WEIGHT * np.array(found)

    return GpuFit(
        model=model,
        gpu=gpu,
        unknowns=unknowns,
        assumed=assumed,
        weight=lambda row: (SERVED_WEIGHT if row.served else 1.0) / (1 + (row.spread_pct / NOISE_PCT) ** 2),
        prior=prior,
        capture_size=capture_size,
    )


def _check_enough(rows: Sequence[Row]) -> None:
    exact = [r for r in rows if not r.served]
    decodes = [r for r in exact if r.phase == "decode"]
    prefills = [r for r in exact if r.phase == "prefill"]
    for found, least, what in (
        (len(decodes), LEAST_DECODE_ROWS, "decode rows"),
        (len({r.batch.decodes for r in decodes}), 2, "sizes of decode batches"),
        (len(prefills), LEAST_PREFILL_ROWS, "prefill rows"),
        (len({r.batch.new_tokens for r in prefills}), 2, "lengths of prefill"),
    ):
        if found < least:
            raise InputError(f"forward_dep*.csv: {found} {what} in all, a fit needs {least}; measure more cases")


def _unknowns(model: ModelSpec, gpu: GpuSpec, rows: Sequence[Row]) -> dict[str, Unknown]:
    exact = [r for r in rows if not r.served]
    decodes = [r for r in exact if r.phase == "decode"]
    prefills = [r for r in exact if r.phase == "prefill"]
    flops, reads = _starts(model, gpu, decodes, prefills)
    shortest = min(r.measured_ms for r in decodes)
    longest = max(prefills, key=lambda r: r.measured_ms)
    pairs = max(r.batch.new_tokens * (r.batch.cached_tokens + r.batch.new_tokens / 2) for r in prefills)
    most = MOST_CPU_EFFICIENCY if gpu.name == "cpu" else MOST_EFFICIENCY

    def share(start: float) -> Unknown:
        start = min(start, most / 2)
        return Unknown(start, start / 300, most)

    def ms(scale: float, most_ms: float) -> Unknown:
        return Unknown(scale, 0.0, most_ms)

    found = {
        "step_fixed_ms": ms(shortest / 2, shortest * 2),
        "dense_flop_efficiency": share(flops),
        "moe_read_efficiency": share(reads),
        "moe_flop_efficiency": share(flops),
        "decode_request_ms": ms(shortest / 50, shortest),
        "prefill_pair_ms": ms(longest.measured_ms / pairs / 10, longest.measured_ms / pairs * 10),
        "prefill_chunk_ms": ms(shortest / 5, longest.measured_ms),
    }
    if len({r.batch.context_tokens for r in decodes}) > 1:
        found["kv_read_efficiency"] = share(reads)
    if len({r.batch.cached_tokens for r in prefills}) > 1:
        cached = max(r.batch.cached_tokens for r in prefills)
        found["prefill_context_ms"] = ms(longest.measured_ms / cached / 20, longest.measured_ms / cached)
    most_short = SHORT_CHUNK_TOKENS.get(gpu.name, 0)
    if sum(0 < r.batch.new_tokens <= most_short and r.batch.cached_tokens > 0 for r in prefills) >= SHORT_ROWS:
        found["short_chunk_pairs"] = Unknown(3.0, 0.3, 10)
    if len(exact) >= ROWS_FOR_SHARPNESS:
        found["roofline_sharpness"] = Unknown(3.0, 1, 12)
    if len({r.batch.new_tokens for r in prefills}) >= LENGTHS_FOR_CAUSAL:
        found["prefill_causal_ms"] = ms(longest.measured_ms / pairs / 20, longest.measured_ms / pairs * 10)
    if len({r.drafts for r in decodes}) > 1:
        found["decode_query_ms"] = ms(shortest / 50, shortest)
        found["draft_fixed_ms"] = ms(shortest / 5, shortest * 5)
    if any(r.dep > 1 for r in exact):
        found |= {"link_efficiency": Unknown(0.3, 0.001, most), "comm_fixed_ms": ms(shortest / 5, shortest * 5)}
    if sum(r.served for r in rows) >= SERVED_ROWS_FOR_ROUTING:
        found |= {"routing_sigma": Unknown(0.5, 0.01, 3), PROFILE_FIXED: ms(shortest / 10, shortest)}
    return found


def _starts(model: ModelSpec, gpu: GpuSpec, decodes: Sequence[Row], prefills: Sequence[Row]) -> tuple[float, float]:
    """(share of the peak arithmetic, share of the memory's rate) that the best row reaches if it did nothing else."""
    dtype = "fp8" if model.expert_flop_dtype == "fp4" else model.expert_flop_dtype
    flop_rate, byte_rate = gpu.dense_tflops[dtype] * 1e9, gpu.hbm_tb_s * 1e9
    per_token = model.flops_per_token_dense["prefill"]
    flops = max(r.batch.prefill_tokens * per_token / r.measured_ms for r in prefills) / flop_rate

    def bytes_read(row: Row) -> float:
        b = row.batch
        touched = experts_touched(b.decodes * row.dep, model.routed_experts, model.top_k) / row.dep
        return (
            model.moe_layers * touched * model.bytes_per_routed_expert
            + model.layers * model.non_expert_read_bytes_per_layer_step
            + b.decodes * b.context_tokens * model.decode_kv_read_bytes_per_context_token
        )

    return flops, max(bytes_read(r) / r.measured_ms for r in decodes) / byte_rate


def _carried(model: ModelSpec, gpu: GpuSpec, unknowns: dict[str, Unknown]) -> dict[str, float]:
    """Values of what no row tells."""
    base = calibration_file(CARRIED_FROM)
    c, layers = base.coefficients, model_spec(base.model, base.gpu).moe_layers
    reads = unknowns["moe_read_efficiency"].start
    # Between GPUs a layer's dispatch and combine are launches on the link; between CPUs two all-reduces of the host's.
    layer_comm_ms = 2 * c.ring_hop_ms if gpu.name == "cpu" else c.comm_fixed_ms / layers
    short = SHORT_CHUNK_TOKENS.get(gpu.name, 0) if "short_chunk_pairs" in unknowns else 0
    return {
        **({"short_chunk_tokens": short, "short_chunk_pairs": 1.0} if gpu.name in SHORT_CHUNK_TOKENS else {}),
        "prefill_causal_ms": 0.0,
        "dense_read_efficiency": reads if gpu.name == "cpu" else 0.8,
        "kv_read_efficiency": reads,
        "prefill_context_ms": 0.0,
        "roofline_sharpness": c.roofline_sharpness,
        "routing_sigma": 0.0,
        "link_efficiency": c.link_efficiency,
        "comm_fixed_ms": layer_comm_ms * model.moe_layers,
    }
