"""An instance that is lost takes its requests along; every request still has one outcome, and its time one cause."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, disaggregated, requests, with_kv_tokens

from rackplan.cli.main import app, execute
from rackplan.engine import Deployment, InputError, parse_deployment
from rackplan.simulator.failures import START_UP_S, Failure, parse_failure
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import gpu_time_share
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

POLICIES = ("round_robin", "random", "least_requests", "least_tokens", "prefix_affinity", "session_affinity")


def run(deployment, reqs, *failures: Failure, transfer=None, **options):
    calibration = FakeCalibration(LinearCost(host=0.8, sync=0.3, admission=0.2, floor=7.0))
    calibration.transfer = dataclasses.replace(calibration.transfer, **(transfer or {}))
    return simulate(deployment, GivenRequests(reqs), Load(), calibration, RunOptions(failures=failures, **options))


def lost(instance=0, at_s=1.0, down_s=5.0, role="aggregated") -> Failure:
    return Failure(role=role, instance=instance, at_s=at_s, down_s=down_s)


def random_deployment(rng: np.random.Generator) -> Deployment:
    """Of either kind, with one to three instances of each role, with a tier in host memory or little KV."""

    def pool(**more):
        return {
            "instances": int(rng.integers(1, 4)),
            "dep": int(rng.choice([1, 2])),
            "max_num_seqs": int(rng.choice([2, 64])),
            "async_scheduling": bool(rng.random() < 0.5),
            **more,
        }

    tier = {"kv_offloading_gib": float(rng.choice([0, 1]))}
    if rng.random() < 0.4:
        deployment = aggregated(**pool(**tier))
    else:
        mode = str(rng.choice(["push", "pull"]))
        deployment = disaggregated(prefill=pool(**tier), decode=pool(), kv_transfer={"mode": mode})
    deployment = parse_deployment({**deployment.to_dict(), "router": {"policy": str(rng.choice(POLICIES))}})
    for p in deployment.pools:
        if rng.random() < 0.4:
            deployment = with_kv_tokens(deployment, p.role, int(rng.choice([4300, 9000])))
    return deployment


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_every_request_has_one_outcome_and_all_gpu_time_one_cause(seed):
    rng = np.random.default_rng(seed)
    n, deployment = int(rng.integers(1, 60)), random_deployment(rng)
    reqs = requests(np.cumsum(rng.exponential(0.05, n)), rng.integers(1, 4000, n), rng.integers(1, 200, n))
    for r in reqs:
        r.session = int(rng.integers(-1, 6))
        r.reuse_tokens = int(rng.integers(0, r.input_tokens + 1)) if r.session >= 0 else 0
    failures = [
        lost(i, float(rng.uniform(0, 3)), float(rng.uniform(0.01, 4)), pool.role)
        for pool in deployment.pools
        for i in range(pool.instances)
        if rng.random() < 0.7
    ]
    transfer = {"setup_ms": float(rng.choice([5, 200])), "gb_per_s": float(rng.choice([0.2, 50]))}
    options = {"resubmit": bool(rng.random() < 0.7), "transfer": transfer}
    result = run(deployment, reqs, *failures, **options)
    assert result.unfinished == 0
    assert n == result.submitted == len(result.finish_ns) + result.failed + result.rejected
    assert len(set(result.request_id)) == len(result.request_id)
    for p in result.pools:
        assert sum(p.gpu_ns.values()) == pytest.approx(p.pool.gpus * result.measured_to_ns, rel=1e-9)
        assert min(p.gpu_ns.values()) >= -1e-3
    assert sum(gpu_time_share(result).values()) == pytest.approx(1.0)
    single = run(deployment, reqs, *failures, coalesce=False, **options)
    assert single.failed == result.failed
    for name in ("request_id", "first_token_ns", "finish_ns", "cached_tokens", "scheduled_ns"):
        np.testing.assert_array_equal(getattr(result, name), getattr(single, name), err_msg=name)
    for p, q in zip(result.pools, single.pools, strict=True):
        assert p.gpu_ns == pytest.approx(q.gpu_ns, rel=1e-9, abs=10.0)


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


def two_by_two(**more) -> Deployment:
    return disaggregated(prefill={"instances": 2}, decode={"instances": 2, "dep": 1}, **more)


def by_request(result, name) -> dict[int, int]:
    return dict(zip(result.request_id.tolist(), getattr(result, name).tolist(), strict=True))


def test_a_prefill_instance_takes_its_prompts_along_and_no_answer_that_is_under_way():
    # Two have decoded for a second when an instance is lost that has 20 of the some 35 ms of a third's prompt.
    reqs = requests([0.0, 0.1, 1.0], [2000, 2000, 3000], [400, 400, 5])
    result, whole = run(two_by_two(), reqs, lost(at_s=1.02, role="prefill")), run(two_by_two(), reqs)
    assert (result.failed, len(result.finish_ns)) == (0, 3)
    for r in (0, 1):
        assert by_request(result, "first_token_ns")[r] == by_request(whole, "first_token_ns")[r]
    waits_ms = (by_request(result, "first_token_ns")[2] - by_request(whole, "first_token_ns")[2]) / 1e6
    assert waits_ms == pytest.approx(20, abs=8)  # the other instance starts it anew; decode steps take some 8 ms
    assert "failed" not in result.pools[1].gpu_ns


def test_a_decode_instance_takes_along_what_it_decodes_and_the_rest_is_sent_again():
    reqs = requests([0.0, 0.1, 1.0], [2000, 2000, 3000], [400, 400, 5])
    result = run(two_by_two(), reqs, lost(at_s=1.01, role="decode"))
    assert result.failed == 1  # one of two that had tokens; the third has none yet
    assert 2 in result.request_id


def test_a_hand_over_that_loses_either_end_fails_where_nothing_is_sent_again():
    calibration = FakeCalibration()
    calibration.transfer = dataclasses.replace(calibration.transfer, setup_ms=500.0)
    for role in ("prefill", "decode"):
        options = RunOptions(failures=(lost(at_s=0.3, role=role),), resubmit=False)
        result = simulate(two_by_two(), GivenRequests(requests([0.0], 1000, 5)), Load(), calibration, options)
        assert (result.failed, len(result.finish_ns)) == (1, 0)


def test_a_hand_over_that_loses_its_prefill_instance_gives_its_kv_to_the_next_in_line():
    # KV for one request. Each takes 47 blocks of 20 ms to come; the first has 300 ms of it when its source is lost.
    calibration = FakeCalibration()
    calibration.transfer = dataclasses.replace(calibration.transfer, per_block_ms=20.0)
    deployment = disaggregated(decode={"instances": 1, "dep": 1}, router={"policy": "round_robin"})
    deployment = with_kv_tokens(deployment, "decode", 4300)
    second_s = []
    for failures in ((), (lost(at_s=0.3, role="prefill"),)):
        options = RunOptions(failures=failures, resubmit=False)
        result = simulate(deployment, GivenRequests(requests([0.0, 0.001], 3000, 5)), Load(), calibration, options)
        assert result.failed == len(failures)
        second_s.append(by_request(result, "first_token_ns")[1] / 1e9)
    assert second_s == pytest.approx([2 * 0.94, 0.3 + 0.94], abs=0.1)


@pytest.mark.parametrize(("lost_at_s", "lease_ends_s"), [(0.3, 30.0), (20.0, 37.5)])
def test_a_prompt_for_a_lost_decode_instance_keeps_its_kv_until_its_lease_ends(lost_at_s, lease_ends_s):
    # KV for one prompt. It waits for room at the lost instance, or is on its way, and starts anew after its lease.
    calibration = FakeCalibration()
    calibration.transfer = dataclasses.replace(calibration.transfer, setup_ms=60_000.0)
    deployment = disaggregated(prefill={"instances": 1}, decode={"instances": 2, "dep": 1})
    deployment = with_kv_tokens(deployment, "prefill", 4300)
    options = RunOptions(failures=(lost(at_s=lost_at_s, down_s=300.0, role="decode"),))
    result = simulate(deployment, GivenRequests(requests([0.0], 3000, 5)), Load(), calibration, options)
    assert result.scheduled_ns[0] / 1e9 == pytest.approx(lease_ends_s, abs=0.1)


def test_requests_wait_at_the_router_while_no_decode_instance_is_up():
    reqs = requests([0.0, 1.5, 2.0], 1000, [5, 5, 5])
    result = run(disaggregated(decode={"instances": 1, "dep": 1}), reqs, lost(at_s=1.0, down_s=4.0, role="decode"))
    assert len(result.finish_ns) == 3
    assert [by_request(result, "scheduled_ns")[r] >= 5e9 for r in (0, 1, 2)] == [False, True, True]


def test_what_was_cached_is_gone_when_it_is_back():
    reqs = requests([0.0, 10.0], 1600, 5)
    for r in reqs:
        r.session, r.reuse_tokens = 1, 1584
    assert run(aggregated(instances=1), reqs).cached_tokens.tolist() == [0, 1584]
    assert run(aggregated(instances=1), reqs, lost(at_s=2.0)).cached_tokens.tolist() == [0, 0]


def test_a_failure_is_written_as_role_instance_time_and_length():
    assert parse_failure("aggregated:1@60s+180s") == lost(1, 60.0, 180.0)
    assert parse_failure("decode:0@1.5m+500ms") == lost(0, 90.0, 0.5, "decode")
    assert parse_failure("prefill:12@1h") == lost(12, 3600.0, START_UP_S, "prefill")


@pytest.mark.parametrize("text", ["", "decode:0", "decode@60s", "decode:0@60", "router:0@60s", "decode:-1@6s"])
def test_another_form_is_refused(text):
    with pytest.raises(InputError, match=f"--fail {text}: write ROLE:INSTANCE@AT"):
        parse_failure(text)


@pytest.mark.parametrize(
    ("deployment", "failures", "says"),
    [
        (disaggregated(), [lost()], "has no aggregated pool; name an instance of prefill and decode"),
        (disaggregated(), [lost(2, role="prefill")], "has 2 instances"),
        (aggregated(), [lost(at_s=600.0)], "arrivals end at 600 s"),
        (aggregated(), [lost(instance=1)], "has 1 instances"),
        (aggregated(), [lost(at_s=1.0), lost(at_s=3.0)], "down until 6 s"),
    ],
)
def test_what_cannot_fail_is_refused(deployment, failures, says):
    with pytest.raises(InputError, match=says):
        run(deployment, requests([0.0], 10, 1), *failures)


@pytest.fixture
def pd_file(tmp_path):
    path = tmp_path / "pd.yaml"
    path.write_text(two_by_two().to_yaml())
    return path


LOAD = ("--workload", "fixed:8000/100", "--rate", "20", "--duration", "60s")


def test_the_command_line_fails_instances_of_any_role(pd_file, capsys):
    fails = ("--fail", "decode:0@20s+10s", "--fail", "prefill:1@30s")
    assert execute(app, "rackplan", ["simulate", str(pd_file), *LOAD, *fails, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["inputs"]["fail"] == ["decode:0@20s+10s", "prefill:1@30s+160s"]
    counts = document["metrics"]["requests"]
    assert counts["failed"] > 0
    assert counts["submitted"] == counts["finished"] + counts["failed"]
    assert sum(document["gpu_time_share"].values()) == pytest.approx(1.0)
    assert document["gpu_time_share"]["failed"] > 0.1
    assert execute(app, "rackplan", ["simulate", str(pd_file), *LOAD, *fails, "--no-resubmit", "--json"]) == 0
    more = json.loads(capsys.readouterr().out)
    assert more["inputs"]["resubmit"] is False
    assert more["metrics"]["requests"]["failed"] > counts["failed"]
    assert execute(app, "rackplan", ["simulate", str(pd_file), *LOAD, *fails]) == 0
    assert "down" in capsys.readouterr().out


def test_a_what_if_fails_instances_of_its_changed_side(pd_file, capsys):
    assert execute(app, "rackplan", ["whatif", str(pd_file), *LOAD, "--fail", "decode:0@20s+30s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"] == {"fail": {"base": None, "changed": ["decode:0@20s+30s"]}}
    assert "failed" not in document["base"]["metrics"]["requests"]
    assert any("failed" in reason for reason in document["why"])
    assert document["changed"]["metrics"]["tpot_ms"]["p90"] > document["base"]["metrics"]["tpot_ms"]["p90"]
    args = ["simulate", str(pd_file), *LOAD, "--no-resubmit"]
    assert execute(app, "rackplan", args) == 2
    assert "--no-resubmit: has no effect without --fail" in capsys.readouterr().err
    assert execute(app, "rackplan", ["whatif", str(pd_file), *LOAD]) == 2
    assert "nothing is changed; give --set KEY=VALUE or --fail" in capsys.readouterr().err
