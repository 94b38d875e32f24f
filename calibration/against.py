"""A calibration against measurements of one's own: clients' results, or a whole profile folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rackplan.calibration.batch import deployment_of, gpu_terms_ms
from rackplan.calibration.compared import Row, row, validation
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import load_calibration
from rackplan.calibration.physics import PhysicalCost
from rackplan.calibration.profile_client import as_run
from rackplan.calibration.rank_order import rank_orders, ranked_runs
from rackplan.calibration.readers.profile_folder import Profile, ProfileRun, read_profile
from rackplan.calibration.readers.served import read_served_runs
from rackplan.calibration.records import METRICS, ServedRun
from rackplan.calibration.rows import Row as StepRow
from rackplan.calibration.serving import replay_served
from rackplan.engine import Deployment, InputError


def validate_against(name: str, files: Sequence[Path], deployment: Deployment | None) -> dict[str, Any]:
    """compared.validation of `files`, all rows checks: each run replayed and compared; where profiles have two or more
    deployments under the same load, their rank order (rank_order.py).

    `files`: results of any client that readers/served.py knows, replayed on `deployment`; or profile folders, whose
    exact batches are compared too and whose runs name their own deployments. Raises InputError as the readers do,
    where a run states none of the metrics, and where a deployment is not the calibration's or is missing.
    """
    calibration = load_calibration(name)
    rows: list[Row] = []
    served: list[tuple[ProfileRun, list[Row]]] = []
    for path in files:
        if path.is_dir():
            profile = read_profile(path)
            found = _served_rows(calibration, profile)
            rows += [*_exact_rows(calibration, profile), *(r for _, mine in found for r in mine)]
            served += found
            continue
        if deployment is None:
            raise InputError(f"--against {path}: needs --deployment, what its runs ran on")
        for id, run in read_served_runs(path):
            rows += _run_rows(calibration, id, run, deployment, str(path))
    return validation(name, rows, rank_orders(ranked_runs(served)))


def _run_rows(calibration: FittedCalibration, id: str, run: ServedRun, deployment: Deployment, where: str) -> list[Row]:
    found = replay_served(run, deployment, calibration)
    if not found:
        raise InputError(f"{where}: states none of {', '.join(METRICS)}; give a serving result")
    return [row(id, m.name, m.unit, m.measured, m.predicted, "check") for m in found]


def _exact_rows(calibration: FittedCalibration, profile: Profile) -> list[Row]:
    predicted_ms = exact_batch_ms(calibration, profile.rows)
    return [
        row(r.id, r.metric, "ms", r.measured_ms, float(ms), "check")
        for r, ms in zip(profile.rows, predicted_ms, strict=True)
    ]


def _served_rows(calibration: FittedCalibration, profile: Profile) -> list[tuple[ProfileRun, list[Row]]]:
    wall = profile.identity.time_kind == "wall"
    return [
        (run, _run_rows(calibration, run.name, run.served, as_run(run, wall), str(run.path))) for run in profile.runs
    ]


def exact_batch_ms(calibration: FittedCalibration, rows: Sequence[StepRow]) -> np.ndarray:
    """What a profile of exact batches would measure: even routing, and the constant that served steps lack."""
    file = calibration.file
    even = calibration.coefficients.model_copy(update={"routing_sigma": 0.0})
    costs = {
        (dep, drafts): PhysicalCost(even, *deployment_of(file.model, file.gpu, dep=dep, drafts=drafts))
        for dep, drafts in {(r.dep, r.drafts) for r in rows}
    }
    gpu = [sum(gpu_terms_ms(costs[r.dep, r.drafts], r.batch, dep=r.dep, drafts=r.drafts).values()) for r in rows]
    return np.array(gpu) + file.profile_fixed_ms
