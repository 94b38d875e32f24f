"""`simulate_document`: one given deployment under one given load."""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import default_calibration, load_calibration
from rackplan.engine import Deployment, InfeasibleError, InputError, check_memory
from rackplan.engine.deployment import DpSync
from rackplan.simulator.arrivals import TraceWorkload
from rackplan.simulator.failures import Failure
from rackplan.simulator.load import Load, Workload
from rackplan.simulator.run_options import STEADY_RUN, USUAL, Drafting, ExpertRun, RunOptions
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.binding import warnings_of
from rackplan.tuner.document import deployment_document, load_document, provenance_of
from rackplan.tuner.probe import Probe, merge, run_once
from rackplan.tuner.run_settings import run_document

WARMUP_SHARE = {"closed": 0.2, "open": 0.1, "recorded": 0.0}
"""Of the duration. A recorded run is measured whole, as the run that it replays was."""
WORTH_PROCESSES_S = 3.0
KEPT = 0.7
"""Of the load that was asked for; less is told."""
WORTH_P99 = 100
"""With fewer requests the P99 is the worst one."""


def simulate_document(
    deployment: Deployment,
    *,
    workload: str,
    concurrency: int | None,
    rate: float | None,
    cv: float,
    duration_s: float,
    calibration: str | None,
    replications: int,
    seed: int,
    run: ExpertRun = STEADY_RUN,
    drafting: Drafting = USUAL,
    failures: tuple[Failure, ...] = (),
    resubmit: bool = True,
) -> dict[str, Any]:
    """The contract's simulation document.

    A closed loop (`concurrency`) runs for `duration_s` and is measured after a fifth of it; an open loop (`rate` in
    req/s, or the recorded arrivals with neither) has arrivals for `duration_s` and runs until all have ended. `run`:
    what happens to the experts in it; `failures`, `resubmit`: instances that are lost in it, and whether their requests
    are sent again. Raises InputError on bad input, InfeasibleError where the deployment does not fit its GPUs.
    """
    parsed = parse_workload(workload)
    fitted = fitted_for(deployment, calibration)
    load = Load(concurrency=concurrency, rate_req_s=rate, cv=cv)
    check_memory(deployment)
    _check_size(load, duration_s)
    options = replace(run_options(load, duration_s, seed), experts=run, drafting=drafting)
    options = replace(options, failures=failures, resubmit=resubmit)
    found = merge(deployment, load, _replicate(deployment, parsed, load, fitted, options, replications))
    _check_measured(found, duration_s, options.warmup_s)
    inputs = {
        "model": deployment.model,
        "gpu": deployment.gpu,
        "gpus": deployment.gpus,
        "workload": workload,
        **load_document(load),
        "duration_s": duration_s,
        "warmup_s": options.warmup_s,
        "calibration": fitted.name,
        "replications": replications,
        "seed": seed,
        "run": run_document(run),
        "fail": [str(f) for f in failures] or None,
        "resubmit": resubmit if failures else None,
        **drafting.to_inputs(),
    }
    return {
        "inputs": inputs,
        "deployment": deployment.to_dict(),
        **deployment_document(found),
        "memory": found.memory,
        "warnings": [
            *warnings_of(found),
            *_few(found),
            *_load_not_kept(found, parsed, duration_s),
            *_not_modelled(deployment),
            *getattr(parsed, "notes", ()),
        ],
        "provenance": provenance_of(fitted.file, found, seed),
    }


MOST_REQUESTS = 5_000_000
"""Of one run: some ten thousand a second are simulated, and each is kept until the end."""


def _check_size(load: Load, duration_s: float) -> None:
    """Refuse at once what would take hours."""
    if load.rate_req_s and load.rate_req_s * duration_s > MOST_REQUESTS:
        raise InputError(
            f"--rate {load.rate_req_s:g}: {load.rate_req_s * duration_s:,.0f} requests in {duration_s:g} s, a run "
            f"takes {MOST_REQUESTS:,}; give --duration {MOST_REQUESTS / load.rate_req_s:.3g}s or less"
        )


def _check_measured(found: Probe, duration_s: float, warmup_s: float) -> None:
    """Nothing to report is an error that names what kept the requests from the measurement."""
    counts = found.metrics["requests"]
    if counts["measured"]:
        return
    if counts["rejected"] == counts["submitted"]:
        limit = min(found.deployment.context_limit, *(plan["kv_tokens"] for plan in found.memory))
        raise InfeasibleError(
            f"every request that came is longer than {limit} tokens, which is the least of max_model_len "
            f"({found.deployment.context_limit}) and a rank's KV room; raise it or shorten the workload"
        )
    if counts["finished"]:
        raise InputError(
            f"--duration {duration_s:g}s: every request ended in the warm-up of {warmup_s:g} s and none came after it; "
            f"give a shorter one or a longer workload"
        )
    raise InputError(f"--duration {duration_s:g}s: no request ended within it; give a longer one")


def _not_modelled(deployment: Deployment) -> list[str]:
    """What the deployment sets and the simulation does not see, or sees in part."""
    notes = []
    for pool in deployment.pools:
        if pool.tp > 1:
            notes.append(f"{pool.role}.tp={pool.tp}: attention is divided by it, its all-reduces are not modelled")
    if deployment.eplb.enabled and all(p.gpus_per_instance == 1 for p in deployment.pools):
        notes.append("eplb.enabled=true has no effect: no instance has a second GPU to balance with")
    if deployment.dp_sync != DpSync() and all(p.dep == 1 for p in deployment.pools):
        notes.append(f"dp_sync.algorithm={deployment.dp_sync.algorithm} has no effect: no pool has a second rank")
    return notes


def _few(found: Probe) -> list[str]:
    """Percentiles that the run cannot tell."""
    notes = []
    measured = found.metrics["requests"]["measured"]
    if measured < WORTH_P99:
        notes.append(
            f"{measured:g} requests were measured a run: P90 and P99 want {WORTH_P99} or more; give a longer --duration"
        )
    if not found.metrics["tpot_ms"]["p99"]:
        notes.append("no request has a second output token: TPOT and interactivity do not exist and are shown as 0")
    return notes


def _load_not_kept(found: Probe, workload: Workload, duration_s: float) -> list[str]:
    """Where the load that was run is not the one that was asked for."""
    load, counts = found.load, found.metrics["requests"]
    expected = (load.rate_req_s or 0.0) * duration_s
    if not isinstance(workload, TraceWorkload) and counts["submitted"] < KEPT * expected - 3 * expected**0.5:
        return [
            f"{counts['submitted']:g} of the {expected:.0f} requests of --rate {load.rate_req_s:g} came: sessions last "
            f"longer than --duration {duration_s:g}s; give a longer one, or --concurrency"
        ]
    if load.concurrency and isinstance(workload, TraceWorkload) and counts["unfinished"] < KEPT * load.concurrency:
        return [
            f"the {counts['submitted']:g} requests of {workload.name} ended before --duration {duration_s:g}s did, and "
            f"the last of them at less than --concurrency {load.concurrency}; give a shorter one"
        ]
    return []


def fitted_for(deployment: Deployment, calibration: str | None) -> FittedCalibration:
    """The named calibration, or the embedded one of the deployment's model and GPU."""
    if calibration is None:
        calibration = default_calibration(deployment.model, deployment.gpu)
    fitted = load_calibration(calibration)
    for key in ("model", "gpu"):
        asked, has = getattr(deployment, key), getattr(fitted.file, key)
        if asked != has:
            raise InputError(f"--calibration {calibration}: fitted for {key}={has}, the deployment has {asked}")
    return fitted


def run_options(load: Load, duration_s: float, seed: int) -> RunOptions:
    """How a load is run and measured for `duration_s`."""
    kind = "closed" if load.concurrency else "open" if load.rate_req_s else "recorded"
    warmup_s = WARMUP_SHARE[kind] * duration_s
    return RunOptions(duration_s=duration_s, warmup_s=warmup_s, seed=seed, drain=kind != "closed")


def _replicate(
    deployment: Deployment,
    workload: Workload,
    load: Load,
    fitted: FittedCalibration,
    options: RunOptions,
    replications: int,
) -> list[dict[str, Any]]:
    """One run a seed; the further ones in processes of their own where the first took long."""
    seeded = [replace(options, seed=options.seed + i) for i in range(replications)]
    began = time.monotonic()
    runs = [run_once(deployment, workload, load, fitted, seeded[0], alone=replications == 1)]
    rest = seeded[1:]
    if len(rest) > 1 and time.monotonic() - began > WORTH_PROCESSES_S:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=min(len(rest), os.cpu_count() or 1), mp_context=context) as pool:
            futures = [pool.submit(run_once, deployment, workload, load, fitted, o) for o in rest]
            return runs + [f.result() for f in futures]
    return runs + [run_once(deployment, workload, load, fitted, o) for o in rest]
