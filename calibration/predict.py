"""The step time of one exact batch, by term, with its interval and whether the calibration has seen its like."""

from typing import Any

import numpy as np

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import load_calibration
from rackplan.engine import InputError, model_spec
from rackplan.simulator.step import step_wall_ms

DEFAULT_NEW_TOKENS = 8192
OUT_OF_RANGE_FACTOR = 2.0
"""The interval's widening past the measured range: physics carries the trend there, nothing bounds its error."""
REDUNDANT_EXPERTS = 32


def predict(
    name: str,
    *,
    pool: str,
    dep: int,
    batch: int = 1,
    context: int = 0,
    drafts: int = 0,
    new: int | None = None,
) -> dict[str, Any]:
    """Step time with every rank at the same batch and async scheduling on.

    pool: "decode", `batch` requests a rank of `context` tokens each, verifying `drafts` drafts; or "prefill", `batch`
    chunks a rank of `new` tokens (8,192 unless given) after `context` cached tokens each.
    Returns step_ms (wall) and gpu_ms; terms_ms, which add up to step_ms; interval_ms [low, high] from the pool's
    hold-out P90 error, doubled out of range; in_range; and notes. Raises InputError on what cannot be.
    """
    calibration = load_calibration(name)
    work = _batch_of(pool, batch, context, new)
    _check_counts(dep=dep, batch=batch, context=context, drafts=drafts)
    terms, wall_ms = _step(calibration, pool, work, dep, drafts)
    gpu_ms = sum(terms.values())
    step = calibration.file.measured[pool].outside(
        dep=dep, batch=batch, context_tokens=context, new_tokens=work.new_tokens, drafts=drafts
    )
    error = calibration.file.errors[pool].holdout_p90_pct / 100 * (OUT_OF_RANGE_FACTOR if step else 1.0)
    return {
        "calibration": name,
        "step_ms": wall_ms,
        "gpu_ms": gpu_ms,
        "terms_ms": {**terms, "host_or_launch": wall_ms - gpu_ms},
        # Errors are predicted over measured: a prediction 30 % low wants 43 % more.
        "interval_ms": [wall_ms / (1 + error), wall_ms / max(0.1, 1 - error)],
        "in_range": not step,
        "notes": [*step, *_load_notes(calibration, pool, dep)],
    }


def _batch_of(pool: str, batch: int, context: int, new: int | None) -> Batch:
    if pool == "decode":
        if new is not None:
            raise InputError(f"new={new} has no effect on pool=decode; leave it out or take pool=prefill")
        return Batch(decodes=batch, context_tokens=context)
    if pool != "prefill":
        raise InputError(f"pool={pool}: one of prefill, decode")
    tokens = DEFAULT_NEW_TOKENS if new is None else new
    if tokens < 1:
        raise InputError(f"new={tokens}: must be at least 1 token")
    return Batch(chunks=batch, new_tokens=tokens, cached_tokens=context)


def _check_counts(*, dep: int, batch: int, context: int, drafts: int) -> None:
    for key, value, least in (("dep", dep, 1), ("batch", batch, 1), ("context", context, 0), ("drafts", drafts, 0)):
        if value < least:
            raise InputError(f"{key}={value}: must be at least {least}")


def redundant_for(calibration: FittedCalibration, pool: str, dep: int) -> int | None:
    """Redundant experts of the EPLB that a decode of skewed routing runs with; None where EPLB is off."""
    if pool == "prefill" or dep == 1 or calibration.file.target_sigma == 0:
        return None
    experts = model_spec(calibration.file.model, calibration.file.gpu).routed_experts
    return REDUNDANT_EXPERTS if (experts + REDUNDANT_EXPERTS) % dep == 0 else 0


def _step(
    calibration: FittedCalibration, pool: str, work: Batch, dep: int, drafts: int
) -> tuple[dict[str, float], float]:
    """(GPU terms, wall time), ms."""
    tokens = work.tokens(drafts)
    deployment, bound = deployment_of(
        calibration.file.model,
        calibration.file.gpu,
        dep=dep,
        tokens=tokens,
        drafts=drafts,
        redundant_experts=redundant_for(calibration, pool, dep),
    )
    # Decodes are predicted in a pool that prefills too, as all but P/D deployments have; prefills on their own.
    cost = calibration.pool_cost(deployment, bound.model_copy(update={"role": pool}) if pool == "prefill" else bound)
    even = calibration.balancedness(deployment, bound, tokens)
    terms = gpu_terms_ms(cost, work, dep=dep, drafts=drafts, balancedness=even)
    floor = cost.launch_floor_ms(tokens, dep if work.chunks else 0)
    host = cost.host_ms(work.chunks + work.decodes)
    gpu_ms = np.array([sum(terms.values())])
    wall = step_wall_ms(gpu_ms, floor, host, cost.dp_sync_ms(), 0.0, async_scheduling=True)
    return terms, float(wall[0])


def _load_notes(calibration: FittedCalibration, pool: str, dep: int) -> list[str]:
    redundant = redundant_for(calibration, pool, dep)
    if redundant is None:
        return []
    return [f"EPLB on with {redundant} redundant experts"]
