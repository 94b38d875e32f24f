"""Two calibrations of one model, as of two engine versions: what each term became, and what that makes of steps."""

from typing import Any

from rackplan.calibration.file import CalibrationFile
from rackplan.calibration.library import calibration_file
from rackplan.calibration.predict import predict
from rackplan.engine import InputError

DECODES = [(batch, context) for batch in (1, 8, 32, 128) for context in (1024, 8192, 65536)]
PREFILLS = [(new, cached) for new in (512, 2048, 8192) for cached in (0, 16384)]


def diff(before: str, after: str) -> dict[str, Any]:
    """{"before", "after", "terms", "steps"}.

    terms: [{"term", "before", "after", "change_pct", "before_interval", "after_interval", "changed"}] of all that
    differs; `changed` is True where the 90 % intervals do not meet, None where a side has no interval. steps: [{"pool",
    "dep", "batch", "context", "new", "before_ms", "after_ms", "change_pct", "in_range"}] at a grid of shapes.
    Raises InputError where the two are of different models or GPUs.
    """
    a, b = calibration_file(before), calibration_file(after)
    for key in ("model", "gpu"):
        if getattr(a, key) != getattr(b, key):
            raise InputError(f"{after}: {key}={getattr(b, key)}, and {before} has {getattr(a, key)}; compare like ones")
    return {
        "before": {"name": a.name, "engine_version": a.engine_version, "date": a.date},
        "after": {"name": b.name, "engine_version": b.engine_version, "date": b.date},
        "terms": _terms(a, b),
        "steps": _steps(before, after, a),
    }


def _terms(a: CalibrationFile, b: CalibrationFile) -> list[dict[str, Any]]:
    old, new = ({**f.coefficients.model_dump(), "frontend_ms": f.frontend_ms} for f in (a, b))
    old |= {f"transfer.{k}": v for k, v in a.transfer.model_dump().items()}
    new |= {f"transfer.{k}": v for k, v in b.transfer.model_dump().items()}
    found = []
    for term, value in old.items():
        if new[term] == value:
            continue
        spans = [f.coefficient_intervals.get(term) for f in (a, b)]
        meet = None if None in spans else max(spans[0][0], spans[1][0]) <= min(spans[0][1], spans[1][1])  # type: ignore[index]
        found.append(
            {
                "term": term,
                "before": value,
                "after": new[term],
                "change_pct": (new[term] / value - 1) * 100 if value else None,
                "before_interval": spans[0],
                "after_interval": spans[1],
                "changed": None if meet is None else not meet,
            }
        )
    return found


def _steps(before: str, after: str, file: CalibrationFile) -> list[dict[str, Any]]:
    shapes = [
        ("decode", dep, batch, context, None)
        for dep in sorted(set(file.measured["decode"].dep))
        for batch, context in DECODES
    ] + [
        ("prefill", dep, 1, cached, new)
        for dep in sorted(set(file.measured["prefill"].dep))
        for new, cached in PREFILLS
    ]
    found = []
    for pool, dep, batch, context, new in shapes:
        old_step, new_step = (
            predict(name, pool=pool, dep=dep, batch=batch, context=context, new=new) for name in (before, after)
        )
        found.append(
            {
                "pool": pool,
                "dep": dep,
                "batch": batch,
                "context": context,
                "new": new or 0,
                "before_ms": old_step["step_ms"],
                "after_ms": new_step["step_ms"],
                "change_pct": (new_step["step_ms"] / old_step["step_ms"] - 1) * 100,
                "in_range": old_step["in_range"] and new_step["in_range"],
            }
        )
    return found
