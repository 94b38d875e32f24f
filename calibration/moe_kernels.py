"""Times of MegaMoE, one kernel that dispatches, computes and combines a MoE layer, as its authors measured it.

They say what the published step times of another model and GPU leave open: the constant of a layer, and what tokens
cost beyond the weights' read. Rows: data/moe_kernels.csv, random routing, mean over 8 ranks of one NVLink domain.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rackplan.calibration.batch import deployment_of
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.physics import PhysicalCost
from rackplan.engine import GpuSpec, ModelSpec, gpu_spec, model_spec
from rackplan.simulator.expert_load import expert_balancedness

ROWS = Path(__file__).parent / "data" / "moe_kernels.csv"
LIKE_MODEL, LIKE_GPU = "deepseek-v4.1-flash", "gb200"
MXFP4_BYTES = 0.5 + 1 / 32
"""Of a weight: four bits, and a byte of scale for 32 of them."""


class KernelRow(NamedTuple):
    """One measured MoE layer."""

    layer: ModelSpec
    ranks: int
    tokens_per_rank: int
    measured_ms: float


@cache
def kernel_rows() -> tuple[KernelRow, ...]:
    """All rows of data/moe_kernels.csv."""
    like = model_spec(LIKE_MODEL, LIKE_GPU)
    rows = []
    with ROWS.open() as f:
        for r in csv.DictReader(f):
            hidden, intermediate = int(r["hidden"]), int(r["intermediate"])
            layer = like.model_copy(
                update={
                    "layers": 1,
                    "replay_layers": 0,
                    "hidden": hidden,
                    "expert_intermediate": intermediate,
                    "routed_experts": int(r["experts"]),
                    "top_k": int(r["top_k"]),
                    "bytes_per_routed_expert": 3 * hidden * intermediate * MXFP4_BYTES,
                }
            )
            row = KernelRow(layer, int(r["ranks"]), int(r["tokens_per_rank"]), float(r["us_per_layer"]) / 1e3)
            rows.append(row)
    return tuple(rows)


@cache
def _b200() -> GpuSpec:
    """GB200's HBM and links at B200's clocks."""
    peaks = {"bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}
    return gpu_spec(LIKE_GPU).model_copy(update={"name": "b200", "dense_tflops": peaks})


def kernel_ms(coefficients: Coefficients, row: KernelRow) -> float:
    """What the coefficients of a step of V4.1 make of one layer of the row: experts, hottest GPU and bytes sent."""
    layers = model_spec(LIKE_MODEL, LIKE_GPU).moe_layers
    one = {"comm_fixed_ms": coefficients.comm_fixed_ms / layers, "routing_sigma": 0.0}
    deployment, pool = deployment_of(LIKE_MODEL, LIKE_GPU, dep=row.ranks)
    cost = PhysicalCost(coefficients.model_copy(update=one), deployment, pool, model=row.layer, gpu=_b200())
    even = expert_balancedness(
        experts=row.layer.routed_experts,
        top_k=row.layer.top_k,
        layers=1,
        gpus=row.ranks,
        redundant_experts=0,
        eplb=False,
        skew_sigma=0.0,
        tokens_per_gpu=row.tokens_per_rank,
    )
    shared = cost.shared_ms(row.tokens_per_rank, row.tokens_per_rank * row.ranks, 0, 0, even)
    return shared.moe + shared.ep_imbalance + shared.communication
