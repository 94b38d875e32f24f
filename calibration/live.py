"""A live engine's load, as its metrics tell it, and the same load in the simulator."""

from dataclasses import dataclass

import numpy as np

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.readers.prometheus import EngineMetrics, Histogram
from rackplan.engine import Deployment, InputError
from rackplan.simulator.arrivals import Row, TraceWorkload
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import Measured
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

LEAST_REQUESTS = 30
MOST_REQUESTS = 1500
SEEDS = 3
METRICS = ("TPOT", "prefill", "front end", "queue", "TTFT")
"""What is compared, mean ms. vLLM counts a request's queue and prefill in the engine and its TTFT in the API server, so
the rest of TTFT is the front end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a load made: means in ms by metric, and their standard errors."""

    mean_ms: dict[str, float]
    error_ms: dict[str, float]


def rate_req_s(window: EngineMetrics, seconds: float) -> float:
    """Requests that ended per second. Raises InputError where they are too few to tell anything."""
    ended = window.histograms["E2E"].count
    if ended < LEAST_REQUESTS:
        raise InputError(f"--over {seconds:g}s: {ended:.0f} requests ended; at least {LEAST_REQUESTS} tell a drift")
    return ended / seconds


def observed(window: EngineMetrics) -> Observed:
    """From the engine's histograms."""
    h = window.histograms
    mean = {k: h[k].mean * 1e3 for k in ("TTFT", "TPOT", "queue", "prefill")}
    error = {k: _standard_error(h[k]) * 1e3 for k in mean}
    mean["front end"] = mean["TTFT"] - mean["queue"] - mean["prefill"]
    error["front end"] = 0.0  # the same requests' times, so their spread cancels
    return Observed(mean_ms=mean, error_ms=error)


def _standard_error(histogram: Histogram) -> float:
    """Of the mean, each observation at the middle of its bucket and the last bucket at its bound."""
    bounds = histogram.bounds
    low = np.concatenate([[0.0], bounds[:-1]])
    middle = np.where(np.isinf(bounds), low, (low + np.where(np.isinf(bounds), 0, bounds)) / 2)
    weight = histogram.counts / histogram.count
    spread = float((weight * middle**2).sum() - (weight * middle).sum() ** 2)
    return float(np.sqrt(max(0.0, spread) / histogram.count))


def workload_of(window: EngineMetrics, seconds: float, seed: int) -> TraceWorkload:
    """Arrivals as random as Poisson's at exactly the observed rate; lengths from the histograms, to their means."""
    rate = rate_req_s(window, seconds)
    rng = np.random.default_rng(seed)
    count = int(min(MOST_REQUESTS, max(LEAST_REQUESTS * 10, window.histograms["E2E"].count)))
    starts = np.cumsum(rng.exponential(1 / rate, count))
    starts *= count / rate / starts[-1]
    inputs, outputs = (_lengths(window.histograms[k], count, rng) for k in ("input", "output"))
    rows = tuple(
        Row(time_s=t, input_tokens=i, output_tokens=o)
        for t, i, o in zip(starts.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
    )
    return TraceWorkload(name="live load", rows=rows)


def _lengths(histogram: Histogram, count: int, rng: np.random.Generator) -> np.ndarray:
    bounds = np.where(np.isinf(histogram.bounds), np.append(0.0, histogram.bounds[:-1]), histogram.bounds)
    bucket = rng.choice(len(bounds), size=count, p=histogram.counts / histogram.count)
    low = np.append(0.0, bounds[:-1])
    drawn = low[bucket] + (bounds[bucket] - low[bucket]) * rng.random(count)
    expected = float((histogram.counts * (low + bounds) / 2).sum() / histogram.count)
    scale = histogram.mean / expected if expected else 1.0
    return np.maximum(1, np.rint(drawn * scale)).astype(int)


def expected(calibration: FittedCalibration, deployment: Deployment, window: EngineMetrics, seconds: float) -> Observed:
    """The same of the simulator, over SEEDS independent runs of the load."""
    runs: list[dict[str, float]] = []
    for seed in range(SEEDS):
        workload = workload_of(window, seconds, seed)
        options = RunOptions(duration_s=float("inf"), seed=seed)
        m = Measured(simulate(deployment, workload, Load(), calibration, options))
        queue = float(m.queue_ms.mean()) - calibration.frontend_ms
        runs.append(
            {
                "TTFT": float(m.ttft_ms.mean()),
                "TPOT": float(m.tpot_ms.mean()),
                "queue": queue,
                "prefill": float((m.ttft_ms - m.queue_ms).mean()),
                "front end": calibration.frontend_ms,
            }
        )
    values = {k: np.array([r[k] for r in runs]) for k in METRICS}
    return Observed(
        mean_ms={k: float(v.mean()) for k, v in values.items()},
        error_ms={k: float(v.std(ddof=1) / np.sqrt(SEEDS)) for k, v in values.items()},
    )
