"""Bounded least squares on relative residuals, one-step bootstrap intervals, error summaries: what the fits share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from rackplan.calibration.file import FitError

BOOTSTRAP_DRAWS = 400
INTERVAL_PERCENTILES = (5, 95)


class Unknown(NamedTuple):
    """A coefficient to be found: where the search starts (also its scale, so not 0), and its physical bounds."""

    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Solution:
    """`values` by name, and at them the residuals (rows,) and their Jacobian (rows, unknowns)."""

    values: dict[str, float]
    residuals: np.ndarray
    jacobian: np.ndarray


def solve(
    unknowns: Mapping[str, Unknown],
    residuals: Callable[[dict[str, float]], np.ndarray],
    most_steps: int | None = None,
) -> Solution:
    """The values that minimise the sum of squared residuals within the bounds. The same on every run. `most_steps`: of
    the search, where a rough answer will do."""
    names = list(unknowns)
    scale = np.array([u.start for u in unknowns.values()])
    low = np.array([u.low for u in unknowns.values()]) / scale
    high = np.array([u.high for u in unknowns.values()]) / scale

    def named(x: np.ndarray) -> dict[str, float]:
        return dict(zip(names, (x * scale).tolist(), strict=True))

    def scaled(x: np.ndarray) -> np.ndarray:
        return residuals(named(x))

    start, step = np.ones(len(names)), np.full(len(names), 1e-5)
    found = least_squares(
        scaled, start, bounds=(low, high), diff_step=step, xtol=1e-10, ftol=1e-10, max_nfev=most_steps
    )
    return Solution(named(found.x), found.fun, np.asarray(found.jac) / scale)


def bootstrap_intervals(solution: Solution, unknowns: Mapping[str, Unknown]) -> dict[str, tuple[float, float]]:
    """90 % intervals: rows drawn with replacement, one Gauss-Newton step from the optimum for each draw, clipped to
    the bounds. One step is exact for what enters linearly and cheap enough to run with every fit."""
    rng = np.random.default_rng(0)
    rows = len(solution.residuals)
    scale = np.array([u.start for u in unknowns.values()])
    optimum = np.array(list(solution.values.values()))
    draws = np.empty((BOOTSTRAP_DRAWS, len(optimum)))
    for draw in draws:
        pick = rng.integers(rows, size=rows)
        step = np.linalg.lstsq(solution.jacobian[pick] * scale, -solution.residuals[pick], rcond=1e-6)[0]
        draw[:] = optimum + step * scale
    bounds = np.array([(u.low, u.high) for u in unknowns.values()]).T
    low, high = np.clip(np.percentile(draws, INTERVAL_PERCENTILES, axis=0), *bounds)
    return {name: (float(a), float(b)) for name, a, b in zip(solution.values, low, high, strict=True)}


def curvature_intervals(solution: Solution, unknowns: Mapping[str, Unknown]) -> dict[str, tuple[float, float]]:
    """90 % intervals from the fit's curvature, for fits of so few rows that resampling would drop what identifies a
    coefficient. The residuals must be in units of their spread, priors among them."""
    scale = np.array([u.start for u in unknowns.values()])
    jacobian = solution.jacobian * scale
    half = 1.645 * np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian))) * scale
    return {
        name: (max(float(value - h), u.low), min(float(value + h), u.high))
        for (name, value), h, u in zip(solution.values.items(), half, unknowns.values(), strict=True)
    }


def summarise(fit_pct: Sequence[float], holdout_pct: Sequence[float]) -> FitError:
    """Absolute errors of one metric. `worst_pct` is the worst of all, held out or not."""
    fit, held = np.abs(fit_pct), np.abs(holdout_pct)
    return FitError(
        rows=len(fit),
        fit_median_pct=round(float(np.median(fit)), 2),
        fit_p90_pct=round(float(np.percentile(fit, 90)), 2),
        holdout_median_pct=round(float(np.median(held)), 2),
        holdout_p90_pct=round(float(np.percentile(held, 90)), 2),
        worst_pct=round(float(max(fit.max(), held.max())), 2),
    )
