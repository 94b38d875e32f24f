"""Served runs replayed request by request, as a client recorded them, and compared metric by metric."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.records import METRICS, ServedRun
from rackplan.engine import Deployment
from rackplan.simulator.arrivals import Row, TraceWorkload
from rackplan.simulator.cost import Calibration
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import metrics_of
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import SimResult, simulate

_PREDICTED: Mapping[str, Callable[[dict[str, Any]], float]] = {
    "output throughput": lambda m: m["output_throughput_tok_s"],
    "mean TPOT": lambda m: m["tpot_ms"]["mean"],
    "median TPOT": lambda m: m["tpot_ms"]["p50"],
    "P90 TPOT": lambda m: m["tpot_ms"]["p90"],
    "P99 TPOT": lambda m: m["tpot_ms"]["p99"],
    "mean TTFT": lambda m: m["ttft_ms"]["mean"],
    "median TTFT": lambda m: m["ttft_ms"]["p50"],
    "P90 TTFT": lambda m: m["ttft_ms"]["p90"],
    "P99 TTFT": lambda m: m["ttft_ms"]["p99"],
}

DRAWS = 8
"""Replays of a run whose launches are drawn: the mean of a median TTFT over so many is good to 2 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMetric:
    """One number of a served run and what the replay makes of it."""

    name: str
    unit: str
    measured: float
    predicted: float


def replay(run: ServedRun, deployment: Deployment, calibration: Calibration, load: Load, seed: int = 0) -> SimResult:
    """The run's requests under a load, cached prefixes as measured where they were."""
    columns = (run.start_s, run.input_tokens, run.output_tokens)
    times, inputs, outputs = (c.tolist() for c in columns)
    cached = [None] * len(times) if run.cached_tokens is None else run.cached_tokens.tolist()
    rows = tuple(
        Row(time_s=t, input_tokens=i, output_tokens=o, cached_tokens=c)
        for t, i, o, c in zip(times, inputs, outputs, cached, strict=True)
    )
    workload = TraceWorkload(name="served run", rows=rows)
    return simulate(deployment, workload, load, calibration, RunOptions(duration_s=float("inf"), seed=seed))


def predicted_metrics(run: ServedRun, deployment: Deployment, calibration: FittedCalibration) -> dict[str, float]:
    """By name, all of METRICS, of the run's replay: where launches are drawn, the mean of DRAWS replays.

    A closed loop is replayed as one: the times at which its requests were sent say how fast the engine was. Others
    are sent when they were.
    Raises InputError where the deployment is not the calibration's."""
    seeds = range(DRAWS if calibration.coefficients.launch_quantiles else 1)
    load = Load(concurrency=run.concurrency)
    runs = [metrics_of(replay(run, deployment, calibration, load, seed)) for seed in seeds]
    return {name: float(np.mean([of(m) for m in runs])) for name, of in _PREDICTED.items()}


def replay_served(run: ServedRun, deployment: Deployment, calibration: FittedCalibration) -> list[ServedMetric]:
    """The metrics that the client was asked for, in METRICS' order, against those of the replay.

    Raises InputError as `predicted_metrics` does."""
    predicted = predicted_metrics(run, deployment, calibration)
    return [
        ServedMetric(name=name, unit=unit, measured=run.metrics[name], predicted=predicted[name])
        for name, unit in METRICS.items()
        if name in run.metrics
    ]


def ttft_beyond_ms(run: ServedRun, deployment: Deployment, calibration: Calibration) -> np.ndarray:
    """TTFT as measured less that of requests sent at the same times, (requests,) ms."""
    found = replay(run, deployment, calibration, Load())
    order = np.argsort(found.request_id)
    predicted_ms = (found.first_token_ns - found.arrival_ns)[order] / 1e6
    return run.ttft_s[found.request_id[order]] * 1e3 - predicted_ms
