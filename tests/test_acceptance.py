"""Acceptance of drafts: each request's own, the mean of all kept, the same for every deployment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests

from rackplan.engine import MODELS, InputError, parse_deployment
from rackplan.simulator.acceptance import Acceptance, moments
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import metrics_of
from rackplan.simulator.run_options import Drafting, RunOptions
from rackplan.simulator.simulate import simulate
from rackplan.simulator.streams import Streams

V41 = MODELS["deepseek-v4.1-flash"]
LONG = 2000


def steps_of(drafts: int, length: float, spread: float, tokens: int = LONG, n: int = 4000) -> np.ndarray:
    acceptance = Acceptance(drafts, length, Streams(3), spread)
    return np.array([acceptance.steps(i, tokens) for i in range(n)])


@pytest.mark.parametrize("drafts", range(1, 6))
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.15])
def test_tokens_over_steps_of_all_requests_are_the_acceptance_length(drafts, spread):
    length = V41.acceptance_length(drafts)
    steps = steps_of(drafts, length, spread)
    assert LONG * len(steps) / steps.sum() == pytest.approx(length, rel=0.01)


def test_requests_differ_as_the_spread_says():
    # Long outputs leave a request's own probability: its sd is read back from tokens / steps by inverting the mean.
    drafts, spread = 5, 0.08
    lengths = LONG / steps_of(drafts, V41.acceptance_length(drafts), spread)
    grid = np.linspace(0.0, 1.0, 2001)
    p = np.interp(lengths, moments(drafts, grid)[0], grid)
    chance = (LONG / steps_of(drafts, V41.acceptance_length(drafts), 0.0)).std()
    assert p.std() == pytest.approx(spread, rel=0.08)
    assert lengths.std() > 3 * chance


def test_a_request_that_is_drafted_well_is_so_at_every_number_of_drafts():
    few, many = (steps_of(k, V41.acceptance_length(k), 0.15, n=500) for k in (2, 5))
    assert np.corrcoef(few, many)[0, 1] > 0.95


def test_without_drafts_every_token_is_a_step_whatever_the_spread():
    assert Acceptance(0, 1.0, Streams(0), 0.2).steps(7, 123) == 123


def test_moments_are_those_of_a_step_played_out():
    rng = np.random.default_rng(0)
    accepted = rng.random((200_000, 3)) < 0.7
    yields = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    mean, square = moments(3, np.array([0.7]))
    assert mean[0] == pytest.approx(yields.mean(), rel=0.01)
    assert square[0] == pytest.approx((yields**2.0).mean(), rel=0.01)


@given(st.integers(1, 7), st.floats(0.02, 0.98), st.floats(0.001, 0.4), st.integers(1, 3000))
def test_steps_lie_between_all_accepted_and_none(drafts, share, spread, tokens):
    try:
        acceptance = Acceptance(drafts, 1 + drafts * share, Streams(0), spread)
    except InputError:
        return
    for i in range(5):
        assert -(-tokens // (drafts + 1)) <= acceptance.steps(i, tokens) <= tokens


def test_a_spread_that_cannot_be_is_refused_with_its_value():
    with pytest.raises(InputError, match=r"--acceptance-spread 0\.4: too wide for 5\.9 tokens a step of 5 drafts"):
        Acceptance(5, 5.9, Streams(0), 0.4)


def served(drafting: Drafting, drafts: int = 5, **options):
    deployment = parse_deployment(
        {
            **aggregated(model="deepseek-v4.1-flash", gpu="gb300", dep=4).to_dict(),
            "speculation": {"draft_tokens": drafts},
        }
    )
    workload = GivenRequests(requests(np.arange(300) / 20, 500, 400))
    calibration = FakeCalibration(LinearCost(context_ms=0.0))
    return simulate(deployment, workload, Load(), calibration, RunOptions(drafting=drafting, **options))


def test_a_spread_moves_the_percentiles_of_tpot_apart_and_leaves_its_mean():
    even, spread = (metrics_of(served(Drafting(acceptance_spread=s)))["tpot_ms"] for s in (0.0, 0.1))
    assert spread["mean"] == pytest.approx(even["mean"], rel=0.03)
    assert spread["p90"] / spread["p50"] > even["p90"] / even["p50"] + 0.1


def test_without_thinking_drafts_are_accepted_as_measured_without_it():
    on, off = (metrics_of(served(Drafting(thinking=t)))["tpot_ms"]["mean"] for t in (True, False))
    measured = V41.acceptance_length(5) / V41.acceptance_length(5, thinking=False)
    assert off / on == pytest.approx(measured, rel=0.03)


def test_coalesced_and_step_by_step_runs_agree_with_a_spread():
    drafting = Drafting(acceptance_spread=0.1)
    passed, single = served(drafting), served(drafting, coalesce=False)
    for name in ("request_id", "first_token_ns", "finish_ns", "scheduled_ns"):
        np.testing.assert_array_equal(getattr(passed, name), getattr(single, name))


@pytest.mark.parametrize("drafting", [Drafting(thinking=False), Drafting(acceptance_spread=0.1)])
def test_what_is_said_of_drafts_that_there_are_not_is_refused(drafting):
    with pytest.raises(InputError, match="has no effect without drafts"):
        drafting.check_effect(0)
    drafting.check_effect(1)
