"""Fits `gb200-v3` from two published figures, F59 and F60, on top of gb300-v4.1-flash.

Two figures give two coefficients: dense efficiency from prefill, the KV read efficiency from decode. NCCL's
all-gather between two and four GPUs, from the same article, gives the exchange of tokens. All else is carried from the
same silicon family or is a prior, and the error bar is as wide as that deserves.
"""

import csv
from functools import cache
from pathlib import Path

import numpy as np

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.figures import fit_value
from rackplan.calibration.file import CalibrationFile, FitError, FittedCalibration, MeasuredRange
from rackplan.calibration.fit import Solution, Unknown, solve
from rackplan.calibration.library import calibration_file
from rackplan.engine import gpu_spec

MODEL, GPU = "deepseek-v3", "gb200"
PROMPT_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS = 2048, 65536, 2048
DECODE_REQUESTS = 512
"""F60 does not state its batch. 512 requests a rank at a mean context of 3,072 take 55 of the 90 GB that its weights
leave, and are the largest captured CUDA graph."""
PAIR_MS = 61 * 6.715 / (65536 * 1024)
"""MLA of 32 prompts of 2,048 tokens takes 6.715 ms a layer (vendor's kernel chart, GB200); there are 61."""
MOE_FLOP_EFFICIENCY = 0.32
"""MoE of R1's shape in NVFP4: 65,536 tokens take 14.4 ms a layer, 3.2 of 10 PFLOP/s (vendor's kernel chart, GB200)."""
DISPATCH_BYTES_FP16 = 2.0
ALL_GATHER = Path(__file__).parent / "data" / "gb200_all_gather.csv"
"""NCCL all_gather on GB200: MiB that each GPU has of its own, us. https://blog.vllm.ai/blog/2026-02-03-dsr1-gb200-part1"""
COLLECTIVES = 2 * 58
"""Of a step: all-gather and reduce-scatter of every MoE layer, the second taken to be as fast as the first."""
UNSURE_PCT = 25.0
"""Median error outside the two figures: the spread that the same batch assumption, from 256 to 768, makes in decode."""

UNKNOWNS = {"dense_flop_efficiency": Unknown(0.3, 0.02, 1.2), "kv_read_efficiency": Unknown(0.4, 0.05, 1.2)}
NOTES = (
    "Two figures, two coefficients: no row is left to test the fit by; its error is an estimate, no hold-out.",
    "F60's batch is assumed: 512 requests a rank at a mean context of 3,072 tokens.",
    "kv_read_efficiency stands for MLA's arithmetic: 128 heads on FP8 KV are bound by it, not by the read, so each "
    "draft takes as long over the context again (context_query_share 1, by arithmetic intensity, not fitted).",
    "Link and latency of a collective are of NCCL's all-gather between two and four GPUs, 4 MiB to 2 GiB (18 rows, one "
    "rate: 14 % too fast for two, 13 % too slow for four at worst); wider instances follow by them.",
    "MoE and host coefficients are carried from gb300-v4.1-flash; expert skew is taken as EPLB-balanced.",
    "Weight offload of every second layer (F59) is hidden: a layer computes for 40 ms where the next loads in 14.",
)


@cache
def all_gathers() -> np.ndarray:
    """(rows, 3): GPUs, MiB a GPU, measured us."""
    with ALL_GATHER.open() as f:
        return np.array([[float(r[k]) for k in ("gpus", "mib_per_gpu", "us")] for r in csv.DictReader(f)])


def all_gather_us(values: dict[str, float]) -> np.ndarray:
    """What `fit_link` predicts of each row of `all_gathers`."""
    gpus, mib, _ = all_gathers().T
    link_bytes_us = gpu_spec(GPU).nvlink_gb_s / 2 * 1e3
    latency = (values["comm_fixed_ms"] + values["comm_rank_ms"] * np.log2(gpus)) / COLLECTIVES * 1e3
    return latency + (gpus - 1) * mib * 2**20 / (link_bytes_us * values["link_efficiency"])


@cache
def fit_link() -> dict[str, float]:
    """The link's share of its rate, and what a step's collectives take without bytes, ms: least squares on relative
    errors."""
    unknowns = {
        "link_efficiency": Unknown(0.6, 0.1, 1.2),
        "comm_fixed_ms": Unknown(2.0, 0.0, 20.0),
        "comm_rank_ms": Unknown(0.5, 0.0, 20.0),
    }
    return solve(unknowns, lambda values: all_gather_us(values) / all_gathers()[:, 2] - 1).values


@cache
def _carried() -> Coefficients:
    base = calibration_file("gb300-v4.1-flash").coefficients
    return base.model_copy(
        update={
            **fit_link(),
            "routing_sigma": 0.0,
            "moe_flop_efficiency": MOE_FLOP_EFFICIENCY,
            "all_to_all": False,
            "dispatch_bytes": DISPATCH_BYTES_FP16 * fit_value("F65"),
            "combine_bytes": 2.0,
            "decode_query_ms": 0.0,
            "prefill_pair_ms": PAIR_MS,
            "context_query_share": 1.0,
        }
    )


def prefill_tok_s(calibration: FittedCalibration) -> float:
    """F59: tok/s/GPU of DEP2, chunks of 65,536 tokens made of prompts of 2,048."""
    deployment, pool = deployment_of(MODEL, GPU, dep=2, tokens=CHUNK_TOKENS)
    batch = Batch(chunks=CHUNK_TOKENS // PROMPT_TOKENS, new_tokens=PROMPT_TOKENS)
    even = calibration.balancedness(deployment, pool, CHUNK_TOKENS)
    terms = gpu_terms_ms(calibration.cost_on(deployment, pool), batch, dep=2, balancedness=even)
    return CHUNK_TOKENS / sum(terms.values()) * 1e3


def decode_tok_s(calibration: FittedCalibration) -> float:
    """F60: tok/s/GPU of DEP8 at DECODE_REQUESTS a rank, the context half-way through the output."""
    deployment, pool = deployment_of(MODEL, GPU, dep=8)
    batch = Batch(decodes=DECODE_REQUESTS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    even = calibration.balancedness(deployment, pool, DECODE_REQUESTS)
    terms = gpu_terms_ms(calibration.cost_on(deployment, pool), batch, dep=8, balancedness=even)
    return DECODE_REQUESTS / sum(terms.values()) * 1e3


FIT_ROWS = {"F59": prefill_tok_s, "F60": decode_tok_s}


def draft_of(values: dict[str, float]) -> CalibrationFile:
    """The calibration with fitted `values` and without its errors, which `build` adds."""
    base = calibration_file("gb300-v4.1-flash")
    prefill = MeasuredRange(dep=(2, 2), batch=(32, 32), context_tokens=(0, 0), new_tokens=(2048, 2048), drafts=(0, 0))
    decode = MeasuredRange(dep=(8, 8), batch=(512, 512), context_tokens=(2048, 4096), new_tokens=(0, 0), drafts=(0, 0))
    return base.model_copy(
        update={
            "name": "gb200-v3",
            "model": MODEL,
            "gpu": GPU,
            "engine_version": "vLLM of the GB200 article",
            "rows": (*FIT_ROWS, "F65", *(f"all_gather_{g:g}x{m:g}MiB" for g, m, _ in all_gathers())),
            "coefficients": Coefficients.model_validate({**_carried().model_dump(), **values}),
            "coefficient_intervals": {},
            "target_sigma": 0.0,
            "draft_sigma": 0.0,
            "measured": {"prefill": prefill, "decode": decode},
            "errors": {},
            "fixes": {},
            "notes": NOTES,
        }
    )


def fit_figures() -> Solution:
    """Solve for UNKNOWNS so that the figures of FIT_ROWS are predicted."""
    def residuals(values: dict[str, float]) -> np.ndarray:
        calibration = FittedCalibration(draft_of(values))
        return np.array([predict(calibration) / fit_value(id) - 1 for id, predict in FIT_ROWS.items()])

    return solve(UNKNOWNS, residuals)


def build() -> CalibrationFile:
    """The `gb200-v3` file: one figure a pool, so its errors are stated (UNSURE_PCT), not held out."""
    solution = fit_figures()
    errors = {
        pool: FitError(
            rows=1,
            fit_median_pct=round(abs(error) * 100, 2),
            fit_p90_pct=round(abs(error) * 100, 2),
            holdout_median_pct=UNSURE_PCT,
            holdout_p90_pct=2 * UNSURE_PCT,
            worst_pct=2 * UNSURE_PCT,
        )
        for pool, error in zip(("prefill", "decode"), solution.residuals, strict=True)
    }
    return draft_of(solution.values).model_copy(update={"errors": errors})
