"""Recorded workloads and their readers: Mooncake JSONL, Azure and agentic CSV, `vllm bench serve --save-detailed`.

`read_trace` tells the format by content, plain or gzip, and checks every value: each error is one InputError with file,
row, value and mend. Rows count from 1, a CSV's header included; in a JSON result they are requests, from 0.
"""

import csv
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rackplan.engine import InputError
from rackplan.simulator.arrivals import MOONCAKE_BLOCK_TOKENS, Row, TraceWorkload
from rackplan.simulator.request import NS_PER_MS, NS_PER_S
from rackplan.simulator.sessions import SessionTree, SessionWorkload, Stream, Turn

AGENTIC_BLOCK_TOKENS = 64
_EXACT = 2**53
"""Up to here a float holds every whole number."""
_AGENTIC_COLUMNS = ("trace", "stream", "t", "in_tok", "out_tok", "lcp_blk", "prev_lcp_blk", "api_time", "think_time")
_FORMATS = "a Mooncake JSONL, an Azure or agentic CSV, or a `vllm bench serve --save-detailed` JSON, plain or .gz"


def read_trace(path: Path) -> TraceWorkload | SessionWorkload:
    """Read a recorded workload. Raises InputError: not readable, unknown format, or the row and value at fault."""
    text = _read_text(path)
    stripped = text.lstrip()
    if not stripped:
        raise InputError(f"{path}: empty; give {_FORMATS}")
    if stripped.startswith(("{", "[")):
        try:
            return _read_json(path, text)
        except (RecursionError, ValueError) as e:
            raise InputError(f"{path}: not a workload's JSON ({str(e).partition(';')[0]}); give {_FORMATS}") from None
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
        raise InputError(f"{path}:{table.line_num}: not a CSV row ({e}); give {_FORMATS}") from None
    raise InputError(f"{path}: unknown format (first line {text.splitlines()[0][:60]!r}); give {_FORMATS}")


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise InputError(f"{path}: truncated or damaged gzip ({e}); copy the file again") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not text at byte {e.start}; give {_FORMATS}") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give {_FORMATS}") from None


def _number(path: Path, row: int, record: Mapping[str, Any], column: str, least: float = -math.inf) -> float:
    """A finite number >= `least` from a record, or InputError with file and row."""
    value = record.get(column)
    if type(value) is int and least <= value <= _EXACT:  # nearly every one
        return float(value)
    if value is None:
        raise InputError(f"{path}:{row}: {column} is missing; add it")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{path}:{row}: {column}={str(value)[:40]!r} is not a number; correct or remove the row")
    if number < least:
        raise InputError(f"{path}:{row}: {column}={value} must be at least {least:g}; correct or remove the row")
    return number


def _tokens(path: Path, row: int, record: Mapping[str, Any], column: str, least: int = 1) -> int:
    number = _number(path, row, record, column, least)
    if number != int(number):
        raise InputError(f"{path}:{row}: {column}={record[column]} is not a whole number of tokens; correct the row")
    return int(number)


def _trace(path: Path, rows: list[Row], notes: tuple[str, ...] = ()) -> TraceWorkload:
    if not rows:
        raise InputError(f"{path}: holds no request; give {_FORMATS}")
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
    raise InputError(f"{path}: unknown format; give {_FORMATS}")


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
        stamps.append(_number(path, n, record, "timestamp", 0))
        input_tokens = _tokens(path, n, record, "input_length")
        rows.append((input_tokens, _tokens(path, n, record, "output_length"), _hash_ids(path, n, record, input_tokens)))
    unit_s, notes = _timestamp_unit_s(np.array(stamps))
    return _trace(
        path,
        [
            Row(time_s=stamp * unit_s, input_tokens=i, output_tokens=o, hash_ids=h)
            for stamp, (i, o, h) in zip(stamps, rows, strict=True)
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
    if not isinstance(ids, list) or {*map(type, ids)} - {int}:
        raise InputError(f"{path}:{n}: hash_ids={str(ids)[:40]!r} is not a list of whole numbers; correct the row")
    blocks = math.ceil(input_tokens / MOONCAKE_BLOCK_TOKENS)
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
        input_tokens = _tokens(path, i, record, "input_lens")
        cached = _tokens(path, i, record, "cached_lens", 0) if "cached_lens" in names else None
        if cached is not None and cached > input_tokens:
            raise InputError(f"{path}:{i}: cached_lens={cached} exceeds input_lens={input_tokens}; correct the row")
        rows.append(
            Row(
                time_s=_number(path, i, record, "start_times", 0),
                input_tokens=input_tokens,
                output_tokens=_tokens(path, i, record, "output_lens"),
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
                input_tokens=_tokens(path, n, record, "ContextTokens"),
                output_tokens=_tokens(path, n, record, "GeneratedTokens"),
            )
        )
    return _trace(path, rows)


def _read_agentic(path: Path, records: list[dict[str, Any]]) -> SessionWorkload:
    """Session trees of kv-cache-tester's requests: one a trace, in file order.

    Requests without output (the provider failed) are left out; what the next one shares with the one before is then
    the least of what each shares with its predecessor, since they are prefixes of one another.
    """
    traces: dict[str, dict[str, list[_Agentic]]] = defaultdict(lambda: defaultdict(list))
    for n, record in enumerate(records, 2):
        traces[str(record["trace"])][str(record["stream"])].append(_agentic(path, n, record))
    empty = sum(r.output_tokens == 0 for streams in traces.values() for rows in streams.values() for r in rows)
    trees = [tree for streams in traces.values() if (tree := _agentic_tree(list(streams.values())))]
    if not trees:
        raise InputError(f"{path}: holds no request; give {_FORMATS}")
    notes = (f"{empty} requests without output skipped",) if empty else ()
    return SessionWorkload(name=path.name, corpus=lambda: trees, notes=notes)


class _Agentic(NamedTuple):
    """A row of the agentic CSV. `end_s`: when the answer was complete, None where that was not recorded."""

    start_s: float
    end_s: float | None
    think_s: float | None
    input_tokens: int
    output_tokens: int
    previous_tokens: int
    earlier_tokens: int


def _agentic(path: Path, n: int, record: Mapping[str, Any]) -> _Agentic:
    start_s = _number(path, n, record, "t", 0)
    api_s, think_s = (_number(path, n, record, c, 0) if record[c] else None for c in ("api_time", "think_time"))
    input_tokens = _tokens(path, n, record, "in_tok")
    previous, earlier = (_tokens(path, n, record, c, 0) * AGENTIC_BLOCK_TOKENS for c in ("prev_lcp_blk", "lcp_blk"))
    if max(previous, earlier) > input_tokens:
        raise InputError(
            f"{path}:{n}: prev_lcp_blk or lcp_blk shares {max(previous, earlier)} of in_tok={input_tokens}; correct it"
        )
    return _Agentic(
        start_s=start_s,
        end_s=None if api_s is None else start_s + api_s,
        think_s=think_s,
        input_tokens=input_tokens,
        output_tokens=_tokens(path, n, record, "out_tok", 0),
        previous_tokens=previous,
        earlier_tokens=earlier,
    )


def _agentic_tree(streams: list[list[_Agentic]]) -> SessionTree | None:
    """The first stream is the main one; the others start at the end of its last turn that began before them."""
    streams = [sorted(rows, key=lambda r: r.start_s) for rows in streams]
    kept = [[r for r in rows if r.output_tokens] for rows in streams]
    main = kept[0]
    if not main:
        return None
    out = [Stream(kind="main", turns=_agentic_turns(streams[0], None))]
    for rows, with_output in zip(streams[1:], kept[1:], strict=True):
        if not with_output:
            continue
        first, last = with_output[0], with_output[-1]
        turn = max(0, sum(r.start_s <= first.start_s for r in main) - 1)
        ended_s = last.start_s if last.end_s is None else last.end_s
        joined = turn + 1 < len(main) and ended_s <= main[turn + 1].start_s
        turns = _agentic_turns(rows, main[turn])
        out.append(Stream(kind="sub", turns=turns, spawned_by=(0, turn), joined=joined))
    return SessionTree(tuple(out))


def _agentic_turns(rows: list[_Agentic], spawner: _Agentic | None) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    before, shared = spawner, rows[0].earlier_tokens if spawner else 0
    for row in rows:
        if turns:
            shared = min(shared, row.previous_tokens)
        if row.output_tokens:
            delay_s = _agentic_delay_s(before, row) if before else 0.0
            turns.append(Turn(row.input_tokens, row.output_tokens, min(shared, row.input_tokens), delay_s))
            before, shared = row, row.input_tokens
    return tuple(turns)


def _agentic_delay_s(before: _Agentic, row: _Agentic) -> float:
    """Recorded gap less recorded API time, at least 0; where that time is missing, the recorded think time."""
    if before.end_s is None and row.think_s is not None:
        return row.think_s
    return max(0.0, row.start_s - (before.start_s if before.end_s is None else before.end_s))


_CSV_FORMATS: Mapping[tuple[str, ...], Callable[[Path, list[dict[str, Any]]], TraceWorkload | SessionWorkload]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _read_azure,
    _AGENTIC_COLUMNS: _read_agentic,
}
