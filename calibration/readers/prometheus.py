"""A running engine's metrics as Prometheus text, from its endpoint or a file, and what two scrapes tell of a load.

Names are vLLM's; every series has an `engine` label, one a data-parallel rank, and histograms add up over engines.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rackplan.calibration.readers import parse
from rackplan.engine import InputError

GAUGES = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
KV_USAGE = "vllm:kv_cache_usage_perc"
COUNTERS = {"prompt_tokens": "vllm:prompt_tokens", "generation_tokens": "vllm:generation_tokens"}
HISTOGRAMS = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "TPOT": "vllm:request_time_per_output_token_seconds",
    "E2E": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "input": "vllm:request_prompt_tokens",
    "output": "vllm:request_generation_tokens",
}
"""By name, in seconds or tokens."""
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """`bounds`: upper bounds of the buckets, the last infinite; `counts`: in each, not cumulative."""

    bounds: np.ndarray
    counts: np.ndarray
    sum: float

    @property
    def count(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> float:
        """NaN where nothing was observed."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """As Prometheus interpolates: even within a bucket, the last finite bound in the last one."""
        if not self.count:
            return math.nan
        cumulative = np.cumsum(self.counts)
        i = int(np.searchsorted(cumulative, share * self.count))
        low = float(self.bounds[i - 1]) if i else 0.0
        if i + 1 >= len(self.bounds):
            return low
        inside = (share * self.count - (cumulative[i] - self.counts[i])) / self.counts[i]
        return low + (float(self.bounds[i]) - low) * float(inside)

    def since(self, before: "Histogram") -> "Histogram":
        """What was observed after `before`. Raises ValueError where it has other buckets, or more in one."""
        counts = self.counts - before.counts if self.bounds.shape == before.bounds.shape else np.array([-1.0])
        if (counts < 0).any():
            raise ValueError("the engine was restarted between the scrapes, or they are of two engines")
        return Histogram(bounds=self.bounds, counts=counts, sum=self.sum - before.sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """One scrape over all engines of a server. `kv_usage`: mean over engines, 0 to 1."""

    engines: tuple[str, ...]
    running: float
    waiting: float
    kv_usage: float
    prompt_tokens: float
    generation_tokens: float
    histograms: Mapping[str, Histogram]

    def since(self, before: "EngineMetrics") -> "EngineMetrics":
        """The load between two scrapes; gauges are the mean of the two. Raises ValueError as Histogram does."""
        return EngineMetrics(
            engines=self.engines,
            running=(self.running + before.running) / 2,
            waiting=(self.waiting + before.waiting) / 2,
            kv_usage=(self.kv_usage + before.kv_usage) / 2,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            generation_tokens=self.generation_tokens - before.generation_tokens,
            histograms={k: h.since(before.histograms[k]) for k, h in self.histograms.items()},
        )


def read_metrics(source: str) -> EngineMetrics:
    """One scrape of `source`, http(s)://… or a file. Raises InputError: out of reach, not vLLM's, or the bad line."""
    if source.startswith(("http://", "https://")):
        return parse_metrics(_fetch(source), source)
    return parse_metrics(parse.read_text(Path(source), "Prometheus text, or the URL of an engine's /metrics"), source)


def _fetch(url: str) -> str:
    import httpx

    try:
        answer = httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise InputError(f"{url}: cannot be reached ({type(e).__name__}); is the engine up?") from None
    if answer.status_code != httpx.codes.OK:
        raise InputError(f"{url}: answered {answer.status_code}; give the engine's /metrics")
    return answer.text


def parse_metrics(text: str, where: str) -> EngineMetrics:
    """One scrape from its text."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[str, float]] = defaultdict(dict)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith("vllm:"):
                continue
            for s in family.samples:
                if not math.isfinite(s.value):
                    raise InputError(f"{where}: {s.name}={s.value} is not a number; scrape again")
                if s.name.endswith("_bucket"):
                    buckets[s.name.removesuffix("_bucket")][float(s.labels["le"])] += s.value
                else:
                    name = s.name.removesuffix("_total")
                    engine = s.labels.get("engine", "0")
                    values[name][engine] = values[name].get(engine, 0.0) + s.value
    except (ValueError, KeyError) as e:
        raise InputError(f"{where}: not Prometheus text ({str(e)[:80]}); scrape again") from None
    for name in (*GAUGES.values(), KV_USAGE, *COUNTERS.values()):
        if name not in values:
            raise InputError(f"{where}: {name} is missing; give the /metrics of a vLLM engine")
    usage = values[KV_USAGE].values()
    return EngineMetrics(
        engines=tuple(sorted(values[GAUGES["running"]])),
        running=sum(values[GAUGES["running"]].values()),
        waiting=sum(values[GAUGES["waiting"]].values()),
        kv_usage=sum(usage) / len(usage),
        prompt_tokens=sum(values[COUNTERS["prompt_tokens"]].values()),
        generation_tokens=sum(values[COUNTERS["generation_tokens"]].values()),
        histograms={k: _histogram(buckets, values, name, where) for k, name in HISTOGRAMS.items()},
    )


def _histogram(
    buckets: Mapping[str, Mapping[float, float]], values: Mapping[str, Mapping[str, float]], name: str, where: str
) -> Histogram:
    if name not in buckets or f"{name}_sum" not in values:
        raise InputError(f"{where}: {name} is missing; give the /metrics of a vLLM engine")
    bounds = np.array(sorted(buckets[name]))
    counts = np.diff(np.array([buckets[name][b] for b in bounds]), prepend=0.0)
    if (counts < 0).any() or not math.isinf(bounds[-1]):
        raise InputError(f"{where}: buckets of {name} do not grow to the last; the scrape was cut short")
    return Histogram(bounds=bounds, counts=counts, sum=sum(values[f"{name}_sum"].values()))
