"""aiperf's results: `profile_export_aiperf.json`, and the requests in `profile_export.jsonl` beside it.

Every value states its unit; its inter-token latency is called TPOT here.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rackplan.calibration.readers import parse
from rackplan.calibration.records import ServedRun, closed_loop
from rackplan.engine import InputError

SUMMARY, REQUESTS = "profile_export_aiperf.json", "profile_export.jsonl"
SCHEMA = "1"
"""Major version of the export's schema."""
_WANTED = f"{SUMMARY} of aiperf"
_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_LATENCIES = {"TTFT": "time_to_first_token", "TPOT": "inter_token_latency"}
_STATISTICS = {"mean": "avg", "median": "p50", "P90": "p90", "P99": "p99"}


def read_aiperf(path: Path) -> ServedRun:
    """One run, warm-up left out. Raises InputError where the requests do not lie beside the summary."""
    summary = parse.read_json(path, _WANTED)
    schema = str(summary.get("schema_version"))
    if schema.partition(".")[0] != SCHEMA:
        raise InputError(f"{path}: schema_version={schema} is unknown; this version reads {SCHEMA}.x")
    metrics = {}
    for name, key in _LATENCIES.items():
        if summary.get(key) is not None:
            found = parse.mapping(summary[key], str(path), key)
            scale = _ms_of(found, f"{path}: {key}")
            for statistic, of in _STATISTICS.items():
                metrics[f"{statistic} {name}"] = parse.number(found, of, f"{path}: {key}") * scale
    if summary.get("output_token_throughput") is not None:
        rate = parse.mapping(summary["output_token_throughput"], str(path), "output_token_throughput")
        if rate.get("unit") != "tokens/sec":
            raise InputError(f"{path}: output_token_throughput: unit={rate.get('unit')!r} is not tokens/sec")
        metrics["output throughput"] = parse.number(rate, "avg", f"{path}: output_token_throughput")
    run = _requests(path.with_name(REQUESTS), metrics)
    return replace(run, concurrency=closed_loop(_clients(summary, str(path)), len(run.start_s)))


def _clients(summary: dict[str, Any], where: str) -> int | None:
    """Requests in flight, where the one phase that was measured keeps to so many and to no rate."""
    config = parse.mapping(summary.get("input_config") or {}, where, "input_config")
    phases = [parse.mapping(p, where, "phase") for p in parse.sequence(config.get("phases") or [], where, "phases")]
    measured = [p for p in phases if p.get("kind") != "warmup" and p.get("name") != "warmup"]
    if len(measured) != 1 or measured[0].get("type") != "concurrency" or measured[0].get("concurrency") is None:
        return None
    return parse.whole(measured[0], "concurrency", f"{where}: input_config.phases", 1)


def _ms_of(value: dict[str, Any], where: str) -> float:
    """The factor from a value's unit to ms."""
    if value.get("unit") not in _MS:
        raise InputError(f"{where}: unit={value.get('unit')!r} is no time; one of {', '.join(_MS)}")
    return _MS[value["unit"]]


def _requests(path: Path, metrics: dict[str, float]) -> ServedRun:
    text = parse.read_text(path, f"{REQUESTS} beside {SUMMARY}: it holds the requests to replay")
    records = []
    for n, line in enumerate(text.splitlines(), 1):
        try:
            record = parse.mapping(json.loads(line), f"{path}:{n}", "line")
        except (RecursionError, ValueError):
            raise InputError(f"{path}:{n}: truncated or not JSON; correct or remove the row") from None
        meta = parse.mapping(record.get("metadata"), f"{path}:{n}", "metadata")
        if record.get("error") is None and meta.get("benchmark_phase") != "warmup" and not meta.get("was_cancelled"):
            values = parse.mapping(record.get("metrics"), f"{path}:{n}", "metrics")
            records.append((parse.number(meta, "request_start_ns", f"{path}:{n}"), values, f"{path}:{n}"))
    if not records:
        raise InputError(f"{path}: no request succeeded; run aiperf again")
    records.sort(key=lambda r: r[0])

    def times_s(key: str) -> np.ndarray:
        return np.array([_value(v, key, w, time=True) for _, v, w in records]) / 1e3

    def tokens(key: str) -> np.ndarray:
        return np.array([parse.whole({key: _value(v, key, w, time=False)}, key, w, 1) for _, v, w in records])

    first_ns = records[0][0]
    start = np.array([(ns - first_ns) / 1e9 for ns, _, _ in records])
    return ServedRun(
        start_s=start,
        ttft_s=times_s("time_to_first_token"),
        end_s=start + times_s("request_latency"),
        input_tokens=tokens("input_sequence_length"),
        output_tokens=tokens("output_sequence_length"),
        cached_tokens=None,
        token_s=[],
        metrics=metrics,
    )


def _value(values: dict[str, Any], key: str, where: str, time: bool) -> float:
    found = parse.mapping(values.get(key), where, key)
    return parse.number(found, "value", f"{where}: {key}") * (_ms_of(found, f"{where}: {key}") if time else 1.0)
