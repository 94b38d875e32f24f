"""The Pareto front of throughput per GPU against interactivity, and the search's history."""

from rackplan.tuner.probe import Probe
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.search import Trial


def pareto_of(request: PlanRequest, trials: list[Trial], answer: list[Probe]) -> list[dict]:
    """Points that no other beats in total tok/s/GPU and in P90 tok/s/user at once, fastest users first.

    `answer`: the chosen deployment's own probes; every probe of the search counts too."""
    points = [_point(request, p, _label(p)) for p in answer]
    points += [_point(request, p, t.candidate.layout.label) for t in trials for p in t.point.probes]
    points = [p for p in points if p["tok_s_per_user"] > 0]
    points.sort(key=lambda p: (-p["tok_s_per_user"], -p["tok_s_per_gpu"]))
    front: list[dict] = []
    for point in points:
        if not front or point["tok_s_per_gpu"] > front[-1]["tok_s_per_gpu"]:
            front.append(point)
    return front


def _label(probe: Probe) -> str:
    pools = probe.deployment.pools
    return " + ".join(f"{p.instances} x DEP{p.dep} {p.role}" for p in pools)


def _point(request: PlanRequest, probe: Probe, label: str) -> dict:
    return {
        "label": label,
        "tok_s_per_gpu": probe.metrics["throughput_total_tok_s_per_gpu"],
        "tok_s_per_user": probe.metrics["interactivity_tok_s_user"]["p90"],
        "gpus": probe.deployment.gpus,
        "concurrency": probe.load.concurrency,
        "rate_req_s": probe.load.rate_req_s,
        "meets_slo": request.slo.meets(probe.metrics),
        "disaggregated": probe.deployment.disaggregated,
    }


def history_of(request: PlanRequest, trials: list[Trial]) -> list[dict]:
    """One entry a simulated candidate, in the order of the search, at its operating point or nearest to it."""
    return [
        {
            "trial": t.number,
            "label": t.candidate.layout.label,
            "tok_s_per_gpu": t.point.nearest.metrics["throughput_total_tok_s_per_gpu"],
            "p90_interactivity_tok_s_user": t.point.nearest.metrics["interactivity_tok_s_user"]["p90"],
            "gpus": t.deployment.gpus,
            "meets": t.score is not None,
        }
        for t in sorted(trials, key=lambda t: t.number)
    ]
