"""`make_plan`: from a target to the deployment that meets it, with what it will do and how sure that is.

Demand -> closed-form screening -> search on the simulator -> confirmation by replications -> the plan document.
"""

import math
from dataclasses import replace

from rackplan import __version__
from rackplan.engine import Deployment, InputError
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.tuner.binding import binding_of, error_warning, grown, warnings_of
from rackplan.tuner.demand import Demand, load_of, play_demand
from rackplan.tuner.document import deployment_document, load_document, provenance_of
from rackplan.tuner.economics import economics_of
from rackplan.tuner.operating_point import lighter_load
from rackplan.tuner.pareto import history_of, pareto_of
from rackplan.tuner.probe import Probe, merge
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Screening
from rackplan.tuner.search import Progress, Search, SearchResult, Trial, horizon
from rackplan.tuner.worker import RunTask, SearchTask, Workers

__all__ = ["PlanRequest", "make_plan"]

NOMINAL_E2E_S = 3.0
PLAYED_S = 60.0
SHORT = " (short run)"
"""What is said of runners-up that no longer run has confirmed: caches may hold more in short ones."""
FINALISTS = 3
REPLICATIONS = 4
EDGE_PROBES = 2
MOST_CYCLE_S, MOST_LIVES_S = 30.0, 60.0
EDGE_S, CONFIRMED_S = 20.0, 80.0
"""Time that is measured for the edge of a finalist, and for each replication of the answer: prompts whose prefix was
evicted are rare and long, and a shorter time sees too few of them."""
MOST_RETREATS = 6
SWEEP = (0.1, 0.5)
"""Shares of the operating load at which the answer's own curve is drawn."""


def make_plan(request: PlanRequest, progress: Progress | None = None) -> dict:
    """The plan document (see docs/documents.md). Raises InputError on bad input; what cannot be met is a document
    with `feasible: false`, the constraint that blocks it and the best that can be had."""
    report = progress or (lambda text, share: None)
    _check(request)
    demand = play_demand(request.parsed_workload, e2e_s=NOMINAL_E2E_S, duration_s=PLAYED_S, seed=request.seed)
    demand = replace(demand, thinking=request.drafting.thinking)
    longest, most = demand.longest_tokens, request.model_spec.max_model_len
    if longest > most:
        raise InputError(
            f"--workload {request.workload}: has requests of {longest:,} tokens, {request.model} takes at most "
            f"{most:,}; choose another workload or model"
        )
    report("screening layouts in closed form", 0.0)
    screening = Screening(request, demand)
    screened = screening.candidates()
    if not screened:  # the best that can be is shown all the same, where there is memory for it
        alone = screening.aggregated_anyway()
        if alone is None:
            return _nothing(request, screening)
        screened = [alone]
    with Workers(request) as workers:
        search = Search(request, screening, workers)
        report("simulating pilots of the best layouts", 0.05)
        search.pilot(screened)
        result = search.run(screening.candidates() or screened, lambda text, share: report(text, 0.15 + 0.6 * share))
        if not any(t.score for t in result.trials):
            report("no load meets the SLOs yet: trying from the lightest", 0.75)
            result = search.last_resort(result)
        report("confirming the best with replications", 0.8)
        starts = [(t.deployment, t.point.nearest) for t in _finalists(result)]
        confirmed = _confirm(request, demand, workers, starts)
        if confirmed and request.achieved_tps(confirmed[0].metrics) < request.target_tps:
            confirmed = _grow(request, screening, demand, workers, confirmed)
        best = confirmed[0] if confirmed else _closest(result)
        report("drawing the answer's curve", 0.95)
        sweep = _sweep(request, demand, workers, best)
    return _document(request, screening, result, confirmed, best, sweep)


def _check(request: PlanRequest) -> None:
    """Resolve what can be wrong before anything runs."""
    _ = request.model_spec, request.gpu_spec, request.fitted, request.parsed_workload
    request.drafting.check_effect(request.model_spec.max_draft_tokens)


def _finalists(result: SearchResult) -> list[Trial]:
    """The best trial of each prefill width, then the best of the rest: short runs rank like kinds well, but see too
    little of a cache that fills to rank unlike ones."""
    meeting = [t for t in result.trials if t.score]
    by_kind: dict[int, Trial] = {}
    for trial in meeting:
        layout = trial.candidate.layout
        by_kind.setdefault(layout.prefill_dep if layout.disaggregated else 0, trial)
    first = sorted(by_kind.values(), key=meeting.index)
    rest = [t for t in meeting if t not in first]
    return (first + rest)[:FINALISTS]


def _confirm(
    request: PlanRequest, demand: Demand, workers: Workers, starts: list[tuple[Deployment, Probe]]
) -> list[Probe]:
    """Deployments, each from a probe near its edge, at the highest load at which every replication meets the SLOs over
    a longer time, best first: down the ranking until one reaches the target."""
    tasks = [
        SearchTask(
            deployment=deployment,
            start=_amount(near.load),
            options=_long_run(near, request, demand, EDGE_S),
            most_probes=EDGE_PROBES,
            bar=None,
            to_the_edge=True,
        )
        for deployment, near in starts
    ]
    edges = [p.best for p in workers.search(tasks) if p.best]
    edges.sort(key=lambda p: request.score(p.metrics), reverse=True)
    confirmed: list[Probe] = []
    for edge in edges:
        if found := _replicate(request, demand, workers, edge):
            confirmed.append(found)
            if request.achieved_tps(found.metrics) >= request.target_tps:
                break
    return sorted(confirmed, key=lambda p: request.score(p.metrics), reverse=True)


def _grow(
    request: PlanRequest, screening: Screening, demand: Demand, workers: Workers, confirmed: list[Probe]
) -> list[Probe]:
    """With one instance more of what binds the best, where GPUs are left and the closed form promises more by it: the
    search sizes pools for rates that short runs saw, and longer ones see less of a cache."""
    best = confirmed[0]
    more = grown(request, screening, best.deployment)
    if more is None or more[2].gpus > request.gpus:
        return confirmed
    gain, _, deployment = more
    load = load_of(request.parsed_workload, (1 + gain) * _amount(best.load))
    found = _confirm(request, demand, workers, [(deployment, replace(best, load=load))])
    return sorted([*confirmed, *found], key=lambda p: request.score(p.metrics), reverse=True)


def _replicate(request: PlanRequest, demand: Demand, workers: Workers, edge: Probe) -> Probe | None:
    """Replications with other seeds; the load gives way until the 95 % intervals of all SLOs are on the right side, and
    every replication too. None if it would not."""
    load, options = edge.load, _long_run(edge, request, demand, CONFIRMED_S)
    for _ in range(MOST_RETREATS):
        tasks = [
            RunTask(deployment=edge.deployment, load=load, options=replace(options, seed=request.seed + 1 + i))
            for i in range(REPLICATIONS)
        ]
        found = merge(edge.deployment, load, workers.run(tasks))
        worst = min((_at_worst(found), *found.runs), key=lambda m: min(request.slo.slack(m).values()))
        if request.slo.meets(worst):
            return found
        lighter = lighter_load(_amount(load), replace(found, metrics=worst), request.slo)
        # Of few clients at least one less: 0.97 of them would be as many again.
        load = load_of(request.parsed_workload, lighter if load.concurrency is None else math.floor(lighter))
    return None


def _at_worst(found: Probe) -> dict:
    """The metrics with those of the SLOs at the unfavourable end of their intervals."""
    slowest, latest = found.ci95["interactivity_tok_s_user"]["p90"][0], found.ci95["ttft_ms"]["p90"][1]
    return {**found.metrics, "interactivity_tok_s_user": {"p90": slowest}, "ttft_ms": {"p90": latest}}


def _amount(load: Load) -> float:
    return float(load.concurrency or load.rate_req_s or 1.0)


def _long_run(found: Probe, request: PlanRequest, demand: Demand, least_measured_s: float) -> RunOptions:
    """Long enough for a closed loop to settle: its queue takes a unit's whole cycle, think time included, and its
    decode batch the life of all but the longest requests."""
    metrics = found.metrics
    short = horizon(metrics["e2e_ms"]["p90"] / 1e3, request, demand)
    served = max(1e-9, metrics["request_throughput_req_s"])
    cycle_s = min(MOST_CYCLE_S, (found.load.concurrency or 0) / served)
    lives_s = min(MOST_LIVES_S, metrics["e2e_ms"]["p99"] / 1e3)
    warmup = max(short.warmup_s, cycle_s, lives_s)
    return replace(short, warmup_s=warmup, duration_s=warmup + max(least_measured_s, short.duration_s - short.warmup_s))


def _closest(result: SearchResult) -> Probe:
    """Where nothing meets the SLOs: what comes closest to them."""
    return result.trials[0].point.nearest


def _sweep(request: PlanRequest, demand: Demand, workers: Workers, best: Probe) -> list[Probe]:
    loads = [load_of(request.parsed_workload, s * _amount(best.load)) for s in SWEEP]
    options = horizon(best.metrics["e2e_ms"]["p90"] / 1e3, request, demand)
    tasks = [RunTask(deployment=best.deployment, load=load, options=options) for load in loads]
    return [merge(t.deployment, t.load, [run]) for t, run in zip(tasks, workers.run(tasks), strict=True)]


def _document(
    request: PlanRequest,
    screening: Screening,
    result: SearchResult,
    confirmed: list[Probe],
    best: Probe,
    sweep: list[Probe],
) -> dict:
    achieved = request.achieved_tps(best.metrics)
    reached = achieved >= request.target_tps
    feasible = bool(confirmed) and reached
    return {
        "feasible": feasible,
        "reason": None if feasible else _why_not(request, best, meets_slo=bool(confirmed), achieved=achieved),
        "target": {"tps": request.target_tps, "count": request.count, "per": request.per},
        "slo": _slo_document(request),
        "inputs": request.to_inputs(),
        "deployment": best.deployment.to_dict(),
        "load": load_document(best.load),
        "prediction": deployment_document(best),
        "margin_pct": 100 * (achieved / request.target_tps - 1),
        "binding": binding_of(request, screening, best),
        "runners_up": _runners_up(request, result, confirmed, best),
        "pareto": pareto_of(request, result.trials, [best, *sweep]),
        "history": history_of(request, result.trials),
        "memory": best.memory,
        "economics": economics_of(best.metrics, request.gpu_spec),
        "warnings": [*warnings_of(best), *error_warning(request, best)],
        "provenance": {
            **provenance_of(request.fitted.file, best, request.seed),
            "search": {
                "simulated": len(result.trials),
                "dropped_by_screening": result.screened,
                "layouts_offered": len(result.layouts),
                "refused": screening.refusals,
            },
        },
    }


def _slo_document(request: PlanRequest) -> dict:
    return {
        "p90_interactivity_tok_s_user": request.p90_interactivity_tok_s_user,
        "p90_ttft_ms": request.p90_ttft_ms,
    }


def _why_not(request: PlanRequest, best: Probe, *, meets_slo: bool, achieved: float) -> str:
    """The constraint that blocks an infeasible plan."""
    slack = request.slo.slack(best.metrics)
    if not meets_slo:
        name = min(slack, key=lambda k: slack[k])
        if slack[name] >= 1.0:
            return f"{name}: met in a short run at {_load_text(best)}, but not in every longer one with another seed"
        if name == "p90_ttft":
            got, want = f"{best.metrics['ttft_ms']['p90']:.0f} ms", f"{request.p90_ttft_ms:.0f} ms"
        else:
            got = f"{best.metrics['interactivity_tok_s_user']['p90']:.1f} tok/s/user"
            want = f"{request.p90_interactivity_tok_s_user:g} tok/s/user"
        return (
            f"{name}: infeasible at any replica count: even at the best of the loads tried "
            f"({_load_text(best)}) it is {got}, the objective is {want}"
        )
    name = "target_tps"
    if request.per == "deployment":
        return f"{name}: {request.gpus} GPUs reach {achieved:,.0f} of {request.target_tps:,.0f} {request.count} tok/s"
    return (
        f"{name}: the best layout reaches {achieved:,.0f} of {request.target_tps:,.0f} {request.count} tok/s/GPU "
        f"within the SLOs; more GPUs do not raise a rate per GPU"
    )


def _load_text(found: Probe) -> str:
    if found.load.concurrency is not None:
        return f"concurrency {found.load.concurrency}"
    return f"{found.load.rate_req_s:g} req/s"


def _nothing(request: PlanRequest, screening: Screening) -> dict:
    """Not one layout has memory: there is no deployment to show."""
    return {
        "feasible": False,
        "reason": f"memory: {screening.memory_refusal or 'no layout fits'}",
        "target": {"tps": request.target_tps, "count": request.count, "per": request.per},
        "slo": _slo_document(request),
        "inputs": request.to_inputs(),
        **dict.fromkeys(("deployment", "load", "prediction", "margin_pct", "binding", "economics")),
        "runners_up": [],
        "pareto": [],
        "history": [],
        "memory": [],
        "warnings": [],
        "provenance": {"calibration": request.calibration_name, "rackplan_version": __version__, "seed": request.seed},
    }


def _runners_up(request: PlanRequest, result: SearchResult, confirmed: list[Probe], best: Probe) -> list[dict]:
    """The next best deployments, one a layout, the best aggregated one always among them, and why not they."""
    layout_label = next((t.candidate.layout.label for t in result.trials if t.deployment == best.deployment), "")
    exact = {p.deployment: p for p in confirmed}
    shown: dict[str, dict] = {}
    aggregated: dict[str, dict] = {}
    for trial in result.trials:
        label = trial.candidate.layout.label
        if label == layout_label or label in shown:  # other knobs on the same layout tell little
            continue
        probe = exact.get(trial.deployment) or trial.point.nearest
        entry = {
            "label": trial.candidate.layout.label,
            "deployment": trial.deployment.to_dict(),
            "load": load_document(probe.load),
            "metrics": probe.metrics,
            "why_not": _behind(request, probe, best, trial) + ("" if trial.deployment in exact else SHORT),
        }
        if not trial.candidate.layout.disaggregated and not aggregated:
            aggregated[trial.candidate.layout.label] = entry
        elif len(shown) < 4:
            shown[trial.candidate.layout.label] = entry
    return [*shown.values(), *aggregated.values()]


def _behind(request: PlanRequest, probe: Probe, best: Probe, trial: Trial) -> str:
    if trial.score is None:
        slack = request.slo.slack(probe.metrics)
        return f"breaks {min(slack, key=lambda k: slack[k])} at every load tried"
    if request.per == "deployment" and probe.metrics["gpus"] != best.metrics["gpus"]:
        return f"{probe.metrics['gpus']} GPUs, {request.achieved_tps(probe.metrics):,.0f} tok/s"
    behind = 1 - request.achieved_tps(probe.metrics) / request.achieved_tps(best.metrics)
    if behind < 0:
        return f"{-behind:.1%} more throughput"
    return f"{behind:.1%} less throughput {'per GPU' if request.per == 'gpu' else ''}".rstrip()
