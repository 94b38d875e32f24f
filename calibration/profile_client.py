"""The front end and the KV hand-over of a profile: what clients saw beyond the replay of their run."""

import numpy as np

from rackplan.calibration.file import CalibrationFile, FittedCalibration, Transfer
from rackplan.calibration.library import calibration_file
from rackplan.calibration.profile_gpu import CARRIED_FROM
from rackplan.calibration.readers.profile_folder import Profile, ProfileRun
from rackplan.calibration.served_log import Front, front_of
from rackplan.calibration.serving import ttft_beyond_ms
from rackplan.engine import Deployment, gpu_spec
from rackplan.simulator.frontend import TURNS

TRANSFER_SHARE_OF_LINK = 0.6
"""Of one way of the link: what a hand-over reaches where none was measured."""
FRONT_TERMS = ("frontend_token_ms", "frontend_turn_ms")
NO_TRANSFER = Transfer(setup_ms=0.0, per_block_ms=0.0, gb_per_s=1e6, block_tokens=16)


def as_run(run: ProfileRun, wall: bool) -> Deployment:
    """The run's deployment as its engine ran it: one on a CPU, or whose log says so, has no async scheduling."""
    logs = [log for ranks in run.logs.values() for log in ranks]
    off = wall or any(log.config.get("async_scheduling") is False for log in logs)
    pools = [p.model_copy(update={"async_scheduling": False}) if off else p for p in run.deployment.pools]
    return run.deployment.model_copy(update={"pools": tuple(pools)})


def _beyond_ms(profile: Profile, draft: CalibrationFile, disaggregated: bool) -> tuple[str, float] | None:
    """(run, median of TTFT as measured less as replayed, ms): of the runs of one kind the one with least, as whatever
    else a machine does only adds to it."""
    wall = profile.identity.time_kind == "wall"
    runs = [r for r in profile.runs if r.deployment.disaggregated == disaggregated and len(r.served.ttft_s)]
    engine = FittedCalibration(draft)
    found = [(float(np.median(ttft_beyond_ms(r.served, as_run(r, wall), engine))), r.name) for r in runs]
    if not found:
        return None
    least_ms, name = min(found)
    return name, max(0.0, least_ms)


def _logged_front(profile: Profile) -> tuple[str, Front] | None:
    """(run, its front end), of the runs of the longest prompts whose client and step log share a clock the one with
    least: shorter prompts are worked through sooner."""
    found, longest = [], max((int(r.served.input_tokens.max()) for r in profile.runs), default=0)
    for run in profile.runs:
        logs = run.logs.get("", ())
        alike = run.deployment.gpus == 1 and len(logs) == 1 and run.served.input_tokens.max() == longest
        if alike and (front := front_of(run.served, logs[0])):
            found.append((run.name, front))
    return min(found, key=lambda x: x[1].total_ms, default=None)


def with_frontend(profile: Profile, draft: CalibrationFile) -> CalibrationFile:
    """With the front end that aggregated runs show, carried where there is none."""
    base = calibration_file(CARRIED_FROM)
    if profile.identity.time_kind == "gpu":
        if logged := _logged_front(profile):
            name, front = logged
            note = f"The front end is that of run {name}, by its client's clock and its step log's."
            parts = {"token_ms": front.token_ms, "turn_ms": front.turn_ms, "ms": front.total_ms}
            logged_terms = {f"frontend_{key}": value for key, value in parts.items()}
            return draft.model_copy(update={**logged_terms, "notes": (*draft.notes, note)})
        tokens = {key: getattr(base, key) for key in FRONT_TERMS}
        # The replay takes the turns; what clients saw beyond it comes on top.
        least_ms = TURNS * base.frontend_turn_ms
        known = {**tokens, "frontend_ms": least_ms, "carried": (*draft.carried, *FRONT_TERMS)}
        draft = draft.model_copy(update=known)
    found = _beyond_ms(profile, draft, disaggregated=False)
    if found is None:
        note = f"The front end is carried from {CARRIED_FROM}: no aggregated run was measured."
        update = {"frontend_ms": base.frontend_ms, "carried": (*draft.carried, "frontend_ms")}
        return draft.model_copy(update={**update, "notes": (*draft.notes, note)})
    name, ms = found
    note = f"The front end is the median TTFT of run {name} beyond its replay, the least of all aggregated runs."
    return draft.model_copy(update={"frontend_ms": draft.frontend_ms + ms, "notes": (*draft.notes, note)})


def with_transfer(profile: Profile, draft: CalibrationFile) -> CalibrationFile:
    """Hand-over of KV: the link's bytes by physics, and what a 1P1D run's TTFT shows beyond its replay as set-up."""
    base = calibration_file(CARRIED_FROM)
    link = gpu_spec(draft.gpu).nvlink_gb_s / 2 * TRANSFER_SHARE_OF_LINK
    physics = base.transfer.model_copy(update={"setup_ms": 0.0, "per_block_ms": 0.0, "gb_per_s": link})
    draft = draft.model_copy(update={"transfer": physics})
    found = _beyond_ms(profile, draft, disaggregated=True)
    if found is None:
        note = (
            f"KV transfer was not measured: set-up is carried from {CARRIED_FROM}, the rate is "
            f"{TRANSFER_SHARE_OF_LINK:.0%} of the link."
        )
        setup, carried = base.transfer.setup_ms, (*draft.carried, "transfer")
    else:
        note = (
            f"KV transfer: set-up is the median TTFT of run {found[0]} beyond its replay with the bytes at "
            f"{TRANSFER_SHARE_OF_LINK:.0%} of the link; descriptors are in it."
        )
        setup, carried = found[1], draft.carried
    transfer = physics.model_copy(update={"setup_ms": setup})
    return draft.model_copy(update={"transfer": transfer, "carried": carried, "notes": (*draft.notes, note)})
