"""A calibration from a profile folder: `fit_profile`. What is measured is fitted, what is not is carried and says so.

The GPU's terms come from exact batches (profile_gpu.py), the host's from what served steps take beyond them
(profile_host.py, put together in profile_terms.py), the front end and the hand-over from what clients saw beyond the
replay of their run (profile_client.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackplan.calibration.batch import Batch
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.file import CalibrationFile, MeasuredRange
from rackplan.calibration.fit import Solution, bootstrap_intervals
from rackplan.calibration.gpu_fit import PROFILE_FIXED, GpuFit
from rackplan.calibration.profile_client import NO_TRANSFER, with_frontend, with_transfer
from rackplan.calibration.profile_gpu import gpu_fit_of
from rackplan.calibration.profile_terms import coefficients_of
from rackplan.calibration.readers.profile_folder import WANTED, Profile, read_profile
from rackplan.calibration.rows import Row
from rackplan.calibration.served import decode_intervals_ms
from rackplan.engine import InputError


def fit_profile(folder: Path, name: str) -> CalibrationFile:
    """The calibration `name` of a profile folder (readers/profile_folder.py): seconds to a minute of CPU.

    Raises InputError with file and row on bad input, and where there are too few rows for a fit.
    """
    profile = read_profile(folder)
    if not profile.rows:
        raise InputError(f"{folder}: has no exact batches to fit to; give {WANTED}")
    identity = profile.identity
    rows = [*profile.rows, *(_served_rows(profile) if identity.time_kind == "gpu" else [])]
    fit = gpu_fit_of(identity.model, identity.gpu, rows, _capture_size(profile))
    solution = fit.fit(rows)
    found = coefficients_of(profile, fit, solution, fit.errors(rows, solution.values))
    draft = CalibrationFile(
        name=name,
        model=identity.model,
        gpu=identity.gpu,
        engine_version=f"vLLM {identity.engine_version}",
        date=identity.date,
        command=identity.command,
        sources=profile.files,
        rows=tuple(r.id for r in rows),
        coefficients=Coefficients.model_validate(found.coefficients),
        coefficient_intervals=_intervals(fit, solution, found.coefficients),
        transfer=NO_TRANSFER,
        frontend_ms=0.0,
        profile_fixed_ms=solution.values.get(PROFILE_FIXED, 0.0) - found.loop_in_step_ms,
        target_sigma=found.coefficients["routing_sigma"],
        draft_sigma=0.0,
        measured=_measured(profile.rows),
        errors=found.errors,
        carried=found.carried,
        notes=found.notes,
    )
    return with_transfer(profile, with_frontend(profile, draft))


def _capture_size(profile: Profile) -> int:
    """Up to how many tokens the engine padded to CUDA graphs, as the served runs say; vLLM's default without."""
    pools = [run.deployment.pools[0] for run in profile.runs]
    return pools[0].max_cudagraph_capture_size if pools else 512


def _served_rows(profile: Profile) -> list[Row]:
    """Decode steps of one aggregated rank under async scheduling: GPU time alone, routed as served text is."""
    rows: list[Row] = []
    for run in (*profile.runs, *profile.decode_runs):
        if run.deployment.gpus > 1 or not run.deployment.pools[0].async_scheduling or not run.served.token_s:
            continue
        rows += [
            Row(
                id=f"{run.name}_served_decode_{batch}",
                metric="decode_served_dep1",
                dep=1,
                batch=Batch(decodes=batch, context_tokens=run.served.mean_context),
                measured_ms=ms,
                served=True,
            )
            for batch, ms in decode_intervals_ms([run.served]).items()
        ]
    return rows


def _measured(rows: Sequence[Row]) -> dict[str, MeasuredRange]:
    def span(values: Sequence[int]) -> tuple[int, int]:
        return min(values), max(values)

    decode = [r for r in rows if r.batch.decodes]
    prefill = [r for r in rows if r.phase == "prefill"]
    return {
        "decode": MeasuredRange(
            dep=span([r.dep for r in decode]),
            batch=span([r.batch.decodes for r in decode]),
            context_tokens=span([r.batch.context_tokens for r in decode]),
            new_tokens=(0, 0),
            drafts=span([r.drafts for r in decode]),
        ),
        "prefill": MeasuredRange(
            dep=span([r.dep for r in prefill]),
            batch=(1, 1),
            context_tokens=span([r.batch.cached_tokens for r in prefill]),
            new_tokens=span([r.batch.new_tokens for r in prefill]),
            drafts=(0, 0),
        ),
    }


def _intervals(fit: GpuFit, solution: Solution, final: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Intervals of what was fitted, moved by what served steps added to it."""
    found = bootstrap_intervals(solution, fit.unknowns)
    moved = {k: final.get(k, solution.values[k]) - solution.values[k] for k in found}
    return {k: (max(0.0, low + moved[k]), max(0.0, high + moved[k])) for k, (low, high) in found.items()}
