"""Replays of every served run that ships for `h200-v2-lite`, and what they say of its errors in serving.

Step times are known better than served latencies: launches drift from one half minute to the next and more from day to
day, and a calibration holds those of its own runs. The replays of runs that no fit saw hold all of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackplan.calibration import campaign, h200
from rackplan.calibration.compared import Row, row
from rackplan.calibration.file import CalibrationFile, FitError, FittedCalibration
from rackplan.calibration.fit import summarise
from rackplan.calibration.h200_rows import PROFILES
from rackplan.calibration.rank_order import rank_orders, ranked_runs
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.readers.profile_folder import ProfileRun, read_profile
from rackplan.calibration.serving import replay_served
from rackplan.engine import Deployment

METRICS = ("output throughput", "mean TPOT", "median TPOT", "median TTFT", "P90 TTFT")
"""What is shown of runs of 90 to 400 requests: of the tails P90 TTFT alone."""
SERVED_ERRORS = {
    "served_throughput": ("output throughput",),
    "served_tpot": ("mean TPOT", "median TPOT"),
    "served_ttft": ("median TTFT", "P90 TTFT"),
}
"""Keys of a calibration's `errors`, and the metrics of a run that each sums up."""
ROLES = ("fit", "check")
ORDER = PROFILES / "profile_order"
"""Every split of two GPUs under the same loads, on a host that launches slower than the file's: checks alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Rows of all replays, and of those of ORDER the rank orders (rank_orders' entries)."""

    rows: list[Row]
    rank_order: list[dict[str, Any]]


def served(calibration: FittedCalibration) -> Served:
    """All runs, request by request at the times they were sent: the first two with every metric, then those with step
    logs, the campaign's and ORDER's. `fit` rows are of runs that a fit used; all else are checks."""
    order = [(run, _shown(_run_rows(run, calibration, "check"))) for run in read_profile(ORDER).runs]
    rows = [*_earlier_rows(calibration), *(r for _, mine in order for r in mine)]
    return Served(rows=rows, rank_order=rank_orders(ranked_runs(order)))


def _earlier_rows(calibration: FittedCalibration) -> list[Row]:
    rows = []
    for rate, path in h200.SERVED_RUNS.items():
        rows += _replayed(rate, path, h200.served_deployment(), calibration, "fit")
    for run in h200.profile_runs().values():
        role = "fit" if h200.CALM_LOAD in run.name else "check"
        rows += _shown(_run_rows(run, calibration, role))
    for run_of in campaign.served_runs():
        role = "fit" if run_of.fitted else "check"
        rows += _shown(_replayed(run_of.name, run_of.path, run_of.deployment, calibration, role))
    return rows


def with_served_errors(file: CalibrationFile) -> CalibrationFile:
    """`file` with the errors of its replays: *fit* of the runs that it was fitted to, *hold-out* of all others."""
    rows = served(FittedCalibration(file)).rows
    errors = {key: _error(rows, metrics) for key, metrics in SERVED_ERRORS.items()}
    return file.model_copy(update={"errors": {**file.errors, **errors}})


def _error(rows: list[Row], metrics: tuple[str, ...]) -> FitError:
    pct = {role: [r["error_pct"] for r in rows if r["role"] == role and r["metric"] in metrics] for role in ROLES}
    return summarise(pct["fit"], pct["check"]).model_copy(update={"rows": len(pct["fit"]) + len(pct["check"])})


def _shown(rows: list[Row]) -> list[Row]:
    return [r for r in rows if r["metric"] in METRICS]


def _run_rows(run: ProfileRun, calibration: FittedCalibration, role: str) -> list[Row]:
    return _replayed(run.name, run.path, run.deployment, calibration, role)


def _replayed(
    name: str, path: Path, deployment: Deployment, calibration: FittedCalibration, role: str
) -> list[Row]:
    rows = []
    for m in replay_served(read_bench_serve(path), deployment, calibration):
        what = f"served run {name}, arrivals as recorded: {m.name}"
        id = f"serve_{name}_{m.name.replace(' ', '_').lower()}"
        rows.append(row(id, what, m.unit, m.measured, m.predicted, role, metric=m.name))
    return rows
