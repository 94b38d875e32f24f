"""`vllm bench forward`: its JSON, or the log of a run that was cut short, in which finished cases stand line by line.

Requests of a case: a decode (or verify) has a prefix and one new token and its drafts, all else is prefill.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rackplan.calibration.batch import Batch
from rackplan.calibration.readers import parse
from rackplan.calibration.rows import Row
from rackplan.engine import InputError

_WANTED = "the JSON of `vllm bench forward --output-json`"
_REQUESTS = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c)?(?::(\d+))?")
_DONE = re.compile(r"\[forward\] (\S+): (\d+) reqs, (\d+) tokens, median (\S+) us, sample spread ([^%\s]+)%")
_BEGUN = re.compile(r"\[forward\] \S+: \d+ reqs")
EVEN = ("balanced", "real")


class Request(NamedTuple):
    """One request of a case: new tokens, tokens in the KV cache after the step, drafts among the new ones."""

    query: int
    kv: int
    drafts: int

    @property
    def decodes(self) -> bool:
        return self.kv > self.query == 1 + self.drafts


def parse_case(text: str) -> tuple[str, tuple[Request, ...]]:
    """(name, requests) of `NAME=REQS` as `--case` takes it; REQS: a comma list of [N*]Q[@K][c][:D]."""
    name, given, body = text.partition("=")
    requests: list[Request] = []
    for item in (body if given else text).split(","):
        match = _REQUESTS.fullmatch(item.strip())
        if not match:
            raise InputError(f"case {text!r}: {item!r} is not [N*]Q[@K][c][:D]; correct it")
        count, query, kv, _, drafts = match.groups()
        requests += [Request(int(query), int(kv or query), int(drafts or 0))] * int(count or 1)
    return name, tuple(requests)


def read_bench_forward(path: Path) -> list[Row]:
    """The rows of a JSON result, times in us. Raises InputError with file and row, from 0."""
    try:
        data = json.loads(parse.read_text(path, _WANTED))
    except json.JSONDecodeError as e:
        raise InputError(
            f"{path}:{e.lineno}: truncated or not JSON ({e.msg}); read the run's log instead, or run it again"
        ) from None
    except (RecursionError, ValueError):
        raise InputError(f"{path}: not JSON that can be read; give {_WANTED}") from None
    rows = [_row(parse.mapping(r, f"{path}:{n}", "row"), f"{path}:{n}") for n, r in enumerate(_list(data, path))]
    if not rows:
        raise InputError(f"{path}: holds no case; give {_WANTED}")
    return rows


def _list(data: Any, path: Path) -> list[Any]:
    if not isinstance(data, list):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a list of cases; give {_WANTED}")
    return data


def _row(record: dict[str, Any], where: str) -> Row:
    requests = []
    for r in parse.sequence(record.get("requests"), where, "requests"):
        found = parse.mapping(r, where, "requests")
        drafts = parse.whole(found, "num_draft_tokens", where) if "num_draft_tokens" in found else 0
        requests.append(Request(parse.whole(found, "query_len", where, 1), parse.whole(found, "kv_len", where), drafts))
    ranks = parse.sequence(record.get("ranks"), where, "ranks")
    if not ranks:
        raise InputError(f"{where}: ranks is empty; run the case again")
    first = parse.mapping(ranks[0], where, "ranks.0")
    if first.get("routing", EVEN[0]) not in EVEN:
        raise InputError(f"{where}: routing={first['routing']!r}: exact batches must route evenly; --routing balanced")
    latency = parse.mapping(first.get("latency_us", {}), where, "latency_us")
    spread = parse.number(latency, "sample_spread_pct", where) if "sample_spread_pct" in latency else 0.0
    us = parse.number(record, "median_us", where, parse.LEAST_STEP_MS * 1e3, parse.MOST_STEP_MS * 1e3)
    return _row_of(str(record.get("case")), requests, len(ranks), us, spread, where)


def read_forward_log(path: Path, cases: Iterable[str], ranks: int) -> list[Row]:
    """The finished cases in a run's log. `cases`: what was passed as `--case`, whose shapes the log does not repeat.

    A last line that was cut short is left out; any other that is not whole, or does not fit its case, is an error."""
    shapes = dict(parse_case(c) for c in cases)
    lines = parse.read_text(path, "the output of `vllm bench forward`").splitlines()
    rows = []
    for n, line in enumerate(lines, 1):
        match, where = _DONE.search(line), f"{path}:{n}"
        if match is None:
            if _BEGUN.search(line) and n < len(lines):
                raise InputError(f"{where}: {line[:60]!r} is not a whole result; remove the line or run the case again")
            continue
        name, count, tokens, us, spread = match.groups()
        if name not in shapes:
            raise InputError(f"{where}: case {name} was not given; pass its --case text")
        if (len(shapes[name]), sum(r.query for r in shapes[name])) != (int(count), int(tokens)):
            raise InputError(f"{where}: case {name} ran {count} requests of {tokens} tokens, which is another shape")
        record = {"median": us, "spread": spread}
        median = parse.number(record, "median", where, parse.LEAST_STEP_MS * 1e3, parse.MOST_STEP_MS * 1e3)
        rows.append(_row_of(name, shapes[name], ranks, median, parse.number(record, "spread", where), where))
    if not rows:
        raise InputError(f"{path}: holds no finished case ('[forward] NAME: …'); give the output of the run")
    return rows


def _row_of(name: str, requests: Iterable[Request], ranks: int, us: float, spread: float, where: str) -> Row:
    decodes = [r for r in requests if r.decodes]
    prefills = [r for r in requests if not r.decodes]
    if len({r.query for r in prefills}) > 1 or len({r.drafts for r in decodes}) > 1:
        raise InputError(f"{where}: case {name} mixes lengths of prefill or numbers of drafts; measure one a case")
    batch = Batch(
        chunks=len(prefills),
        new_tokens=prefills[0].query if prefills else 0,
        cached_tokens=round(sum(r.kv - r.query for r in prefills) / max(1, len(prefills))),
        decodes=len(decodes),
        context_tokens=round(sum(r.kv for r in decodes) / max(1, len(decodes))),
    )
    row = Row(
        id=f"{name}_dep{ranks}",
        metric="",
        dep=ranks,
        batch=batch,
        measured_ms=us / 1e3,
        spread_pct=spread,
        drafts=decodes[0].drafts if decodes else 0,
    )
    return row.named()
