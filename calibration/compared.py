"""Rows of measured against predicted, and their summaries: what validate, diff and update print."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def row(id: str, what: str, unit: str, measured: float, predicted: float, role: str, metric: str = "") -> Row:
    """One comparison; the error is signed, (predicted / measured - 1) in %. `metric`: what it is grouped by."""
    return {
        "id": id,
        "what": what,
        "metric": metric or what,
        "unit": unit,
        "measured": measured,
        "predicted": predicted,
        "error_pct": (predicted / measured - 1) * 100,
        "role": role,
    }


def validation(name: str, rows: Sequence[Row], rank_order: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of a validation: {"name", "rows", "by_metric", "summary", "rank_order"}. Its summary also counts the
    pairs of deployments over all of `rank_order` (rank_orders' entries), where there are any."""
    ranked = {f"ranked_{what}": sum(o[what] for o in rank_order) for what in ("pairs", "agree", "disagree")}
    return {
        "name": name,
        "rows": rows,
        "by_metric": by_metric(rows),
        "summary": summary(rows) | (ranked if rank_order else {}),
        "rank_order": rank_order,
    }


def summary(rows: Sequence[Row]) -> dict[str, float | int]:
    """Number, median and worst magnitude of the errors of fit and check rows."""
    found: dict[str, float | int] = {}
    for role in ("fit", "check"):
        errors = [abs(r["error_pct"]) for r in rows if r["role"] == role]
        found[f"{role}_rows"] = len(errors)
        if errors:
            found[f"{role}_median_abs_pct"] = float(np.median(errors))
            found[f"{role}_worst_abs_pct"] = float(max(errors))
    return found


def by_metric(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """[{"metric", "rows", "p50_pct", "p50_abs_pct", "worst_pct", "worst_id"}] in the rows' order; errors signed but for
    the P50 of their magnitudes."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for r in rows:
        groups[r["metric"]].append(r)
    found = []
    for metric, mine in groups.items():
        errors = np.array([r["error_pct"] for r in mine])
        worst = int(np.argmax(np.abs(errors)))
        found.append(
            {
                "metric": metric,
                "rows": len(mine),
                "p50_pct": float(np.median(errors)),
                "p50_abs_pct": float(np.median(np.abs(errors))),
                "worst_pct": float(errors[worst]),
                "worst_id": mine[worst]["id"],
            }
        )
    return found
