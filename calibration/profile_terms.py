"""All coefficients of a profile: the GPU as fitted, the host from what served steps add to it, the rest carried."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rackplan.calibration.file import FitError
from rackplan.calibration.fit import Solution, summarise
from rackplan.calibration.gpu_fit import GpuFit
from rackplan.calibration.library import calibration_file
from rackplan.calibration.physics import PhysicalCost
from rackplan.calibration.profile_gpu import CARRIED_FROM
from rackplan.calibration.profile_host import (
    Loop,
    ServedStep,
    client_steps,
    fit_loop,
    launch_terms,
    served_steps,
    several_ranks_ms,
)
from rackplan.calibration.readers.profile_folder import Profile
from rackplan.calibration.served_log import host_terms, mean_host_terms
from rackplan.engine import model_spec

HOST = ("host_step_ms", "host_request_ms")
LAUNCHES = (
    "piecewise_floor_ms",
    "eager_floor_ms",
    "eager_decode_launch_ms",
    "eager_ep_launch_ms",
    "eager_token_launch_ms",
)
SYNC = ("ring_hop_ms", "doubling_round_ms", "nccl_sync_ms")
BY_PHYSICS = ("dense_read_efficiency", "short_chunk_tokens")
ADMISSION = ("admission_token_ms",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a fit has so far: coefficients, which of them are carried, errors by metric, what to say of them.
    `loop_in_step_ms`: the host's loop that the step's constant holds."""

    coefficients: dict[str, Any]
    carried: tuple[str, ...]
    errors: dict[str, FitError]
    notes: tuple[str, ...] = ()
    loop_in_step_ms: float = 0.0

    def measured(self, values: dict[str, Any]) -> "Found":
        """With these coefficients measured, whatever they were."""
        carried = tuple(k for k in self.carried if k not in values)
        return replace(self, coefficients={**self.coefficients, **values}, carried=carried)

    def noted(self, note: str) -> "Found":
        """With one more note."""
        return replace(self, notes=(*self.notes, note))


def coefficients_of(profile: Profile, fit: GpuFit, solution: Solution, errors: dict[str, FitError]) -> Found:
    """All coefficients: the GPU's, and the host's from the difference that served steps show."""
    base = calibration_file(CARRIED_FROM)
    layers = model_spec(profile.identity.model, profile.identity.gpu).layers / model_spec(base.model, base.gpu).layers
    wall = profile.identity.time_kind == "wall"
    carried = base.coefficients.model_dump()
    values = {
        **fit.coefficients(solution.values),
        **{k: carried[k] for k in (*SYNC, *ADMISSION, *HOST)},
        # Kernels to launch one by one are as many as there are layers; where host and device are one there is no launch
        **{k: 0.0 if wall else carried[k] * layers for k in LAUNCHES},
        **({k: 0.0 for k in HOST} if wall else {}),
    }
    unmeasured = [*SYNC, *ADMISSION, *(() if wall else (*LAUNCHES, *HOST))]
    unmeasured += [k for k in fit.assumed if k not in BY_PHYSICS]
    if not any(r.batch.chunks > 1 for r in profile.rows):
        unmeasured.append("prefill_chunk_ms")  # told apart from what any prefill costs by served steps alone
    found = Found(coefficients=values, carried=tuple(unmeasured), errors=errors)
    steps = _steps(profile, fit, solution)
    found = _with_loop(found, [s for s in steps if s.dep == 1] or steps, steps, wall)
    if not wall:
        found = _with_hidden_host(found, profile)
        cost = fit.cost(solution.values, 1, served=True)
        found = _with_launches(found, launch_terms(profile.runs, cost))
    return found


def _steps(profile: Profile, fit: GpuFit, solution: Solution) -> list[ServedStep]:
    """Steps without overlap of host and GPU: from logs where a run has some, else from its client."""
    measured = {r.dep for r in profile.rows}
    deps = {pool.dep for run in profile.runs for pool in run.deployment.pools} | {1}
    alone = solution.values
    cost_of: dict[int, PhysicalCost] = {}
    for dep in deps:
        # Where no exact batch had this many ranks, the difference is to hold all that they add.
        known = fit if dep in measured or dep == 1 else _without_link(fit)
        cost_of[dep] = known.cost(alone, dep, served=True)
    steps: list[ServedStep] = []
    for run in profile.runs:
        if profile.identity.time_kind == "gpu" and run.deployment.pools[0].async_scheduling:
            continue
        steps += served_steps(run, cost_of) or client_steps(run, cost_of[1])
    return steps


def _without_link(fit: GpuFit) -> GpuFit:
    return replace(fit, assumed={**fit.assumed, "comm_fixed_ms": 0.0})


def _with_loop(found: Found, alone: list[ServedStep], steps: list[ServedStep], wall: bool) -> Found:
    """The loop's work of a step and of a request. Where host and device are one it makes the step itself longer."""
    loop = fit_loop(alone)
    if loop is None:
        if not wall:
            return found
        return found.noted("No served step was measured: their time beyond the exact batches is unknown.")
    c = dict(found.coefficients)
    shorter = min(loop.shorter_ms, c["step_fixed_ms"])
    if wall:
        c["step_fixed_ms"] += loop.step_ms - shorter
        c["decode_request_ms"] += loop.request_ms
        c["prefill_chunk_ms"] = c.get("prefill_chunk_ms", 0.0) + loop.request_ms
        text = (
            f"Exact batches hold host and device; served steps take {loop.step_ms - shorter:+.3g} ms and "
            f"{loop.request_ms:.2g} ms a request beyond them, which step_fixed_ms and decode_request_ms hold: on one "
            "set of cores no scheduling hides it."
        )
    else:
        c |= {"host_step_ms": loop.step_ms, "host_request_ms": loop.request_ms}
        text = "Host times are what steps without async scheduling take beyond their GPU time."
    known = tuple(k for k in found.carried if wall or k not in HOST)
    errors = {**found.errors, **_step_errors(alone, loop)}
    in_step_ms = loop.step_ms - shorter if wall else 0.0
    found = replace(found, coefficients=c, carried=known, errors=errors, loop_in_step_ms=in_step_ms).noted(text)
    return _with_ranks(found, steps, loop) if any(s.dep == 1 for s in steps) else found


def _step_errors(steps: list[ServedStep], loop: Loop) -> dict[str, FitError]:
    """Errors of served steps, by kind, with the loop's two constants as all that was fitted to them."""
    errors = {}
    for kind in (False, True):
        mine = [s for s in steps if s.prefill == kind]
        wall = np.array([s.wall_ms for s in mine])
        made = [s.gpu_ms + loop.step_ms - loop.shorter_ms + loop.request_ms * s.requests for s in mine]
        if mine:
            pct = ((np.array(made) / wall - 1) * 100).tolist()
            errors[f"{'mixed' if kind else 'decode'}_served_wall"] = summarise(pct, pct)
    return errors


def _with_ranks(found: Found, steps: list[ServedStep], loop: Loop) -> Found:
    """What several ranks add where no exact batch had several: dispatch, combine and sync in one constant."""
    extra = several_ranks_ms(steps, loop)
    if extra is None or "comm_fixed_ms" not in found.carried:
        return found
    dep = max(s.dep for s in steps)
    note = (
        f"comm_fixed_ms is what served steps of {dep} ranks take beyond one rank's: dispatch, combine and sync in one."
    )
    return found.measured({"comm_fixed_ms": extra}).noted(note)


def _with_hidden_host(found: Found, profile: Profile) -> Found:
    """The host's work where no step without overlap tells it: of decode steps behind eager ones."""
    if not set(HOST) <= set(found.carried):
        return found
    told = []
    for run in profile.runs:
        pool, own = run.deployment.pools[0], run.logs.get("", ())
        if run.deployment.gpus == 1 and pool.async_scheduling and len(own) == 1:
            told.append(host_terms(own[0], pool.max_cudagraph_capture_size))
    if terms := mean_host_terms(told):
        return found.measured(terms).noted("Host times are of decode steps behind eager ones, over all step logs.")
    return found.noted(f"No served step tells the host's work apart: host times are carried from {CARRIED_FROM}.")


def _with_launches(found: Found, floors: dict[str, Any]) -> Found:
    """Launches as measured beside decodes; what the decodes add to one past the captured sizes is carried."""
    if "eager_floor_ms" in floors:
        beside_ms = floors["eager_floor_ms"] - found.coefficients["eager_decode_launch_ms"]
        floors = {**floors, "eager_floor_ms": max(0.0, beside_ms)}
    return found.measured(floors)
