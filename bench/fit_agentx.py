"""Find `rackplan.simulator.agentx.FIT`: context windows, compaction and first prompts behind the published lengths.

Usage: python bench/fit_agentx.py [SESSIONS]. Takes about a minute; prints the fit and what it gives against the
published statistics.
The draws of one seed are kept while the fit moves, so the loss is smooth enough for Nelder-Mead.
"""

import sys
from dataclasses import astuple, fields
from math import log

import numpy as np
from scipy.optimize import minimize

from rackplan.simulator.agentx import FIT, GrowthFit, generate_trees, published, session_statistics

NAMES = [f.name for f in fields(GrowthFit)]
EVALUATIONS = 130
START = np.array(astuple(FIT))


def targets(stats: dict) -> dict[str, float]:
    """What the fit answers for: input lengths, and the mean input of a request."""
    lengths = {f"{kind}.{q}": v for kind in ("main_isl", "sub_isl") for q, v in stats[kind].items()}
    mean_input = stats["input_tokens"] / stats["requests"]
    return lengths | {"all_isl_p50": stats["all_isl_p50"], "mean_input": mean_input}


def fit_at(scale: np.ndarray) -> GrowthFit:
    values = dict(zip(NAMES, (START * np.exp(scale)).tolist(), strict=True))
    values["lead_share"] = min(values["lead_share"], 1.0)
    values["keep_high"] = min(max(values["keep_high"], values["keep_low"]), 0.9)
    values["keep_low"] = min(values["keep_low"], values["keep_high"])
    return GrowthFit(**values)


def main(sessions: int) -> None:
    want = targets(published())

    def loss(scale: np.ndarray) -> float:
        got = targets(session_statistics(generate_trees(np.random.default_rng(11), sessions, fit_at(scale))))
        return sum(log(got[k] / want[k]) ** 2 for k in want)

    corners = np.vstack([np.zeros(len(NAMES)), 0.2 * np.eye(len(NAMES))])
    best = minimize(loss, corners[0], method="Nelder-Mead", options={"maxfev": EVALUATIONS, "initial_simplex": corners})
    fit = fit_at(best.x)
    print(fit)
    got = targets(session_statistics(generate_trees(np.random.default_rng(12), 2 * sessions, fit)))
    for name, value in want.items():
        print(f"{name:14s} published {value:10.0f}  generated {got[name]:10.0f}  {got[name] / value - 1:+.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
