"""Reader of the agentic CSV: coding agents' requests with their prefix tree, as session trees."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rackplan.engine import InputError
from rackplan.simulator.prefix_lines import Line, Recorded, prefix_lines
from rackplan.simulator.session_tree import SessionTree, Stream, Turn
from rackplan.simulator.sessions import SessionWorkload
from rackplan.simulator.trace_values import FORMATS, number_of, tokens_of

AGENTIC_BLOCK_TOKENS = 64
AGENTIC_COLUMNS = (
    "trace", "idx", "stream", "t", "in_tok", "out_tok", "ref_idx", "lcp_blk", "api_time", "think_time",
)  # fmt: skip


def read_agentic(path: Path, records: list[dict[str, Any]]) -> SessionWorkload:
    """Session trees of kv-cache-tester's requests: one a trace, in file order.

    Requests without output (the provider failed) are left out; what a later one shares with those alone is new.
    """
    traces: dict[str, list[_Agentic]] = defaultdict(list)
    for n, record in enumerate(records, 2):
        trace = traces[str(record["trace"])]
        trace.append(_agentic(path, n, record, trace))
    empty = sum(not r.is_sent for rows in traces.values() for r in rows)
    trees = [tree for rows in traces.values() if (tree := _agentic_tree(rows))]
    if not trees:
        raise InputError(f"{path}: holds no request; give {FORMATS}")
    notes = (f"{empty} requests without output skipped",) if empty else ()
    return SessionWorkload(name=path.name, corpus=lambda: trees, notes=notes)


class _Agentic(NamedTuple):
    """A row of the agentic CSV. `end_s`: when the answer was complete, None where that was not recorded; `ref`: the
    earlier row of the trace with which it shares the most blocks, `shared`."""

    stream: str
    start_s: float
    end_s: float | None
    think_s: float | None
    input_tokens: int
    output_tokens: int
    ref: int
    shared: int

    @property
    def is_sent(self) -> bool:
        return self.output_tokens > 0


def _agentic(path: Path, n: int, record: Mapping[str, Any], before: list[_Agentic]) -> _Agentic:
    """`before`: the rows of its trace so far, which `idx` numbers."""
    start_s = number_of(path, n, record, "t", 0)
    api_s, think_s = (number_of(path, n, record, c, 0) if record[c] else None for c in ("api_time", "think_time"))
    input_tokens = tokens_of(path, n, record, "in_tok")
    index, ref = tokens_of(path, n, record, "idx", 0), tokens_of(path, n, record, "ref_idx", -1)
    if index != len(before) or ref >= index:
        raise InputError(
            f"{path}:{n}: idx={index}, ref_idx={ref}: rows of a trace are numbered from 0 and refer to earlier ones; "
            f"correct it"
        )
    shared = tokens_of(path, n, record, "lcp_blk", 0)
    has = min(input_tokens, before[ref].input_tokens if ref >= 0 else 0)
    if shared * AGENTIC_BLOCK_TOKENS > has:
        raise InputError(
            f"{path}:{n}: lcp_blk={shared} shares {shared * AGENTIC_BLOCK_TOKENS} of in_tok={input_tokens} with row "
            f"ref_idx={ref}; {has} tokens can be; correct it"
        )
    return _Agentic(
        stream=str(record["stream"]),
        start_s=start_s,
        end_s=None if api_s is None else start_s + api_s,
        think_s=think_s,
        input_tokens=input_tokens,
        output_tokens=tokens_of(path, n, record, "out_tok", 0),
        ref=ref,
        shared=shared,
    )


def _agentic_tree(rows: list[_Agentic]) -> SessionTree | None:
    """The first stream is the main one; the others start at the end of its last turn that began before them."""
    lines = prefix_lines([Recorded(r.stream, r.ref, r.shared, r.is_sent) for r in rows])
    streams: dict[str, list[tuple[_Agentic, Line]]] = {r.stream: [] for r in rows}
    for row, line in zip(rows, lines, strict=True):
        if line:
            streams[row.stream].append((row, line))
    main, *subs = (sorted(turns, key=lambda turn: turn[0].start_s) for turns in streams.values())
    if not main:
        return None
    out = [_agentic_stream(main, None)]
    for turns in filter(None, subs):
        first, last = turns[0][0], turns[-1][0]
        turn = max(0, sum(r.start_s <= first.start_s for r, _ in main) - 1)
        ended_s = last.start_s if last.end_s is None else last.end_s
        joined = turn + 1 < len(main) and ended_s <= main[turn + 1][0].start_s
        out.append(_agentic_stream(turns, main[turn][0], spawned_by=(0, turn), joined=joined))
    return SessionTree(tuple(out))


def _agentic_stream(rows: list[tuple[_Agentic, Line]], before: _Agentic | None, **spawned: Any) -> Stream:
    """`before`: the turn that spawned it."""
    turns = []
    for row, line in rows:
        delay_s = _agentic_delay_s(before, row) if before else 0.0
        turns.append(Turn(row.input_tokens, row.output_tokens, line.shared * AGENTIC_BLOCK_TOKENS, delay_s))
        before = row
    return Stream(
        kind="sub" if spawned else "main",
        turns=tuple(turns),
        lines=tuple((line.name, line.like) for _, line in rows),
        **spawned,
    )


def _agentic_delay_s(before: _Agentic, row: _Agentic) -> float:
    """Recorded gap less recorded API time, at least 0; where that time is missing, the recorded think time."""
    if before.end_s is None and row.think_s is not None:
        return row.think_s
    return max(0.0, row.start_s - (before.start_s if before.end_s is None else before.end_s))
