"""guidellm's report, `benchmarks.json`: one served run for each benchmark in it.

Its inter-token latency is a request's mean over the tokens after the first, which is called TPOT here; its "time per
output token" counts the first one too.
"""

from pathlib import Path
from typing import Any

import numpy as np

from rackplan.calibration.readers import parse
from rackplan.calibration.records import ServedRun, closed_loop
from rackplan.engine import InputError

VERSION = 2
_WANTED = "the benchmarks.json of guidellm"
_LATENCIES = {"TTFT": "time_to_first_token_ms", "TPOT": "inter_token_latency_ms"}
_MOST_MS = 86_400_000.0


def read_guidellm(path: Path) -> list[tuple[str, ServedRun]]:
    """(strategy and number, run) of each benchmark. Raises InputError with the benchmark and request at fault."""
    report = parse.read_json(path, _WANTED)
    version = parse.mapping(report.get("metadata"), str(path), "metadata").get("version")
    if version != VERSION:
        raise InputError(f"{path}: metadata.version={version!r} is unknown; this version reads {VERSION}")
    benchmarks = parse.sequence(report.get("benchmarks"), str(path), "benchmarks")
    if not benchmarks:
        raise InputError(f"{path}: holds no benchmark; run guidellm again")
    return [(f"benchmark-{i}", _run(parse.mapping(b, f"{path}:{i}", "benchmark"), f"{path}:{i}"))
            for i, b in enumerate(benchmarks)]  # fmt: skip


def _run(benchmark: dict[str, Any], where: str) -> ServedRun:
    groups = parse.mapping(benchmark.get("requests"), where, "requests")
    requests = [
        (parse.mapping(r, f"{where}.{i}", "request"), f"{where}.{i}")
        for i, r in enumerate(parse.sequence(groups.get("successful"), where, "requests.successful"))
    ]
    if not requests:
        raise InputError(f"{where}: no request succeeded; run guidellm again")
    requests.sort(key=lambda r: parse.number(r[0], "request_start_time", r[1]))
    start = np.array([parse.number(r, "request_start_time", w) for r, w in requests])
    ttft = np.array([parse.number(r, _LATENCIES["TTFT"], w, 0, _MOST_MS) for r, w in requests]) / 1e3
    latency = np.array([parse.number(r, "request_latency", w) for r, w in requests])
    for (_, w), first, whole in zip(requests, ttft, latency, strict=True):
        if first > whole * 1.001 + 0.001:
            raise InputError(f"{w}: the first token after {first:g} s, the last after {whole:g}; units are mixed")
    outputs = np.array([parse.whole(r, "output_tokens", w, 1) for r, w in requests])
    cached = [r.get("cached_tokens") for r, _ in requests]
    metrics = _metrics(parse.mapping(benchmark.get("metrics"), where, "metrics"), where)
    span_s = float((start + latency).max() - start.min())
    return ServedRun(
        start_s=start,
        ttft_s=ttft,
        end_s=start + latency,
        input_tokens=np.array([parse.whole(r, "prompt_tokens", w, 1) for r, w in requests]),
        output_tokens=outputs,
        cached_tokens=None if None in cached else np.array([parse.whole(r, "cached_tokens", w) for r, w in requests]),
        token_s=[],
        metrics={"output throughput": float(outputs.sum()) / span_s, **metrics},
        concurrency=closed_loop(_clients(benchmark, where), len(requests)),
    )


def _clients(benchmark: dict[str, Any], where: str) -> int | None:
    """Requests in flight, where the strategy keeps to so many and to no rate."""
    config = parse.mapping(benchmark.get("config") or {}, where, "config")
    strategy = parse.mapping(config.get("strategy") or {}, where, "config.strategy")
    if strategy.get("type_") == "synchronous":
        return 1
    key = {"concurrent": "streams", "throughput": "max_concurrency"}.get(str(strategy.get("type_")))
    return parse.whole(strategy, key, where, 1) if key and strategy.get(key) is not None else None


def _metrics(metrics: dict[str, Any], where: str) -> dict[str, float]:
    found = {}
    for name, key in _LATENCIES.items():
        by_status = parse.mapping(metrics.get(key), where, f"metrics.{key}")
        summary = parse.mapping(by_status.get("successful"), where, f"metrics.{key}.successful")
        percentiles = parse.mapping(summary.get("percentiles"), where, f"metrics.{key}.percentiles")
        found[f"mean {name}"] = parse.number(summary, "mean", where, 0, _MOST_MS)
        found[f"median {name}"] = parse.number(summary, "median", where, 0, _MOST_MS)
        found[f"P90 {name}"] = parse.number(percentiles, "p90", where, 0, _MOST_MS)
        found[f"P99 {name}"] = parse.number(percentiles, "p99", where, 0, _MOST_MS)
    return found
