"""Recorded workloads and their readers: Mooncake JSONL, Azure and agentic CSV, `vllm bench serve --save-detailed`.

`read_trace` tells the format by content, plain or gzip, and checks every value: each error is one InputError with file,
row, value and mend. Rows count from 1, a CSV's header included; in a JSON result they are requests, from 0.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rackplan.engine import InputError
from rackplan.simulator.agentic_trace import AGENTIC_COLUMNS, read_agentic
from rackplan.simulator.arrivals import MOONCAKE_BLOCK_TOKENS, Row, TraceWorkload
from rackplan.simulator.garbage import no_collections
from rackplan.simulator.request import NS_PER_MS, NS_PER_S
from rackplan.simulator.sessions import SessionWorkload
from rackplan.simulator.trace_values import FORMATS, number_of, tokens_of


def read_trace(path: Path) -> TraceWorkload | SessionWorkload:
    """Read a recorded workload. Raises InputError: not readable, unknown format, or the row and value at fault."""
    with no_collections():
        return _read(path, _read_text(path))


def _read(path: Path, text: str) -> TraceWorkload | SessionWorkload:
    stripped = text.lstrip()
    if not stripped:
        raise InputError(f"{path}: empty; give {FORMATS}")
    if stripped.startswith(("{", "[")):
        try:
            return _read_json(path, text)
        except (RecursionError, ValueError) as e:
            raise InputError(f"{path}: not a workload's JSON ({str(e).partition(';')[0]}); give {FORMATS}") from None
    try:
        table = csv.DictReader(text.splitlines())
        columns = set(table.fieldnames or ())
        for known, read in _CSV_FORMATS.items():
            # Any two of its columns tell a format, so that a missing third can be named.
            if len(columns & set(known)) >= 2:
                if missing := [c for c in known if c not in columns]:
                    raise InputError(f"{path}: column {missing[0]} is missing; needed are {', '.join(known)}")
                return read(path, list(table))
    except csv.Error as e:
        raise InputError(f"{path}:{table.line_num}: not a CSV row ({e}); give {FORMATS}") from None
    raise InputError(f"{path}: unknown format (first line {text.splitlines()[0][:60]!r}); give {FORMATS}")


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise InputError(f"{path}: truncated or damaged gzip ({e}); copy the file again") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not text at byte {e.start}; give {FORMATS}") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give {FORMATS}") from None


def _trace(path: Path, rows: list[Row], notes: tuple[str, ...] = ()) -> TraceWorkload:
    if not rows:
        raise InputError(f"{path}: holds no request; give {FORMATS}")
    return TraceWorkload(name=path.name, rows=tuple(sorted(rows, key=lambda r: r.time_s)), notes=notes)


def _read_json(path: Path, text: str) -> TraceWorkload:
    lines = [(n, line) for n, padded in enumerate(text.splitlines(), 1) if (line := padded.strip())]
    try:
        first = json.loads(lines[0][1])
    except json.JSONDecodeError:
        first = None
    if isinstance(first, dict) and first.keys() & {"timestamp", "input_length", "output_length"}:
        return _read_mooncake(path, lines)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as e:
        raise InputError(f"{path}:{e.lineno}: truncated or not JSON ({e.msg}); copy the file again") from None
    if isinstance(whole, dict) and whole.keys() & {"start_times", "input_lens", "output_lens", "total_output_tokens"}:
        return _read_bench_serve(path, whole)
    raise InputError(f"{path}: unknown format; give {FORMATS}")


def _read_mooncake(path: Path, lines: list[tuple[int, str]]) -> TraceWorkload:
    rows, stamps = [], []
    decode = json.JSONDecoder().raw_decode  # half the time of json.loads on rows as short as these
    for n, line in lines:
        try:
            record, end = decode(line)
            if end < len(line):
                raise json.JSONDecodeError("Extra data", line, end)
        except json.JSONDecodeError as e:
            raise InputError(f"{path}:{n}: truncated or not JSON ({e.msg}); correct or remove the row") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}:{n}: {line[:40]!r} is not an object; correct or remove the row")
        stamps.append(number_of(path, n, record, "timestamp", 0))
        input_tokens = tokens_of(path, n, record, "input_length")
        output_tokens = tokens_of(path, n, record, "output_length")
        rows.append((input_tokens, output_tokens, _hash_ids(path, n, record, input_tokens)))
    unit_s, notes = _timestamp_unit_s(np.array(stamps))
    return _trace(
        path,
        [
            Row(stamp * unit_s, input_tokens, output_tokens, hash_ids)
            for stamp, (input_tokens, output_tokens, hash_ids) in zip(stamps, rows, strict=True)
        ],
        notes,
    )


def _timestamp_unit_s(stamps: np.ndarray) -> tuple[float, tuple[str, ...]]:
    """Mooncake's timestamps are ms, but some tools write seconds. Seconds is taken where ms would mean more than 1,000
    requests/s, or, for stamps with fractions, more than 50 requests/s (few tools write fractions of a ms).
    """
    mean_gap = (stamps.max() - stamps.min()) / max(1, len(stamps) - 1)
    fractions = bool(np.any(stamps != np.rint(stamps)))
    if 0 < mean_gap < (20 if fractions else 1):
        return 1.0, (f"timestamps read as seconds: as ms they would mean {1e3 / mean_gap:,.0f} requests/s",)
    return NS_PER_MS / NS_PER_S, ()


def _hash_ids(path: Path, n: int, record: Mapping[str, Any], input_tokens: int) -> tuple[int, ...] | None:
    ids = record.get("hash_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise InputError(f"{path}:{n}: hash_ids={str(ids)[:40]!r} is not a list of whole numbers; correct the row")
    blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(ids) > blocks:
        raise InputError(
            f"{path}:{n}: {len(ids)} hash_ids for input_length={input_tokens}; blocks of {MOONCAKE_BLOCK_TOKENS} "
            f"tokens make at most {blocks}"
        )
    return tuple(ids)


def _read_bench_serve(path: Path, result: dict[str, Any]) -> TraceWorkload:
    names = [c for c in ("start_times", "input_lens", "output_lens", "errors", "cached_lens") if c in result]
    for column in ("start_times", "input_lens", "output_lens"):
        if column not in names:
            raise InputError(f"{path}: {column} is missing; run `vllm bench serve` with --save-detailed")
    for column in names:
        if not isinstance(result[column], list) or len(result[column]) != len(result["start_times"]):
            raise InputError(f"{path}: {column} is not a list as long as start_times; save the result again")
    rows, failed = [], 0
    for i, values in enumerate(zip(*(result[c] for c in names), strict=True)):
        record = dict(zip(names, values, strict=True))
        if record.get("errors"):
            failed += 1
            continue
        input_tokens = tokens_of(path, i, record, "input_lens")
        cached = tokens_of(path, i, record, "cached_lens", 0) if "cached_lens" in names else None
        if cached is not None and cached > input_tokens:
            raise InputError(f"{path}:{i}: cached_lens={cached} exceeds input_lens={input_tokens}; correct the row")
        rows.append(
            Row(
                time_s=number_of(path, i, record, "start_times", 0),
                input_tokens=input_tokens,
                output_tokens=tokens_of(path, i, record, "output_lens"),
                cached_tokens=cached,
            )
        )
    return _trace(path, rows, (f"{failed} failed requests skipped",) if failed else ())


def _read_azure(path: Path, records: list[dict[str, Any]]) -> TraceWorkload:
    rows = []
    for n, record in enumerate(records, 2):
        text = str(record["TIMESTAMP"])
        try:
            stamp = datetime.fromisoformat(text)
        except ValueError:
            raise InputError(f"{path}:{n}: TIMESTAMP={text!r} is not a date and time; correct the row") from None
        rows.append(
            Row(
                time_s=(stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp(),
                input_tokens=tokens_of(path, n, record, "ContextTokens"),
                output_tokens=tokens_of(path, n, record, "GeneratedTokens"),
            )
        )
    return _trace(path, rows)


_CSV_FORMATS: Mapping[tuple[str, ...], Callable[[Path, list[dict[str, Any]]], TraceWorkload | SessionWorkload]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _read_azure,
    AGENTIC_COLUMNS: read_agentic,
}
