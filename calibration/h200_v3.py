"""Fits `h200-v3` from slices of DeepSeek-V3 on H200, FP8. Run as `python -m rackplan.calibration.h200_v3`.

The slices have V3's widths and 2 or 4 layers, one of them dense; what a layer costs is taken times V3's layers. Two
GPUs of expert parallelism were measured: wider instances follow by physics. docs/model/calibration.md has the limits.
"""

from collections import defaultdict
from collections.abc import Hashable
from functools import cache

import numpy as np

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.campaign import CAMPAIGN
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.file import CalibrationFile, FitError, FittedCalibration, MeasuredRange, Transfer
from rackplan.calibration.fit import Solution, Unknown, bootstrap_intervals, solve, summarise
from rackplan.calibration.h200_rows import DATA
from rackplan.calibration.library import calibration_file
from rackplan.calibration.physics import PhysicalCost
from rackplan.calibration.profile_terms import LAUNCHES
from rackplan.calibration.readers.forward_csv import forward_rows
from rackplan.calibration.rows import Row
from rackplan.engine import ModelSpec, model_spec

MODEL, GPU, NAME = "deepseek-v3", "h200", "h200-v3"
FILES = {"bench_forward_v3_L2_dep1.csv": 2, "bench_forward_v3_L4_dep1.csv": 4, "bench_forward_v3_L4_dep2.csv": 4}
"""Layers of the slice by file."""
KV_BYTES_PER_LAYER = 2 * 576
"""The slices kept BF16 KV: 512 + 64 values a token and layer."""
CARRIED = (
    *("host_step_ms", "host_request_ms", "admission_token_ms"),
    *("ring_hop_ms", "doubling_round_ms", "nccl_sync_ms"),
)
HOLDOUT_FACTOR = 2.0
"""Hold-out errors of slices, widened for what no row shows: 57 more layers and wider expert parallelism."""

UNKNOWNS = {
    "slice_fixed_ms": Unknown(0.05, 0, 2),
    "layer_fixed_ms": Unknown(0.1, 0, 1),
    "dense_flop_efficiency": Unknown(0.4, 0.05, 1.2),
    "moe_read_efficiency": Unknown(0.8, 0.2, 1.2),
    "moe_flop_efficiency": Unknown(0.3, 0.05, 1.2),
    "roofline_sharpness": Unknown(3.0, 1, 12),
    "comm_layer_ms": Unknown(0.03, 0, 1),
    "request_layer_ms": Unknown(2e-4, 0, 0.1),
    "kv_read_efficiency": Unknown(0.6, 0.1, 1.3),
    "pair_layer_ms": Unknown(2e-8, 1e-10, 1e-6),
    "chunk_layer_ms": Unknown(0.1, 0, 5),
}
"""ms a layer (`_layer_ms`; of communication: a MoE layer), ms a step (`slice_fixed_ms`), and shares of peak."""
NOTES = (
    "Slices of 2 and 4 layers (1 dense) extrapolated to 61: what a layer costs times the layers. DEP2 is measured, "
    "wider expert parallelism follows by physics, with the all-gather that was measured. Errors are those of the "
    "slices, doubled where held out.",
    "Routing was even and over one expert group; skew is taken as EPLB-balanced.",
    "KV was BF16 in the slices. A context token is charged what it took there, though the model's KV is FP8.",
    "What a pair in a chunk of up to 512 tokens costs is carried from h200-v2-lite, whose heads are of the same size.",
    "Link efficiency is carried from h200-v2-lite (the same all-gather): between two GPUs it is 2 % of a step here.",
    "Prefill: five rows of DEP2, spread up to 12 %; dense and MoE arithmetic are told apart poorly.",
    "Launch floors are those of h200-v2-lite by layers (61 / 27), descriptors of a KV block likewise; host, sync and "
    "front end are carried from it; set-up and rate of KV transfer too.",
)


def slice_of(layers: int) -> ModelSpec:
    """DeepSeek-V3 on H200 with that many layers, one of them dense, and BF16 KV."""
    model = model_spec(MODEL, GPU)
    routed = model.top_k * 6.0 * model.hidden * model.expert_intermediate
    dense = model.flops_per_token_dense["decode"] - model.moe_layers * routed
    flops = dense * layers / model.layers + (layers - 1) * routed
    return model.model_copy(
        update={
            "layers": layers,
            "dense_layers": 1,
            "flops_per_token_dense": {"prefill": flops, "decode": flops},
            "decode_kv_read_bytes_per_context_token": float(KV_BYTES_PER_LAYER * layers),
        }
    )


def coefficients_of(values: dict[str, float], model: ModelSpec) -> Coefficients:
    """Coefficients of a model of `model.layers` layers: what the fit has per layer, times the layers."""
    own = {k: v for k, v in values.items() if k in Coefficients.model_fields}
    lite = calibration_file("h200-v2-lite").coefficients
    return Coefficients(
        **own,
        dense_read_efficiency=0.8,
        link_efficiency=lite.link_efficiency,
        short_chunk_tokens=lite.short_chunk_tokens,
        short_chunk_pairs=lite.short_chunk_pairs,
        step_fixed_ms=values["slice_fixed_ms"] + values["layer_fixed_ms"] * model.layers,
        comm_fixed_ms=values["comm_layer_ms"] * model.moe_layers,
        decode_request_ms=values["request_layer_ms"] * model.layers,
        prefill_pair_ms=values["pair_layer_ms"] * model.layers,
        prefill_chunk_ms=values["chunk_layer_ms"] * model.layers,
        host_step_ms=0.0,
        ring_hop_ms=0.0,
        doubling_round_ms=0.0,
        nccl_sync_ms=0.0,
    )


@cache
def rows() -> tuple[tuple[int, Row], ...]:
    """(layers of the slice, exact batch) of all files."""
    return tuple((layers, row) for name, layers in FILES.items() for row in forward_rows(CAMPAIGN / name))


def row_id(layers: int, row: Row) -> str:
    """The row's id with its slice's, e.g. L4_decode_32_1024."""
    return f"L{layers}_{row.id}"


_POOLS = {dep: deployment_of(MODEL, GPU, dep=dep) for dep in (1, 2)}


def predict_ms(values: dict[str, float], batches: tuple[tuple[int, Row], ...]) -> np.ndarray:
    """GPU time of each slice's batch, ms."""
    models = {layers: slice_of(layers) for layers, _ in batches}
    costs = {
        (layers, dep): PhysicalCost(coefficients_of(values, model), *_POOLS[dep], model=model)
        for layers, model in models.items()
        for dep in _POOLS
    }
    return np.array([sum(gpu_terms_ms(costs[n, r.dep], r.batch, dep=r.dep).values()) for n, r in batches])


def error_pct(values: dict[str, float], batches: tuple[tuple[int, Row], ...]) -> np.ndarray:
    """Signed errors, %, (rows,)."""
    return (predict_ms(values, batches) / np.array([r.measured_ms for _, r in batches]) - 1) * 100


def fit(batches: tuple[tuple[int, Row], ...] | None = None, start: dict[str, float] | None = None) -> Solution:
    """Least squares on relative errors of all rows, or of `batches`. The same on every run."""
    used = batches or rows()
    measured = np.array([r.measured_ms for _, r in used])
    unknowns = {k: u._replace(start=start[k] or u.start) for k, u in UNKNOWNS.items()} if start else UNKNOWNS
    return solve(unknowns, lambda values: predict_ms(values, used) / measured - 1)


def _errors(values: dict[str, float]) -> dict[str, FitError]:
    """By phase: errors of the fit, and of every batch size left out in turn, widened by HOLDOUT_FACTOR."""
    every = rows()
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, (_, row) in enumerate(every):
        groups[row.batch.new_tokens, row.batch.decodes].append(i)
    fitted, held = defaultdict(list), defaultdict(list)
    for (_, row), error in zip(every, error_pct(values, every), strict=True):
        fitted[_phase(row)].append(float(error))
    for left_out in groups.values():
        kept = tuple(b for i, b in enumerate(every) if i not in left_out)
        refit = fit(kept, values).values
        for i, error in zip(left_out, error_pct(refit, tuple(every[i] for i in left_out)), strict=True):
            held[_phase(every[i][1])].append(float(error) * HOLDOUT_FACTOR)
    return {phase: summarise(fitted[phase], held[phase]) for phase in fitted}


def _phase(row: Row) -> str:
    return "prefill" if row.batch.new_tokens else "decode"


def draft_of(values: dict[str, float]) -> CalibrationFile:
    """The file of the whole model without its errors."""
    model, base = model_spec(MODEL, GPU), calibration_file("h200-v2-lite")
    by_layers = model.layers / model_spec(base.model, base.gpu).layers
    host = base.coefficients
    coefficients = coefficients_of(values, model).model_copy(
        update={
            # as long per context token as the BF16 that was measured
            "kv_read_efficiency": values["kv_read_efficiency"]
            * model.decode_kv_read_bytes_per_context_token
            / (KV_BYTES_PER_LAYER * model.layers),
            # 0.59 of HBM is 0.69 of BF16 peak: arithmetic of 128 heads binds (docs/model/speculation.md)
            "context_query_share": 1.0,
            **{k: getattr(host, k) * by_layers for k in LAUNCHES},
            **{k: getattr(host, k) for k in CARRIED},
        }
    )
    carried = base.transfer.model_dump() | {"per_block_ms": base.transfer.per_block_ms * by_layers}
    decode = MeasuredRange(dep=(1, 2), batch=(1, 256), context_tokens=(1024, 4096), new_tokens=(0, 0), drafts=(0, 0))
    prefill = MeasuredRange(dep=(2, 2), batch=(1, 1), context_tokens=(0, 0), new_tokens=(512, 8192), drafts=(0, 0))
    return CalibrationFile(
        name=NAME,
        model=MODEL,
        gpu=GPU,
        engine_version="vLLM 0.33.0",
        date="2026-11-29",
        command="python -m rackplan.calibration.h200_v3",
        sources=tuple(f"data/h200_dsv2lite/campaign/{name}" for name in FILES),
        rows=tuple(row_id(layers, row) for layers, row in rows()),
        coefficients=coefficients,
        transfer=Transfer.model_validate(carried),
        frontend_ms=base.frontend_ms,
        frontend_token_ms=base.frontend_token_ms,
        frontend_turn_ms=base.frontend_turn_ms,
        target_sigma=0.0,
        draft_sigma=0.0,
        measured={"decode": decode, "prefill": prefill},
        errors={},
        notes=NOTES,
    )


def build() -> CalibrationFile:
    """The whole file, with intervals of what was fitted (per layer) and errors."""
    found = fit()
    update = {"coefficient_intervals": bootstrap_intervals(found, UNKNOWNS), "errors": _errors(found.values)}
    return draft_of(found.values).model_copy(update=update)


F66_DEP, F66_REQUESTS, F66_CONTEXT = 32, 256, 2048 + 2048 // 2
RDMA_GB_PER_S = 45.0
"""What all-to-all kernels reach on one 400 Gbit/s adapter a GPU, as their authors report; NVLink ends after 8 GPUs."""
F66_ASSUMPTION = (
    "EP32 over four hosts, all-to-all of FP8 out and BF16 back at 45 GB/s a GPU; 3,072 tokens of context; "
    "launches and host hidden under the GPU"
)


def decode_ep32_tok_s(calibration: FittedCalibration) -> float:
    """F66: output tok/s/GPU of a decode at EP32 over hosts, which rackplan does not deploy: no NVLink domain has 32."""
    deployment, pool = deployment_of(MODEL, GPU, dep=8)
    link_gb_per_s = deployment.gpu_spec.nvlink_gb_s / 2
    coefficients = calibration.coefficients.model_copy(
        update={"all_to_all": True, "dispatch_bytes": 1.0, "link_efficiency": RDMA_GB_PER_S / link_gb_per_s}
    )
    cost = PhysicalCost(coefficients, deployment, pool.model_copy(update={"dep": F66_DEP}))
    batch = Batch(decodes=F66_REQUESTS, context_tokens=F66_CONTEXT)
    return F66_REQUESTS / sum(gpu_terms_ms(cost, batch, dep=F66_DEP).values()) * 1e3


if __name__ == "__main__":
    file = build()
    file.save(DATA / f"{file.name}.json")
    for metric, error in file.errors.items():
        print(f"{metric}: {error.model_dump()}")
