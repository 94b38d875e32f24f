"""Laws of generated workloads: one seed, one workload; rates, burstiness, closed loops and session trees."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackplan.engine import InputError
from rackplan.simulator.arrivals import gamma_times
from rackplan.simulator.load import Load, Source
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.session_tree import MAX_DELAY_S, SessionTree, Stream, Turn
from rackplan.simulator.sessions import SessionSource
from rackplan.simulator.streams import Streams
from rackplan.simulator.workloads import parse_workload


def requests_of(source: Source, most: int = 2000) -> list[Request]:
    return list(islice(source.arrivals(), most))


def lengths(requests: list[Request]) -> list[tuple[int, int]]:
    return [(r.input_tokens, r.output_tokens) for r in requests]


def test_same_seed_same_requests() -> None:
    workload, load = parse_workload("lognormal:2000/200"), Load(rate_req_s=5)
    one, two, other = (requests_of(workload.source(load, 100, Streams(seed))) for seed in (7, 7, 8))
    assert [(r.arrival_ns, *x) for r, x in zip(one, lengths(one), strict=True)] == [
        (r.arrival_ns, *x) for r, x in zip(two, lengths(two), strict=True)
    ]
    assert lengths(one) != lengths(other)


def test_request_i_has_the_same_lengths_under_every_load() -> None:
    workload = parse_workload("lognormal:2000/200/0.7")
    slow = requests_of(workload.source(Load(rate_req_s=5), 100, Streams(1)), 50)
    fast = requests_of(workload.source(Load(rate_req_s=500, cv=3), 100, Streams(1)), 50)
    closed = requests_of(workload.source(Load(concurrency=50), 100, Streams(1)), 50)
    assert lengths(slow) == lengths(fast) == lengths(closed)


def test_lognormal_has_its_medians_and_repeats_by_its_seed() -> None:
    workload = parse_workload("lognormal:3000/400/0.8")
    drawn = np.array(lengths(requests_of(workload.source(Load(rate_req_s=1000), 60, Streams(3)), 50_000)))
    assert np.median(drawn, axis=0) == pytest.approx([3000, 400], rel=0.02)
    # The mean of a lognormal; clipping at three sigma takes less than 2 %.
    assert drawn.mean(axis=0) == pytest.approx(np.array([3000, 400]) * np.exp(0.8**2 / 2), rel=0.02)
    again = lengths(requests_of(workload.source(Load(rate_req_s=10), 60, Streams(3)), 300))
    assert [list(pair) for pair in again] == drawn[: len(again)].tolist()


@pytest.mark.parametrize(("rate", "cv"), [(20.0, 1.0), (200.0, 1.0), (50.0, 3.0), (50.0, 0.5), (50.0, 0.0)])
def test_rate_is_honoured_within_three_sigma_and_so_is_the_coefficient_of_variation(rate: float, cv: float) -> None:
    duration_s = 1000
    times_s = np.fromiter(gamma_times(rate, cv, duration_s, np.random.default_rng(5)), dtype=float) / NS_PER_S
    assert abs(len(times_s) - rate * duration_s) <= max(1, 3 * cv * np.sqrt(rate * duration_s))
    gaps = np.diff(times_s)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)
    assert times_s[-1] < duration_s


def test_closed_loop_keeps_its_clients_busy_and_stops_at_the_end() -> None:
    source = parse_workload("fixed:100/10").source(Load(concurrency=3), 10, Streams(0))
    first = requests_of(source)
    assert [r.arrival_ns for r in first] == [0, 0, 0]
    (following,) = source.finished(first[1], 5 * NS_PER_S)
    assert (following.id, following.arrival_ns) == (3, 5 * NS_PER_S)
    assert source.finished(following, 10 * NS_PER_S) == []


@pytest.mark.parametrize(
    ("text", "load", "mend"),
    [
        ("fixed:100/10", Load(), "--concurrency, --rate"),
        ("agentx", Load(), "--concurrency, --rate"),
        ("fixed:100/10", Load(concurrency=1, rate_req_s=1), "give one"),
        ("fixed:100/10", Load(concurrency=0), "at least 1"),
        ("fixed:100/10", Load(rate_req_s=0), "above 0"),
        ("fixed:100/10", Load(rate_req_s=1, cv=-1), "--cv=-1"),
        ("fixed:100/10", Load(concurrency=1, cv=3), "no effect"),
    ],
)
def test_a_load_that_says_nothing_or_too_much_is_refused(text: str, load: Load, mend: str) -> None:
    with pytest.raises(InputError, match=mend):
        parse_workload(text).source(load, 10, Streams(0))


@pytest.mark.parametrize(
    "text",
    [
        "fixed:100",
        "fixed:100/10/1",
        "fixed:a/b",
        "fixed:0/5",
        "lognormal:5/-1",
        "lognormal:5/5/nan",
        "no_file.csv",
        "/",
    ],
)
def test_a_workload_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match=f"workload={text}") as refused:
        parse_workload(text)
    assert "\n" not in str(refused.value)


def play(source: Source, service_s: float = 1.0) -> list[tuple[Request, int]]:
    """Every request with its end, ns, each served at once in `service_s`."""
    open_requests, done = requests_of(source, 10**6), []
    while open_requests:
        open_requests.sort(key=lambda r: (r.arrival_ns, r.id), reverse=True)
        request = open_requests.pop()
        end_ns = request.arrival_ns + int(service_s * NS_PER_S)
        done.append((request, end_ns))
        following = source.finished(request, end_ns)
        assert all(r.arrival_ns >= end_ns for r in following)
        open_requests += following
    return done


@st.composite
def trees(draw: st.DrawFn) -> SessionTree:
    """Any tree of up to five streams; a turn's input tokens name it, so that a played request can be told."""
    streams: list[Stream] = []
    for index in range(draw(st.integers(1, 5))):
        delays_s = draw(st.lists(st.sampled_from([0.0, 0.5, 2.0, 1000.0]), min_size=1, max_size=4))
        turns = tuple(Turn(1000 * (index + 1) + n, 10, 0, d) for n, d in enumerate(delays_s))
        by = None
        if index:
            parent = draw(st.integers(0, index - 1))
            by = (parent, draw(st.integers(0, len(streams[parent].turns) - 1)))
        joined = bool(index) and draw(st.booleans())
        streams.append(Stream(kind="sub" if index else "main", turns=turns, spawned_by=by, joined=joined))
    return SessionTree(tuple(streams))


@settings(max_examples=200, deadline=None)
@given(trees())
def test_every_turn_runs_once_in_order_and_joined_streams_end_before_their_parent_goes_on(tree: SessionTree) -> None:
    # At this rate one tree comes within the first draw and the run outlasts it.
    source = SessionSource([tree], Load(rate_req_s=1e-5 * tree.requests, cv=0), 1.5e5, Streams(0))
    done = play(source)
    start = {r.input_tokens: r.arrival_ns for r, _ in done}
    end = {r.input_tokens: e for r, e in done}
    names = {s: [t.input_tokens for t in stream.turns] for s, stream in enumerate(tree.streams)}
    assert sorted(r.input_tokens for r, _ in done) == sorted(n for turns in names.values() for n in turns)
    for index, stream in enumerate(tree.streams):
        ready = [end[n] for n in names[index]]
        if stream.spawned_by is not None:
            parent, turn = stream.spawned_by
            ready = [end[names[parent][turn]], *ready]
            if stream.joined and turn + 1 < len(names[parent]):
                assert ready[-1] <= start[names[parent][turn + 1]]
        else:
            ready = [start[names[0][0]], *ready]
        for before, name, turn_data in zip(ready, names[index], stream.turns, strict=False):
            assert start[name] - before >= min(turn_data.delay_s, MAX_DELAY_S) * NS_PER_S * (index > 0 or name > 1000)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 5))
def test_lanes_stay_live_and_streams_in_play_never_share_a_session(corpus: list[SessionTree], lanes: int) -> None:
    source = SessionSource(corpus, Load(concurrency=lanes), 2000, Streams(2))
    done = play(source)
    assert all(r.arrival_ns < 2000 * NS_PER_S for r, _ in done)
    assert len({r.id for r, _ in done}) == len(done)
    busy: dict[int, int] = {}
    for request, end_ns in sorted(done, key=lambda d: (d[0].arrival_ns, d[1])):
        assert request.arrival_ns >= busy.get(request.session, 0)
        busy[request.session] = end_ns
    # No lane is idle longer than the capped delay that precedes a turn, nor than its joins.
    assert max(r.arrival_ns for r, _ in done) >= (2000 - MAX_DELAY_S - 100) * NS_PER_S


def test_primed_contexts_are_those_that_the_first_turns_reuse() -> None:
    source = parse_workload("agentx").source(Load(concurrency=200), 600, Streams(4))
    held = dict(source.primed())
    assert len(held) == len(source.primed())
    reusing = [r for r in source.arrivals() if r.reuse_tokens]
    assert len(reusing) > 190
    assert sum(held.get(r.session, 0) >= r.reuse_tokens for r in reusing) >= len(reusing) * 0.95


# -- how AgentX replays -------------------------------------------------------------------------------------------
def tree_of(*delays_s: float, sub: tuple[float, ...] = ()) -> SessionTree:
    """A main stream of those delays, and a sub-agent that its first turn spawns."""
    streams = [Stream(kind="main", turns=tuple(Turn(1000 + n, 10, 0, d) for n, d in enumerate(delays_s)))]
    if sub:
        turns = tuple(Turn(2000 + n, 10, 0, d) for n, d in enumerate(sub))
        streams.append(Stream(kind="sub", turns=turns, spawned_by=(0, 0)))
    return SessionTree(tuple(streams))


def played_from_the_start(tree: SessionTree) -> dict[int, int]:
    """When each turn was sent, s after the first, by its input tokens; requests take 1 s."""
    source = SessionSource([tree], Load(rate_req_s=1e-6 * tree.requests, cv=0), 1.5e6, Streams(0))
    sent = {r.input_tokens: r.arrival_ns for r, _ in play(source)}
    return {tokens: (at_ns - sent[1000]) // NS_PER_S for tokens, at_ns in sent.items()}


def test_a_tree_is_idle_for_300_s_at_most_and_its_timers_move_forward() -> None:
    assert played_from_the_start(tree_of(0.0, 250.0)) == {1000: 0, 1001: 251}
    assert played_from_the_start(tree_of(0.0, 1000.0)) == {1000: 0, 1001: 301}
    # A sub-agent is at work until 403 s: a turn due at 501 s keeps its time, one due at 1,001 s comes 300 s later.
    sub = (0.0, 200.0, 199.0)
    assert played_from_the_start(tree_of(0.0, 500.0, sub=sub))[1001] == 501
    assert played_from_the_start(tree_of(0.0, 1000.0, sub=sub))[1001] == 403 + 300
    # Two timers of one tree: both move by as much.
    both = played_from_the_start(tree_of(0.0, 1000.0, sub=(0.0, 1100.0)))
    assert (both[1001], both[2001]) == (302, 403)  # 1,001 and 1,102 without


@settings(max_examples=100, deadline=None)
@given(trees())
def test_no_tree_is_idle_for_longer(tree: SessionTree) -> None:
    source = SessionSource([tree], Load(rate_req_s=1e-5 * tree.requests, cv=0), 1.5e5, Streams(0))
    done = sorted(play(source), key=lambda d: d[0].arrival_ns)
    ends = np.maximum.accumulate([end_ns for _, end_ns in done])
    idle_ns = [r.arrival_ns - end for (r, _), end in zip(done[1:], ends, strict=False)]
    assert max(idle_ns, default=0) <= MAX_DELAY_S * NS_PER_S


def test_lanes_start_anywhere_between_a_quarter_and_three_quarters_of_their_trees() -> None:
    # 101 turns of 10 s each, think time and request together.
    tree = tree_of(0.0, *[10.0 - 1.1] * 100)
    source = SessionSource([tree], Load(concurrency=2000), 60, Streams(3))
    turns = np.array([r.input_tokens - 1000 for r in source.arrivals()])
    assert turns.min() >= 25
    assert turns.max() <= 77
    counts = np.histogram(turns, bins=5, range=(26, 76))[0]
    assert counts.min() > 320  # of 400 each, within four standard deviations


def test_each_stream_in_play_is_primed_once_with_what_its_last_turn_left_and_no_other() -> None:
    tree = tree_of(0.0, *[5.0] * 40, sub=(0.0, *[4.0] * 40))
    short = tree_of(0.0, *[5.0] * 40, sub=(0.0,))  # its sub-agent has ended by then
    source = SessionSource([tree, short], Load(concurrency=2), 60, Streams(1))
    first = list(source.arrivals())
    assert len(first) == len(source.primed()) == 3
    primed = dict(source.primed())
    assert {r.session: r.input_tokens - 1 + 10 for r in first} == primed


def test_a_lane_takes_the_next_tree_when_its_own_ends_and_starts_it_from_the_beginning() -> None:
    trees_ = [tree_of(0.0, *[1.0] * n) for n in (3, 4, 5)]
    source = SessionSource(trees_, Load(concurrency=1), 60, Streams(1))
    done = play(source)
    starts = [i for i, (r, _) in enumerate(done) if r.input_tokens == 1000]
    lengths_ = np.diff([*starts]).tolist()
    assert lengths_[:3] == [5, 6, 4]  # trees 1, 2, 0: one turn more than their delays
    for i in starts:
        assert i == 0 or done[i][0].arrival_ns == done[i - 1][1]
    assert all(r.arrival_ns >= end for (r, _), (_, end) in zip(done[1:], done, strict=False))  # one at a time


def test_sub_agents_cost_no_concurrency() -> None:
    tree = tree_of(0.0, *[0.0] * 20, sub=(0.0, *[0.0] * 20))
    done = play(SessionSource([tree], Load(concurrency=1), 300, Streams(1)))
    at_once = max(sum(a.arrival_ns <= r.arrival_ns < end for a, end in done) for r, _ in done)
    assert at_once == 2
