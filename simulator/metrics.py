"""What a run says: the serving metrics, GPU time by cause, and confidence intervals over replications.

TTFT: arrival to first token. TPOT: (E2E - TTFT) / (output - 1), per request. ITL: gaps between chunks, pooled.
E2E: arrival to last token. Interactivity: 1000 / TPOT in ms, tok/s/user; its p90 is what 90 % of requests reach.
Throughput is over all GPUs of the deployment: total = cached input + new input + output.
"""

from collections.abc import Callable

import numpy as np

from rackplan.simulator.simulate import SimResult
from rackplan.simulator.step import CAUSES

PERCENTILES = (50, 90, 99)
BATCHES, BATCH_REQUESTS = 10, 20
"""Parts of a run for batch means, and the requests that each needs."""
CURVE_QUANTILES = (*np.linspace(0.02, 0.98, 25), 0.99, 0.999)


class Measured:
    """The requests of a run that count, in ms. Arrays are (requests,); TPOT is of those with two tokens or more."""

    def __init__(self, result: SimResult, ends_ns: tuple[int, int] | None = None) -> None:
        """`ends_ns`: of those that count, only the requests that end in [from, to)."""
        start, end = result.measured_from_ns, result.measured_to_ns
        # A drained run counts by arrival, so that slow requests are not left out; a cut one by end, as a meter would.
        keep = result.arrival_ns >= start if result.drained else result.finish_ns >= start
        if ends_ns:
            keep = keep & (result.finish_ns >= ends_ns[0]) & (result.finish_ns < ends_ns[1])
        arrival, first, finish = result.arrival_ns[keep], result.first_token_ns[keep], result.finish_ns[keep]
        self.input_tokens, self.cached_tokens = result.input_tokens[keep], result.cached_tokens[keep]
        self.output_tokens = result.output_tokens[keep]
        self.request_id = result.request_id[keep]
        self.ttft_ms = (first - arrival) / 1e6
        self.e2e_ms = (finish - arrival) / 1e6
        self.queue_ms = (result.scheduled_ns[keep] - arrival) / 1e6
        many = self.output_tokens > 1
        self.tpot_ms = (finish - first)[many] / 1e6 / (self.output_tokens[many] - 1)
        if result.drained and len(arrival):
            start, end = int(arrival.min()), int(finish.max())
        self.from_ns, self.to_ns = start, end = ends_ns or (start, end)
        self.span_s = max(1, end - start) / 1e9
        gaps = [g for pool in result.pools for g in pool.token_gaps]
        self.itl_ms = np.concatenate([np.frombuffer(g.walls_ns, np.int64) for g in gaps]) / 1e6
        self.itl_weight = np.concatenate([np.frombuffer(g.sequences, np.int64) for g in gaps])


def metrics_of(result: SimResult, ends_ns: tuple[int, int] | None = None) -> dict:
    """The contract's `metrics` of one run; with `ends_ns`, of its requests that end in [from, to)."""
    m = Measured(result, ends_ns)
    gpus = result.deployment.gpus
    inputs, outputs, cached = int(m.input_tokens.sum()), int(m.output_tokens.sum()), int(m.cached_tokens.sum())
    return {
        "throughput_total_tok_s_per_gpu": (inputs + outputs) / m.span_s / gpus,
        "throughput_output_tok_s_per_gpu": outputs / m.span_s / gpus,
        "throughput_new_input_tok_s_per_gpu": (inputs - cached) / m.span_s / gpus,
        "total_throughput_tok_s": (inputs + outputs) / m.span_s,
        "output_throughput_tok_s": outputs / m.span_s,
        "request_throughput_req_s": len(m.e2e_ms) / m.span_s,
        "gpus": gpus,
        "requests": {
            "measured": len(m.e2e_ms),
            "submitted": result.submitted,
            "finished": len(result.finish_ns),
            "rejected": result.rejected,
            "unfinished": result.unfinished,
            **({"failed": result.failed} if result.failures else {}),
        },
        "prefix_hit_share": cached / inputs if inputs else 0.0,
        "ttft_ms": _spread(m.ttft_ms),
        "tpot_ms": _spread(m.tpot_ms),
        "itl_ms": _weighted_spread(m.itl_ms, m.itl_weight),
        "e2e_ms": _spread(m.e2e_ms),
        "queue_ms": _spread(m.queue_ms),
        "interactivity_tok_s_user": _interactivity(m.tpot_ms),
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    p50, p90, p99 = percentiles(values)
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}


def percentiles(values: np.ndarray) -> list[float]:
    """PERCENTILES of `values` (requests,), not empty, to the bit as np.percentile gives them: that one imports
    numpy.ma, which takes as long as a thousand requests."""
    last = len(values) - 1
    places = [last * (percent / 100) for percent in PERCENTILES]
    below = [int(place) for place in places]
    above = [min(i + 1, last) for i in below]
    ordered = np.partition(values, sorted({*below, *above}))
    found = []
    for place, i, j in zip(places, below, above, strict=True):
        low, high, share = float(ordered[i]), float(ordered[j]), place - i
        found.append(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))
    return found


def _weighted_spread(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    if not len(values):
        return _spread(values)
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    p50, p90, p99 = (float(values[order][np.searchsorted(reached, q / 100)]) for q in PERCENTILES)
    return {"mean": float(np.average(values, weights=weights)), "p50": p50, "p90": p90, "p99": p99}


def _interactivity(tpot_ms: np.ndarray) -> dict[str, float]:
    """1000 / TPOT. Requests whose tokens all came in one chunk have no gap and count in percentiles alone."""
    some = tpot_ms[tpot_ms > 0]
    spread = _spread(tpot_ms)
    return {"mean": float((1e3 / some).mean()) if len(some) else 0.0} | {
        k: 1e3 / spread[k] if spread[k] > 0 else 0.0 for k in ("p50", "p90", "p99")
    }


def gpu_time_share(result: SimResult) -> dict[str, float]:
    """Share of all GPU time by cause; adds up to 1."""
    causes = dict.fromkeys([*CAUSES, *(c for p in result.pools for c in p.gpu_ns)])
    return _shares({c: sum(p.gpu_ns.get(c, 0.0) for p in result.pools) for c in causes})


def _shares(ns: dict[str, float]) -> dict[str, float]:
    total = sum(ns.values())
    return {c: v / total if total else float(c == "idle") for c, v in ns.items()}


def pool_reports(result: SimResult) -> list[dict]:
    """One entry a pool: its size, the share of time in which it steps, and its GPU time by cause."""
    return [
        {
            "role": p.pool.role,
            "instances": p.pool.instances,
            "dep": p.pool.dep,
            "gpus": p.pool.gpus,
            "utilization": p.busy_share,
            "gpu_time_share": _shares(p.gpu_ns),
            "most_admitted_in_a_step": p.most_admitted_in_a_step,
            "preemptions": p.preemptions,
        }
        for p in result.pools
    ]


def utilization(pools: list[dict]) -> dict[str, float]:
    """Share of time in which the pools of a role step, weighted by GPUs."""
    roles = dict.fromkeys(p["role"] for p in pools)
    return {r: _mean_by_gpus([p for p in pools if p["role"] == r]) for r in roles}


def _mean_by_gpus(pools: list[dict]) -> float:
    return sum(p["utilization"] * p["gpus"] for p in pools) / sum(p["gpus"] for p in pools)


def latency_curves(result: SimResult) -> dict[str, list[list[float]]]:
    """[quantile, value] points of TTFT, TPOT (ms) and interactivity (tok/s/user; quantile = share that reach it)."""
    m = Measured(result)
    curves: dict[str, list[list[float]]] = {}
    for name, values in (("ttft_ms", m.ttft_ms), ("tpot_ms", m.tpot_ms), ("e2e_ms", m.e2e_ms)):
        curves[name] = [[float(q), float(np.quantile(values, q))] for q in CURVE_QUANTILES] if len(values) else []
    curves["interactivity_tok_s_user"] = [[q, 1e3 / v] for q, v in curves["tpot_ms"] if v > 0]
    return curves


def combine(runs: list[dict]) -> tuple[dict, dict]:
    """(means, 95 % intervals) of replications with one shape; numbers only, nested dicts kept.

    The interval is Student's t over replications; of a single run it is the run itself, which says nothing of its
    spread."""
    means = _zip_numbers(runs, lambda v: float(np.mean(v)))
    return means, _zip_numbers(runs, _interval)


def batch_intervals(result: SimResult, metrics: dict) -> dict:
    """95 % intervals of one run's `metrics` by batch means: its time in BATCHES parts, Student's t over their values.

    Parts depend on one another where requests last longer than they do, so the intervals are then rather narrow. With
    fewer than BATCH_REQUESTS requests a part the interval is the value itself: the run says nothing of its spread.
    """
    whole = Measured(result)
    edges = np.linspace(whole.from_ns, whole.to_ns + 1, BATCHES + 1).astype(np.int64).tolist()
    parts = [metrics_of(result, ends) for ends in zip(edges, edges[1:], strict=False)]
    if min(p["requests"]["measured"] for p in parts) < BATCH_REQUESTS:
        return _zip_numbers([metrics], _interval)
    halves = _zip_numbers(parts, _half_width)

    def around(value: dict, half: dict) -> dict:
        return {
            k: around(v, half[k]) if isinstance(v, dict) else [max(0.0, v - half[k]), v + half[k]]
            for k, v in value.items()
        }

    fixed = {k: _zip_numbers([{k: metrics[k]}], _interval)[k] for k in ("gpus", "requests", "itl_ms")}
    return around({k: v for k, v in metrics.items() if k not in fixed}, halves) | fixed


def _interval(values: list[float]) -> list[float]:
    mean, half = float(np.mean(values)), _half_width(values)
    return [max(0.0, mean - half), mean + half]


def _half_width(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    from scipy.special import stdtrit  # Student's t quantile; scipy.stats takes half a second to import

    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(len(values)))


def _zip_numbers(runs: list[dict], of: Callable[[list[float]], object]) -> dict:
    out: dict = {}
    for key, first in runs[0].items():
        values = [r[key] for r in runs]
        if isinstance(first, dict):
            out[key] = _zip_numbers(values, of)
        elif isinstance(first, int) and len(set(values)) == 1 and of is not _interval:
            out[key] = first
        else:
            out[key] = of(values)
    return out
