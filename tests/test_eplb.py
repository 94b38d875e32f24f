"""EPLB in a run: what a rearrangement moves and costs, which placement serves when, and when it does not pay."""

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.experts import experts_touched, replicas_touched
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import load_calibration
from rackplan.engine import InputError, parse_deployment
from rackplan.simulator.cost import PlacedAt, SharedTime
from rackplan.simulator.eplb import Placement, eplb_placement, linear_placement, start_placement
from rackplan.simulator.expert_load import Balancing, ExpertLoad
from rackplan.simulator.load import Load
from rackplan.simulator.rearrange import most_moved, moved_per_layer
from rackplan.simulator.run_options import ExpertRun, RunOptions
from rackplan.simulator.simulate import simulate

V41, GB300 = "deepseek-v4.1-flash", "gb300"


class BalanceCost(LinearCost):
    """A step takes 10 ms with even experts, of which 2 are communication."""

    def attention_ms(self, prefill_tokens, prefill_pairs, prefill_context, decode_requests, decode_context):
        return 0.0 * decode_context

    def shared_ms(self, widest_tokens, total_tokens, prefill_tokens, prefill_chunks, balancedness):
        return SharedTime(4.0, 4.0, 4.0 / balancedness - 4.0, 2.0, 0.0)


def gaps_ms(eplb: dict, experts: ExpertRun, *, steps: int = 400, cost=None) -> np.ndarray:
    """Step times of one request that decodes on two ranks, (steps - 1,)."""
    deployment = parse_deployment({**aggregated(dep=2).to_dict(), "eplb": {"enabled": True, **eplb}})
    calibration = FakeCalibration(cost or BalanceCost(), balance=0.8)
    workload = GivenRequests(requests([0.0], 100, steps))
    result = simulate(deployment, workload, Load(), calibration, RunOptions(experts=experts))
    return np.array(result.pools[0].token_gaps[0].walls_ns) / 1e6


LINEAR, PLACED = 6 + 4 / 0.4, 6 + 4 / 0.8


# -- what moves ---------------------------------------------------------------------------------------------------
def placed(slots: list[list[int]], experts: int, gpus: int) -> Placement:
    expert_of_slot = np.array(slots)
    return Placement(
        expert_of_slot=expert_of_slot,
        replica_of_slot=np.zeros_like(expert_of_slot),
        replicas=np.array([np.bincount(row, minlength=experts) for row in slots]),
        gpu_of_slot=np.repeat(np.arange(gpus), len(slots[0]) // gpus),
    )


def test_what_stays_is_not_moved_and_the_busiest_gpu_counts():
    before = placed([[0, 1, 2, 3]], 4, 2)
    assert most_moved(before, before, 2).tolist() == [0]
    assert most_moved(before, placed([[1, 0, 3, 2]], 4, 2), 2).tolist() == [0]  # within a GPU
    assert most_moved(before, placed([[0, 2, 1, 3]], 4, 2), 2).tolist() == [1]
    assert most_moved(before, placed([[2, 3, 0, 1]], 4, 2), 2).tolist() == [2]
    hot = placed([[0, 1, 2, 0, 3, 0, 1, 0]], 4, 4)  # from GPU 0 go expert 0 to three and half of expert 1's sends
    assert most_moved(placed([[0, 1, 2, 3, 1, 2, 3, 2]], 4, 4), hot, 4).tolist() == [3.5]


def test_an_engine_starts_with_blocks_and_the_replicas_at_their_end():
    start = start_placement(2, 6, 2, 4)
    assert start.expert_of_slot[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert start.replicas[0].tolist() == [2, 2, 1, 1, 1, 1]
    assert start.replica_of_slot[0].tolist() == [0] * 6 + [1] * 2
    same = linear_placement(1, 6, 2)
    assert (start_placement(1, 6, 0, 2).expert_of_slot == same.expert_of_slot).all()
    with pytest.raises(InputError, match=r"redundant_experts=1.*nearest 0, 2"):
        start_placement(1, 6, 1, 2)


def test_a_first_rearrangement_moves_nearly_every_expert_and_more_gpus_move_less_each():
    load = ExpertLoad(experts=384, top_k=6, layers=40, skew_sigma=1.4)
    balancing = Balancing(redundant_experts=32, window_steps=1000, interval_steps=3000)
    moved = {gpus: moved_per_layer(load, gpus, balancing, first=True) for gpus in (4, 8, 32)}
    assert all(0.5 * 416 / gpus < n <= 416 / gpus + 20 for gpus, n in moved.items())
    assert moved[4] > moved[8] > moved[32]


def test_the_longest_rearrangement_published_is_one_second_on_32_gpus():
    """F35; a synchronous one is reported at 0.65 to 1.70 s."""
    deployment, pool = deployment_of(V41, GB300, dep=32, drafts=5, redundant_experts=32)
    found = load_calibration("gb300-v4.1-flash").rearrangement(deployment, pool, first=False, drift_per_step=0.0)
    assert 650 <= found.total_ms <= 1010
    assert 0 < found.link_share < 0.05  # 13 experts of 18.8 MB in each of 40 layers: what takes long is not the bytes


# -- which placement serves ---------------------------------------------------------------------------------------
def test_a_run_is_of_the_steady_state_unless_told_otherwise():
    assert gaps_ms({"use_async": False, "interval_steps": 10_000}, ExpertRun()) == pytest.approx(PLACED)


def test_a_cold_start_is_linear_until_a_quarter_of_the_interval():
    gaps = gaps_ms({"use_async": False, "interval_steps": 200}, ExpertRun(cold_start=True))
    assert gaps[:48] == pytest.approx(LINEAR)
    stops = np.flatnonzero(gaps > 500)
    assert np.diff(stops).tolist() == [200]  # the step numbers 50 and 250
    assert gaps[stops[0] + 2 : stops[1] - 1] == pytest.approx(PLACED)


def test_an_asynchronous_rearrangement_serves_when_it_has_arrived_and_takes_a_share_of_the_link():
    gaps = gaps_ms({"use_async": True, "interval_steps": 200}, ExpertRun(cold_start=True))
    assert gaps.max() < 20  # nobody stops
    shared = 2.0 / 0.9 - 2.0  # a tenth of the link for a second
    began = int(np.flatnonzero(gaps > LINEAR + 0.01)[0])
    ended = int(np.flatnonzero(gaps < LINEAR - 0.01)[0])
    assert gaps[began:ended] == pytest.approx(LINEAR + shared)
    assert (ended - began) * (LINEAR + shared) == pytest.approx(1000, abs=2 * LINEAR)
    assert gaps[ended : ended + 50] == pytest.approx(PLACED)


def test_a_step_takes_in_one_layer_of_an_asynchronous_rearrangement_at_most():
    slow = BalanceCost()
    slow.shared_ms = lambda *a: SharedTime(100.0, 4.0, 4.0 / a[-1] - 4.0, 0.0, 0.0)
    gaps = gaps_ms({"use_async": True, "interval_steps": 200}, ExpertRun(cold_start=True), cost=slow)
    assert int(np.flatnonzero(gaps < gaps[0] - 1)[0]) - 50 == pytest.approx(26, abs=2)  # its MoE layers, in 2.7 s


def test_drift_counts_once_eplb_has_stopped():
    eplb = {"use_async": False, "interval_steps": 50}
    kept = gaps_ms(eplb, ExpertRun(drift_per_step=1e-2))
    stopped = gaps_ms(eplb, ExpertRun(drift_per_step=1e-2, eplb_off_s=0.0))
    no_drift = gaps_ms(eplb, ExpertRun(eplb_off_s=0.0))
    assert no_drift == pytest.approx(PLACED)
    assert (kept > 500).sum() == 7
    assert stopped[:90] == pytest.approx(PLACED)
    assert stopped[-1] > stopped[150] > PLACED + 1


def test_drift_lowers_balance_with_the_age_of_the_placement():
    calibration = load_calibration("gb300-v4.1-flash")
    deployment, pool = deployment_of(V41, GB300, dep=32, drafts=5, redundant_experts=32)
    ages = [
        calibration.balancedness(deployment, pool, 96, PlacedAt(age_steps=age, drift_per_step=1e-5))
        for age in (2e3, 2e4, 2e5)
    ]
    linear = calibration.balancedness(deployment, pool, 96, PlacedAt(linear=True))
    assert ages[0] > ages[1] > ages[2]
    assert linear == pytest.approx(0.35, abs=0.02)  # F29


@pytest.mark.parametrize("wrong", [{"eplb_off_s": -1.0}, {"drift_per_step": -1.0}, {"drift_per_step": float("nan")}])
def test_bad_values_of_a_run_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ExpertRun(**wrong)


# -- what it costs ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sigma", [0.0, 1.4])
def test_every_replica_with_a_token_is_read(sigma):
    for tokens in (1, 30, 3000):
        alone = experts_touched(tokens, 384, 6, sigma)
        some, more = (replicas_touched(tokens, 384, 6, sigma, n) for n in (32, 96))
        assert alone <= some + 1e-9 <= more + 2e-9
        assert more <= 384 + 96
        assert some <= tokens * 6 + 1e-9
        assert replicas_touched(tokens, 384, 6, sigma, 0) == alone
    assert replicas_touched(3072, 384, 6, 1.4, 32) > experts_touched(3072, 384, 6, 1.4) + 30


def step_terms(*, dep: int, redundant: int | None, older: str | None = None) -> dict[str, float]:
    """Terms of a decode step of 16 requests a rank at 128K tokens, ms."""
    calibration = FittedCalibration(load_calibration("gb300-v4.1-flash").file, older=older)
    deployment, pool = deployment_of(V41, GB300, dep=dep, drafts=5, redundant_experts=redundant)
    cost = calibration.pool_cost(deployment, pool)
    even = calibration.balancedness(deployment, pool, 96)
    return gpu_terms_ms(cost, Batch(decodes=16, context_tokens=131072), dep=dep, drafts=5, balancedness=even)


def test_the_drafts_imbalance_has_a_cost():
    """F31, F32: 0.21 without EPLB, 0.89 with it, beside more weights to read."""
    off, on = step_terms(dep=32, redundant=None)["draft"], step_terms(dep=32, redundant=32)["draft"]
    even, pool = deployment_of(V41, GB300, dep=32, drafts=5)
    cost = load_calibration("gb300-v4.1-flash").pool_cost(even, pool)
    hot = cost.shared_ms(384, 384 * 32, 0, 0, 1.0).draft
    cost.draft_balancedness = lambda tokens: 1.0
    cost.shared_ms.cache_clear()
    assert hot > cost.shared_ms(384, 384 * 32, 0, 0, 1.0).draft + 0.02
    assert abs(off - on) < 0.2


def test_recording_costs_what_fusing_it_saved():
    """F36."""
    before = step_terms(dep=32, redundant=32, older="before_eplb_fusion")
    now = step_terms(dep=32, redundant=32)
    # The draft's layers take a share of the target's, recording with them.
    assert before["dense"] - now["dense"] == pytest.approx(0.2)
    unbalanced = step_terms(dep=32, redundant=None, older="before_eplb_fusion")
    assert unbalanced == step_terms(dep=32, redundant=None)


def test_a_placement_of_eplb_is_better_than_blocks_where_tokens_bind():
    loads = np.random.default_rng(1).lognormal(0, 1.4, (4, 384))
    assert eplb_placement(loads, redundant_experts=32, gpus=32).replicas.max() > 1
    assert sum(step_terms(dep=32, redundant=32).values()) < sum(step_terms(dep=32, redundant=None).values()) + 0.1
