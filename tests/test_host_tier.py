"""A KV tier in host memory: what HBM lost is loaded over the host link instead of computed, and waited for."""

import json

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, aggregated, disaggregated, with_kv_tokens
from random_runs import ARRAYS, random_run

from rackplan.engine import InputError, parse_deployment, plan_memory
from rackplan.engine.placement import Placement
from rackplan.engine.serving import server_commands
from rackplan.simulator.host_tier import HostTier
from rackplan.simulator.load import Load
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.rank import Rank
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.scheduler import Caps, Given, plan_rank
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.simulate import simulate

CUDA = Placement(hosts=("h0", "h1", "h2"), model="m")
LONG = 3000


def turns(others: int, at_ms: float = 4000) -> list[Request]:
    """A session's turn, `others` that push it out of HBM, and its next turn."""
    first = Request(0, 0, LONG, 2, session=0)
    between = [Request(i, i * 200_000_000, LONG, 2, session=i) for i in range(1, others + 1)]
    return [first, *between, Request(99, round(at_ms * 1e6), LONG + 200, 2, session=0, reuse_tokens=LONG)]


def run(gib: float, reqs: list[Request], **options):
    deployment = with_kv_tokens(aggregated(kv_offloading_gib=gib), "aggregated", 5000)
    return simulate(deployment, GivenRequests(reqs), Load(), FakeCalibration(), RunOptions(**options))


def of(result, name, request_id):
    return int(getattr(result, name)[result.request_id == request_id][0])


def test_what_hbm_lost_is_loaded_in_the_time_that_its_bytes_take():
    without, with_tier = run(0, turns(4)), run(4, turns(4))
    assert of(without, "cached_tokens", 99) == 0
    assert of(with_tier, "cached_tokens", 99) == LONG // 16 * 16
    deployment = aggregated()
    load_ns = LONG // 16 * 16 * deployment.model_spec.kv_bytes_per_token / deployment.gpu_spec.host_gb_s
    waits = of(with_tier, "scheduled_ns", 99) - of(with_tier, "arrival_ns", 99)
    assert waits == pytest.approx(load_ns, abs=2)
    saved_ms = (of(without, "first_token_ns", 99) - of(with_tier, "first_token_ns", 99)) / 1e6
    computed_ms = 0.01 * (LONG // 16 * 16)  # LinearCost's tokens; its pairs add some
    assert saved_ms == pytest.approx(computed_ms - load_ns / 1e6, rel=0.1)


def test_waiting_for_host_memory_is_a_cause_of_its_own():
    assert run(4, turns(4)).pools[0].gpu_ns["transfer_wait"] > 0
    assert run(0, turns(4)).pools[0].gpu_ns["transfer_wait"] == 0


def test_the_least_recently_used_goes_when_host_memory_is_full():
    fits = aggregated().model_spec.kv_bytes_per_token * LONG * 3 / 2**30
    assert of(run(fits, turns(2)), "cached_tokens", 99) > 0
    assert of(run(fits, turns(4)), "cached_tokens", 99) == 0


def test_a_hit_in_hbm_needs_no_load():
    result = run(4, turns(0))
    assert of(result, "cached_tokens", 99) == LONG // 16 * 16
    assert result.pools[0].gpu_ns["transfer_wait"] == 0


def test_loads_take_the_link_one_after_the_other():
    tier = HostTier(SessionCache(), 10_000, token_bytes=100.0, bytes_per_ns=50.0)
    assert [tier.load_ns(1000, 0), tier.load_ns(1000, 500), tier.load_ns(1000, 9000)] == [2000, 3500, 2000]


@pytest.mark.parametrize("coalesce", [True, False])
def test_loads_beside_running_requests_change_no_outcome(coalesce):
    busy = [Request(200 + i, i * 150_000_000, 500, 400) for i in range(25)]
    reqs = sorted(turns(4) + busy, key=lambda r: r.arrival_ns)
    result = run(4, reqs, coalesce=coalesce)
    assert len(result.finish_ns) == len(reqs)
    assert of(result, "finish_ns", 99) == of(run(4, reqs), "finish_ns", 99)


def rank_with_two_sessions_in_host_memory() -> Rank:
    """Two requests wait, each of 2,600 tokens of which host memory has 1,488."""
    rank = Rank(SessionCache(), HostTier(SessionCache(), 10_000, token_bytes=100.0, bytes_per_ns=50.0))
    for session in (0, 1):
        assert rank.host is not None
        rank.host.store(Request(session, 0, 1500, 1, session=session), 1500)
        request = Request(10 + session, 0, 2600, 1, session=session, reuse_tokens=1500)
        rank.waiting.append(Sequence(request, 0, 0, 2600))
    return rank


def plan(rank: Rank, room_tokens: int, visible_before_ns: int = 1):
    caps = Caps(aggregated(kv_offloading_gib=1).pools[0], width=1, replay_tokens=0)
    resumed = rank.resumable(visible_before_ns)
    started, _, blocked_by = plan_rank(rank, [], resumed, Given(caps, 0, visible_before_ns), room_tokens, False)
    return started, blocked_by


@pytest.mark.parametrize(("kv_tokens", "loads"), [(2600 + 1488, 2), (2600 + 1487, 1), (2600, 1), (2599, 0)])
def test_a_load_leaves_what_the_loads_before_it_still_need(kv_tokens, loads):
    rank = rank_with_two_sessions_in_host_memory()
    _, blocked_by = plan(rank, kv_tokens)
    assert [seq.request.session for seq in rank.begun] == [0, 1][:loads]
    assert blocked_by == (None if loads == 2 else "kv_full")


def test_what_holds_kv_is_in_line_before_what_waits_in_the_order_of_its_loads():
    rank = rank_with_two_sessions_in_host_memory()
    plan(rank, 10_000)
    first, second = rank.begun
    rank.waiting.append(Sequence(Request(20, 0, 100, 1), 0, 0, 100))
    second.is_loading, second.ready_ns = False, 5  # its load has ended, the other's has not
    assert plan(rank, 10_000, visible_before_ns=6)[0][0] is second
    first.is_loading, first.ready_ns = False, 7
    rank.waiting.append(Sequence(Request(21, 0, 100, 1), 0, 0, 100))
    assert plan(rank, 1112, visible_before_ns=8)[0][0] is first  # what it holds needs no room
    assert not rank.holding


def test_runs_with_a_tier_and_little_kv_end_and_take_their_steps_together():
    waited = preempted = 0
    for seed in range(300):
        result = random_run(seed, tier=True)
        assert result.unfinished == 0, seed
        waited += result.pools[0].gpu_ns["transfer_wait"] > 0
        preempted += result.pools[0].preemptions > 0
        if seed < 100:
            single = random_run(seed, tier=True, coalesce=False)
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(result, name), getattr(single, name), err_msg=f"{seed} {name}")
    assert min(waited, preempted) > 20


def test_vllm_is_told_of_it_and_keeps_nixl_in_a_prefill_pool():
    (alone,) = server_commands(aggregated(kv_offloading_gib=100), CUDA)
    assert alone.argv[alone.argv.index("--kv-offloading-size") + 1] == "100"
    command = server_commands(disaggregated(prefill={"instances": 1, "kv_offloading_gib": 1}), CUDA)[0]
    config = json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_producer")
    nixl, host = config["kv_connector_extra_config"]["connectors"]
    assert nixl["kv_connector"] == "NixlPushConnector"
    assert host["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2**30}


def test_the_memory_plan_says_how_many_tokens_it_holds():
    deployment = aggregated(kv_offloading_gib=1)
    plan = plan_memory(deployment, deployment.pools[0])
    assert plan.kv_offloading_tokens == int(2**30 / deployment.model_spec.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ({"enable_prefix_caching": False}, "aggregated.kv_offloading_gib=5 has no effect: enable_prefix_caching=false"),
        ({"kv_offloading_gib": -1}, "aggregated.kv_offloading_gib=.*-1"),
    ],
)
def test_a_tier_without_effect_is_refused(pool, says):
    with pytest.raises(InputError, match=says):
        aggregated(**{"kv_offloading_gib": 5, **pool})


def test_a_decode_pool_has_no_tier():
    data = disaggregated().to_dict()
    data["pools"][1]["kv_offloading_gib"] = 5
    with pytest.raises(InputError, match="decode.kv_offloading_gib=5 has no effect"):
        parse_deployment(data)
