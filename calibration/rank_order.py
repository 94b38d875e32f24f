"""Does the simulator rank deployments as the engine does? Served runs of several deployments under the same load, in
measured and in predicted order.

A choice between deployments needs the order alone, and errors that all of them share leave it as it is. A pair that
the measurement's own repeats cannot tell apart has no measured order, so no prediction disagrees with it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import kendalltau
from scipy.stats import t as student

from rackplan.calibration.compared import Row
from rackplan.calibration.readers.profile_folder import ProfileRun
from rackplan.calibration.records import METRICS
from rackplan.engine import Deployment

MORE_IS_BETTER = {"mean TPOT": False, "median TTFT": False, "P90 TTFT": False, "output throughput": True}
"""The metrics that are ranked by."""
CONFIDENCE = 0.9
"""At which the repeats must tell a pair apart, two-sided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRun:
    """One run of a deployment under a load, both by the names under which they are shown. `metrics`: (measured,
    predicted) by metric."""

    load: str
    deployment: str
    metrics: Mapping[str, tuple[float, float]]


def rank_orders(runs: Sequence[RankedRun]) -> list[dict[str, Any]]:
    """One entry a load and metric of MORE_IS_BETTER that two or more deployments have: {"load", "metric", "unit",
    "deployments", "pairs", "agree", "disagree", "within_spread", "spread_pct", "kendall_tau"}.

    `deployments`: {"deployment", "runs", "measured", "predicted", "predicted_rank"}, the best measured first, values
    the means of their runs. `within_spread`: pairs that the repeats cannot tell apart. `spread_pct`: standard deviation
    of one run, from the repeats of all deployments; None where none was repeated, and then only equals are not told
    apart.
    `kendall_tau`: tau-b over all pairs, None where all are equal. Metrics with a value of 0 are left out.
    """
    loads: dict[str, list[RankedRun]] = defaultdict(list)
    for run in runs:
        loads[run.load].append(run)
    found = []
    for load, mine in loads.items():
        for metric in MORE_IS_BETTER:
            values: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for run in mine:
                if metric in run.metrics:
                    values[run.deployment].append(run.metrics[metric])
            if len(values) > 1 and all(v > 0 for pairs in values.values() for pair in pairs for v in pair):
                found.append({"load": load, "metric": metric, "unit": METRICS[metric]} | _order(metric, values))
    return found


def _order(metric: str, values: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    sign = -1 if MORE_IS_BETTER[metric] else 1
    names = list(values)
    measured, predicted = np.array([np.mean(values[n], axis=0) for n in names]).T
    best = np.argsort(sign * measured, kind="stable")
    rank = np.empty(len(names), dtype=int)
    rank[np.argsort(sign * predicted, kind="stable")] = np.arange(1, len(names) + 1)
    tau = float(kendalltau(measured, predicted).statistic)
    deployments = [
        {
            "deployment": names[i],
            "runs": len(values[names[i]]),
            "measured": float(measured[i]),
            "predicted": float(predicted[i]),
            "predicted_rank": int(rank[i]),
        }
        for i in best
    ]
    spread, freedom = _spread([np.log([m for m, _ in values[n]]) for n in names])
    counts = _count(measured, predicted, [len(values[n]) for n in names], spread, freedom)
    return {"deployments": deployments, **counts} | {
        "spread_pct": 100 * spread if freedom else None,
        "kendall_tau": tau if np.isfinite(tau) else None,
    }


def _spread(logs: Sequence[np.ndarray]) -> tuple[float, int]:
    """(standard deviation of one run's logarithm about its deployment's mean, degrees of freedom)."""
    freedom = sum(len(x) - 1 for x in logs)
    squares = sum(float(((x - x.mean()) ** 2).sum()) for x in logs)
    return float(np.sqrt(squares / freedom)) if freedom else 0.0, freedom


def _count(
    measured: np.ndarray, predicted: np.ndarray, runs: Sequence[int], spread: float, freedom: int
) -> dict[str, int]:
    """Pairs by how prediction and measurement compare; a difference of means is told apart by Student's t."""
    times = float(student.ppf((1 + CONFIDENCE) / 2, freedom)) if freedom else 0.0
    counts = {"pairs": 0, "agree": 0, "disagree": 0, "within_spread": 0}
    for i, j in combinations(range(len(runs)), 2):
        apart = np.log(measured[i] / measured[j])
        least = times * spread * np.sqrt(1 / runs[i] + 1 / runs[j])
        alike = apart * np.log(predicted[i] / predicted[j]) > 0
        counts["within_spread" if abs(apart) <= least else "agree" if alike else "disagree"] += 1
        counts["pairs"] += 1
    return counts


def deployment_label(deployment: Deployment) -> str:
    """Pools, widths and token budgets in one phrase."""
    pools = [f"{p.instances} x {p.role} DEP{p.dep}" + (f" TP{p.tp}" if p.tp > 1 else "") for p in deployment.pools]
    budgets = dict.fromkeys(f"{p.max_num_batched_tokens:,}" for p in deployment.pools)
    return f"{' + '.join(pools)}, {' / '.join(budgets)} tokens"


def ranked_runs(served: Sequence[tuple[ProfileRun, Sequence[Row]]]) -> list[RankedRun]:
    """Runs of profiles whose load is stated, each with its rows of measured against predicted. Unlike deployments
    never share a label."""
    labels: dict[Deployment, str] = {}
    for run, _ in served:
        if run.deployment not in labels:
            label = deployment_label(run.deployment)
            labels[run.deployment] = f"{label} ({run.name})" if label in labels.values() else label
    return [
        RankedRun(
            load=run.load,
            deployment=labels[run.deployment],
            metrics={r["metric"]: (r["measured"], r["predicted"]) for r in mine},
        )
        for run, mine in served
        if run.load
    ]
