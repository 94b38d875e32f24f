"""Readers of recorded workloads: what they make of good files, and what they say of bad ones."""

import csv
import gzip
import heapq
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from models import FakeCalibration, aggregated

from rackplan.engine import InputError
from rackplan.simulator.arrivals import TraceWorkload
from rackplan.simulator.block_cache import BlockCache
from rackplan.simulator.load import Load
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.session_tree import SessionTree, Turn
from rackplan.simulator.sessions import SessionWorkload
from rackplan.simulator.simulate import simulate
from rackplan.simulator.streams import Streams
from rackplan.simulator.traces import read_trace
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.demand import play_demand

WORKLOADS = Path(os.environ.get("RACKPLAN_WORKLOADS") or Path(__file__).parents[1] / ".." / "shared" / "workloads")

MOONCAKE = '{"timestamp": %s, "input_length": 1000, "output_length": 50, "hash_ids": [1, %d]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
AGENTIC = "trace,idx,stream,t,in_tok,out_tok,ref_idx,lcp_blk,api_time,think_time\n"
BENCH = {
    "start_times": [10.0, 12.0, 11.0],
    "input_lens": [100, 200, 300],
    "output_lens": [5, 6, 7],
    "errors": ["", "", ""],
    "cached_lens": [0, 64, 64],
}


def recorded(name: str) -> Path:
    path = WORKLOADS / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set RACKPLAN_WORKLOADS to the folder that has it")
    return path


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def trace_of(path: Path) -> TraceWorkload:
    workload = read_trace(path)
    assert isinstance(workload, TraceWorkload)
    return workload


def sessions_of(path: Path) -> SessionWorkload:
    workload = read_trace(path)
    assert isinstance(workload, SessionWorkload)
    return workload


def replay(workload: TraceWorkload, load: Load = Load(), duration_s: float = 1e6) -> list[Request]:  # noqa: B008
    return list(workload.source(load, duration_s, Streams(0)).arrivals())


@pytest.mark.parametrize(
    ("stamps", "seconds"),
    [
        ([0, 300, 900], 0.9),  # ms
        ([0, 0, 1], 1.0),  # whole seconds: ms would be 2,000 requests/s
        ([0.25, 0.5, 1.75], 1.5),  # seconds with fractions
        ([0.5, 300.25, 900.5], 0.9),  # ms with fractions
    ],
)
def test_mooncake_unit_of_time_is_told_from_its_stamps(tmp_path: Path, stamps: list[float], seconds: float) -> None:
    workload = trace_of(write(tmp_path, "".join(MOONCAKE % (s, i) for i, s in enumerate(stamps))))
    requests = replay(workload)
    assert requests[-1].arrival_ns == pytest.approx(seconds * NS_PER_S)
    assert [r.hash_ids for r in requests] == [(1, 0), (1, 1), (1, 2)]
    assert bool(workload.notes) == (seconds >= 1)


def test_infinite_cache_hits_of_hashed_blocks_are_counted(tmp_path: Path) -> None:
    workload = trace_of(write(tmp_path, MOONCAKE % (0, 2) + MOONCAKE % (900, 3) + MOONCAKE % (1800, 2)))
    demand = play_demand(workload, e2e_s=1.0, duration_s=10.0, seed=0)
    assert demand.new_tokens == pytest.approx((1000 + (1000 - 512) + 0) / 3)


def test_rows_out_of_order_are_sorted_and_failed_ones_skipped(tmp_path: Path) -> None:
    workload = trace_of(write(tmp_path, json.dumps(BENCH | {"errors": ["", "timeout", ""]})))
    requests = replay(workload)
    assert [(r.arrival_ns, r.input_tokens, r.cached_tokens) for r in requests] == [(0, 100, 0), (NS_PER_S, 300, 64)]
    assert workload.notes == ("1 failed requests skipped",)


def test_a_rate_stretches_time_and_a_concurrency_keeps_the_order(tmp_path: Path) -> None:
    workload = trace_of(write(tmp_path, json.dumps(BENCH, indent=1)))
    assert [r.arrival_ns for r in replay(workload, Load(rate_req_s=0.5))] == [0, 2 * NS_PER_S, 4 * NS_PER_S]
    assert [r.input_tokens for r in replay(workload, Load(rate_req_s=0.5), 3)] == [100, 300]
    source = workload.source(Load(concurrency=1), 100, Streams(0))
    (first,) = source.arrivals()
    (second,) = source.finished(first, NS_PER_S)
    (third,) = source.finished(second, 2 * NS_PER_S)
    assert [first.input_tokens, second.input_tokens, third.input_tokens] == [100, 300, 200]
    assert source.finished(third, 3 * NS_PER_S) == []


@pytest.mark.parametrize("load", [Load(cv=3), Load(rate_req_s=5, cv=3)])
def test_burstiness_of_a_recorded_trace_is_not_settable(tmp_path: Path, load: Load) -> None:
    with pytest.raises(InputError, match="no effect"):
        trace_of(write(tmp_path, json.dumps(BENCH))).source(load, 10, Streams(0))


def test_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert trace_of(path).rows[0].input_tokens == 4808


ROW = '{"timestamp": 0, "input_length": 10, "output_length": 5}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("hello\nworld\n", "unknown format"),
        ('{"a": 1}', "unknown format"),
        ("[1, 2]", "unknown format"),
        ('{"start_times": [1.0', ":1: truncated or not JSON"),
        (ROW + ROW[:-9], ":2: truncated or not JSON"),
        (ROW + "7\n", ":2: '7' is not an object"),
        (ROW + '{"timestamp": 5, "input_length": 10}\n', ":2: output_length is missing"),
        (ROW + ROW.replace("10", "-10"), ":2: input_length=-10 must be at least 1"),
        (ROW + ROW.replace("10", "NaN"), ":2: input_length='nan' is not a number"),
        (ROW + ROW.replace("10", '"ten"'), ":2: input_length='ten' is not a number"),
        (ROW + ROW.replace("10", "1" + "0" * 400), ":2: input_length='1000"),
        (ROW + ROW.rstrip() + ROW, ":2: truncated or not JSON (Extra data)"),
        (ROW + ROW.replace("10", "1.5"), ":2: input_length=1.5 is not a whole"),
        (ROW + ROW.replace("5}", "0}"), ":2: output_length=0 must be at least 1"),
        (ROW.replace("5}", '5, "hash_ids": [1, 2]}'), ":1: 2 hash_ids"),
        (ROW.replace("5}", '5, "hash_ids": ["a"]}'), ":1: hash_ids="),
        (AZURE.replace("ContextTokens", "Context"), "column ContextTokens is missing"),
        (AZURE.replace("2023-11-16", "yesterday"), ":2: TIMESTAMP="),
        (AZURE + "2023-11-16 18:17:04,12\n", ":3: GeneratedTokens is missing"),
        (AZURE + "2023-11-16 18:17:04,12,0\n", ":3: GeneratedTokens=0"),
        (AZURE.splitlines()[0], "no request"),
        (AGENTIC.replace("t,in_tok,", "t,"), "column in_tok is missing"),
        (AGENTIC + "a,0,main,0,100,5,-1,2,1,0\n", ":2: lcp_blk=2 shares 128 of in_tok=100 with row ref_idx=-1; 0 "),
        (AGENTIC + "a,0,main,soon,100,5,-1,0,1,0\n", ":2: t='soon'"),
        (AGENTIC + "a,1,main,0,100,5,-1,0,1,0\n", ":2: idx=1, ref_idx=-1: rows of a trace are numbered from 0"),
        (AGENTIC + "a,0,main,0,100,5,0,0,1,0\n", ":2: idx=0, ref_idx=0: rows of a trace are numbered from 0"),
        (AGENTIC, "no request"),
        (json.dumps({k: v for k, v in BENCH.items() if k != "start_times"}), "start_times is missing; run"),
        (json.dumps(BENCH | {"output_lens": [1]}), "output_lens is not a list as long"),
        (json.dumps(BENCH | {"output_lens": [1, 2, 0]}), ":2: output_lens=0"),
        (json.dumps(BENCH | {"cached_lens": [0, 0, 400]}), ":2: cached_lens=400 exceeds"),
        (json.dumps(BENCH | {"errors": ["x", "x", "x"]}), "no request"),
    ],
)
def test_bad_files_are_refused_in_one_line_with_file_row_and_value(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as refused:
        parse_workload(str(path))
    message = str(refused.value)
    assert message.startswith(str(path))
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "data",
    [gzip.compress(AZURE.encode() * 50)[:-20], b"\x1f\x8bxx", b"TIMESTAMP\xff,\x80\n"],
    ids=["cut", "bad", "bin"],
)
def test_damaged_bytes_are_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(data)
    with pytest.raises(InputError, match="truncated or damaged gzip|not text"):
        read_trace(path)


def test_agentic_rows_become_trees(tmp_path: Path) -> None:
    rows = [
        "a,0,main,0,1000,50,-1,0,10,0",
        "a,1,sub:1,30,700,20,0,4,5,0",  # starts 20 s after turn 0 and ends before turn 1: joined
        "a,2,sub:1,40,900,20,1,10,5,4",
        "a,3,main,100,2000,60,0,15,20,88",  # 100 - 10 s after the end of the turn before
        "a,4,main,130,2100,0,3,31,,1",  # failed: left out
        "a,5,main,140,2200,70,4,20,5,9",  # shares 20 blocks with the one left out, so 20 with turn 1 too
        "a,6,main,143,2300,8,5,34,1,0",  # sent 2 s before the answer was there
        "b,0,main,0,500,5,-1,0,1,0",
    ]
    workload = sessions_of(write(tmp_path, AGENTIC + "\n".join(rows)))
    tree, other = workload.corpus()
    main, sub = tree.streams
    assert [t[2:] for t in main.turns] == [(0, 0.0), (960, 90.0), (1280, 20.0), (2176, 0.0)]
    assert [t[2:] for t in sub.turns] == [(256, 20.0), (640, 5.0)]
    assert (main.lines, sub.lines) == (((0, -1),) * 4, ((1, 0), (1, -1)))
    assert (sub.spawned_by, sub.joined) == ((0, 0), True)
    assert other.requests == 1
    assert workload.notes == ("1 requests without output skipped",)


def test_recorded_agentic_requests_hit_what_the_record_says_block_for_block() -> None:
    """In the record's order, with a cache that never evicts: `lcp_blk` of every request but those that share blocks
    with one that failed alone. 96.31 % of the input; with those 27, 96.32 % (the file's own statistics)."""
    path = recorded("agentic_requests.csv.gz")
    trees = iter(sessions_of(path).corpus())
    hits = inputs = fewer = 0
    for rows in rows_by_trace(path).values():
        turns = turns_by_stream(rows, next(trees))
        cache = SessionCache()
        for row in rows:
            if row["out_tok"] == "0":
                continue
            turn, (line, like) = next(turns[row["stream"]])
            request = Request(0, 0, turn.input_tokens, turn.output_tokens, line, turn.reuse_tokens, like)
            assert request.input_tokens == int(row["in_tok"])
            hit = cache.match(request)
            assert hit == turn.reuse_tokens <= int(row["lcp_blk"]) * 64
            fewer += hit < int(row["lcp_blk"]) * 64
            cache.begin(request, hit)
            cache.end(request, request.input_tokens)
            hits, inputs = hits + hit, inputs + request.input_tokens
    assert next(trees, None) is None
    assert fewer == 17
    assert hits / inputs == pytest.approx(0.963124, abs=1e-6)


def rows_by_trace(path: Path) -> dict[str, list[dict[str, str]]]:
    traces: dict[str, list[dict[str, str]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            traces.setdefault(row["trace"], []).append(row)
    return traces


def turns_by_stream(rows: list[dict[str, str]], tree: SessionTree) -> dict[str, Iterator[tuple[Turn, tuple[int, int]]]]:
    names = dict.fromkeys(row["stream"] for row in rows if row["out_tok"] != "0")
    return {n: zip(s.turns, s.lines or (), strict=True) for n, s in zip(names, tree.streams, strict=True)}


def test_recorded_agentic_sessions_hit_nearly_that_when_they_are_played() -> None:
    """Sub-agents then run at other times than they did, so some begin before what they begin like."""
    workload = sessions_of(recorded("agentic_requests.csv.gz"))
    source = workload.source(Load(rate_req_s=10), 3e5, Streams(0))
    cache = SessionCache()
    queue = [(r.arrival_ns, r.id, r) for r in islice(source.arrivals(), 710)]
    heapq.heapify(queue)
    hits = inputs = 0
    while queue:
        at_ns, _, request = heapq.heappop(queue)
        hits, inputs = hits + cache.match(request), inputs + request.input_tokens
        cache.begin(request, cache.match(request))
        cache.end(request, request.input_tokens)
        for r in source.finished(request, at_ns + NS_PER_S):
            heapq.heappush(queue, (r.arrival_ns, r.id, r))
    assert inputs == sum(t.input_tokens for tree in workload.corpus() for s in tree.streams for t in s.turns)
    assert hits / inputs == pytest.approx(0.96312, abs=1e-4)


def test_recorded_mooncake_and_azure_traces_are_read_whole() -> None:
    mooncake = trace_of(recorded("mooncake_conversation.jsonl.gz"))
    assert (len(mooncake.rows), mooncake.notes) == (12031, ())
    assert replay(mooncake)[-1].arrival_ns == 3_536_999 * 1_000_000
    azure = trace_of(recorded("azure2023_code.csv.gz"))
    assert len(azure.rows) == 8819
    times_s = np.array([r.arrival_ns for r in replay(azure, Load(rate_req_s=10))]) / NS_PER_S
    assert (len(times_s) - 1) / times_s[-1] == pytest.approx(10)
    assert (np.diff(times_s) >= 0).all()


def test_mooncake_hits_are_those_that_its_authors_count() -> None:
    """37.4 % of the input, with a cache that never evicts."""
    workload, cache = trace_of(recorded("mooncake_conversation.jsonl.gz")), BlockCache()
    assert workload.hashed
    hits = inputs = 0
    for request in replay(workload):
        hits += cache.match(request)
        inputs += request.input_tokens
        cache.begin(request, 0)
        cache.end(request, request.input_tokens)
    assert hits / inputs == pytest.approx(0.374, abs=0.0005)


def test_a_trace_with_hashes_hits_in_the_simulator(tmp_path: Path) -> None:
    line = {"input_length": 2048, "output_length": 5, "hash_ids": [1, 2, 3, 4]}
    lines = [line | {"timestamp": 60_000 * i} for i in range(2)]
    workload = trace_of(write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines)))
    result = simulate(aggregated(), workload, Load(), FakeCalibration(), RunOptions(duration_s=1000))
    assert result.cached_tokens.tolist() == [0, 2032]  # never the last token, whole blocks of 16
