"""Adaptive verification: how many drafts are verified, and that requests end where they should whatever changes."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests
from random_runs import digest_of, random_deployment, random_requests

from rackplan.calibration.library import load_calibration
from rackplan.engine import InputError, parse_deployment
from rackplan.engine.flags import speculation_flags
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.adaptive import Verification
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.load import Load
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.rank import Rank
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import USUAL, RunOptions
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.simulate import simulate
from rackplan.simulator.streams import Streams

ADAPTIVE = {"draft_tokens": 5, "enable_adaptive_verification": True}
LENGTHS = (1.0, 1.81, 2.43, 2.9, 3.26, 3.51)


def deployment_of(speculation, *, dep=4, **pool):
    flash = aggregated(model="deepseek-v4.1-flash", gpu="gb300", dep=dep, **pool)
    return parse_deployment({**flash.to_dict(), "speculation": speculation})


def run(deployment, reqs, cost, **options):
    return simulate(deployment, GivenRequests(reqs), Load(), FakeCalibration(cost), RunOptions(**options))


def random_adaptive_run(seed: int, *, coalesce: bool):
    """A cost at which batches of a few requests cross every threshold."""
    rng = random.Random(seed)
    deployment = random_deployment(rng)
    while not deployment.speculation.draft_tokens:
        deployment = random_deployment(rng)
    deployment = parse_deployment(
        {**deployment.to_dict(), "speculation": {**ADAPTIVE, "draft_tokens": deployment.speculation.draft_tokens}}
    )
    cost = LinearCost(token_ms=rng.choice([0.01, 0.1, 0.3, 1.0]), host=rng.choice([0.0, 0.8]), admission=0.2)
    return run(deployment, random_requests(rng), cost, coalesce=coalesce)


@given(st.integers(0, 10_000))
def test_runs_of_steps_are_those_of_single_steps(seed):
    one, other = (random_adaptive_run(seed, coalesce=c) for c in (True, False))
    assert digest_of(one)["integers"] == digest_of(other)["integers"]


def test_where_tokens_cost_nothing_all_drafts_are_verified():
    reqs = requests(np.arange(40) * 0.01, 300, 100)
    free = LinearCost(token_ms=0.0)
    fixed, adaptive = (run(deployment_of(s), reqs, free) for s in ({"draft_tokens": 5}, ADAPTIVE))
    assert digest_of(fixed) == digest_of(adaptive)


def test_where_tokens_are_all_that_costs_none_is_verified():
    reqs = requests(np.arange(10) * 0.5, 300, 100)
    dear = LinearCost(fixed_ms=0.0, token_ms=10.0)
    none, adaptive = (run(deployment_of(s), reqs, dear) for s in ({"draft_tokens": 0}, ADAPTIVE))
    np.testing.assert_array_equal(none.finish_ns, adaptive.finish_ns)


@given(st.integers(0, 500))
def test_fewer_drafts_are_verified_the_more_requests_there_are(seed):
    rng = np.random.default_rng(seed)
    deployment = deployment_of(ADAPTIVE)
    cost = LinearCost(fixed_ms=rng.uniform(0, 10), token_ms=rng.uniform(0.001, 1))
    verification = Verification(FakeCalibration(cost), deployment, deployment.pools[0], USUAL, 0)
    best = [verification._best_of(n) for n in range(1, 200, 7)]
    assert best == sorted(best, reverse=True)


def test_on_gb300_wide_instances_turn_to_fewer_drafts_at_smaller_batches():
    # More ranks touch most experts sooner, so that a further token costs arithmetic and no more reads.
    found = {}
    for dep in (4, 32):
        deployment = deployment_of(ADAPTIVE, dep=dep, max_num_seqs=512)
        calibration = load_calibration("gb300-v4.1-flash")
        verification = Verification(calibration, deployment, deployment.pools[0], USUAL, 0)
        found[dep] = [verification._best_of(n) for n in (4, 64, 512)]
    assert found[4][0] == found[32][0] == 5
    assert found[32][1] < found[4][1]
    assert 1 <= found[32][2] < found[4][2] < 5


def batch_of(outputs):
    levels = [Acceptance(n, length, Streams(3)) for n, length in enumerate(LENGTHS)]
    rank = Rank(SessionCache())
    batch = DecodeBatch([rank], 10_000_000, levels[-1])
    seqs = [Sequence(Request(i, 0, 100, n + 1), 0, 0, 100) for i, n in enumerate(outputs)]
    batch.enter(0, len(seqs))
    for seq in seqs:
        batch.start(seq, seq.request.output_tokens - 1, 101)
    return batch, seqs, levels


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=30))
def test_changes_within_one_step_leave_no_trace(outputs, changes):
    batch, seqs, levels = batch_of(outputs)
    before = [seq.finish_step for seq in seqs]
    for n in [*changes, 5]:
        batch.change_acceptance(levels[n])
    assert [seq.finish_step for seq in seqs] == before
    assert batch.context(0) == pytest.approx(101 * len(seqs))


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=30),
)
def test_a_request_ends_when_the_shares_of_its_steps_add_up(outputs, changes):
    batch, seqs, levels = batch_of(outputs)
    share = dict.fromkeys(seqs, 0.0)
    for n, steps in [*changes, (5, 10_000)]:
        batch.change_acceptance(levels[n])
        for _ in range(steps):
            if not batch.running:
                break
            batch.step += 1
            for seq in batch._ranks[0].decoding:
                share[seq] += 1 / levels[n].steps(seq.request.id, seq.request.output_tokens - 1)
            for seq in batch.pop_ended():
                assert batch.stop(seq) == pytest.approx(101 + seq.request.output_tokens - 1)
                # Each change rounds what is left up to a whole step.
                longest = 1 / min(levels[k].steps(seq.request.id, seq.request.output_tokens - 1) for k in range(6))
                assert 1 - 1e-6 <= share[seq] <= 1 + (len(changes) + 1) * longest
    assert not batch.running
    assert batch.context(0) == 0.0


def test_the_flag_says_so_and_misfits_are_named():
    (_, config) = speculation_flags(deployment_of(ADAPTIVE))
    assert '"enable_adaptive_verification":true' in config.replace(" ", "")
    with pytest.raises(InputError, match="no effect without drafts"):
        deployment_of({**ADAPTIVE, "draft_tokens": 0})
    with pytest.raises(InputError, match="wants CUDA graphs; set aggregated.max_cudagraph_capture_size"):
        deployment_of(ADAPTIVE, max_cudagraph_capture_size=0)
    with pytest.raises(InputError, match="DSpark's drafts alone"):
        parse_deployment(
            {
                "model": "deepseek-v3",
                "gpu": "gb300",
                "pools": [{"role": "aggregated", "instances": 1, "dep": 8}],
                "speculation": {**ADAPTIVE, "draft_tokens": 1},
            }
        )
