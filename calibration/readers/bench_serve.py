"""Results of `vllm bench serve --save-result`, plain or gzip; with `--save-detailed` request by request."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rackplan.calibration.readers import parse
from rackplan.calibration.records import ServedRun, closed_loop
from rackplan.engine import InputError

KEYS = {
    "output throughput": "output_throughput",
    "mean TPOT": "mean_tpot_ms",
    "median TPOT": "median_tpot_ms",
    "P90 TPOT": "p90_tpot_ms",
    "P99 TPOT": "p99_tpot_ms",
    "mean TTFT": "mean_ttft_ms",
    "median TTFT": "median_ttft_ms",
    "P90 TTFT": "p90_ttft_ms",
    "P99 TTFT": "p99_ttft_ms",
}
"""By metric: the key in the client's JSON; times are ms."""
_WANTED = "the JSON of `vllm bench serve --save-result --save-detailed`"
_DETAILS = ("start_times", "input_lens", "output_lens")
_TIMES = ("ttfts", "itls")
_MOST_S = 86_400.0


def read_bench_serve(path: Path) -> ServedRun:
    """One run. Raises InputError where it was saved without details, or with the request at fault, from 0."""
    data = parse.read_json(path, _WANTED)
    for key in _DETAILS:
        if key not in data:
            raise InputError(f"{path}: {key} is missing; run `vllm bench serve` with --save-detailed")
    keys = (*_DETAILS, *_TIMES, "errors", "cached_lens")
    columns = {k: parse.sequence(data[k], str(path), k) for k in keys if k in data}
    count = len(columns["start_times"])
    for key, values in columns.items():
        if len(values) != count:
            raise InputError(f"{path}: {key} has {len(values)} requests, start_times {count}; save the result again")
    failed = columns.pop("errors", [""] * count)
    rows = [({k: v[i] for k, v in columns.items()}, f"{path}:{i}") for i in range(count) if not failed[i]]
    if not rows:
        raise InputError(f"{path}: no request succeeded; give {_WANTED}")
    rows.sort(key=lambda row: parse.number(row[0], "start_times", row[1]))
    metrics = {name: parse.number(data, key, str(path)) for name, key in KEYS.items() if data.get(key) is not None}
    loops = data.get("max_concurrency") is not None and data.get("request_rate") == "inf"  # else a rate, with a cap
    clients = parse.whole(data, "max_concurrency", str(path), 1) if loops else None
    return replace(_run(rows, metrics, set(columns)), concurrency=closed_loop(clients, count))


def _run(rows: list[tuple[dict[str, Any], str]], metrics: dict[str, float], columns: set[str]) -> ServedRun:
    start = np.array([parse.number(r, "start_times", where) for r, where in rows])
    tokens, ttft = [], np.empty(0)
    if columns.issuperset(_TIMES):
        ttft = np.array([parse.number(r, "ttfts", where, 0, _MOST_S) for r, where in rows])
        first = start + ttft
        tokens = [np.concatenate([[t], t + np.cumsum(_gaps_s(*row))]) for t, row in zip(first, rows, strict=True)]
    cached = "cached_lens" in columns
    return ServedRun(
        start_s=start,
        ttft_s=ttft,
        end_s=np.array([t[-1] for t in tokens]),
        input_tokens=np.array([parse.whole(r, "input_lens", where, 1) for r, where in rows]),
        output_tokens=np.array([parse.whole(r, "output_lens", where, 1) for r, where in rows]),
        cached_tokens=np.array([parse.whole(r, "cached_lens", where) for r, where in rows]) if cached else None,
        token_s=tokens,
        metrics=metrics,
    )


def _gaps_s(record: dict[str, Any], where: str) -> list[float]:
    return [parse.number({"itls": x}, "itls", where, 0, _MOST_S) for x in parse.sequence(record["itls"], where, "itls")]
