"""What holds a plan back, and what the next GPU buys."""

from rackplan.engine import Deployment, Pool
from rackplan.tuner.capacity import estimate
from rackplan.tuner.probe import Probe
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Screening

TIGHT = 1.08
"""An SLO with less slack than this is what binds."""
BUSY = 0.9
LEAST_GAIN = 0.005
STRANDED = 0.1


def binding_of(request: PlanRequest, screening: Screening, found: Probe) -> dict[str, str]:
    """{"resource", "why", "next_gpu"} of a plan at its operating point."""
    slack = request.slo.slack(found.metrics)
    tightest = min(slack, key=lambda k: slack[k])
    resource, why = _resource(found, tightest, slack[tightest])
    return {"resource": resource, "why": why, "next_gpu": next_gpu(request, screening, found)}


def _resource(found: Probe, tightest: str, slack: float) -> tuple[str, str]:
    decoding = next((p for p in found.pools if p["role"] != "prefill"), found.pools[0])
    lost = {c: s for c, s in decoding["gpu_time_share"].items() if c not in ("compute", "idle") and s > 0.02}
    costs = ", ".join(f"{c.replace('_', ' ')} {s:.0%}" for c, s in sorted(lost.items(), key=lambda x: -x[1])[:2])
    tail = f" (of its GPU time: {costs})" if costs else ""
    if slack <= TIGHT and tightest == "p90_interactivity":
        role = decoding["role"]
        where = "at its objective; more load makes" if slack >= 1.0 else "short of its objective: so long are"
        longer = " longer" if slack >= 1.0 else " at this load"
        return f"{role} step time", f"P90 interactivity is {where} {role} steps{longer}{tail}"
    full = next((p for p in found.pools if p["gpu_time_share"]["kv_full"] > 0.02), None)
    if full:
        share = full["gpu_time_share"]["kv_full"]
        return f"{full['role']} KV cache", f"requests wait for KV in {share:.0%} of its time"
    busiest = max(found.pools, key=lambda p: p["utilization"])
    if busiest["role"] == "prefill" and (busiest["utilization"] > BUSY or tightest == "p90_ttft"):
        return "prefill compute", f"the prefill pool is busy {busiest['utilization']:.0%} of the time; TTFT grows next"
    if slack <= TIGHT:
        return "queueing before prefill", "P90 TTFT is at its objective"
    return "offered load", "no SLO is tight at the highest load that was tried"


def grown(request: PlanRequest, screening: Screening, deployment: Deployment) -> tuple[float, Pool, Deployment] | None:
    """(gain of rate, pool, deployment): one more instance of the pool that gains most per GPU by the closed form, rates
    of pools in series. None where no single instance raises the rate."""

    def rate_of(d: Deployment) -> float:
        return estimate(d, screening.demand, request.fitted, request.slo, screening.corrections).rate_req_s

    now, gains = rate_of(deployment), []
    for i, pool in enumerate(deployment.pools):
        more = pool.model_copy(update={"instances": pool.instances + 1})
        pools = (*deployment.pools[:i], more, *deployment.pools[i + 1 :])
        then = deployment.model_copy(update={"pools": pools})
        gains.append((rate_of(then) / now - 1 if now else 0.0, pool, then))
    most = max(gains, key=lambda g: g[0] / g[1].gpus_per_instance)
    return most if most[0] >= LEAST_GAIN else None


def next_gpu(request: PlanRequest, screening: Screening, found: Probe) -> str:
    """What one more instance would add, by the closed form."""
    more = grown(request, screening, found.deployment)
    if more is None:
        return "no single further instance raises the rate; both pools would have to grow"
    gain, pool, then = more
    per_gpu = (1 + gain) * found.deployment.gpus / then.gpus - 1
    return (
        f"one more {pool.role} instance ({pool.gpus_per_instance} GPUs): about {gain:+.1%} throughput, "
        f"{per_gpu:+.1%} per GPU (closed form)"
    )


def warnings_of(found: Probe) -> list[str]:
    """What a reader should know before using this deployment at this load."""
    notes = []
    for pool in found.pools:
        if pool["utilization"] < STRANDED and pool["gpus"]:
            notes.append(
                f"{pool['role']}: {pool['gpus']} GPUs are busy {pool['utilization']:.1%} of the time; fewer instances "
                f"or an aggregated deployment would strand less"
            )
        if pool["preemptions"]:
            notes.append(f"{pool['role']}: {pool['preemptions']} requests were preempted for want of KV")
    notes += seat_warning(found)
    rejected = found.metrics["requests"]["rejected"]
    if rejected:
        notes.append(f"{rejected:g} requests are longer than the context limit or a rank's KV pool and were rejected")
    if failed := found.metrics["requests"].get("failed"):
        notes.append(f"{failed:g} requests failed, whose answers were under way on an instance that was lost")
    return notes


def seat_warning(found: Probe) -> list[str]:
    """Caps are per rank: fewer ranks seat fewer requests."""
    pools = [p for p in found.deployment.pools if p.role != "prefill"]
    seats = sum(p.instances * p.dep * p.max_num_seqs for p in pools)
    role = pools[0].role
    metrics = found.metrics
    # Where prefill is apart, a request takes a decode seat after its first token alone.
    seated_ms = metrics["e2e_ms"]["mean"] - (metrics["ttft_ms"]["mean"] if found.deployment.disaggregated else 0.0)
    in_flight = metrics["request_throughput_req_s"] * metrics["e2e_ms"]["mean"] / 1e3
    seated = metrics["request_throughput_req_s"] * seated_ms / 1e3
    ranks = seats // pools[0].max_num_seqs
    clients = found.load.concurrency or 0
    asked = clients if in_flight > 0.9 * clients > 0 else seated  # clients that never pause are all there at once
    if asked <= seats:
        return []
    return [
        f"{role}: {asked:.0f} requests at once, but max_num_seqs={pools[0].max_num_seqs} seats {seats} on {ranks} "
        f"ranks; the rest queue: raise {role}.max_num_seqs to {-(-round(asked) // ranks)}"
    ]


def error_warning(request: PlanRequest, found: Probe) -> list[str]:
    """Where the calibration's own error could break the interactivity objective that the simulation meets."""
    errors = request.fitted.file.errors
    # TPOT of whole runs where some were replayed: launches and the front end are in it, in a step's time they are not.
    what, key = ("served TPOT is", "served_tpot") if "served_tpot" in errors else ("decode steps are", "decode")
    error = errors[key].holdout_p90_pct / 100
    reached = found.metrics["interactivity_tok_s_user"]["p90"]
    wanted = request.p90_interactivity_tok_s_user
    lowest = reached * (1 - error)
    if not reached or lowest >= wanted or reached < wanted:
        return []
    return [
        f"the calibration's {what} off by up to {error:.0%} (hold-out P90): P90 interactivity may be as low "
        f"as {lowest:.0f} tok/s/user on the rack; to be safe plan with --p90-interactivity {wanted / (1 - error):.0f}"
    ]
