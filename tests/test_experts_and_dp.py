"""Experts and data parallelism over many ranks: what users ran into (U6 to U9) and what was published of 32 ranks."""

import pytest
from models import FakeCalibration, GivenRequests, LinearCost, requests

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.library import load_calibration
from rackplan.calibration.published import draft_sigma, target_sigma
from rackplan.calibration.validate import CHECKS
from rackplan.engine import Deployment, InputError, parse_deployment
from rackplan.simulator.expert_load import expert_balancedness
from rackplan.simulator.load import Load
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import SimResult, simulate
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.evaluate import simulate_document
from rackplan.tuner.whatif import compare

V41, GB300 = "deepseek-v4.1-flash", "gb300"


def eight_to_one(*, cap: int | None = None, mode: str = "push", use_async: bool = True) -> Deployment:
    """8P1D: DEP2 prefill, DEP32 decode."""
    prefill = {"role": "prefill", "instances": 8, "dep": 2, "max_num_batched_tokens": 16384}
    decode = {"role": "decode", "instances": 1, "dep": 32, "max_num_batched_tokens": 1024, "max_num_seqs": 128}
    return parse_deployment(
        {
            "model": V41,
            "gpu": GB300,
            "pools": [prefill, {**decode, "max_new_kv_loads_per_step": cap}],
            "eplb": {"enabled": True, "redundant_experts": 32, "use_async": use_async},
            "speculation": {"draft_tokens": 5},
            "kv_transfer": {"mode": mode},
        }
    )


def agentic(deployment: Deployment, duration_s: float = 40.0) -> SimResult:
    """AgentX at the published concurrency."""
    options = RunOptions(duration_s=duration_s, warmup_s=duration_s / 2, drain=False)
    calibration = load_calibration("gb300-v4.1-flash")
    return simulate(deployment, parse_workload("agentx"), Load(concurrency=3072), calibration, options)


def step_ms(dep: int, redundant: int | None, requests: int) -> tuple[float, float]:
    """(balancedness, GPU time) of a decode step at 128K tokens of context."""
    calibration = load_calibration("gb300-v4.1-flash")
    deployment, pool = deployment_of(V41, GB300, dep=dep, drafts=5, redundant_experts=redundant)
    even = calibration.balancedness(deployment, pool, requests * 6)
    batch = Batch(decodes=requests, context_tokens=131072)
    cost = calibration.pool_cost(deployment, pool)
    return even, sum(gpu_terms_ms(cost, batch, dep=dep, drafts=5, balancedness=even).values())


def served(deployment: Deployment, workload: str, *, concurrency: int) -> dict:
    """What 20 s of a closed loop come to."""
    return simulate_document(
        deployment,
        workload=workload,
        concurrency=concurrency,
        rate=None,
        cv=1.0,
        duration_s=20.0,
        calibration=None,
        replications=1,
        seed=0,
    )


# -- U6: balancedness rose and throughput fell --------------------------------------------------------------------
def test_u6_eplb_can_balance_and_still_be_slower():
    """At DEP8 a step of 16 requests reads every expert, and replicas are read too."""
    (off, off_ms), (on, on_ms) = step_ms(8, None, 16), step_ms(8, 32, 16)
    assert on > off + 0.2
    assert on_ms > off_ms
    assert step_ms(8, 0, 16)[1] < off_ms  # without replicas it pays
    assert step_ms(32, 32, 64)[1] < 0.8 * step_ms(32, None, 64)[1]  # and where tokens bind, with them


def test_u6_a_synchronous_eplb_that_stops_often_loses_what_it_balances():
    def output_tok_s(eplb: dict) -> float:
        pool = {"role": "aggregated", "instances": 1, "dep": 32, "max_num_batched_tokens": 4096}
        deployment = {"model": V41, "gpu": GB300, "pools": [pool], "speculation": {"draft_tokens": 5}, "eplb": eplb}
        found = served(parse_deployment(deployment), "fixed:1024/512", concurrency=1024)
        return found["metrics"]["throughput_output_tok_s_per_gpu"]

    off = output_tok_s({})
    often = output_tok_s({"enabled": True, "redundant_experts": 32, "use_async": False, "interval_steps": 100})
    aside = output_tok_s({"enabled": True, "redundant_experts": 32, "use_async": True, "interval_steps": 100})
    assert often < 0.9 * off < off < aside


# -- U7: EPLB stopped in silence ----------------------------------------------------------------------------------
def whatif(*changes: tuple[str, str]) -> dict:
    pool = {"role": "aggregated", "instances": 1, "dep": 32, "max_num_batched_tokens": 4096}
    base = {"model": V41, "gpu": GB300, "pools": [pool], "speculation": {"draft_tokens": 5}}
    base["eplb"] = {"enabled": True, "redundant_experts": 32, "interval_steps": 200, "window_steps": 100}
    load = {"workload": "fixed:256/2048", "concurrency": 1024, "rate": None, "duration_s": 60.0}
    rest = {"calibration": None, "replications": 1, "seed": 0}
    return compare(parse_deployment(base), list(changes), **load, **rest)


def test_u7_eplb_that_stops_costs_throughput_where_popularity_drifts():
    drifts, stops = ("run.drift_per_step", "1.0e-3"), ("run.eplb_off_s", "10")
    found = whatif(drifts, stops)
    assert found["changes"]["run.eplb_off_s"] == {"base": None, "changed": 10}
    assert found["base"]["inputs"]["run"]["drift_per_step"] == 1e-3  # the traffic's, so on both sides
    lost = {m["metric"]: m["change_pct"] for m in found["moved"]}
    assert lost["output tok/s/GPU"] < -1
    assert not whatif(stops)["moved"]  # nothing drifts: the placement stays as good as it was


def test_u7_what_eplb_does_in_a_run_needs_eplb_and_a_known_key():
    for changes, says in (
        ((("eplb.enabled", "false"), ("run.cold_start", "true")), "run.cold_start: has no effect while EPLB is off"),
        ((("run.cold", "true"),), "run.cold=True: no such key"),
        ((("run.eplb_off_s", "soon"),), "run.eplb_off_s=soon: write a number"),
        ((("run.cold_start", "1"),), "run.cold_start=1: write true or false"),
    ):
        with pytest.raises(InputError, match=says):
            whatif(*changes)


# -- U8: ten milliseconds a step in the sync ----------------------------------------------------------------------
def test_u8_the_transport_of_the_sync_is_a_parameter():
    calibration = load_calibration("gb300-v4.1-flash")

    def sync_ms(algorithm: str, dep: int) -> float:
        deployment, pool = deployment_of(V41, GB300, dep=dep, algorithm=algorithm)
        return calibration.pool_cost(deployment, pool).dp_sync_ms()

    assert sync_ms("ring", 32) == pytest.approx(10.8)  # F40
    assert sync_ms("recursive_doubling", 32) == pytest.approx(1.5)  # F41
    assert 0.1 <= sync_ms("nccl", 32) < 1
    assert sync_ms("ring", 32) / sync_ms("ring", 16) == pytest.approx(31 / 15)


# -- U9: idle ranks -----------------------------------------------------------------------------------------------
def test_u9_a_request_alone_on_eight_ranks_waits_for_seven_dummy_batches():
    """A rank alone has no sync, and decodes beside nobody; at DEP8 every step syncs and runs dummies."""

    def tpot_ms(dep: int) -> float:
        deployment, pool = deployment_of("deepseek-v2-lite", "h200", dep=dep)
        found = served(deployment, "fixed:256/256", concurrency=1)
        shares = found["pools"][0]["gpu_time_share"]
        assert (shares["dp_imbalance"] > 0.5) == (dep == 8)
        return found["metrics"]["tpot_ms"]["p50"]

    assert tpot_ms(8) > tpot_ms(1)


# -- published of 32 ranks ----------------------------------------------------------------------------------------
def check(id: str) -> float:
    return CHECKS["gb300-v4.1-flash"][id].predict(load_calibration("gb300-v4.1-flash"))


def test_wider_was_slower_until_the_cpu_was_mended():
    """F37 to F39, F43: at DEP32 the GPU needs less than at DEP16, yet a step took longer."""
    assert check("F39") > 0
    assert check("F37") > check("F38")
    assert check("F43") < check("F38")
    assert check("F43") < check("F42") < check("F37")


def test_balancedness_with_eplb_is_as_published_at_the_batch_of_the_served_run():
    """F30, F32 at 16 requests a GPU, F33, F34 at their 72: within 0.02."""
    target = {"experts": 384, "top_k": 6, "layers": 40, "gpus": 32}
    draft = {"experts": 128, "top_k": 3, "layers": 3, "gpus": 32}
    on = {"redundant_experts": 32, "eplb": True}
    even = {"redundant_experts": 0, "eplb": False, "skew_sigma": 0.0}
    found = {
        0.94: expert_balancedness(**target, **on, skew_sigma=target_sigma(), tokens_per_gpu=16 * 6),
        0.89: expert_balancedness(**draft, **on, skew_sigma=draft_sigma(), tokens_per_gpu=16 * 5),
        0.96: expert_balancedness(**target, **even, tokens_per_gpu=72 * 6),
    }
    for published, predicted in found.items():
        assert predicted == pytest.approx(published, abs=0.02)
    assert expert_balancedness(**draft, **even, tokens_per_gpu=72 * 5) == pytest.approx(0.94, abs=0.02)


def most_loads_in_a_step(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> int:
    """Requests with KV from a prefill instance that all ranks together admit in one step, at most."""
    most, plan = 0, Ranks.plan

    def counted(self, *args):
        nonlocal most
        plans = plan(self, *args)
        most = max(most, sum(len(loads) for _, _, loads in plans.values()))
        return plans

    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "plan", counted)
        agentic(deployment)
    return most


def test_without_a_cap_bursts_are_admitted_in_a_step(monkeypatch):
    """F48: 140. They come after a second without steps, as of a synchronous rearrangement; a cap spreads them. Loads
    begin with the step after it and end in the next few, so that a step has some half of the burst."""
    stopped = most_loads_in_a_step(monkeypatch, eight_to_one(use_async=False))
    assert 140 / 3 < stopped < 140
    assert stopped > 3 * most_loads_in_a_step(monkeypatch, eight_to_one())
    assert most_loads_in_a_step(monkeypatch, eight_to_one(use_async=False, cap=1)) <= 32


def test_a_cap_shortens_the_longest_step_of_a_burst():
    """Admissions of a rank follow one another, and every rank waits for the fullest."""

    def longest_ms(cap: int | None) -> float:
        deployment = parse_deployment(
            {
                **eight_to_one(cap=cap, use_async=False).to_dict(),
                "eplb": {},
                "speculation": {},
            }
        )
        calibration = FakeCalibration(LinearCost(admission=6.0))  # F51
        at_once = GivenRequests(requests([0.0] * 512, 64, 64))
        found = simulate(deployment, at_once, Load(), calibration, RunOptions())
        return max(max(gaps.walls_ns) for gaps in found.pools[1].token_gaps) / 1e6

    assert longest_ms(1) < longest_ms(4) < longest_ms(None)
