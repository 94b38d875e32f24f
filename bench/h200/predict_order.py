"""What rackplan says of order.py's plans before anything is measured: a table in Markdown.
Run: `predict_order.py --gpus N [--calibration NAME]`; one row a deployment and rate.

`vllm bench serve` draws its arrivals from NumPy's global generator and stretches them to prompts / rate seconds, so a
seed's arrivals are known beforehand. Turns have the same, so the first tells all.
"""

import argparse

import numpy as np
from order import PLANS, order_loads, ordered
from parts import INPUT_TOKENS, OUTPUT_TOKENS, Load

from rackplan.calibration.library import load_calibration
from rackplan.calibration.records import ServedRun
from rackplan.calibration.serving import predicted_metrics

SHOWN = {"output throughput": 0, "mean TPOT": 2, "median TTFT": 1, "P90 TTFT": 1}
"""Metrics and their decimals."""


def arrivals(load: Load) -> ServedRun:
    """The load's requests, nothing measured."""
    state = np.random.RandomState(load.seed)
    times_s = np.cumsum(state.gamma(1.0, 1 / load.rate, load.prompts))
    times_s *= load.prompts / load.rate / times_s[-1]
    same = np.ones(load.prompts, dtype=int)
    none = np.empty(0)
    return ServedRun(
        start_s=times_s,
        ttft_s=none,
        end_s=none,
        input_tokens=same * INPUT_TOKENS,
        output_tokens=same * OUTPUT_TOKENS,
        cached_tokens=None,
        token_s=[],
        metrics={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--calibration", default="h200-v2-lite")
    args = parser.parse_args()
    calibration = load_calibration(args.calibration)
    print("| load, req/s | deployment |", " | ".join(SHOWN), "|\n|---|---|" + "---|" * len(SHOWN))
    rows = []
    for plan in PLANS:
        at = {o.port: o for o in ordered(plan, args.gpus)}
        for load in order_loads(args.gpus)[plan]:
            if load.name.endswith("_1"):
                found = predicted_metrics(arrivals(load), at[load.port].deployment, calibration)
                rows.append((load.rate, at[load.port].name, [f"{found[m]:,.{d}f}" for m, d in SHOWN.items()]))
    for rate, name, cells in sorted(rows, key=lambda row: row[0]):
        print(f"| {rate:g} | {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
