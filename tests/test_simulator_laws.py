"""Invariants of every run.

1. Every arrival has one outcome. 2. GPU time by cause adds up to all GPU time. 3. Coalesced and step-by-step runs
agree, request by request. 4. The same seed gives the same run. 5. Times are in order: arrival, scheduled, first token,
end.
"""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, disaggregated, requests, with_kv_tokens

from rackplan.engine import parse_deployment
from rackplan.engine.deployment import RouterPolicy
from rackplan.simulator.cost import TransferCost
from rackplan.simulator.kv_transfer import steps_waited
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import PERCENTILES, batch_intervals, gpu_time_share, metrics_of, percentiles
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import USUAL, Drafting, ExpertRun, RunOptions
from rackplan.simulator.simulate import simulate
from rackplan.simulator.step import overlap_one_ms

DRAFTING = (USUAL, Drafting(thinking=False, acceptance_spread=0.1))


def run(deployment, reqs, calibration=None, *, primed=(), **options):
    workload = GivenRequests(reqs, primed)
    return simulate(deployment, workload, Load(), calibration or FakeCalibration(), RunOptions(**options))


@st.composite
def streams_of_requests(draw):
    n = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gap_ms = draw(st.sampled_from([0.0, 1.0, 20.0, 200.0]))
    arrivals = np.cumsum(rng.exponential(gap_ms, n)) / 1e3
    inputs, outputs = rng.integers(1, 4000, n), rng.integers(1, 200, n)
    out = requests(arrivals, inputs, outputs)
    for r in out:
        if rng.random() < 0.4:
            r.session = int(rng.integers(0, 6))
            r.reuse_tokens = int(rng.integers(0, r.input_tokens + 1))
            r.prefix_session = int(rng.integers(-1, 6))
    return out


@st.composite
def deployments(draw):
    def ranks_of(ranks):
        dep = draw(st.sampled_from(ranks))
        return {"dep": dep, "prefill_schedule_interval": draw(st.sampled_from([1, 3])) if dep > 1 else 1}

    drafts = draw(st.sampled_from([0, 0, 3]))
    model, gpu = ("deepseek-v4.1-flash", "gb300") if drafts else ("deepseek-v2-lite", "h200")
    ranks = (4, 8) if drafts else (1, 2, 4)
    common = {
        "max_num_batched_tokens": draw(st.sampled_from([512, 2048, 8192])),
        "max_num_seqs": draw(st.sampled_from([1, 4, 64])),
        "async_scheduling": draw(st.booleans()),
    }
    adaptive = drafts > 0 and draw(st.booleans())
    top = {"model": model, "gpu": gpu}
    top["speculation"] = {"draft_tokens": drafts, "enable_adaptive_verification": adaptive}
    top["router"] = {"policy": draw(st.sampled_from(get_args(RouterPolicy)))}
    if top["router"]["policy"] == "session_affinity":
        top["router"]["affinity_timeout_s"] = draw(st.sampled_from([None, 0.5]))
    tier_gib = draw(st.sampled_from([0, 0.05, 1.0]))
    if draw(st.booleans()):
        instances = draw(st.integers(1, 2))
        deployment = aggregated(**common, kv_offloading_gib=tier_gib, instances=instances, **ranks_of(ranks))
        deployment = parse_deployment({**deployment.to_dict(), **top})
        role = "aggregated"
    else:
        cap = draw(st.sampled_from([None, 1, 4]))
        deployment = disaggregated(
            prefill={**common, "instances": 2, "kv_offloading_gib": tier_gib, **ranks_of(ranks)},
            decode={**common, **ranks_of(ranks), "max_new_kv_loads_per_step": cap},
            kv_transfer={"mode": draw(st.sampled_from(["push", "pull"]))},
            **top,
        )
        role = "decode"
    eplb = draw(st.sampled_from([None, {"use_async": False}, {"use_async": True}]))
    if eplb:
        eplb |= {"enabled": True, "interval_steps": 7}
        deployment = parse_deployment({**deployment.to_dict(), "eplb": eplb})
    if draw(st.booleans()):  # so little KV that requests wait for it and are preempted
        deployment = with_kv_tokens(deployment, role, draw(st.sampled_from([4500, 9000])))
    return deployment


EXPERT_RUNS = (
    ExpertRun(),
    ExpertRun(cold_start=True),
    ExpertRun(eplb_off_s=0.5, drift_per_step=1e-3),
    ExpertRun(cold_start=True, eplb_off_s=0.0, drift_per_step=1e-3),
)


@settings(max_examples=100)
@given(
    deployments(),
    streams_of_requests(),
    st.sampled_from(EXPERT_RUNS),
    st.sampled_from(DRAFTING),
    st.sampled_from([0.001, 0.4]),
    st.booleans(),
)
def test_laws_hold_on_random_deployments(deployment, reqs, experts, drafting, per_block_ms, counts_steps):
    calibration = FakeCalibration(LinearCost(host=0.8, sync=0.3, admission=0.2, floor=7.0), balance=0.8)
    calibration.transfer = dataclasses.replace(
        calibration.transfer, per_block_ms=per_block_ms, counts_steps=counts_steps
    )
    how = {"experts": experts, "drafting": drafting}
    result = run(deployment, reqs, calibration, **how)
    # 1
    assert result.submitted == len(reqs) == len(result.finish_ns) + result.rejected
    assert result.unfinished == 0
    assert len(set(result.request_id)) == len(result.request_id)
    # 2
    for pool in result.pools:
        assert sum(pool.gpu_ns.values()) == pytest.approx(pool.pool.gpus * result.measured_to_ns, rel=1e-9)
        assert min(pool.gpu_ns.values()) >= -1e-3
    assert sum(gpu_time_share(result).values()) == pytest.approx(1.0)
    # 3
    single = run(deployment, reqs, calibration, coalesce=False, **how)
    for name in ("request_id", "first_token_ns", "finish_ns", "cached_tokens", "scheduled_ns"):
        np.testing.assert_array_equal(getattr(result, name), getattr(single, name), err_msg=name)
    # 4
    assert metrics_of(result) == metrics_of(run(deployment, reqs, calibration, **how))
    # 5
    if len(result.finish_ns):
        assert (result.arrival_ns <= result.scheduled_ns).all()
        assert (result.scheduled_ns < result.first_token_ns).all()
        assert (result.first_token_ns <= result.finish_ns).all()
        assert (result.cached_tokens < result.input_tokens).all()


def test_preemption_happens_and_loses_no_request():
    deployment = with_kv_tokens(aggregated(max_num_seqs=64), "aggregated", 6000)
    result = run(deployment, requests(np.zeros(20), 500, 400))
    assert result.pools[0].preemptions > 0
    assert len(result.finish_ns) == 20


def test_one_request_takes_its_steps_computed_by_hand():
    # One prefill step of 1000 tokens, then 9 decode steps of 1 token at contexts 1001..1009; by LinearCost's formula.
    result = run(aggregated(), requests([0.0], 1000, 10))
    prefill_ms = 3.0 + 0.01 * 1000 + 0.5 + 1e-7 * 1000 * 500
    decode_ms = sum(3.0 + 0.01 + 0.5 + 1e-3 + 1e-6 * c for c in range(1001, 1010))
    assert result.first_token_ns[0] / 1e6 == pytest.approx(prefill_ms, abs=1e-5)
    assert result.finish_ns[0] / 1e6 == pytest.approx(prefill_ms + decode_ms, abs=1e-4)


def test_chunked_prefill_splits_a_prompt_by_the_token_budget():
    result = run(aggregated(max_num_batched_tokens=400, max_num_seqs=8), requests([0.0], 1000, 1))
    chunks = [(400, 0), (400, 400), (200, 800)]
    expected_ms = sum(3.5 + 0.01 * new + 1e-7 * new * (done + new / 2) for new, done in chunks)
    assert result.finish_ns[0] / 1e6 == pytest.approx(expected_ms, abs=1e-5)


def test_async_scheduling_sees_an_arrival_one_step_later():
    # The first request decodes in steps of about 3.5 ms; the second arrives in the middle of one.
    reqs = requests([0.0, 0.050], [100, 100], [100, 1])
    waits = {}
    for mode in (True, False):
        result = run(aggregated(async_scheduling=mode), reqs)
        waits[mode] = (result.scheduled_ns - result.arrival_ns)[result.request_id == 1][0] / 1e6
    assert 0 < waits[False] < 3.6
    assert waits[True] - waits[False] == pytest.approx(3.51, abs=0.02)


def test_an_idle_rank_costs_dummy_batches_that_count_as_imbalance():
    one = run(aggregated(dep=1), requests([0.0], 100, 200))
    two = run(aggregated(dep=2), requests([0.0], 100, 200))
    assert gpu_time_share(two)["dp_imbalance"] == pytest.approx(0.5, abs=0.01)
    assert gpu_time_share(one)["dp_imbalance"] == 0.0
    assert two.finish_ns[0] >= one.finish_ns[0]


def test_the_slowest_rank_sets_the_step_of_all():
    # Round robin: rank 0 gets a long prompt, rank 1 a short one; they start together and first tokens come together.
    deployment = aggregated(dep=2).model_copy(
        update={"router": aggregated().router.model_copy(update={"policy": "round_robin"})}
    )
    result = run(deployment, requests([0.0, 0.0], [8000, 10], [2, 2]))
    assert len(set(result.first_token_ns)) == 1


def test_cap_on_new_kv_loads_spreads_an_admission_burst():
    reqs = requests(np.zeros(32), 500, 50)
    capped = disaggregated(decode={"dep": 1, "max_new_kv_loads_per_step": 4})
    free = disaggregated(decode={"dep": 1})
    calibration = FakeCalibration(LinearCost(fixed_ms=0.5, admission=2.0))
    most = {n: run(d, reqs, calibration).pools[1].most_admitted_in_a_step for n, d in (("cap", capped), ("free", free))}
    assert most["cap"] == 4
    assert most["free"] > 4


def test_pull_delays_decode_steps_and_push_does_not():
    reqs = requests(np.arange(40) / 50, 3000, 100)
    calibration = FakeCalibration()
    calibration.transfer = dataclasses.replace(calibration.transfer, per_block_ms=0.5)
    tpot = {
        m: metrics_of(run(disaggregated(kv_transfer={"mode": m}), reqs, calibration))["tpot_ms"]["mean"]
        for m in ("push", "pull")
    }
    assert tpot["pull"] > 1.2 * tpot["push"]


def test_a_post_costs_decode_steps_only_what_the_gpu_has_to_wait_for():
    # Steps take 6.5 ms and their launch 3.4: a post of 7.3 behind the launch has 9.6 ms before the GPU runs dry.
    wall, lead, following = overlap_one_ms(6.5, 0.0, 3.4, 6.5, 7.3)
    assert (wall, lead) == (6.5, 6.5)
    assert following == pytest.approx(6.5 + 6.5 - 3.4 - 7.3)
    late, _, _ = overlap_one_ms(6.5, 0.0, 3.4, following, 0.0)
    assert late == pytest.approx(6.5 + 3.4 - following)
    assert overlap_one_ms(6.5, 0.0, 3.4, 6.5, 11.0)[2] < 0


@given(st.floats(0.1, 90), st.floats(0.0, 90), st.floats(0.0, 20), st.floats(0.0, 90), st.floats(0.1, 20))
def test_more_work_behind_a_launch_never_puts_the_host_ahead(gpu, floor, host, lead, after):
    wall, _, following = overlap_one_ms(gpu, floor, host, lead)
    wall_after, _, following_after = overlap_one_ms(gpu, floor, host, lead, after)
    assert wall_after == wall  # this step is launched already
    assert following - after - 1e-9 <= following_after <= following + 1e-9


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_hand_over_waits_for_steps_of_the_engine_that_takes_it(mode):
    # One request decodes in steps of 20 ms without end; a second is handed over meanwhile.
    reqs = requests([0.0, 1.0], 100, [400, 2])
    deployment = disaggregated(prefill={"instances": 1}, decode={"dep": 1}, kv_transfer={"mode": mode})
    calibration = FakeCalibration(LinearCost(fixed_ms=20.0, context_ms=0.0))
    first = {}
    for counts in (False, True):
        calibration.transfer = TransferCost(
            setup_ms=5.0, per_block_ms=0.0, gb_per_s=50.0, block_tokens=64, counts_steps=counts
        )
        result = run(deployment, reqs, calibration)
        first[counts] = result.first_token_ns[result.request_id == 1][0] / 1e6
    step_ms = 20.0 + 0.01 + 0.5 + 1e-3
    assert first[True] - first[False] == pytest.approx(steps_waited(async_scheduling=True) * step_ms, abs=step_ms)


def test_a_hand_over_to_an_idle_engine_waits_for_no_step():
    at = {}
    for counts in (False, True):
        calibration = FakeCalibration()
        calibration.transfer = dataclasses.replace(calibration.transfer, counts_steps=counts, per_block_ms=1.0)
        deployment = disaggregated(decode={"dep": 1}, kv_transfer={"mode": "pull"})
        at[counts] = run(deployment, requests([0.0], 100, 50), calibration).finish_ns
    np.testing.assert_array_equal(at[False], at[True])


def test_transfers_share_a_link():
    # 40 prompts of 31104 B x 3000 tokens at 1 GB/s take 93 ms each on one receiving link: the last waits for them all.
    calibration = FakeCalibration()
    calibration.transfer = dataclasses.replace(calibration.transfer, gb_per_s=1.0, setup_ms=0.0, per_block_ms=0.0)
    result = run(disaggregated(decode={"dep": 1}), requests(np.zeros(40), 3000, 2), calibration)
    assert result.finish_ns.max() / 1e9 >= 40 * 3000 * 31104 / 1e9


def test_a_full_decode_pool_holds_prompts_back_on_the_prefill_side():
    deployment = with_kv_tokens(disaggregated(decode={"dep": 1}), "decode", 4000)
    result = run(deployment, requests(np.zeros(12), 1500, 100))
    assert len(result.finish_ns) == 12
    roomy = run(disaggregated(decode={"dep": 1}), requests(np.zeros(12), 1500, 100))
    assert result.transfer_wait_ns > 10 * max(1, roomy.transfer_wait_ns)


def test_a_session_hits_what_its_last_turn_left():
    first = Request(0, 0, 1000, 50, session=7)
    second = Request(1, 2_000_000_000, 1200, 10, session=7, reuse_tokens=1050)
    result = run(aggregated(), [first, second])
    assert result.cached_tokens.tolist() == [0, 1050 // 16 * 16]
    pd = run(disaggregated(router={"policy": "prefix_affinity"}), [first, second])
    assert pd.cached_tokens.tolist() == [0, 1000 // 16 * 16]  # the prefill side has the prompt, not the output


def test_requests_that_can_never_fit_are_rejected():
    result = run(with_kv_tokens(aggregated(), "aggregated", 3000), requests([0.0, 0.0], [2000, 5000], 10))
    assert (len(result.finish_ns), result.rejected) == (1, 1)


def test_a_synchronous_eplb_stops_all_ranks_and_an_asynchronous_one_does_not():
    eplb = {"enabled": True, "interval_steps": 50}
    base = aggregated(dep=2).to_dict()
    ends = {}
    for use_async in (True, False):
        deployment = parse_deployment({**base, "eplb": {**eplb, "use_async": use_async}})
        ends[use_async] = run(deployment, requests([0.0], 100, 200)).finish_ns[0] / 1e6
    # 199 decode steps after one of prefill: three rearrangements of a second, each in place of a step.
    assert 2980 < ends[False] - ends[True] < 3000


def test_batch_means_cover_what_other_seeds_say():
    deployment = aggregated(max_num_seqs=64)

    def one(seed):
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / 20, 4000))
        return run(deployment, requests(arrivals, 500, 50))

    results = [one(seed) for seed in range(12)]
    values = [metrics_of(r)["ttft_ms"]["mean"] for r in results]
    covered = 0
    for result in results:
        low, high = batch_intervals(result, metrics_of(result))["ttft_ms"]["mean"]
        covered += low <= np.mean(values) <= high
    assert covered >= 9  # 95 % of 12, less what a dozen may miss by chance
    short = run(deployment, requests([0.0, 1.0], 500, 50))
    assert batch_intervals(short, metrics_of(short))["ttft_ms"]["mean"] == [metrics_of(short)["ttft_ms"]["mean"]] * 2


@given(st.lists(st.one_of(st.floats(0, 1e9), st.integers(0, 3).map(float)), min_size=1, max_size=300))
def test_percentiles_are_numpys_to_the_bit(values):
    assert percentiles(np.array(values)) == np.percentile(values, PERCENTILES).tolist()
