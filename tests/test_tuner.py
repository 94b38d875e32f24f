"""The tuner by parts: operating points, capacity, screening, what-if changes, economics, the Pareto front, demand."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from models import aggregated, disaggregated
from test_model_folder import QWEN3_MOE

from rackplan.engine import InputError, gpu_spec
from rackplan.engine.placement import Placement
from rackplan.engine.serving import server_commands
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.tuner.capacity import Corrections, estimate
from rackplan.tuner.demand import play_demand
from rackplan.tuner.economics import PRICES_USD_PER_M_TOKENS, economics_of
from rackplan.tuner.operating_point import find_operating_point
from rackplan.tuner.pareto import pareto_of
from rackplan.tuner.probe import Probe, probe
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Screening
from rackplan.tuner.slo import Slo
from rackplan.tuner.space import Knobs, Layout, instances_for, make_deployment, simplified, sized_layout
from rackplan.tuner.whatif import apply_changes

SLO = Slo(p90_interactivity_tok_s_user=50.0, p90_ttft_ms=2000.0)


def request_of(**changes) -> PlanRequest:
    asked = {
        "model": "deepseek-v2-lite",
        "gpu": "h200",
        "gpus": 4,
        "target_tps": 5e3,
        "count": "total",
        "per": "gpu",
        "workload": "fixed:2048/256",
        "p90_interactivity_tok_s_user": 30.0,
        "p90_ttft_ms": 5000.0,
        "seed": 0,
        "trials": 2,
    }
    return PlanRequest(**{**asked, **changes})


def screening_of(**changes) -> Screening:
    request = request_of(**changes)
    return Screening(request, play_demand(request.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0))


def fake_probe(load: Load, *, tps: float, tpot_ms: float, ttft_ms: float, deployment=None) -> Probe:
    """A probe with the given figures; what the functions under test do not read is left empty."""
    deployment = deployment or aggregated()
    spread = {
        k: dict.fromkeys(("mean", "p50", "p90", "p99"), v) for k, v in (("tpot_ms", tpot_ms), ("ttft_ms", ttft_ms))
    }
    metrics = {
        **spread,
        "interactivity_tok_s_user": dict.fromkeys(("mean", "p50", "p90", "p99"), 1e3 / tpot_ms),
        "total_throughput_tok_s": tps,
        "throughput_total_tok_s_per_gpu": tps / deployment.gpus,
        "request_throughput_req_s": tps / 1000,
        "gpus": deployment.gpus,
        "requests": {"measured": 100, "rejected": 0},
    }
    return Probe(
        deployment=deployment,
        load=load,
        metrics=metrics,
        ci95={},
        runs=[metrics],
        gpu_time_share={},
        utilization={},
        pools=[],
        latency_curves={},
        memory=[],
    )


# -- operating point ----------------------------------------------------------------------------------------------
def rising(edge: float, *, closed: bool, ttft_edge: float = math.inf):
    """A deployment whose TPOT reaches its objective at load `edge` and whose TTFT does at `ttft_edge`."""

    def simulate_at(load: float) -> Probe:
        asked = Load(concurrency=round(load)) if closed else Load(rate_req_s=load)
        tpot_ms = SLO.p90_tpot_ms * (0.3 + 0.7 * load / edge)
        return fake_probe(asked, tps=1000 * load, tpot_ms=tpot_ms, ttft_ms=100 + 1900 * load / ttft_edge)

    return simulate_at


@given(st.floats(20, 5000), st.floats(0.2, 5), st.booleans())
@example(100.0, 1.01, True)  # the next lighter load is as close as the search otherwise looks
def test_the_operating_point_is_just_below_the_load_that_breaks_an_slo(edge, start_share, closed):
    found = find_operating_point(
        rising(edge, closed=closed), edge * start_share, SLO, most_probes=12, least=1.0, to_the_edge=True
    )
    assert found.best is not None
    assert SLO.meets(found.best.metrics)
    load = found.best.load.concurrency or found.best.load.rate_req_s
    assert 0.9 * edge <= load <= edge * 1.001 + 0.5  # clients are whole


@given(st.floats(20, 2000), st.floats(20, 2000), st.floats(0.3, 3))
def test_the_answer_is_the_best_of_the_probes_that_meet_the_slos(tpot_edge, ttft_edge, start_share):
    edge = min(tpot_edge, ttft_edge)
    simulate_at = rising(tpot_edge, closed=False, ttft_edge=ttft_edge)
    found = find_operating_point(simulate_at, edge * start_share, SLO, most_probes=6, least=0.01)
    meeting = [p for p in found.probes if SLO.meets(p.metrics)]
    assert len(found.probes) <= 6
    assert (found.best is None) == (not meeting)
    if meeting:
        assert found.best.metrics["total_throughput_tok_s"] == max(p.metrics["total_throughput_tok_s"] for p in meeting)


def test_where_no_load_meets_the_slos_the_search_ends_at_the_lightest():
    found = find_operating_point(rising(0.01, closed=True), 40.0, SLO, most_probes=20, least=1.0)
    assert found.best is None
    assert found.nearest.load.concurrency == 1


def test_more_load_without_more_throughput_ends_the_search():
    def saturated(load):
        return fake_probe(Load(rate_req_s=load), tps=1000 * min(load, 10), tpot_ms=5.0, ttft_ms=100.0)

    found = find_operating_point(saturated, 10.0, SLO, most_probes=10, least=0.01)
    assert len(found.probes) == 2
    assert found.best.metrics["total_throughput_tok_s"] == 10_000


# -- demand and capacity ------------------------------------------------------------------------------------------
def test_demand_of_a_fixed_workload_is_what_its_name_says():
    demand = play_demand(request_of().parsed_workload, e2e_s=2.0, duration_s=60.0, seed=0)
    assert (demand.input_tokens, demand.output_tokens, demand.longest_tokens) == (2048, 256, 2304)
    assert demand.new_tokens == 2048  # nothing is shared
    assert set(demand.outputs) == {256}
    assert demand.rate_req_s == pytest.approx(1 / 2.0, rel=0.05)  # one client, 2 s a request
    assert (demand.counted_tokens("total"), demand.counted_tokens("output")) == (2304, 256)


@pytest.mark.parametrize("seats", [8, 30])
def test_capacity_of_a_decoding_pool_is_what_the_simulator_serves(seats):
    """Short prompts and no SLO to speak of: the closed form's rate at full seats against a closed loop that fills
    them. 8 and 30 are batches that the closed form looks at."""
    request = request_of(workload="fixed:16/512", p90_interactivity_tok_s_user=1.0, p90_ttft_ms=1e6)
    deployment = aggregated(max_num_seqs=seats)
    demand = play_demand(request.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0)
    ideal = Corrections(tail=1.0, aggregated_share=1.0)
    promised = estimate(deployment, demand, request.fitted, request.slo, ideal)
    options = RunOptions(duration_s=40.0, warmup_s=15.0, drain=False)
    found = probe(deployment, request.parsed_workload, Load(concurrency=seats), request.fitted, options)
    assert promised.rate_req_s == pytest.approx(found.metrics["request_throughput_req_s"], rel=0.1)
    assert promised.tpot_ms == pytest.approx(found.metrics["tpot_ms"]["mean"], rel=0.1)


@given(st.floats(5, 300), st.floats(1.0, 3.0))
def test_a_laxer_slo_never_lowers_capacity(interactivity, laxer):
    demand = play_demand(request_of().parsed_workload, e2e_s=3.0, duration_s=5.0, seed=0)
    fitted = request_of().fitted

    def rate(floor):
        slo = Slo(p90_interactivity_tok_s_user=floor, p90_ttft_ms=5000.0)
        return estimate(disaggregated(), demand, fitted, slo, Corrections()).rate_req_s

    assert rate(interactivity / laxer) >= rate(interactivity)


@pytest.mark.parametrize(("rate", "own", "instances"), [(10, 2.5, 4), (10, 3, 4), (0.001, 5, 1), (0.3, 0.1, 3)])
def test_instances_carry_the_rate_and_one_fewer_would_not(rate, own, instances):
    assert instances_for(rate, own) == instances


def test_an_instance_that_carries_nothing_cannot_be_multiplied():
    with pytest.raises(InputError, match="cannot be multiplied"):
        sized_layout(3.0, decode_dep=2, decode_req_s=0.0)


# -- screening ----------------------------------------------------------------------------------------------------
WIDE = Layout(prefill_instances=1, prefill_dep=2, decode_instances=1, decode_dep=2)


def test_a_candidate_that_can_be_is_estimated_by_pool():
    found = screening_of().candidate(WIDE, Knobs(redundant=-1))
    assert found is not None
    assert found.estimate.rate_req_s == min(found.estimate.by_role.values()) > 0
    assert found.score == pytest.approx(found.estimate.rate_req_s * 2304 / 4)


@pytest.mark.parametrize(
    ("asked", "layout", "knobs", "reason"),
    [
        ({}, Layout(prefill_instances=0, prefill_dep=1, decode_instances=1, decode_dep=5), Knobs(), "experts do not"),
        (
            {"model": "deepseek-v3", "gpu": "gb200"},
            Layout(prefill_instances=0, prefill_dep=1, decode_instances=1, decode_dep=1),
            Knobs(),
            "memory",
        ),
        ({"p90_interactivity_tok_s_user": 1e5}, WIDE, Knobs(redundant=-1), "p90_interactivity"),
    ],
)
def test_screening_counts_why_a_candidate_fell(asked, layout, knobs, reason):
    screening = screening_of(**asked)
    found = screening.candidate(layout, knobs)
    assert found is None or found.score == -math.inf
    assert [r for r in screening.refusals if r.startswith(reason)]
    assert (screening.memory_refusal is not None) == (reason == "memory")


def test_screened_layouts_keep_to_the_gpus_that_there_are_and_aggregated_ones_are_among_them():
    for asked in ({}, {"per": "deployment", "target_tps": 20e3}):
        found = screening_of(**asked).candidates()
        assert all(c.layout.gpus <= 4 for c in found)
        assert {c.layout.disaggregated for c in found} == {True, False}
        assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)


@given(
    st.sampled_from([-1, 0, 32]),
    st.sampled_from(["push", "pull"]),
    st.sampled_from([0, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1]),
    st.sampled_from([32, 512]),
)
def test_every_proposal_is_a_deployment_that_the_engine_runs(redundant, mode, cap, width, prefills, seats):
    layout = Layout(prefill_instances=prefills, prefill_dep=width, decode_instances=1, decode_dep=width)
    gpu = request_of().gpu_spec
    knobs = Knobs(redundant=redundant, mode=mode, cap=cap, seats=seats, window=500, interval=1000)
    knobs = simplified(layout, knobs, gpu)
    deployment = make_deployment("deepseek-v2-lite", "h200", layout, knobs, None)
    assert deployment.kv_transfer.mode == (mode if prefills else "push")
    assert deployment.eplb.enabled == (redundant >= 0 and width > 1)
    assert simplified(layout, knobs, gpu) == knobs
    assert server_commands(deployment, Placement(model="model", devices_per_node=8))


@given(st.sampled_from(["push", "pull"]), st.sampled_from([0, 1]), st.sampled_from([1, 2]))
def test_on_a_cpu_only_what_its_engine_runs_is_proposed(mode, prefills, width):
    layout = Layout(prefill_instances=prefills, prefill_dep=width, decode_instances=1, decode_dep=width)
    knobs = simplified(layout, Knobs(redundant=-1, mode=mode), gpu_spec("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_MOE))
        deployment = make_deployment(folder, "cpu", layout, knobs, None)
        placement = Placement(device="cpu", engine_version="0.32", devices_per_node=8)
        assert server_commands(deployment, placement)
    assert knobs.mode == "pull"


# -- what-if ------------------------------------------------------------------------------------------------------
def test_changes_are_typed_named_and_leave_the_base_as_it_was():
    base = disaggregated()
    before = base.to_dict()
    changed, effective = apply_changes(base, [("decode.dep", "4"), ("router.policy", "round_robin")])
    assert changed.pools_of("decode")[0].dep == 4
    assert effective["decode.dep"] == {"base": 2, "changed": 4}
    assert effective["router.policy"] == {"base": "prefix_affinity", "changed": "round_robin"}
    assert base.to_dict() == before


def test_eplb_off_takes_its_settings_with_it_and_says_so():
    eplb = {"enabled": True, "redundant_experts": 32, "window_steps": 500, "interval_steps": 1000}
    base = disaggregated(eplb=eplb, decode={"redundant_experts": 64})
    changed, effective = apply_changes(base, [("eplb.enabled", "false")])
    assert changed.eplb == type(changed.eplb)()
    assert set(effective) == {
        "eplb.enabled",
        "eplb.redundant_experts",
        "eplb.window_steps",
        "eplb.interval_steps",
        "decode.redundant_experts",
    }


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("decode.deep", "4", "decode.deep: no such key"),
        ("aggregated.dep", "4", "aggregated.dep: no such key"),
        ("pools", "[]", "pools: is a group"),
        ("eplb", "true", "eplb: is a group; name a field"),
        ("decode.dep", "2", "has no effect"),
        ("decode.dep", "3", "decode.dep=3.*nearest"),
        ("decode.instances", "many", "decode.instances='many'"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(key, value, says):
    with pytest.raises(InputError, match=says):
        apply_changes(disaggregated(), [(key, value)])


# -- economics and the front --------------------------------------------------------------------------------------
def test_cost_and_revenue_by_hand():
    """1,000 tok/s/GPU of which 100 are output, 300 new input and so 600 cached: 3.6 M tokens an hour."""
    gpu = gpu_spec("h200")
    metrics = {
        "throughput_total_tok_s_per_gpu": 1000.0,
        "throughput_output_tok_s_per_gpu": 100.0,
        "throughput_new_input_tok_s_per_gpu": 300.0,
    }
    found = economics_of(metrics, gpu)
    prices = PRICES_USD_PER_M_TOKENS
    earned = 2.16 * prices["input_cache_hit"] + 1.08 * prices["input_cache_miss"] + 0.36 * prices["output"]
    assert found["usd_per_m_tokens_total"] == pytest.approx(gpu.usd_per_gpu_hour / 3.6)
    assert found["usd_per_m_output_tokens"] == pytest.approx(gpu.usd_per_gpu_hour / 0.36)
    assert found["revenue_usd_per_gpu_hour"] == pytest.approx(earned)
    assert economics_of(dict.fromkeys(metrics, 0.0), gpu)["usd_per_m_output_tokens"] is None


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30))
def test_no_point_of_the_front_beats_another_and_every_probe_is_on_it_or_beaten(points):
    probes = [
        fake_probe(Load(concurrency=i + 1), tps=x, tpot_ms=1e3 / y, ttft_ms=1.0) for i, (x, y) in enumerate(points)
    ]
    front = [(p["tok_s_per_gpu"], p["tok_s_per_user"]) for p in pareto_of(request_of(), [], probes)]

    def beats(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    seen = [(p.metrics["throughput_total_tok_s_per_gpu"], p.metrics["interactivity_tok_s_user"]["p90"]) for p in probes]
    assert not [1 for a in front for b in front if beats(a, b)]
    assert all(p in front or any(beats(f, p) for f in front) for p in seen)
    assert [u for _, u in front] == sorted((u for _, u in front), reverse=True)
