"""Fit and check errors of a calibration, row by row: what it was fitted to, and what it was not shown."""

from typing import Any

import numpy as np

from rackplan.calibration import h200, h200_served, h200_v3, published, published_v3, replay
from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.compared import Row, row, validation
from rackplan.calibration.figures import Predictor, figures, fit_value
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import list_calibrations, load_calibration
from rackplan.calibration.published import ALL_FIXES, EPLB_REDUNDANT, Setting, gain_pct, terms_ms
from rackplan.engine import InputError
from rackplan.simulator.step import step_wall_ms

_K = 1024
AGENTX_CONTEXT = 207_394
AGENTX_PROMPT = 218_900
AGENTX_OUTPUT = 106_474_498 / 98_827
"""Time-averaged context, mean prompt and mean output of AgentX, tokens. Source: the trace's statistics."""
DECODE_REQUESTS, DRAFTS = 16, 5
STEP_ASSUMPTION = (
    "16 requests a rank (as F21), 5 drafts, 207,394 tokens of context, 3.51 tokens a step; a rank admits a 218.9K "
    "prompt in 5.2 % of steps, and the step waits if any rank does"
)
SINGLE_USER = "5 drafts, 3.51 tokens a step, 207,394 tokens of context; TP's all-reduces are not modelled"
V3_H200_PREFILL_TOK_S = 7020
"""FP8, EP16, 2K prompts, per GPU: public results of the same authors as F66."""


def _decode_step_ms(calibration: FittedCalibration, dep: int, algorithm: str, older: str | None = None) -> float:
    """Wall time of a decode step under AgentX. The host shows only where it is longer than the GPU."""
    engine = FittedCalibration(calibration.file, older=older)
    batch = Batch(decodes=DECODE_REQUESTS, context_tokens=AGENTX_CONTEXT)
    setting = Setting("gb300", dep, batch, drafts=DRAFTS, eplb=EPLB_REDUNDANT)
    gpu_ms = np.array([sum(terms_ms(engine, setting).values())])
    deployment, pool = deployment_of(
        published.MODEL, "gb300", dep=dep, drafts=DRAFTS, redundant_experts=EPLB_REDUNDANT, algorithm=algorithm
    )
    cost = engine.pool_cost(deployment, pool)
    per_rank = DECODE_REQUESTS * deployment.model_spec.acceptance_length(DRAFTS) / AGENTX_OUTPUT
    admission_ms = (1 - np.exp(-dep * per_rank)) * cost.admission_ms(AGENTX_PROMPT)
    wall = step_wall_ms(
        gpu_ms, 0.0, cost.host_ms(DECODE_REQUESTS), cost.dp_sync_ms(), admission_ms, async_scheduling=True
    )
    return float(wall[0])


def _gpu_saved_ms(calibration: FittedCalibration) -> float:
    batch = Batch(decodes=DECODE_REQUESTS, context_tokens=AGENTX_CONTEXT)
    at = {d: Setting("gb300", d, batch, drafts=DRAFTS, eplb=EPLB_REDUNDANT) for d in (16, 32)}
    return sum(terms_ms(calibration, at[16]).values()) - sum(terms_ms(calibration, at[32]).values())


def _target_share_pct(calibration: FittedCalibration, terms: tuple[str, ...]) -> float:
    """Share of some terms in the target's part of F24's step."""
    setting = Setting("gb200", 4, Batch(decodes=64, context_tokens=128 * _K), drafts=5, eplb=EPLB_REDUNDANT)
    found = terms_ms(calibration, setting)
    return 100 * sum(found[t] for t in terms) / (sum(found.values()) - found["draft"])


def _single_user_tok_s(calibration: FittedCalibration) -> float:
    """Tokens a second of one request alone on four GPUs of one tensor-parallel rank."""
    deployment, pool = deployment_of(published.MODEL, "gb300", dep=4, drafts=DRAFTS)
    cost = calibration.cost_on(deployment, pool.model_copy(update={"dep": 1, "tp": 4}))
    gpu_ms = sum(gpu_terms_ms(cost, Batch(decodes=1, context_tokens=AGENTX_CONTEXT), dep=1, drafts=DRAFTS).values())
    wall_ms = step_wall_ms(gpu_ms, 0.0, cost.host_ms(1), 0.0, 0.0, async_scheduling=True)
    return deployment.model_spec.acceptance_length(DRAFTS) / wall_ms * 1e3


def _gb200_over_h200(calibration: FittedCalibration) -> float:
    """Output tokens per GPU of 4 x DEP2 + DEP8 over those of 16 + 32 H200, each bound by its slower pool."""
    gb200 = min(8 * published_v3.prefill_tok_s(calibration), 8 * published_v3.decode_tok_s(calibration)) / 16
    h200_rate = min(16 * V3_H200_PREFILL_TOK_S, 32 * fit_value("F66")) / 48
    return gb200 / h200_rate


_MOE = ("moe", "ep_imbalance", "communication")
CHECKS: dict[str, dict[str, Predictor]] = {
    "gb300-v4.1-flash": {
        "F06": Predictor(lambda c: gain_pct(c, 4 * _K, ALL_FIXES, ALL_FIXES[1:])),
        "F07": Predictor(lambda c: gain_pct(c, 64 * _K, ALL_FIXES, ALL_FIXES[1:])),
        "F10": Predictor(lambda c: gain_pct(c, 64 * _K, ALL_FIXES[2:], ())),
        "F11": Predictor(lambda c: gain_pct(c, 32 * _K, ALL_FIXES, ())),
        "F12": Predictor(lambda c: gain_pct(c, 64 * _K, ALL_FIXES, ())),
        "F27": Predictor(lambda c: _target_share_pct(c, _MOE), "communication is inside MegaMoE"),
        "F28": Predictor(lambda c: _target_share_pct(c, ("attention",))),
        "F37": Predictor(
            lambda c: _decode_step_ms(c, 32, "ring", "before_cpu_fixes"), f"ring sync, old admission; {STEP_ASSUMPTION}"
        ),
        "F38": Predictor(
            lambda c: _decode_step_ms(c, 16, "ring", "before_cpu_fixes"), f"ring sync, old admission; {STEP_ASSUMPTION}"
        ),
        "F39": Predictor(_gpu_saved_ms, STEP_ASSUMPTION),
        "F42": Predictor(lambda c: _decode_step_ms(c, 32, "ring"), STEP_ASSUMPTION),
        "F43": Predictor(lambda c: _decode_step_ms(c, 32, "recursive_doubling"), STEP_ASSUMPTION),
        "F56": Predictor(_single_user_tok_s, f"{SINGLE_USER}, on the standard decode path"),
        "F57": Predictor(_single_user_tok_s, SINGLE_USER),
        **replay.PUBLISHED,
    },
    "gb200-v3": {"F61": Predictor(_gb200_over_h200, "H200 at F66 and 7,020 tok/s/GPU")},
}
"""Check rows by calibration; those of replay.py are simulated, the others closed forms."""

HELD_OUT = {"decode": ("F37", "F38", "F42", "F43"), "prefill": ("F14", "F16", "F19", "F20")}
"""Check rows that are a step time or a throughput: no fit saw them, so they count among their pool's hold-out."""


def held_out_pct(calibration: FittedCalibration) -> dict[str, list[float]]:
    """Signed errors, %, of the check rows by pool."""
    checks = CHECKS[calibration.name]
    return {
        p: [_figure_row(id, checks[id].predict(calibration))["error_pct"] for id in ids] for p, ids in HELD_OUT.items()
    }


def validate(name: str) -> dict[str, Any]:
    """compared.validation of an embedded calibration, with the rank order of deployments where its rows hold several
    under the same load.

    Errors are signed, %; the summary holds medians of their magnitudes. Simulates: some 20 s of CPU for
    gb300-v4.1-flash, seconds for the others. Raises InputError for an unknown name, and for a file of one's own, whose
    measurements only its owner has.
    """
    calibration = load_calibration(name)
    if calibration.name not in (c["name"] for c in list_calibrations()):
        raise InputError(f"{name}: its rows do not ship with rackplan; give --against its profile folder or results")
    orders: list[dict[str, Any]] = []
    if calibration.name == "h200-v2-lite":
        served = h200_served.served(calibration)
        rows, orders = [*_exact_batch_rows(calibration), *served.rows], served.rank_order
    else:
        rows = _v3_slice_rows(calibration) if calibration.name == h200_v3.NAME else _fit_rows(calibration)
    checks = CHECKS.get(calibration.name, {})
    rows += [_figure_row(id, p.predict(calibration), p.assumption, "check") for id, p in sorted(checks.items())]
    return validation(name, rows, orders)


def _exact_batch_rows(calibration: FittedCalibration) -> list[Row]:
    found = calibration.coefficients.model_dump()
    measured = h200.all_rows()
    values = {k: found[k] for k in h200.UNKNOWNS} | {"profile_fixed_ms": calibration.file.profile_fixed_ms}
    predicted = h200.GPU_FIT.predict_ms(values, measured)
    return [row(r.id, r.metric, "ms", r.measured_ms, float(p), "fit") for r, p in zip(measured, predicted, strict=True)]


def _v3_slice_rows(calibration: FittedCalibration) -> list[Row]:
    """Exact batches of the slices, from the same fit that the file's coefficients come from; then F66, which the fit
    does not use."""
    measured = h200_v3.rows()
    predicted = h200_v3.predict_ms(h200_v3.fit().values, measured)
    rows = [
        row(h200_v3.row_id(layers, r), f"{r.metric}, {layers} layers", "ms", r.measured_ms, float(p), "fit")
        for (layers, r), p in zip(measured, predicted, strict=True)
    ]
    figure = figures()["F66"]
    what = f"{figure.what} ({h200_v3.F66_ASSUMPTION})"
    tok_s = h200_v3.decode_ep32_tok_s(calibration)
    return [*rows, row("F66", what, figure.unit, figure.value, tok_s, "check", metric=figure.unit)]


def _fit_rows(calibration: FittedCalibration) -> list[Row]:
    of_v3 = calibration.file.model == published_v3.MODEL
    predictors = published_v3.FIT_ROWS if of_v3 else published.FIT_ROWS
    rows = [_figure_row(id, predict(calibration)) for id, predict in predictors.items()]
    return rows + (_all_gather_rows(calibration) if of_v3 else [])


def _all_gather_rows(calibration: FittedCalibration) -> list[Row]:
    predicted = published_v3.all_gather_us(calibration.coefficients.model_dump())
    return [
        row(f"all_gather_{g:g}x{m:g}MiB", f"NCCL all-gather of {g:g} GPUs, {m:g} MiB each", "us", us, float(p), "fit",
            metric="NCCL all-gather")
        for (g, m, us), p in zip(published_v3.all_gathers(), predicted, strict=True)
    ]  # fmt: skip


def _figure_row(id: str, predicted: float, assumption: str = "", role: str | None = None) -> Row:
    """A figure that is a range says so: its error is against the middle."""
    figure = figures()[id]
    stated = [f"{figure.text} was stated"] if " to " in figure.text else []
    notes = "; ".join([*stated, *([assumption] if assumption else [])])
    what = f"{figure.what} ({notes})" if notes else figure.what
    found = row(id, what, figure.unit, figure.value, predicted, role or figure.role, metric=figure.unit)
    return found | {"error_pct": figure.error_pct(predicted)}
