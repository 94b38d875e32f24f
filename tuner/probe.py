"""One deployment at one load, simulated: what the search, the plan and the what-if compare."""

from dataclasses import dataclass, replace
from typing import Any

from rackplan.engine import Deployment
from rackplan.simulator.cost import Calibration
from rackplan.simulator.load import Load, Workload
from rackplan.simulator.metrics import (
    batch_intervals,
    combine,
    gpu_time_share,
    latency_curves,
    metrics_of,
    pool_reports,
    utilization,
)
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Means over replications and their 95 % intervals. `runs`: each replication's metrics; `memory`: per pool."""

    deployment: Deployment
    load: Load
    metrics: dict
    ci95: dict
    runs: list[dict]
    gpu_time_share: dict[str, float]
    utilization: dict[str, float]
    pools: list[dict]
    latency_curves: dict[str, list[list[float]]]
    memory: list[dict]


def run_once(
    deployment: Deployment,
    workload: Workload,
    load: Load,
    calibration: Calibration,
    options: RunOptions,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """One replication, as plain data; the only one (`alone`) has intervals of its own, from batch means. Raises what
    `simulate` raises."""
    result = simulate(deployment, workload, load, calibration, options)
    metrics = metrics_of(result)
    return {
        "metrics": metrics,
        "ci95": batch_intervals(result, metrics) if alone else None,
        "gpu_time_share": gpu_time_share(result),
        "pools": pool_reports(result),
        "latency_curves": latency_curves(result),
        "memory": [m.to_dict() for m in result.memory],
    }


def merge(deployment: Deployment, load: Load, runs: list[dict[str, Any]]) -> Probe:
    """Replications of one deployment at one load as one probe; the curves are the first's."""
    metrics, ci95 = combine([r["metrics"] for r in runs])
    ci95 = runs[0]["ci95"] or ci95
    pools = [_mean_report([r["pools"][i] for r in runs]) for i in range(len(deployment.pools))]
    return Probe(
        deployment=deployment,
        load=load,
        metrics=metrics,
        ci95=ci95,
        runs=[r["metrics"] for r in runs],
        gpu_time_share=combine([r["gpu_time_share"] for r in runs])[0],
        utilization=utilization(pools),
        pools=pools,
        latency_curves=runs[0]["latency_curves"],
        memory=runs[0]["memory"],
    )


def probe(
    deployment: Deployment,
    workload: Workload,
    load: Load,
    calibration: Calibration,
    options: RunOptions,
    *,
    replications: int = 1,
) -> Probe:
    """Simulate with seeds options.seed, +1, …; raises what `simulate` raises."""
    seeded = [replace(options, seed=options.seed + i) for i in range(replications)]
    alone = replications == 1
    return merge(deployment, load, [run_once(deployment, workload, load, calibration, o, alone=alone) for o in seeded])


def _mean_report(reports: list[dict]) -> dict:
    """One pool's reports over replications: means, the most, and the sum where counted."""
    return {
        **reports[0],
        "utilization": sum(r["utilization"] for r in reports) / len(reports),
        "gpu_time_share": combine([r["gpu_time_share"] for r in reports])[0],
        "most_admitted_in_a_step": max(r["most_admitted_in_a_step"] for r in reports),
        "preemptions": sum(r["preemptions"] for r in reports),
    }
