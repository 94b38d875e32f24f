"""Replays: rank streams stay on their ranks, served runs come out as measured, the host's lead shows where it must."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests

from rackplan.calibration import campaign, h200, h200_launches, h200_served, replay
from rackplan.calibration.against import validate_against
from rackplan.calibration.experts import experts_touched
from rackplan.calibration.library import load_calibration
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.readers.profile_folder import read_profile
from rackplan.calibration.serving import replay_served
from rackplan.calibration.validate import HELD_OUT, held_out_pct, validate
from rackplan.engine import InputError, parse_deployment
from rackplan.simulator.agentx import AGENTX
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import gpu_time_share
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate
from rackplan.simulator.step import overlap_ms, step_wall_ms


def prefill(workload, load=None, dep=2, policy="prefix_affinity", seconds=30.0):
    deployment = replay.prefill_deployment(dep, policy)
    options = RunOptions(duration_s=seconds, drain=False)
    return simulate(deployment, workload, load or Load(), load_calibration("gb300-v4.1-flash"), options)


@pytest.mark.parametrize("dep", [2, 4])
def test_mirrored_ranks_lose_nothing_to_imbalance_and_staggered_ranks_do(dep):
    mirrored = prefill(replay.RankStreams(ranks=dep, stagger_s=0.0), dep=dep)
    staggered = prefill(replay.RankStreams(ranks=dep, stagger_s=1.0), dep=dep)
    assert gpu_time_share(mirrored)["dp_imbalance"] == pytest.approx(0.0, abs=1e-9)
    assert gpu_time_share(staggered)["dp_imbalance"] > 0.02
    # The same prompts end together on every rank, in order.
    ends = mirrored.finish_ns.reshape(-1, dep)
    assert (ends == ends[:, :1]).all()
    assert (mirrored.request_id.reshape(-1, dep) // dep == np.arange(len(ends))[:, None]).all()


def test_prefill_only_ends_with_the_first_token():
    result = prefill(replay.PrefillOnly(of=AGENTX), Load(concurrency=8), policy="least_requests")
    assert len(result.finish_ns) >= 5
    assert (result.output_tokens == 1).all()
    assert (result.first_token_ns == result.finish_ns).all()
    assert (result.cached_tokens == 0).all()


@pytest.mark.parametrize("rate", ["r4", "r12"])
def test_served_runs_come_out_as_measured(rate):
    calibration, path = load_calibration("h200-v2-lite"), h200.SERVED_RUNS[rate]
    found = {m.name: m for m in replay_served(read_bench_serve(path), h200.served_deployment(), calibration)}
    for name, within in (("output throughput", 0.05), ("mean TPOT", 0.10), ("median TTFT", 0.20)):
        assert found[name].predicted == pytest.approx(found[name].measured, rel=within), name


@pytest.fixture(scope="module")
def validated():
    return validate("h200-v2-lite")


@pytest.fixture(scope="module")
def served_rows(validated):
    return [r for r in validated["rows"] if r["id"].startswith("serve_")]


def test_validation_says_which_served_runs_a_fit_used(served_rows):
    assert len(served_rows) == len({r["id"] for r in served_rows})
    fitted = {r["id"] for r in served_rows if r["role"] == "fit"}
    calm = [run.name for run in h200.calm_runs()]
    runs = (*h200.SERVED_RUNS, *calm, campaign.LAUNCH_RUN, campaign.TRANSFER_RUN)
    used = tuple(f"serve_{run}_" for run in runs)
    assert len(calm) == 5
    assert {id for id in fitted if not id.startswith(used)} == set()
    assert sum(r["role"] == "check" for r in served_rows) == 5 * (20 + 18)


def test_served_errors_sum_up_the_replays_and_no_fit_row_counts_as_held_out(served_rows):
    errors = load_calibration("h200-v2-lite").file.errors
    for key, metrics in h200_served.SERVED_ERRORS.items():
        check = [abs(r["error_pct"]) for r in served_rows if r["role"] == "check" and r["metric"] in metrics]
        assert errors[key].holdout_median_pct == pytest.approx(np.median(check), abs=0.02)
        assert errors[key].holdout_p90_pct == pytest.approx(np.percentile(check, 90), abs=0.02)
        assert errors[key].worst_pct >= max(check) - 0.02


WITHIN_PCT = {"output throughput": 3, "mean TPOT": 5, "median TPOT": 5.5, "median TTFT": 10, "P90 TTFT": 15}
REPEATED = ("load0", "load1", "pilot")
"""Loads that were served again and again: launches of half minutes differ by 20 %, so it is their mean that tells."""
KNOWN_MISSES_PCT = {"turns_burst": 20, "turns_short": 28, "pd_deploy_canary": 14, "skew_r12": 32, "skew_eplb_r12": 32}
KNOWN_TPOT_MISS_PCT = {"pilot": 7}
ORDERED = ("1p1d_b", "2xdep1_b", "dep2_b")
"""Runs of every split of two GPUs, on a host whose launches are longer than the file's."""
"""docs/validation.md says why."""


def run_of(row):
    return row["what"].removeprefix("served run ").split(",")[0]


def test_served_runs_that_no_fit_saw_come_out_as_measured(served_rows):
    others = (*REPEATED, *ORDERED)
    once = [r for r in served_rows if r["role"] == "check" and not any(load in run_of(r) for load in others)]
    assert len(once) > 50
    for row in once:
        assert abs(row["error_pct"]) < KNOWN_MISSES_PCT.get(run_of(row), WITHIN_PCT[row["metric"]]), row


@pytest.mark.parametrize("load", REPEATED)
def test_the_mean_of_repeated_loads_comes_out_as_measured(load, served_rows):
    for metric, within in WITHIN_PCT.items():
        rows = [r for r in served_rows if load in run_of(r) and r["metric"] == metric]
        assert len(rows) == {"load0": 5, "load1": 5, "pilot": 2}[load]
        measured, predicted = (np.mean([r[what] for r in rows]) for what in ("measured", "predicted"))
        if "TPOT" in metric:
            within = KNOWN_TPOT_MISS_PCT.get(load, within)
        assert predicted == pytest.approx(measured, rel=within / 100), metric


def ordered(rows, metric):
    """Rows of the ORDERED runs by name."""
    found = {run_of(r): r for r in rows if run_of(r).startswith(ORDERED) and r["metric"] == metric}
    assert len(found) == 18
    return found


def test_a_slower_host_serves_no_faster_than_predicted(served_rows):
    for metric in ("median TTFT", "P90 TTFT"):
        assert all(r["error_pct"] < 0 for r in ordered(served_rows, metric).values())
    for name, row in ordered(served_rows, "output throughput").items():
        saturated = name.startswith(("1p1d_b2048_r12", "dep2_b2048_r12"))
        assert 0 < row["error_pct"] < (9 if saturated else 1), row
    for name, row in ordered(served_rows, "mean TPOT").items():
        # A decode server of its own never launches an eager step.
        assert abs(row["error_pct"]) < 4 if name.startswith("1p1d") else -36 < row["error_pct"] < 0, row


def test_launches_of_that_host_are_longer_than_the_files():
    """Begin of a step with a prompt past the captured sizes to begin of the next, beside decodes on one GPU: of that
    host, and of the runs from which the file has its level."""
    there = [
        (after.t_s - step.t_s) * 1e3
        for run in read_profile(h200_served.ORDER).runs
        if run.name.startswith("2xdep1")
        for (log,) in run.logs.values()
        for step, after in pairwise(log.steps)
        if sum(new for new, _ in step.prefill) > h200_launches.CAPTURED_TOKENS and step.decode_requests
    ]
    assert len(there) > 300
    steps = h200.launch_steps()
    here = np.concatenate([h200_launches.launches_by_run(steps, eager=True)[run].ms for run in h200.SERVED_RUNS])
    assert 1.1 < np.mean(there) / np.mean(here) < 1.4


def test_deployments_rank_as_measured_on_a_slower_host(validated):
    orders = validated["rank_order"]
    assert [(o["pairs"], len(o["deployments"])) for o in orders] == [(15, 6)] * 8
    wrong = {(o["metric"], o["load"].split(",")[0]): o["disagree"] for o in orders if o["disagree"]}
    assert wrong == {("median TTFT", "12 req/s"): 1, ("median TTFT", "6 req/s"): 1}
    tpot = {o["load"].split(",")[0]: o for o in orders if o["metric"] == "mean TPOT"}
    assert tpot["12 req/s"]["agree"] == 15
    assert validated["summary"]["ranked_pairs"] == 120
    assert validated["summary"]["ranked_agree"] >= 80


def test_the_stated_error_covers_the_checks():
    calibration = load_calibration("gb300-v4.1-flash")
    found = held_out_pct(calibration)
    for pool in HELD_OUT:
        assert calibration.file.errors[pool].worst_pct >= max(map(abs, found[pool])) - 0.01


@given(st.floats(0.01, 200), st.floats(0, 100), st.floats(0, 100), st.floats(0, 50), st.integers(1, 40))
def test_a_run_of_equal_steps_settles_at_the_time_of_a_step_among_its_like(gpu, floor, host, lead, steps):
    wall, leads, following = overlap_ms(np.full(steps, gpu), floor, host, lead)
    assert (wall > 0).all()
    assert (leads >= 0).all()
    assert (following >= -1e-9).all()
    np.testing.assert_allclose(leads[1:], following[:-1])
    many, _, _ = overlap_ms(np.full(20_000, gpu), floor, host, lead)
    steady = float(step_wall_ms(np.array([gpu]), floor, host, 0.0, 0.0, True)[0])
    # Steps of which the GPU takes all but a little of the launch take that long to use up a lead.
    assert many[-1] == pytest.approx(steady, rel=1e-3, abs=lead / 10_000)


def test_a_first_token_leaves_after_the_next_steps_launch():
    # Two prompts of one step each; the second comes while the first is launched, so it runs next.
    calibration = FakeCalibration(LinearCost(fixed_ms=3.0, floor=70.0))
    reqs = requests([0.0, 0.010], 1000, 2)
    found = simulate(aggregated(), GivenRequests(reqs), Load(), calibration, RunOptions())
    first = dict(zip(found.request_id.tolist(), (found.first_token_ns / 1e6).tolist(), strict=True))
    assert first[0] == pytest.approx(140, abs=0.01)  # its own launch, then that of the second prompt
    assert first[1] == pytest.approx(140, abs=4)
    alone = simulate(aggregated(), GivenRequests(reqs[:1]), Load(), calibration, RunOptions())
    assert alone.first_token_ns[0] / 1e6 == pytest.approx(70, abs=0.01)


def test_a_launch_overlaps_the_step_before():
    # A prompt joins a decoding request: its launch starts while the decode step before it still runs.
    calibration = FakeCalibration(LinearCost(fixed_ms=10.0, floor=70.0))
    found = simulate(aggregated(), GivenRequests(requests([0.0], 1000, 100)), Load(), calibration, RunOptions())
    reqs = requests([0.0, 0.300], 1000, [100, 1])
    joined = simulate(aggregated(), GivenRequests(reqs), Load(), calibration, RunOptions())
    delay_ms = (joined.finish_ns.max() - found.finish_ns.max()) / 1e6
    assert 70 - 2 * 10.6 < delay_ms < 70 - 0.9 * 10.5


@given(st.integers(1, 2000), st.floats(0.05, 2.5))
def test_skewed_routing_touches_fewer_experts(tokens, sigma):
    skewed, even = experts_touched(tokens, 64, 6, sigma), experts_touched(tokens, 64, 6)
    assert 6 - 1e-9 <= skewed <= even + 1e-9
    assert experts_touched(1, 64, 6, sigma) == pytest.approx(6)


def test_a_serving_result_of_ones_own_is_compared_metric_by_metric(tmp_path: Path) -> None:
    deployment = parse_deployment(
        {
            "model": "deepseek-v2-lite",
            "gpu": "h200",
            "pools": [{"role": "aggregated", "instances": 1, "dep": 1, "max_num_seqs": 512}],
        }
    )
    run = {
        "start_times": [0.0, 1.0],
        "input_lens": [512, 512],
        "output_lens": [64, 64],
        "errors": ["", ""],
        "output_throughput": 100.0,
        "mean_tpot_ms": 3.3,
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(run))
    rows = validate_against("h200-v2-lite", [path], deployment)["rows"]
    assert [(r["id"], r["what"], r["measured"]) for r in rows] == [
        ("mine", "output throughput", 100.0),
        ("mine", "mean TPOT", 3.3),
    ]
    assert abs(rows[1]["error_pct"]) < 10
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(InputError, match="mine.json: start_times is missing; run `vllm bench serve`"):
        validate_against("h200-v2-lite", [path], deployment)


@pytest.mark.parametrize(
    ("rate", "clients", "closed"),
    [("inf", 4, True), ("inf", 12, False), (5.0, 4, False)],
    ids=["loop", "burst", "rate"],
)
def test_a_closed_loop_is_replayed_as_one_whatever_the_speed_it_was_served_at(tmp_path, rate, clients, closed) -> None:
    """Requests of an engine that is slow are sent late: replayed at those times its throughput would look right."""

    def throughput(gap_s: float) -> float:
        sent = {"start_times": [gap_s * (i // 4) for i in range(12)], "request_rate": rate, "max_concurrency": clients}
        lengths = {"input_lens": [512] * 12, "output_lens": [64] * 12}
        path = tmp_path / "run.json"
        path.write_text(json.dumps({**sent, **lengths, "output_throughput": 100.0}))
        found = replay_served(read_bench_serve(path), h200.served_deployment(), load_calibration("h200-v2-lite"))
        return {m.name: m.predicted for m in found}["output throughput"]

    slow, slower = throughput(1.0), throughput(10.0)
    assert slower == (slow if closed else pytest.approx(12 * 64 / 20, rel=0.1))
    assert slow > 12 * 64 / 3
