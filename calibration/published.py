"""Fits `gb300-v4.1-flash` from the published figures marked fit. Run as `python -m rackplan.calibration.published`.

Fifteen figures cannot identify every coefficient: what they leave open is a prior or carried, and is named in the
file's notes. gb200-v3, which leans on this fit, is in published_v3.py. docs/model/calibration.md has the reasons.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.coefficients import Coefficients, EngineFix
from rackplan.calibration.figures import cpu_side, fit_value
from rackplan.calibration.file import CalibrationFile, FitError, FittedCalibration, MeasuredRange, Transfer
from rackplan.calibration.fit import Solution, Unknown, curvature_intervals, solve, summarise
from rackplan.calibration.library import calibration_file
from rackplan.calibration.moe_kernels import kernel_ms, kernel_rows
from rackplan.engine import gpu_spec
from rackplan.simulator.expert_load import fit_skew

DATA = Path(__file__).parent / "data"
MODEL = "deepseek-v4.1-flash"
ALL_FIXES = ("layer20_replay", "engram_huge_pages", "deepselect")
REPLAY_FIXES_OFF = ALL_FIXES
"""The agentic replays (F13 to F20) do not say which fixes they ran with. Their level, 69,000 tok/s/GPU at chunks of
16K, is that of the engine before: read so, the fit's sum of squares is a fifth of what it is read as after."""
REPLAY_CHUNK_TOKENS = 16384
EPLB_REDUNDANT = 32
"""F24 to F26 say 'EPLB on' without a number; 32 replicas make one more expert per GPU at DEP32."""
QUERY_EFFICIENCY = 0.32
"""Of BF16 peak, of sparse attention while decoding. A prior: no figure has it alone."""

NOTES = (
    "MoE coefficients are fitted to MegaMoE kernel times of two other models on B200 too, at a spread of 10 %.",
    "Link efficiency above 1 says that the kernel hides part of what it sends under its arithmetic.",
    "The draft's 3 layers take, beside experts, what as many of the target's do; its output head is a prior (0.2 ms).",
    "Sparse attention of decode queries runs at 0.32 of BF16 peak: a prior.",
    "Host time of a step and of a request, the piecewise launch floor (for eager steps too) and the front end are "
    "carried from h200-v2-lite: interval -50 % to +100 %.",
    "KV transfer set-up (10 ms), descriptors (0.005 ms a block of 64) and link use (60 %) are priors; reports of other "
    "engines range from 36 to 263 ms a request.",
    "NCCL's DP sync (0.3 ms) is a prior.",
    "F13 to F20 are read as measured before the prefill fixes, which they do not state.",
    "F24 to F26 are GB200 runs: same HBM and links, FP4 peak of GB200. EPLB there is read as 32 redundant experts.",
    "Tensor parallelism inside a rank (F57) is outside: its all-reduces are not modelled.",
    "Hold-out errors count each fit row left out in turn, and the check rows F37, F38, F42, F43 (decode) and F14, F16, "
    "F19, F20 (prefill).",
)
UNKNOWNS = {
    "step_fixed_ms": Unknown(3.0, 0, 20),
    "dense_flop_efficiency": Unknown(0.2, 0.005, 1.2),
    "moe_read_efficiency": Unknown(0.85, 0.3, 1.1),
    "moe_flop_efficiency": Unknown(0.5, 0.1, 1.2),
    "link_efficiency": Unknown(0.6, 0.05, 1.2),
    "comm_fixed_ms": Unknown(1.0, 0, 10),
    "draft_fixed_ms": Unknown(0.2, 0.01, 10),
    "kv_read_efficiency": Unknown(0.4, 0.05, 1.2),
    "prefill_pair_ms": Unknown(5e-9, 1e-10, 1e-7),
    "replay_pair_ms": Unknown(1e-8, 0, 1e-7),
    "engram_token_ms": Unknown(3e-4, 0, 1e-2),
    "deepselect_pair_ms": Unknown(1e-8, 0, 1e-7),
}
PRIORS = {"draft_fixed_ms": (0.2, 0.5)}
"""(centre, standard deviation of the logarithm). The figures fix sums of which these are parts. The draft's centre: its
3 layers at what a layer of the target takes in F21, 8.86 ms / 40."""
DATA_SPREAD = 0.03
"""What one standard deviation of a figure is taken to be: charts read to 1 or 2 %, conditions stated in part."""


KERNEL_SPREAD = 0.1
"""The same of a kernel's time (moe_kernels.py): other shapes, another GPU, nothing else running."""


class Setting(NamedTuple):
    """Where a figure was measured. `eplb`: redundant experts, None without EPLB."""

    gpu: str
    dep: int
    batch: Batch
    drafts: int = 0
    eplb: int | None = None
    fixes_off: tuple[str, ...] = ()


def query_ms() -> float:
    """Sparse attention of one query token of a decoding request, ms: 40 layers, 64 heads of 512, 512 selected tokens
    and a window of 128, at QUERY_EFFICIENCY of BF16 peak. A prior."""
    flops = 40 * 64 * 512 * (512 + 128) * 4
    return flops / (gpu_spec("gb300").dense_tflops["bf16"] * 1e9 * QUERY_EFFICIENCY)


def agentx_pair_context() -> float:
    """Mean context that a new token of an AgentX prompt attends to, prefix cache off: E[L^2] / (2 E[L]).

    Prompt lengths: 56,798 main requests by their quantiles (0, 0.5, 0.9, 0.99, 1), linear between; 42,029 of
    sub-agents, log-normal through the median 64,000 and the 90th percentile 196,326. Source: the trace's statistics.
    """
    main = np.interp(np.linspace(0, 1, 20001), (0, 0.5, 0.9, 0.99, 1), (0, 254080, 651008, 897672, 1048576))
    sigma = np.log(196326 / 64000) / 1.2816
    first = 56798 * main.mean() + 42029 * 64000 * np.exp(sigma**2 / 2)
    second = 56798 * (main**2).mean() + 42029 * 64000**2 * np.exp(2 * sigma**2)
    return float(second / first / 2)


def target_sigma() -> float:
    """Skew of the target's experts from F29. The batch is not stated; 72 requests of 6 tokens as in F33's run."""
    return fit_skew(experts=384, top_k=6, layers=40, gpus=32, tokens_per_gpu=432, balancedness=fit_value("F29"))


def draft_sigma() -> float:
    """Skew of the draft's experts from F31, at the batch of F29."""
    return fit_skew(experts=128, top_k=3, layers=3, gpus=32, tokens_per_gpu=432, balancedness=fit_value("F31"))


HOST_STEP_MS, HOST_REQUEST_MS = 3.1200748198686306, 0.04390177681529824
"""Of h200-v2-lite as it was first fitted (-50 % to +100 % here): a refit of another GPU does not move these plans."""


def coefficients_of(values: dict[str, float], routing_sigma: float) -> tuple[Coefficients, dict[str, EngineFix]]:
    """The calibrated engine is the one after the fixes; each fix holds what undoing it adds. `routing_sigma`: the skew
    of F29, by which fewer experts are touched too."""
    own = {k: v for k, v in values.items() if k in Coefficients.model_fields}
    host = calibration_file("h200-v2-lite").coefficients
    coefficients = Coefficients(
        **own,
        **cpu_side(),
        routing_sigma=routing_sigma,
        dense_read_efficiency=0.8,
        decode_query_ms=query_ms(),
        draft_layer_share=1.0,
        all_to_all=True,
        dispatch_bytes=1.0,
        combine_bytes=2.0,
        host_step_ms=HOST_STEP_MS,
        host_request_ms=HOST_REQUEST_MS,
        piecewise_floor_ms=host.piecewise_floor_ms,
        # Not the eager floor of H200 (76 ms): there a layer launches tens of Triton kernels from a shared CPU, here
        # MegaMoE is one kernel a layer, and the published times are of whole steps, launches and all.
        eager_floor_ms=host.piecewise_floor_ms,
    )
    fixes = {
        "layer20_replay": EngineFix(full_layers=1, per_pair_ms=values["replay_pair_ms"]),
        "engram_huge_pages": EngineFix(per_token_ms=values["engram_token_ms"]),
        "deepselect": EngineFix(per_pair_ms=values["deepselect_pair_ms"]),
    }
    return coefficients, fixes


def terms_ms(calibration: FittedCalibration, setting: Setting) -> dict[str, float]:
    """GPU time by term. The calibrated silicon may be put beside another of the same HBM and links (F24 on GB200)."""
    deployment, pool = deployment_of(
        MODEL, setting.gpu, dep=setting.dep, drafts=setting.drafts, redundant_experts=setting.eplb
    )
    tokens = setting.batch.tokens(setting.drafts)
    even = calibration.balancedness(deployment, pool, tokens)
    cost = calibration.cost_on(deployment, pool, setting.fixes_off)
    return gpu_terms_ms(cost, setting.batch, dep=setting.dep, drafts=setting.drafts, balancedness=even)


def prefill_setting(new: int, cached: int, *, off: tuple[str, ...] = (), dep: int = 2) -> Setting:
    """One chunk a rank of `new` tokens after `cached` ones on GB300, the fixes named in `off` undone."""
    return Setting("gb300", dep, Batch(chunks=1, new_tokens=new, cached_tokens=cached), fixes_off=off)


def gain_pct(calibration: FittedCalibration, new: int, before: tuple[str, ...], after: tuple[str, ...]) -> float:
    """Gain in throughput from `before` (fixes off) to `after` at DEP2, `new` tokens after 128K cached, %."""
    slow = sum(terms_ms(calibration, prefill_setting(new, 131072, off=before)).values())
    return (slow / sum(terms_ms(calibration, prefill_setting(new, 131072, off=after)).values()) - 1) * 100


def replay_tok_s(calibration: FittedCalibration, dep: int) -> float:
    """Instance throughput of a mirrored agentic replay: chunks of 16K at the mean context of its prompts."""
    cached = round(agentx_pair_context() - REPLAY_CHUNK_TOKENS / 2)
    setting = prefill_setting(REPLAY_CHUNK_TOKENS, cached, off=REPLAY_FIXES_OFF, dep=dep)
    return dep * REPLAY_CHUNK_TOKENS / sum(terms_ms(calibration, setting).values()) * 1e3


def target_forward_ms(calibration: FittedCalibration, context: int) -> float:
    """Target model alone at DEP32, 16 requests of 6 tokens a rank."""
    setting = Setting("gb300", 32, Batch(decodes=16, context_tokens=context), drafts=5, eplb=EPLB_REDUNDANT)
    return sum(v for k, v in terms_ms(calibration, setting).items() if k != "draft")


def moe_and_rest_ms(calibration: FittedCalibration, dep: int) -> tuple[float, float]:
    """(MoE with its communication: MegaMoE is one kernel; everything else with the draft) at 64 requests, 128K."""
    setting = Setting("gb200", dep, Batch(decodes=64, context_tokens=131072), drafts=5, eplb=EPLB_REDUNDANT)
    terms = terms_ms(calibration, setting)
    moe = terms["moe"] + terms["ep_imbalance"] + terms["communication"]
    return moe, sum(terms.values()) - moe


def _step(new: int, cached: int, off: tuple[str, ...] = ()) -> Callable[[FittedCalibration], float]:
    return lambda c: sum(terms_ms(c, prefill_setting(new, cached, off=off)).values())


def _rate(new: int, cached: int, off: tuple[str, ...] = ()) -> Callable[[FittedCalibration], float]:
    return lambda c: new / _step(new, cached, off)(c) * 1e3


_K = 1024
FIT_ROWS: dict[str, Callable[[FittedCalibration], float]] = {
    "F01": _step(8 * _K, 0, ALL_FIXES),
    "F02": _step(8 * _K, 512 * _K, ALL_FIXES),
    "F03": _rate(64 * _K, 128 * _K, ALL_FIXES),
    "F04": _rate(64 * _K, 128 * _K),
    "F05": lambda c: gain_pct(c, 32 * _K, ALL_FIXES, ALL_FIXES[1:]),
    "F08": lambda c: gain_pct(c, 32 * _K, ALL_FIXES[1:], ALL_FIXES[2:]),
    "F09": lambda c: gain_pct(c, 32 * _K, ALL_FIXES[2:], ()),
    "F13": lambda c: replay_tok_s(c, 2),
    "F15": lambda c: replay_tok_s(c, 4),
    "F21": lambda c: target_forward_ms(c, 64 * _K),
    "F22": lambda c: target_forward_ms(c, 128 * _K),
    "F23": lambda c: target_forward_ms(c, 512 * _K),
    "F24": lambda c: moe_and_rest_ms(c, 4)[0],
    "F25": lambda c: moe_and_rest_ms(c, 32)[0],
    "F26": lambda c: float(np.mean([moe_and_rest_ms(c, d)[1] for d in (4, 8, 16, 32)])),
}
"""What the model makes of each figure that it is fitted to, in the figure's unit."""
GAINS = ("F05", "F08", "F09")
SLOPES = ("F22", "F23")
RATIO_WEIGHT = 3.0
"""Gains and slopes compare runs of one machine: what is common to them cancels, so they are known that much better."""


def draft_of(values: dict[str, float], sigmas: tuple[float, float]) -> CalibrationFile:
    """The file without its errors: enough to compute with."""
    coefficients, fixes = coefficients_of(values, sigmas[0])
    decode = MeasuredRange(
        dep=(4, 32), batch=(16, 64), context_tokens=(65536, 524288), new_tokens=(0, 0), drafts=(5, 5)
    )
    prefill = MeasuredRange(
        dep=(2, 4), batch=(1, 1), context_tokens=(0, 524288), new_tokens=(8192, 65536), drafts=(0, 5)
    )
    return CalibrationFile(
        name="gb300-v4.1-flash",
        model=MODEL,
        gpu="gb300",
        engine_version="vLLM of the GB300 article, after its prefill and CPU fixes",
        date="2026-11-29",
        command="python -m rackplan.calibration.published",
        sources=(
            "data/published_figures.csv",
            "data/moe_kernels.csv",
            "engine/data/models.yaml",
            "engine/data/gpus.yaml",
        ),
        rows=(*FIT_ROWS, "F29", "F31", "F36", "F40", "F41", "F51"),
        coefficients=coefficients,
        # Set-up and descriptors are priors (see NOTES); the wire is 60 % of NVLink in one direction.
        transfer=Transfer(setup_ms=10.0, per_block_ms=0.005, gb_per_s=0.6 * 900, block_tokens=64),
        frontend_ms=calibration_file("h200-v2-lite").frontend_ms,
        target_sigma=sigmas[0],
        draft_sigma=sigmas[1],
        measured={"decode": decode, "prefill": prefill},
        errors={},
        fixes=fixes,
        older_engines={
            "before_cpu_fixes": {"admission_token_ms": fit_value("F50") / 855_000},
            "before_eplb_fusion": {"eplb_record_ms": fit_value("F36")},
        },
        notes=NOTES,
    )


def row_errors_pct(calibration: FittedCalibration, ids: list[str]) -> np.ndarray:
    """Signed errors, %. Of a gain, the throughput ratio's."""
    errors = []
    for id in ids:
        predicted, measured = FIT_ROWS[id](calibration), fit_value(id)
        if id in GAINS:
            predicted, measured = 100 + predicted, 100 + measured
        errors.append((predicted / measured - 1) * 100)
    return np.array(errors)


def _slope_errors_pct(calibration: FittedCalibration) -> list[float]:
    """Of F22 and F23 as ratios to F21, which is what tells the cost of context."""
    base = target_forward_ms(calibration, 64 * _K) / fit_value("F21")
    return [(FIT_ROWS[id](calibration) / fit_value(id) / base - 1) * 100 for id in SLOPES]


def fit_figures(ids: list[str], sigmas: tuple[float, float], start: dict[str, float] | None = None) -> Solution:
    """Least squares on the rows and the priors, both in units of their spread."""
    unknowns = {k: u._replace(start=start[k] or u.start) for k, u in UNKNOWNS.items()} if start else UNKNOWNS

    def residuals(values: dict[str, float]) -> np.ndarray:
        calibration = FittedCalibration(draft_of(values, sigmas))
        weight = np.array([RATIO_WEIGHT if id in GAINS else 1.0 for id in ids])
        data = weight * row_errors_pct(calibration, ids)
        slopes = [
            RATIO_WEIGHT * error
            for id, error in zip(SLOPES, _slope_errors_pct(calibration), strict=True)
            if id in ids and "F21" in ids
        ]
        prior = [np.log(values[k] / centre) / spread for k, (centre, spread) in PRIORS.items()]
        kernels = np.array([kernel_ms(calibration.coefficients, row) / row.measured_ms for row in kernel_rows()])
        kernels = np.log(kernels) / KERNEL_SPREAD
        return np.concatenate([data / 100 / DATA_SPREAD, np.array(slopes) / 100 / DATA_SPREAD, kernels, prior])

    return solve(unknowns, residuals)


def _errors(solution: Solution, sigmas: tuple[float, float]) -> dict[str, FitError]:
    """By pool: errors of the fit; of each row when it alone was left out, and of the check rows, which always are."""
    from rackplan.calibration.validate import held_out_pct

    ids = list(FIT_ROWS)
    fitted = row_errors_pct(FittedCalibration(draft_of(solution.values, sigmas)), ids)
    fit_pct: dict[str, list[float]] = defaultdict(list)
    held_pct: dict[str, list[float]] = defaultdict(list)
    for id, error in zip(ids, fitted, strict=True):
        pool = "prefill" if id < "F20" else "decode"
        fit_pct[pool].append(float(error))
        refit = fit_figures([i for i in ids if i != id], sigmas, solution.values)
        held = FittedCalibration(draft_of(refit.values, sigmas))
        held_pct[pool].append(float(row_errors_pct(held, [id])[0]))
    checks = held_out_pct(FittedCalibration(draft_of(solution.values, sigmas)))
    return {pool: summarise(fit_pct[pool], held_pct[pool] + checks[pool]) for pool in fit_pct}


def build() -> CalibrationFile:
    """The whole file, with intervals and hold-out errors: ten seconds of CPU."""
    sigmas = (target_sigma(), draft_sigma())
    solution = fit_figures(list(FIT_ROWS), sigmas)
    intervals = curvature_intervals(solution, UNKNOWNS)
    return draft_of(solution.values, sigmas).model_copy(
        update={"coefficient_intervals": intervals, "errors": _errors(solution, sigmas)}
    )


if __name__ == "__main__":
    from rackplan.calibration.published_v3 import build as build_v3

    for make in (build, build_v3):
        file = make()
        file.save(DATA / f"{file.name}.json")
        for metric, error in file.errors.items():
            print(f"{file.name} {metric}: {error.model_dump()}")
