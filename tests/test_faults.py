"""An instance that is lost takes its requests along; every request still has one outcome, and its time one cause."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, disaggregated, requests

from rackplan.engine import InputError, parse_deployment
from rackplan.simulator.faults import Failure, parse_failure
from rackplan.simulator.metrics import gpu_time_share
from rackplan.simulator.request import Load
from rackplan.simulator.simulate import RunOptions, simulate

POLICIES = ("round_robin", "random", "least_requests", "least_tokens", "prefix_affinity", "session_affinity")


def run(deployment, reqs, *failures: Failure, **options):
    calibration = FakeCalibration(LinearCost(host=0.8, sync=0.3, admission=0.2, floor=7.0))
    return simulate(deployment, GivenRequests(reqs), Load(), calibration, RunOptions(failures=failures, **options))


def lost(instance=0, at_s=1.0, down_s=5.0) -> Failure:
    return Failure(instance=instance, at_s=at_s, down_s=down_s)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_every_request_has_one_outcome_and_all_gpu_time_one_cause(seed):
    rng = np.random.default_rng(seed)
    n, instances = int(rng.integers(1, 60)), int(rng.integers(1, 4))
    base = aggregated(
        instances=instances,
        dep=int(rng.choice([1, 2])),
        max_num_seqs=int(rng.choice([2, 64])),
        async_scheduling=bool(rng.random() < 0.5),
        kv_offloading_gib=float(rng.choice([0, 1])),
    )
    deployment = parse_deployment({**base.to_dict(), "router": {"policy": str(rng.choice(POLICIES))}})
    reqs = requests(np.cumsum(rng.exponential(0.05, n)), rng.integers(1, 4000, n), rng.integers(1, 200, n))
    for r in reqs:
        r.session = int(rng.integers(-1, 6))
        r.reuse_tokens = int(rng.integers(0, r.input_tokens + 1)) if r.session >= 0 else 0
    failures = [lost(i, float(rng.uniform(0, 3)), float(rng.uniform(0.01, 4))) for i in range(instances)]
    options = {"resubmit": bool(rng.random() < 0.7)}
    result = run(deployment, reqs, *failures, **options)
    assert result.unfinished == 0
    assert n == result.submitted == len(result.finish_ns) + result.failed + result.rejected
    assert len(set(result.request_id)) == len(result.request_id)
    total = deployment.gpus * result.measured_to_ns
    assert sum(result.pools[0].gpu_ns.values()) == pytest.approx(total, rel=1e-9)
    assert sum(gpu_time_share(result).values()) == pytest.approx(1.0)
    single = run(deployment, reqs, *failures, coalesce=False, **options)
    assert single.failed == result.failed
    for name in ("request_id", "first_token_ns", "finish_ns", "cached_tokens", "scheduled_ns"):
        np.testing.assert_array_equal(getattr(result, name), getattr(single, name), err_msg=name)


def test_requests_without_a_token_are_sent_again_and_wait_longer():
    reqs = requests([0.0, 0.99, 0.995], [100, 3000, 3000], [2000, 5, 5])
    result = run(aggregated(instances=1), reqs, lost(at_s=1.0, down_s=5.0))
    assert result.failed == 1  # the one whose answer was under way
    assert sorted(result.request_id.tolist()) == [1, 2]
    assert ((result.first_token_ns - result.arrival_ns) / 1e9 > 5.0).all()
    assert run(aggregated(instances=1), reqs, lost(), resubmit=False).failed == 3


def test_nothing_is_placed_on_an_instance_that_is_down():
    reqs = requests(np.arange(40) * 0.1, 200, 20)
    result = run(aggregated(instances=2), reqs, lost(instance=0, at_s=0.05, down_s=3.0))
    assert len(result.finish_ns) + result.failed == 40
    whole, half = run(aggregated(instances=2), reqs), result.pools[0].gpu_ns
    assert half["failed"] == pytest.approx(3.0e9, rel=0.02)  # one GPU, three seconds
    assert "failed" not in whole.pools[0].gpu_ns


def test_what_was_cached_is_gone_when_it_is_back():
    reqs = requests([0.0, 10.0], 1600, 5)
    for r in reqs:
        r.session, r.reuse_tokens = 1, 1584
    assert run(aggregated(instances=1), reqs).cached_tokens.tolist() == [0, 1584]
    assert run(aggregated(instances=1), reqs, lost(at_s=2.0)).cached_tokens.tolist() == [0, 0]


def test_a_failure_is_written_as_role_instance_time_and_length():
    assert parse_failure("aggregated:1@60s+180s") == lost(1, 60.0, 180.0)
    with pytest.raises(InputError, match=r"--fail decode:0@60s\+180s: write"):
        parse_failure("decode:0@60s+180s")


@pytest.mark.parametrize(
    ("deployment", "failures", "says"),
    [
        (disaggregated(), [lost()], "aggregated pool alone"),
        (aggregated(), [lost(instance=1)], "has 1 instances"),
        (aggregated(), [lost(at_s=1.0), lost(at_s=3.0)], "down until 6 s"),
    ],
)
def test_what_cannot_fail_is_refused(deployment, failures, says):
    with pytest.raises(InputError, match=says):
        run(deployment, requests([0.0], 10, 1), *failures)
