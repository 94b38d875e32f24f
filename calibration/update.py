"""Has a live engine drifted from its calibration, on which term, and the refit of what its metrics can tell.

One load has one number for each of three parts of a request: so one coefficient of each part is refitted, and the
result says that a slope cannot be told from a constant.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from rackplan.calibration.compared import by_metric, row, summary
from rackplan.calibration.file import CalibrationFile, FittedCalibration
from rackplan.calibration.library import calibration_file
from rackplan.calibration.live import METRICS, Observed, expected, observed, rate_req_s
from rackplan.calibration.readers.prometheus import EngineMetrics
from rackplan.engine import Deployment, InputError

REFITS = 8
"""Steps of the search; each simulates the load once for every term."""
DIFF_STEP = 0.1
"""Share of a term by which its effect is tried: far enough that the order of arrivals and steps does not blur it."""
LEAST_SCALE_MS = 0.5
FRONTEND_TOLERANCE_MS = 3.0
STANDARD_ERRORS = 2.0


class Term(NamedTuple):
    """A part of a request and what is refitted for it. `phase`: whose hold-out error says how far off is normal."""

    part: str
    phase: str | None


TERMS = (Term("TPOT", "decode"), Term("prefill", "prefill"), Term("front end", None))


def update(
    name: str, window: EngineMetrics, seconds: float, deployment: Deployment
) -> tuple[dict[str, Any], CalibrationFile | None]:
    """(document, refitted file or None where nothing drifted).

    document: {"name", "load", "rows", "by_metric", "summary", "drifted", "terms", "notes"}; rows are checks of mean ms;
    terms: [{"term", "measured_ms", "expected_ms", "tolerance_ms", "drifted", "coefficient", "before", "after"}].
    Raises InputError where too few requests ended or the deployment is not the calibration's.
    """
    file = calibration_file(name)
    seen = observed(window)
    now = expected(FittedCalibration(file), deployment, window, seconds)
    drifted = {
        t.part: abs(seen.mean_ms[t.part] - now.mean_ms[t.part]) > _tolerance_ms(file, t, seen, now) for t in TERMS
    }
    refitted = _refit(file, window, seconds, deployment, seen, drifted) if any(drifted.values()) else None
    rows = [
        row(part.replace(" ", "_"), f"mean {part}", "ms", seen.mean_ms[part], now.mean_ms[part], "check")
        for part in METRICS
        if seen.mean_ms[part] > 0
    ]
    load = {
        "rate_req_s": rate_req_s(window, seconds),
        "input_tokens": window.histograms["input"].mean,
        "output_tokens": window.histograms["output"].mean,
        "running": window.running,
        "kv_usage": window.kv_usage,
    }
    document = {
        "name": name,
        "load": load,
        "rows": rows,
        "by_metric": by_metric(rows),
        "summary": summary(rows),
        "drifted": any(drifted.values()),
        "terms": [_term(t, file, refitted, seen, now, drifted[t.part]) for t in TERMS],
        "notes": list(_notes(refitted)),
    }
    return document, refitted


def _tolerance_ms(file: CalibrationFile, term: Term, seen: Observed, now: Observed) -> float:
    """What the calibration was off by where it was checked, and the sampling errors of both means."""
    sampling = STANDARD_ERRORS * math.hypot(seen.error_ms[term.part], now.error_ms[term.part])
    if term.phase is None:
        return FRONTEND_TOLERANCE_MS + sampling
    return file.errors[term.phase].holdout_p90_pct / 100 * now.mean_ms[term.part] + sampling


def _coefficient(term: Term, file: CalibrationFile) -> str:
    """What a part is refitted by: the launch where it bounds a prompt's step, else the constant of a chunk."""
    if term.part == "front end":
        return "frontend_ms"
    if term.part == "TPOT":
        return "step_fixed_ms"
    return "eager_floor_ms" if file.coefficients.eager_floor_ms > 0 else "prefill_chunk_ms"


def _value(file: CalibrationFile, coefficient: str) -> float:
    return file.frontend_ms if coefficient == "frontend_ms" else float(getattr(file.coefficients, coefficient))


def _with(file: CalibrationFile, coefficient: str, value: float) -> CalibrationFile:
    if coefficient == "frontend_ms":
        return file.model_copy(update={"frontend_ms": value})
    return file.model_copy(update={"coefficients": file.coefficients.model_copy(update={coefficient: value})})


def _refit(
    file: CalibrationFile,
    window: EngineMetrics,
    seconds: float,
    deployment: Deployment,
    seen: Observed,
    drifted: dict[str, bool],
) -> CalibrationFile:
    """The drifted terms together, so that the load simulated anew has the parts that were seen: a longer launch, say,
    delays the requests that decode too."""
    terms = [t for t in TERMS if drifted[t.part]]
    keys = [_coefficient(t, file) for t in terms]
    start = np.array([max(_value(file, k), LEAST_SCALE_MS) for k in keys])

    def at(scaled: np.ndarray) -> CalibrationFile:
        made = file
        for key, value in zip(keys, scaled * start, strict=True):
            made = _with(made, key, float(value))
        return made

    def off(scaled: np.ndarray) -> np.ndarray:
        now = expected(FittedCalibration(at(scaled)), deployment, window, seconds)
        return np.array([now.mean_ms[t.part] / seen.mean_ms[t.part] - 1 for t in terms])

    step = np.full(len(keys), DIFF_STEP)
    best = least_squares(off, np.ones(len(keys)), bounds=(0.0, np.inf), diff_step=step, max_nfev=REFITS)
    found = at(best.x)
    moved = ", ".join(keys)
    note = (
        f"Refitted to a live load of {rate_req_s(window, seconds):.3g} requests/s: {moved}. One load cannot tell a "
        "slope from a constant, so the constants took it; errors are those from before."
    )
    intervals = {k: v for k, v in found.coefficient_intervals.items() if k not in keys}
    return found.model_copy(
        update={"name": f"{file.name}-live", "notes": (*file.notes, note), "coefficient_intervals": intervals}
    )


def _term(
    term: Term,
    file: CalibrationFile,
    refitted: CalibrationFile | None,
    seen: Observed,
    now: Observed,
    drifted: bool,
) -> dict[str, Any]:
    key = _coefficient(term, file)
    return {
        "term": term.part,
        "measured_ms": seen.mean_ms[term.part],
        "expected_ms": now.mean_ms[term.part],
        "tolerance_ms": _tolerance_ms(file, term, seen, now),
        "drifted": drifted,
        "coefficient": key,
        "before": _value(file, key),
        "after": _value(refitted, key) if refitted else _value(file, key),
    }


def _notes(refitted: CalibrationFile | None) -> tuple[str, ...]:
    if refitted is None:
        return ("The engine does what the calibration expects of it, within the calibration's own error.",)
    return refitted.notes[-1:]


def window_of(scrapes: list[EngineMetrics], where: str) -> EngineMetrics:
    """The load between two scrapes. Raises InputError where the engine was restarted between them."""
    try:
        return scrapes[1].since(scrapes[0])
    except ValueError as e:
        raise InputError(f"{where}: {e}; scrape twice again") from None
