"""What people who plan deployments ran into, as cases. The numbers U1, U2, … are those of the project's list of cases;
each name says what the user sees."""

import math
import re
from dataclasses import fields
from itertools import pairwise

import pytest
import yaml
from models import aggregated, disaggregated
from test_local_deploy import Rack

from rackplan.cli.main import app, execute
from rackplan.engine import (
    DeployError,
    Deployment,
    InfeasibleError,
    InputError,
    check_memory,
    load_deployment,
    parse_deployment,
    plan_memory,
)
from rackplan.engine.cluster import Cluster
from rackplan.engine.local import Verdict
from rackplan.engine.manifests import render_cluster
from rackplan.engine.parser_table import check_command, parser_table
from rackplan.engine.placement import Placement
from rackplan.engine.serving import server_commands
from rackplan.simulator.run_options import Drafting
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.binding import STRANDED
from rackplan.tuner.demand import play_demand
from rackplan.tuner.evaluate import simulate_document
from rackplan.tuner.plan import make_plan
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Screening
from rackplan.tuner.search import offered_layouts
from rackplan.tuner.space import sized_layout
from rackplan.tuner.whatif import apply_changes, compare

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "interactivity_tok_s_user")


def request_of(**changes) -> PlanRequest:
    asked = {
        "model": "deepseek-v2-lite",
        "gpu": "h200",
        "gpus": 2,
        "target_tps": 5e3,
        "count": "total",
        "per": "gpu",
        "workload": "fixed:2048/256",
        "p90_interactivity_tok_s_user": 100.0,  # strict enough to keep the load, and with it the test, light
        "p90_ttft_ms": 2000.0,
        "seed": 0,
        "trials": 1,
    }
    return PlanRequest(**{**asked, **changes})


@pytest.fixture(scope="module")
def plan() -> dict:
    """A plan that meets its target: DeepSeek-V2-Lite on up to two H200."""
    return make_plan(request_of())


@pytest.fixture(scope="module")
def missed() -> dict:
    """The best that can be had where the target is out of reach and only light load meets the TTFT."""
    return make_plan(request_of(target_tps=900e3, p90_ttft_ms=150.0))


def simulated(deployment: Deployment, **changes) -> dict:
    asked = {
        "workload": "fixed:2048/256",
        "concurrency": None,
        "rate": None,
        "cv": 1.0,
        "duration_s": 60.0,
        "calibration": None,
        "replications": 1,
        "seed": 0,
    }
    return simulate_document(deployment, **{**asked, **changes})


def decoding_at_once(document: dict) -> float:
    """Requests that decode at once, by Little's law."""
    metrics = document["metrics"]
    return metrics["request_throughput_req_s"] * (metrics["e2e_ms"]["mean"] - metrics["ttft_ms"]["mean"]) / 1e3


def with_kv_tokens(deployment: Deployment, tokens: int) -> Deployment:
    """The aggregated deployment with its share of HBM set so that a rank holds about `tokens` of KV."""
    pool, model = deployment.pools[0], deployment.model_spec
    excess = plan_memory(deployment, pool).kv_pool_gib * 2**30 - tokens * model.kv_bytes_per_token
    share = pool.gpu_memory_utilization - excess / (deployment.gpu_spec.hbm_gb * 1e9)
    pools = (pool.model_copy(update={"gpu_memory_utilization": share}),)
    return deployment.model_copy(update={"pools": pools})


# -- U1: planned a batch of 96 a rank, the engine admitted 29 -----------------------------------------------------
def test_u1_no_more_requests_run_than_max_num_seqs_admits():
    seated = simulated(aggregated(max_num_seqs=29), workload="fixed:256/512", concurrency=96, duration_s=300.0)
    free = simulated(aggregated(max_num_seqs=96), workload="fixed:256/512", concurrency=96, duration_s=300.0)
    assert decoding_at_once(seated) == pytest.approx(29, rel=0.05)
    assert decoding_at_once(free) == pytest.approx(96, rel=0.05)
    per_gpu = "throughput_output_tok_s_per_gpu"
    assert seated["metrics"][per_gpu] < 0.7 * free["metrics"][per_gpu]


def test_u1_no_more_requests_run_than_the_kv_pool_holds():
    deployment = with_kv_tokens(aggregated(), 29 * 2080)
    found = simulated(deployment, workload="fixed:2048/32", concurrency=96)
    kv_tokens = found["memory"][0]["kv_tokens"]
    assert kv_tokens == pytest.approx(29 * 2080, rel=0.01)
    assert 1 < decoding_at_once(found) <= kv_tokens / 2048 * 1.05


def test_u1_every_prediction_carries_its_provenance_and_its_intervals(plan):
    for document in (simulated(aggregated(), rate=4.0, replications=2), plan["prediction"] | plan):
        provenance = document["provenance"]
        assert provenance["calibration"] == "h200-v2-lite"
        assert provenance["engine_version"]
        assert provenance["calibration_error"]["decode"]["holdout_median_pct"] > 0
        assert provenance["in_range"] == (not [n for n in provenance["notes"] if n.startswith("extrapolated")])
        for name in LATENCIES:
            for quantile, value in document["metrics"][name].items():
                low, high = document["ci95"][name][quantile]
                assert low <= value <= high


# -- U2: the headline plan broke the SLO --------------------------------------------------------------------------
def test_u2_a_feasible_plan_meets_its_target_and_every_slo(plan):
    assert plan["feasible"]
    assert plan["reason"] is None
    metrics = plan["prediction"]["metrics"]
    assert metrics["throughput_total_tok_s_per_gpu"] >= 5e3
    assert metrics["interactivity_tok_s_user"]["p90"] >= 100
    assert metrics["ttft_ms"]["p90"] <= 2000


def test_u2_what_cannot_be_met_is_infeasible_names_the_constraint_and_still_keeps_the_slos(missed):
    assert not missed["feasible"]
    assert missed["reason"].startswith("target_tps: ")
    assert "900,000" in missed["reason"]
    metrics = missed["prediction"]["metrics"]
    assert metrics["interactivity_tok_s_user"]["p90"] >= 100
    assert metrics["ttft_ms"]["p90"] <= 150
    assert missed["margin_pct"] < 0


# -- U3: an unreachable TTFT pinned ever more replicas ------------------------------------------------------------
def test_u3_a_ttft_that_a_lone_request_misses_is_infeasible_at_any_replica_count():
    found = make_plan(request_of(p90_ttft_ms=10.0, gpus=1))
    assert not found["feasible"]
    assert found["reason"].startswith("p90_ttft: infeasible at any replica count")
    assert found["load"]["concurrency"] == 1
    assert found["prediction"]["metrics"]["ttft_ms"]["p90"] > 10


def test_u3_a_ttft_that_light_load_meets_is_not_called_infeasible(missed):
    assert "p90_ttft" not in missed["reason"]
    assert "within the SLOs" in missed["reason"]


def test_u3_an_interactivity_that_no_step_reaches_is_infeasible_at_any_replica_count():
    found = make_plan(request_of(p90_interactivity_tok_s_user=1e5))
    assert not found["feasible"]
    assert found["reason"].startswith("p90_interactivity: infeasible at any replica count")
    assert 0 < found["prediction"]["metrics"]["interactivity_tok_s_user"]["p90"] < 1e5  # the best that can be, shown


# -- U4: 1P:1D was the worst ratio --------------------------------------------------------------------------------
def test_u4_stranded_gpus_show_in_the_utilisation_by_pool_and_are_warned_about():
    one_to_one = disaggregated(prefill={"instances": 1}, decode={"dep": 1})
    found = simulated(one_to_one, workload="fixed:64/512", concurrency=32)
    assert found["utilization"]["prefill"] < STRANDED
    assert found["utilization"]["decode"] > 0.9
    assert [w for w in found["warnings"] if w.startswith("prefill: 1 GPUs are busy") and "strand" in w]


def test_u4_a_plan_states_utilisation_and_lost_time_of_every_pool(plan):
    prediction = plan["prediction"]
    assert set(prediction["utilization"]) == {p["role"] for p in plan["deployment"]["pools"]}
    for pool in prediction["pools"]:
        assert sum(pool["gpu_time_share"].values()) == pytest.approx(1)


# -- U5: aggregated was three times better on agentic work --------------------------------------------------------
def test_u5_aggregated_layouts_are_offered_for_agentic_work_on_a_rack():
    asked = request_of(
        model="deepseek-v4.1-flash", gpu="gb300", gpus=16, workload="agentx", p90_interactivity_tok_s_user=150.0
    )
    demand = play_demand(asked.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0)
    offered = offered_layouts(Screening(asked, demand).candidates())
    assert {c.layout.disaggregated for c in offered} == {True, False}


def test_u5_an_aggregated_deployment_is_always_simulated_and_shown(plan, missed):
    for found in (plan, missed):
        assert [t for t in found["history"] if "aggregated" in t["label"]]
        shown = [found["deployment"], *(r["deployment"] for r in found["runners_up"])]
        assert [d for d in shown if d["pools"][0]["role"] == "aggregated"]


# -- U13: half the ranks with the same caps -----------------------------------------------------------------------
def test_u13_fewer_ranks_with_the_same_caps_are_warned_about():
    base = aggregated(dep=8, max_num_seqs=4)
    load = {"workload": "fixed:512/128", "concurrency": 32, "rate": None, "duration_s": 20.0}
    rest = {"calibration": None, "replications": 1, "seed": 0}
    found = compare(base, [("aggregated.dep", "4")], **load, **rest)
    warning = "32 requests at once, but max_num_seqs=4 seats 16 on 4 ranks"
    assert not found["base"]["warnings"]
    assert [w for w in found["changed"]["warnings"] if warning in w and "raise aggregated.max_num_seqs to 8" in w]
    assert [w for w in found["why"] if warning in w]
    moved = {m["metric"]: m["change_pct"] for m in found["moved"]}
    assert moved["TTFT P90, ms"] > 50
    raised = compare(base, [("aggregated.dep", "4"), ("aggregated.max_num_seqs", "8")], **load, **rest)
    assert not raised["changed"]["warnings"]


# -- U16: no room for activations, and a script without its limits ------------------------------------------------
def test_u16_a_chunk_whose_activations_do_not_fit_is_refused_with_one_that_does():
    cramped = {"gpu_memory_utilization": 0.3, "max_num_seqs": 64}
    roomy, tight = (aggregated(max_num_batched_tokens=n, **cramped) for n in (8192, 262144))
    assert check_memory(roomy)[0].kv_pool_gib > 0
    with pytest.raises(InfeasibleError, match=r"aggregated pool does not fit.*activations 14\.0") as e:
        check_memory(tight)
    fits = int(str(e.value).partition("max_num_batched_tokens=")[2].partition(" ")[0])
    assert check_memory(aggregated(max_num_batched_tokens=fits, **cramped))[0].kv_pool_gib > 0


def test_u16_the_plan_states_activations_graphs_and_workspace_of_every_pool(plan):
    for memory in plan["memory"]:
        assert min(memory[k] for k in ("activation_gib", "graphs_gib", "runtime_gib")) > 0
        assert memory["kv_pool_gib"] > 0


def test_u16_what_was_simulated_is_what_is_written(plan):
    written = plan["deployment"]
    deployment = parse_deployment(written)
    assert deployment.to_dict() == written
    assert [m.to_dict() for m in check_memory(deployment)] == plan["memory"]
    assert "max_model_len" in written
    for pool in written["pools"]:
        assert {
            "max_num_batched_tokens",
            "max_num_seqs",
            "gpu_memory_utilization",
            "max_cudagraph_capture_size",
        } <= set(pool)


def test_u16_every_server_is_told_the_longest_request_and_its_memory(plan):
    deployment = parse_deployment(plan["deployment"])
    for command in server_commands(deployment, Placement(model="m")):
        told = dict(pairwise(command.argv))
        assert told["--max-model-len"] == str(deployment.context_limit)
        assert {"--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs"} <= set(told)


# -- U17: out of memory reported as "relax the SLO" ---------------------------------------------------------------
@pytest.mark.parametrize("interactivity", [30.0, 150.0])
def test_u17_what_does_not_fit_is_refused_for_memory_and_not_for_an_slo(interactivity):
    """The model fits from four GPUs on; that they would miss the SLO is no answer to one who has two."""
    asked = request_of(model="deepseek-v3", gpu="gb200", gpus=2, p90_interactivity_tok_s_user=interactivity)
    found = make_plan(asked)
    assert not found["feasible"]
    assert found["reason"].startswith("memory: ")
    assert "GiB short" in found["reason"]
    assert not [word for word in ("p90", "SLO", "interactivity") if word in found["reason"]]


# -- U18: 40,960 tokens asked, about 16,320 fit -------------------------------------------------------------------
def test_u18_a_context_that_does_not_fit_is_refused_with_shortfall_and_the_longest_that_does():
    base = with_kv_tokens(aggregated(), 16320)
    asked = base.model_copy(update={"max_model_len": 40960})
    need, have = 40960 * 31104 / 2**30, plan_memory(base, base.pools[0])
    with pytest.raises(InfeasibleError) as e:
        check_memory(asked)
    text = str(e.value)
    assert f"needs {need:.2f} GiB of KV" in text
    assert f"has {have.kv_pool_gib:.2f} GiB ({need - have.kv_pool_gib:.2f} short)" in text
    longest = int(text.partition("max_model_len=")[2].partition(" ")[0])
    assert longest == pytest.approx(16320, abs=2)
    check_memory(base.model_copy(update={"max_model_len": longest}))
    with pytest.raises(InfeasibleError):
        check_memory(base.model_copy(update={"max_model_len": longest + 1}))


# -- U22: flags silently ignored ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "eplb: {enabled: false, redundant_experts: 32}",
        "eplb: {enabled: false, interval_steps: 500}",
        "kv_transfer: {mode: pull}",
    ],
)
def test_u22_a_setting_of_a_deployment_that_has_no_effect_is_an_error(tmp_path, text):
    pools = "pools: [{role: aggregated, instances: 1, dep: 2}]"
    path = tmp_path / "d.yaml"
    path.write_text(f"model: deepseek-v2-lite\ngpu: h200\n{pools}\n{text}\n")
    with pytest.raises(InputError, match="has no effect"):
        load_deployment(path)


@pytest.mark.parametrize(
    "pool",
    [
        {"max_new_kv_loads_per_step": 4},
        {"long_prefill_token_threshold": 8192, "max_num_batched_tokens": 8192},
        {"redundant_experts": 32},
    ],
)
def test_u22_a_setting_of_a_pool_that_has_no_effect_is_an_error(pool):
    with pytest.raises(InputError, match="has no effect"):
        aggregated(dep=2, **pool)


def test_u22_a_change_that_changes_nothing_is_an_error():
    with pytest.raises(InputError, match="--set aggregated.dep=2: has no effect"):
        apply_changes(aggregated(dep=2), [("aggregated.dep", "2")])


def test_u22_an_option_that_is_unknown_or_idle_is_an_error(capsys):
    for line in ("simulate d.yaml --cv 3", "simulate d.yaml --burstiness 3", "plan --target-tps 9k --slo 3"):
        assert execute(app, "rackplan", line.split()) == 2
        assert line.split()[-2] in capsys.readouterr().err


def test_u22_a_server_is_given_no_flag_that_its_release_lacks():
    with pytest.raises(InputError, match="--swap-space: vLLM 0.33.0 has no such option"):
        check_command(("vllm", "serve", "m", "--swap-space", "16"), parser_table("0.33"))


def test_u22_what_the_engine_would_ignore_is_refused():
    with pytest.raises(InputError, match="dp_sync.algorithm=nccl .set recursive_doubling."):
        server_commands(disaggregated(dp_sync={"algorithm": "nccl"}), Placement(model="m"))


# -- U23: the GPU count forgot DP or CP ---------------------------------------------------------------------------
def test_u23_one_count_of_gpus_is_used_everywhere():
    deployment = disaggregated(prefill={"instances": 3, "dep": 1, "tp": 2}, decode={"instances": 2, "dep": 4})
    assert deployment.gpus == 3 * 1 * 2 + 2 * 4
    found = simulated(deployment, rate=4.0)
    metrics = found["metrics"]
    assert found["inputs"]["gpus"] == metrics["gpus"] == 14
    assert sum(p["gpus"] for p in found["pools"]) == 14
    assert metrics["throughput_output_tok_s_per_gpu"] * 14 == pytest.approx(metrics["output_throughput_tok_s"])
    assert metrics["throughput_total_tok_s_per_gpu"] * 14 == pytest.approx(metrics["total_throughput_tok_s"])


def test_u23_a_plan_keeps_to_the_gpus_that_it_may_use(plan):
    used = parse_deployment(plan["deployment"]).gpus
    assert used == plan["prediction"]["metrics"]["gpus"] <= plan["inputs"]["gpus"]


def test_u23_the_servers_take_the_gpus_that_the_plan_counts(plan):
    deployment = parse_deployment(plan["deployment"])
    taken = [(c.machine, d) for c in server_commands(deployment, Placement(model="m")) for d in c.devices]
    assert len(set(taken)) == len(taken) == deployment.gpus == plan["prediction"]["metrics"]["gpus"]


# -- U24: default SLOs silently filtered results ------------------------------------------------------------------
def test_u24_every_effective_input_of_a_plan_is_echoed(plan):
    drafting = {f.name for f in fields(Drafting)}
    assert set(plan["inputs"]) == {f.name for f in fields(PlanRequest)} - {"drafting"} | drafting
    assert plan["inputs"]["calibration"] == "h200-v2-lite"  # chosen by model and GPU
    assert plan["slo"] == {"p90_interactivity_tok_s_user": 100.0, "p90_ttft_ms": 2000.0}
    assert plan["target"] == {"tps": 5e3, "count": "total", "per": "gpu"}


def test_u24_an_infeasible_answer_echoes_its_inputs_too():
    found = make_plan(request_of(p90_interactivity_tok_s_user=1e5))
    assert found["inputs"]["p90_interactivity_tok_s_user"] == 1e5
    assert found["inputs"]["p90_ttft_ms"] == 2000.0


def test_u24_every_effective_input_of_a_simulation_is_echoed():
    found = simulated(aggregated(), rate=4.0)
    for key in ("workload", "concurrency", "rate_req_s", "cv", "duration_s", "warmup_s", "calibration", "seed"):
        assert key in found["inputs"]
    assert {f.name for f in fields(Drafting)} <= set(found["inputs"])
    assert found["inputs"]["calibration"] == "h200-v2-lite"
    assert set(found["deployment"]) == set(Deployment.model_fields)


# -- U25: GB300 manifests selected GB200 nodes; a searched batch of 32 became max-num-seqs 512 ---------------------
@pytest.mark.parametrize("target", ["lws", "dynamo", "llm-d"])
def test_u25_manifests_select_the_planned_gpu_and_carry_the_searched_batch(target):
    deployment = parse_deployment(
        {
            "model": "deepseek-v4.1-flash",
            "gpu": "gb300",
            "pools": [
                {"role": "prefill", "instances": 2, "dep": 4, "max_num_seqs": 8},
                {"role": "decode", "instances": 1, "dep": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512},
            ],
            "kv_transfer": {"mode": "pull"},
            "router": {"policy": "least_requests"},
        }
    )
    cluster = Cluster(name="plan", image="vllm", router_image="rackplan", model="m")
    files = render_cluster(target, deployment, cluster).files
    assert load_deployment_text(files["deployment.yaml"]) == deployment
    text = "".join(t for name, t in files.items() if name != "deployment.yaml")
    assert set(re.findall(r"nvidia.com/gpu.product: (\S+)", text)) == {"NVIDIA-GB300"}
    assert set(re.findall(r"--max-num-seqs (\d+)", text)) == {"8", "32"}
    for role, caps in (("kv_producer", "8"), ("kv_consumer", "32")):
        for script in re.findall(rf"--max-num-seqs (\d+)(?:(?!--max-num-seqs)[\s\S])*?{role}", text):
            assert script == caps


def load_deployment_text(text: str) -> Deployment:
    return parse_deployment(yaml.safe_load(text))


# -- U30: 900k output tok/s are 132 GPUs, 900k total tok/s are 66 -------------------------------------------------
@pytest.mark.parametrize(("count", "prefill_gpus", "decode_gpus"), [("output", 36, 96), ("total", 18, 48)])
def test_u30_the_gpus_of_a_target_follow_from_what_it_counts(count, prefill_gpus, decode_gpus):
    """DeepSeek-R1 2K/2K on GB200 at 26.2K prefill tok/s/GPU in DEP2 and 10.1K decode tok/s/GPU in DEP8. 89.1 decode
    GPUs would do for 900k output tok/s, but instances are whole."""
    demand = play_demand(parse_workload("fixed:2000/2000"), e2e_s=20.0, duration_s=60.0, seed=0)
    layout = sized_layout(
        900e3 / demand.counted_tokens(count),
        prefill_dep=2,
        prefill_req_s=2 * 26.2e3 / demand.new_tokens,
        decode_dep=8,
        decode_req_s=8 * 10.1e3 / demand.output_tokens,
    )
    assert layout.prefill_instances * layout.prefill_dep == prefill_gpus
    assert layout.decode_instances * layout.decode_dep == decode_gpus
    assert layout.gpus == prefill_gpus + decode_gpus


def test_u30_a_plan_says_what_its_target_counts_and_over_what():
    screening = {}
    for count, per in (("total", "gpu"), ("output", "gpu"), ("output", "deployment")):
        asked = request_of(count=count, per=per, target_tps=500.0)
        demand = play_demand(asked.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0)
        screening[count, per] = Screening(asked, demand).candidates()[0].score
    assert screening["total", "gpu"] == pytest.approx(9 * screening["output", "gpu"])  # (2048 + 256) / 256
    assert screening["output", "deployment"] == -1  # the fewest GPUs that reach it: one
    assert all(map(math.isfinite, screening.values()))


def test_u26_servers_of_another_revision_are_not_taken_for_the_new_ones(tmp_path):
    rack = Rack(tmp_path)
    rack.faults("old-pod")
    with pytest.raises(DeployError, match='revision was planned as "2.*", the engine has "an older one"'):
        rack.machine().deploy(rack.launch(), lambda record: pytest.fail("measured what was not deployed"))
    assert rack.running() == []


def test_u26_nothing_can_be_reverted_while_a_rollout_is_under_way(tmp_path):
    rack = Rack(tmp_path)

    def revert(record):
        with pytest.raises(InputError, match="another rackplan is at work"):
            rack.machine().rollback()
        return Verdict(keep=True)

    record = rack.machine().deploy(rack.launch(), revert)
    assert rack.state.read().current.id == record.id
    rack.machine().stop()
