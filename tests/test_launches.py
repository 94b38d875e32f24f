"""Launches that spread: drawn once a step from a named stream, the same in runs of steps and step by step."""

from math import erf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests

from rackplan.calibration import h200
from rackplan.calibration.campaign import ep_launches
from rackplan.calibration.h200_launches import by_machine, launches_by_run
from rackplan.calibration.library import calibration_file, load_calibration
from rackplan.calibration.served import (
    Launches,
    launch_at_no_tokens_ms,
    launch_correlation,
    launch_quantiles,
    token_launch_ms,
)
from rackplan.simulator.cost import ShortChunks, chunk_work
from rackplan.simulator.launches import DrawnLaunches
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

SPREAD = (0.7, 0.9, 1.0, 1.1, 1.3)


class SpreadCost(LinearCost):
    launch_quantiles = SPREAD


def run(cost, seed=0, coalesce=True, instances=2):
    rng = np.random.default_rng(5)
    reqs = requests(np.cumsum(rng.exponential(0.08, 60)), rng.integers(200, 3000, 60), rng.integers(2, 80, 60))
    options = RunOptions(seed=seed, coalesce=coalesce)
    return simulate(aggregated(instances=instances), GivenRequests(reqs), Load(), FakeCalibration(cost), options)


def same(a, b) -> bool:
    return all((getattr(a, k) == getattr(b, k)).all() for k in ("request_id", "first_token_ns", "finish_ns"))


@given(st.integers(0, 1000))
def test_runs_of_steps_draw_what_single_steps_draw(seed):
    assert same(run(SpreadCost(floor=60.0), seed), run(SpreadCost(floor=60.0), seed, coalesce=False))


@given(st.integers(0, 1000))
def test_draws_are_numpys_one_by_one_and_lie_between_the_quantiles_as_interp_has_them(seed):
    cost = SpreadCost(floor=60.0)
    drawn, rng, correlation = DrawnLaunches(cost, np.random.default_rng(seed)), np.random.default_rng(seed), 0.0
    slow = rng.standard_normal()
    for _ in range(300):
        slow = correlation * slow + rng.standard_normal()
        share = ((1 + erf(slow / sqrt(2))) / 2) ** (1 / 2)
        expected = cost.launch_floor_ms(2048, 2) * np.interp(share, np.linspace(0, 1, len(SPREAD)), SPREAD)
        assert drawn.launch_floor_ms(2048, 2) == expected


def test_the_same_seed_draws_the_same_launches_and_another_seed_others():
    first = run(SpreadCost(floor=60.0))
    assert same(first, run(SpreadCost(floor=60.0)))
    assert not same(first, run(SpreadCost(floor=60.0), seed=1))


def test_without_a_spread_nothing_is_drawn():
    assert same(run(LinearCost(floor=60.0)), run(LinearCost(floor=60.0), seed=1))


def test_instances_draw_from_streams_of_their_own():
    # Requests of one instance meet the same launches, whatever another instance does.
    reqs = requests([0.0, 0.5, 1.0], 1000, 1)
    options = RunOptions(seed=3)
    alone = simulate(aggregated(), GivenRequests(reqs), Load(), FakeCalibration(SpreadCost(floor=60.0)), options)
    both = requests([0.0, 0.001, 0.5, 0.501, 1.0, 1.001], 1000, 1)
    pair = simulate(
        aggregated(instances=2), GivenRequests(both), Load(), FakeCalibration(SpreadCost(floor=60.0)), options
    )
    ttft = {i: t for i, t in zip(pair.request_id, pair.first_token_ns - pair.arrival_ns, strict=True)}
    assert (alone.first_token_ns - alone.arrival_ns).tolist() == [ttft[0], ttft[2], ttft[4]]


def test_only_launches_of_prompts_are_drawn_and_their_mean_stays():
    drawn = DrawnLaunches(SpreadCost(floor=60.0), np.random.default_rng(0))
    assert drawn.launch_floor_ms(2048, 0) == 0.0
    many = np.array([drawn.launch_floor_ms(2048, 1) for _ in range(20_000)])
    assert many.mean() == pytest.approx(60.0, rel=0.005)
    assert many.min() >= 0.7 * 60
    assert many.max() <= 1.3 * 60


def test_a_step_waits_for_the_latest_of_the_ranks_that_prefill():
    rng = np.random.default_rng(0)
    drawn = DrawnLaunches(SpreadCost(floor=60.0), rng)
    means = [np.mean([drawn.launch_floor_ms(2048, ranks) for _ in range(20_000)]) for ranks in (1, 2, 4, 32)]
    assert (np.diff(means) > 0).all()
    pairs = np.interp(rng.random((2, 20_000)), np.linspace(0, 1, len(SPREAD)), SPREAD)
    assert means[1] == pytest.approx(60 * pairs.max(axis=0).mean(), rel=0.005)
    assert means[-1] < 1.3 * 60


@given(st.floats(0, 0.01), st.integers(0, 100))
def test_what_tokens_add_and_how_launches_spread_are_found_again(slope, seed):
    rng = np.random.default_rng(seed)
    runs = []
    for mean in (70.0, 100.0):
        tokens = 2048.0 * rng.integers(1, 5, 400)
        runs.append(Launches(ms=mean * rng.uniform(0.8, 1.2, 400) + slope * tokens, tokens=tokens))
    assert token_launch_ms(runs) == pytest.approx(slope, abs=0.001)
    assert launch_at_no_tokens_ms(runs, slope) == pytest.approx(85.0, rel=0.02)
    quantiles = np.array(launch_quantiles(runs, slope))
    assert ((quantiles[1:] + quantiles[:-1]) / 2).mean() == pytest.approx(1.0)
    assert (np.diff(quantiles) >= 0).all()
    assert 0.75 < quantiles[0] < 1 < quantiles[-1] < 1.25


def test_prompts_of_one_length_tell_nothing_of_tokens():
    assert token_launch_ms([Launches(ms=np.array([70.0, 90.0]), tokens=np.array([2048.0, 2048.0]))]) == 0.0


def test_the_embedded_spread_is_that_of_its_fit_runs():
    c = calibration_file("h200-v2-lite").coefficients
    one_gpu = list(launches_by_run(h200.launch_steps(), eager=True).values())
    assert c.launch_correlation == pytest.approx(launch_correlation(one_gpu), rel=1e-3)
    assert c.eager_token_launch_ms == pytest.approx(token_launch_ms(one_gpu), rel=1e-3)
    assert c.launch_quantiles == pytest.approx(
        launch_quantiles([*one_gpu, ep_launches()], c.eager_token_launch_ms), rel=1e-3
    )
    assert all(not calibration_file(n).coefficients.launch_quantiles for n in ("gb300-v4.1-flash", "gb200-v3"))


def test_the_embedded_level_is_that_of_one_host_and_its_error_spans_the_others():
    file = calibration_file("h200-v2-lite")
    machines = [m.ms.mean() for m in by_machine(launches_by_run(h200.launch_steps(), eager=True))]
    c = file.coefficients
    beside_ms = c.eager_floor_ms + c.eager_decode_launch_ms + c.eager_token_launch_ms * 2048
    assert beside_ms == pytest.approx(machines[0], rel=0.03)
    low, high = file.coefficient_intervals["eager_floor_ms"]
    assert high - low > np.std(machines)


def test_tokens_add_to_an_eager_launch_alone():
    deployment = aggregated()
    cost = load_calibration("h200-v2-lite").pool_cost(deployment, deployment.pools[0])
    small, large = cost.launch_floor_ms(1024, 1), cost.launch_floor_ms(8192, 1)
    assert large - small == pytest.approx(7168 * cost.c.eager_token_launch_ms)
    assert cost.launch_floor_ms(256, 1) == cost.launch_floor_ms(64, 1)


# -- prefill attention -------------------------------------------------------------------------------------------------
@given(st.integers(1, 4000), st.integers(0, 30_000))
def test_a_short_chunk_costs_its_pairs_and_no_context(tokens, context):
    deployment = aggregated()
    cost = load_calibration("h200-v2-lite").pool_cost(deployment, deployment.pools[0])
    pairs, read = chunk_work(cost.short_chunks, tokens, context)
    alone = tokens * (context + tokens / 2)
    if tokens <= cost.c.short_chunk_tokens:
        assert (pairs, read) == (pytest.approx(cost.c.short_chunk_pairs * alone), 0)
    else:
        assert (pairs, read) == (alone, context)
    assert chunk_work(ShortChunks(), tokens, context) == (alone, context)


def test_exact_batches_of_short_chunks_are_met():
    """64 to 512 new tokens after 1,024 to 32,768 cached ones, and eight chunks at once: taken as longer chunks are,
    eight of 128 would be off by a quarter, and 64 after 8,192 by 40 %."""
    rows = [
        r for r in h200.all_rows() if 0 < r.batch.new_tokens <= 512 and r.batch.cached_tokens and not r.batch.decodes
    ]
    assert len(rows) > 15
    file = calibration_file("h200-v2-lite")
    values = {**file.coefficients.model_dump(), "profile_fixed_ms": file.profile_fixed_ms}
    errors = np.abs(h200.GPU_FIT.error_pct(values, rows))
    assert np.median(errors) < 3
    assert errors.max() < 9


def test_pairs_of_one_chunk_cost_more_than_cached_pairs():
    deployment = aggregated()
    cost = load_calibration("h200-v2-lite").pool_cost(deployment, deployment.pools[0])
    assert cost.c.prefill_causal_ms > 0
    one = cost.shared_ms(16384, 16384, 16384, 1, 1.0).dense
    two = cost.shared_ms(16384, 16384, 16384, 2, 1.0).dense
    halved = cost.c.prefill_causal_ms * 16384 * 16384 / 4
    assert one - two + cost.c.prefill_chunk_ms == pytest.approx(halved)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_draws_keep_their_mean_and_follow_one_another(correlation):
    cost = SpreadCost(floor=60.0)
    cost.launch_correlation = correlation
    drawn = DrawnLaunches(cost, np.random.default_rng(1))
    ms = np.array([drawn.launch_floor_ms(1000, 1) for _ in range(20_000)])
    assert ms.mean() == pytest.approx(60.0, rel=0.01)
    runs = [Launches(ms=ms, tokens=np.full(len(ms), 1000.0))]
    assert launch_correlation(runs) == pytest.approx(correlation, abs=0.05)
