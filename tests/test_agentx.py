"""The generator of agentic sessions against the published statistics of the AgentX corpus."""

import time
from typing import Any

import numpy as np
import pytest
from models import FakeCalibration, LinearCost, disaggregated

from rackplan.simulator.agentx import AGENTX, generate_trees, published, session_statistics
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import metrics_of
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.session_tree import SessionTree
from rackplan.simulator.simulate import simulate
from rackplan.simulator.streams import Streams
from rackplan.simulator.workloads import parse_workload

COMPARED = (
    "main_isl", "sub_isl", "all_isl_p50", "main_osl", "all_osl_p50", "new_prefill_per_turn", "turns_main", "gap_s",
    "sessions_with_subagents", "subagent_groups_per_session_p50", "inner_reqs_p50", "hit_prev_in_stream",
    "hit_infinite",
)  # fmt: skip


def values(stats: dict[str, Any]) -> dict[str, float]:
    """The compared statistics, totals as means."""
    out = {
        "requests_per_session": stats["requests"] / stats["sessions"],
        "groups_per_session": stats["subagent_groups"] / stats["sessions"],
        "main_share": stats["main_requests"] / stats["requests"],
        "input_per_request": stats["input_tokens"] / stats["requests"],
        "output_per_request": stats["output_tokens"] / stats["requests"],
    }
    for key in COMPARED:
        part = stats[key]
        out |= {f"{key}.{q}": v for q, v in part.items()} if isinstance(part, dict) else {key: part}
    return out


@pytest.fixture(scope="module")
def trees() -> list[SessionTree]:
    return generate_trees(np.random.default_rng(1), 2000)


def test_generated_sessions_match_the_published_statistics_within_10_percent(trees: list[SessionTree]) -> None:
    assert values(session_statistics(trees)) == pytest.approx(values(published()), rel=0.10)


def test_another_seed_matches_within_12_percent() -> None:
    other = generate_trees(np.random.default_rng(77), 2000)
    assert values(session_statistics(other)) == pytest.approx(values(published()), rel=0.12)


def test_corpus_that_is_replayed_matches_too() -> None:
    want = published()
    turns = [turn for tree in AGENTX.corpus() for stream in tree.streams for turn in stream.turns]
    inputs, outputs, reuse, _ = (np.array(c, dtype=float) for c in zip(*turns, strict=True))
    assert inputs.mean() == pytest.approx(want["input_tokens"] / want["requests"], rel=0.10)
    assert outputs.mean() == pytest.approx(want["output_tokens"] / want["requests"], rel=0.10)
    assert len(turns) / len(AGENTX.corpus()) == pytest.approx(want["requests"] / want["sessions"], rel=0.10)
    # What an infinite cache misses is a small difference of large numbers.
    assert (inputs - reuse).mean() == pytest.approx((1 - want["hit_infinite"]) * inputs.mean(), rel=0.15)
    assert (inputs + outputs).max() <= 1_048_576


def test_contexts_grow_from_what_the_previous_turn_held(trees: list[SessionTree]) -> None:
    for tree in trees[:300]:
        for stream in tree.streams:
            turns = stream.turns
            assert all(0 <= t.reuse_tokens <= t.input_tokens for t in turns)
            assert all(t.output_tokens >= 1 and t.delay_s >= 0 for t in turns)
            # Rounding to whole tokens may add one.
            assert all(b.reuse_tokens <= a.input_tokens + 1 for a, b in zip(turns, turns[1:], strict=False))


def test_every_stream_is_spawned_by_a_turn_of_one_before_it(trees: list[SessionTree]) -> None:
    for tree in trees:
        assert tree.streams[0].spawned_by is None
        for index, stream in enumerate(tree.streams[1:], 1):
            assert stream.spawned_by is not None
            parent, turn = stream.spawned_by
            assert parent < index
            assert turn < len(tree.streams[parent].turns)


def test_same_seed_same_sessions() -> None:
    one, two = (generate_trees(np.random.default_rng(3), 40) for _ in range(2))
    assert one == two


def test_4800_lanes_start_in_two_seconds_out_of_step() -> None:
    began = time.process_time()
    source = parse_workload("agentx").source(Load(concurrency=4800), 600, Streams(123))
    first = list(source.arrivals())
    assert time.process_time() - began < 2
    times_ns = [r.arrival_ns for r in first]
    assert times_ns == sorted(times_ns)
    assert len(first) >= 4800 * 0.9
    assert len(set(times_ns)) > len(first) * 0.9


def test_a_replay_is_measured_as_agentx_measures() -> None:
    """All input, cached too, and output of what ended after the warm-up, over its time and all GPUs; ITL of a request
    is (E2E - TTFT) / (output - 1), and P90 interactivity 1 / its P90."""
    options = RunOptions(duration_s=120, warmup_s=30, drain=False)
    deployment = disaggregated(prefill={"instances": 2}, decode={"dep": 1})
    result = simulate(deployment, AGENTX, Load(concurrency=40), FakeCalibration(), options)
    assert 0 < sum(result.finish_ns < 30e9) < len(result.finish_ns)
    kept = result.finish_ns >= 30e9
    tokens = result.input_tokens[kept].sum() + result.output_tokens[kept].sum()
    metrics = metrics_of(result)
    assert metrics["throughput_total_tok_s_per_gpu"] == pytest.approx(tokens / 90 / 3)
    many = kept & (result.output_tokens > 1)
    itl_ms = (result.finish_ns - result.first_token_ns)[many] / 1e6 / (result.output_tokens[many] - 1)
    assert metrics["interactivity_tok_s_user"]["p90"] == pytest.approx(1e3 / np.percentile(itl_ms, 90))


def test_time_in_which_no_session_has_anything_in_flight_is_measured_too() -> None:
    # Two lanes, whose next turns may all be due after the end.
    last_s = []
    for seed in range(20):
        options = RunOptions(duration_s=600, warmup_s=10, drain=False, seed=seed)
        result = simulate(disaggregated(), AGENTX, Load(concurrency=2), FakeCalibration(), options)
        assert result.measured_to_ns == 600e9
        last_s.append(result.finish_ns.max() / 1e9)
    assert min(last_s) < 590


def test_answers_are_as_long_as_recorded() -> None:
    """ignore_eos: no request ends before its recorded output."""
    source = AGENTX.source(Load(concurrency=4), 60, Streams(0))
    recorded = {r.id: r.output_tokens for r in source.arrivals()}
    options = RunOptions(duration_s=60, drain=False)
    result = simulate(disaggregated(), AGENTX, Load(concurrency=4), FakeCalibration(LinearCost()), options)
    outputs = dict(zip(result.request_id.tolist(), result.output_tokens.tolist(), strict=True))
    assert all(outputs[i] == tokens for i, tokens in recorded.items() if i in outputs)
    # Of a LinearCost's decode step no more than one token comes: at least 3.5 ms each.
    decoded_ms = (result.finish_ns - result.first_token_ns) / 1e6
    assert (decoded_ms >= 3.5 * (result.output_tokens - 1)).all()
