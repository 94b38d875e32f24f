"""Laws of expert load and EPLB: what a placement must hold, and how balancedness moves."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackplan.engine import InputError
from rackplan.simulator.eplb import Placement, eplb_placement, linear_placement
from rackplan.simulator.expert_load import MAX_SIGMA, ExpertLoad, expert_balancedness, fit_skew

TARGET = {"experts": 384, "top_k": 6, "layers": 40, "gpus": 32}
DRAFT = {"experts": 128, "top_k": 3, "layers": 3, "gpus": 32}
LITE = {"experts": 64, "top_k": 6, "layers": 26, "gpus": 2}
V3 = {"experts": 256, "top_k": 8, "layers": 58, "gpus": 8}


def balancedness(part: dict, sigma: float, tokens: float, *, eplb: bool = False, redundant: int = 0, **more) -> float:
    return expert_balancedness(
        **part, redundant_experts=redundant, eplb=eplb, skew_sigma=sigma, tokens_per_gpu=tokens, **more
    )


def gpu_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    return placement.gpu_loads(np.take_along_axis(loads / placement.replicas, placement.expert_of_slot, axis=1))


def mean_over_max(loads: np.ndarray) -> float:
    return float(loads.mean(axis=-1).sum() / loads.max(axis=-1).sum())


@st.composite
def placements(draw):
    gpus = draw(st.sampled_from([2, 4, 8]))
    groups, nodes = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 2)]))
    experts = 12 * gpus * draw(st.integers(1, 3))
    redundant = gpus * draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    loads = np.floor(1000 * np.exp(draw(st.floats(0, 3)) * rng.standard_normal((3, experts))))
    return loads, {"redundant_experts": redundant, "gpus": gpus, "groups": groups, "nodes": nodes}


@settings(max_examples=60, deadline=None)
@given(placements())
def test_placement_gives_every_expert_a_replica_and_every_gpu_equally_many(case):
    loads, how = case
    placement = eplb_placement(loads, **how)
    slots = loads.shape[1] + how["redundant_experts"]
    assert placement.replicas.min() >= 1
    assert (placement.replicas.sum(axis=1) == slots).all()
    assert (np.bincount(placement.gpu_of_slot, minlength=how["gpus"]) == slots // how["gpus"]).all()
    for layer, experts in enumerate(placement.expert_of_slot):
        assert (np.bincount(experts, minlength=loads.shape[1]) == placement.replicas[layer]).all()
        assert len(set(zip(experts, placement.replica_of_slot[layer], strict=True))) == slots
    assert (placement.replica_of_slot < np.take_along_axis(placement.replicas, placement.expert_of_slot, axis=1)).all()


@settings(max_examples=60, deadline=None)
@given(placements())
def test_placement_keeps_all_load_and_sums_it_by_gpu(case):
    loads, how = case
    placement = eplb_placement(loads, **how)
    per_slot = np.take_along_axis(loads / placement.replicas, placement.expert_of_slot, axis=1)
    by_gpu = gpu_loads(placement, loads)
    assert by_gpu.sum(axis=1) == pytest.approx(loads.sum(axis=1))
    for gpu in range(how["gpus"]):
        assert by_gpu[:, gpu] == pytest.approx(per_slot[:, placement.gpu_of_slot == gpu].sum(axis=1))


@pytest.mark.parametrize("redundant", [0, 32])
def test_eplb_does_not_lower_balance_on_the_loads_it_placed(redundant):
    rng = np.random.default_rng(5)
    for sigma in (0.0, 0.5, 1.5, 3.0):
        loads = np.exp(sigma * rng.standard_normal((20, 384)))
        placed = mean_over_max(gpu_loads(eplb_placement(loads, redundant_experts=redundant, gpus=32), loads))
        assert placed >= mean_over_max(gpu_loads(linear_placement(20, 384, 32), loads)) - 1e-12


@pytest.mark.parametrize(("experts", "redundant", "gpus"), [(384, 32, 32), (128, 32, 32), (64, 0, 2), (256, 8, 8)])
def test_equal_loads_are_placed_equally(experts, redundant, gpus):
    loads = np.full((2, experts), 7.0)
    by_gpu = gpu_loads(eplb_placement(loads, redundant_experts=redundant, gpus=gpus), loads)
    assert mean_over_max(by_gpu) > 0.99


def test_hierarchical_placement_keeps_a_group_on_one_node():
    loads = np.random.default_rng(2).lognormal(0, 1, (4, 64))
    placement = eplb_placement(loads, redundant_experts=16, gpus=8, groups=8, nodes=2)
    node_of_slot = placement.gpu_of_slot // 4
    for experts in placement.expert_of_slot:
        for group in range(8):
            assert len(set(node_of_slot[experts // 8 == group])) == 1


def test_hottest_expert_gets_the_spare_slots():
    loads = np.array([[100.0, 1.0, 1.0, 1.0]])
    placement = eplb_placement(loads, redundant_experts=4, gpus=4)
    assert placement.replicas.tolist() == [[5, 1, 1, 1]]
    assert gpu_loads(placement, loads).max() == 40  # five replicas of 20 on four GPUs: one holds two


def test_linear_placement_gives_the_first_gpus_what_does_not_divide():
    assert np.bincount(linear_placement(1, 10, 4).gpu_of_slot).tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize(("experts", "redundant", "gpus"), [(384, 32, 32), (128, 32, 32), (256, 0, 8), (64, 0, 2)])
def test_placement_equals_vllms_own(experts, redundant, gpus):
    policy = pytest.importorskip("vllm.distributed.eplb.policy", reason="needs vLLM").DefaultEplbPolicy
    torch = pytest.importorskip("torch", reason="needs torch")
    loads = np.random.default_rng(4).lognormal(0, 1.5, (5, experts)).astype(np.float32)
    theirs = policy.rebalance_experts(torch.from_numpy(loads), experts + redundant, 1, 1, gpus)
    slots = np.asarray(theirs[0] if isinstance(theirs, tuple) else theirs)
    ours = eplb_placement(loads, redundant_experts=redundant, gpus=gpus)
    assert (np.sort(slots.reshape(5, gpus, -1)) == np.sort(ours.expert_of_slot.reshape(5, gpus, -1))).all()


def test_placement_of_the_largest_case_takes_under_a_tenth_of_a_second():
    loads = np.random.default_rng(0).lognormal(0, 1.5, (40, 384))
    start = time.process_time()
    eplb_placement(loads, redundant_experts=32, gpus=32)
    assert time.process_time() - start < 0.1


def test_inclusion_sums_to_top_k_and_grows_with_popularity():
    for sigma in (0.0, 1.4, MAX_SIGMA):
        chance = ExpertLoad(experts=128, top_k=3, layers=3, skew_sigma=sigma).probability()
        assert chance.sum(axis=1) == pytest.approx(3)
        assert 0 <= chance.min() <= chance.max() <= 1


def gumbel_top_k_loads(load: ExpertLoad, tokens: int, gpus: int, layers: int) -> np.ndarray:
    """Every token routed one by one: the top_k smallest of exponentials at the experts' weights (Gumbel top-k)."""
    rng = np.random.default_rng([load.seed, load.layers, load.experts])
    weights = np.exp(load.skew_sigma * rng.standard_normal((2, load.models * load.layers, load.experts))[0])
    draws = np.random.default_rng(9)
    chosen = [
        np.argpartition(draws.standard_exponential((tokens, load.experts)) / w, load.top_k)[:, : load.top_k]
        for w in weights[:layers]
    ]
    return np.array([np.bincount(c.ravel() * gpus // load.experts, minlength=gpus) for c in chosen])


@pytest.mark.parametrize(
    ("part", "sigma", "tokens"), [(TARGET, 0.0, 64), (DRAFT, 0.0, 64), (DRAFT, 1.6, 64), (LITE, 1.0, 8)]
)
def test_sampling_matches_routing_token_by_token(part, sigma, tokens):
    load = ExpertLoad(**{k: part[k] for k in ("experts", "top_k", "layers")}, skew_sigma=sigma)
    layers = min(12, load.models * load.layers) if part is TARGET else load.models * load.layers
    routed = gumbel_top_k_loads(load, tokens * part["gpus"], part["gpus"], layers)
    assert balancedness(part, sigma, tokens) == pytest.approx(mean_over_max(routed), abs=0.02)


@pytest.mark.parametrize("part", [TARGET, DRAFT, LITE, V3], ids=["target", "draft", "lite", "v3"])
def test_eplb_never_lowers_balancedness(part):
    for sigma in (0.0, 0.5, 1.4):
        for tokens in (1, 16, 256):
            off, on = balancedness(part, sigma, tokens), balancedness(part, sigma, tokens, eplb=True)
            assert 0 < off <= 1
            assert 0 < on <= 1
            assert on >= off - 0.01  # sampling error


@pytest.mark.parametrize("part", [TARGET, DRAFT, LITE, V3], ids=["target", "draft", "lite", "v3"])
@pytest.mark.parametrize(("sigma", "eplb"), [(0.0, False), (1.4, False), (1.4, True)])
def test_more_tokens_do_not_lower_balancedness(part, sigma, eplb):
    seen = [balancedness(part, sigma, tokens, eplb=eplb) for tokens in (0.1, 0.5, 1, 4, 16, 64, 256, 1024)]
    assert all(b >= a - 0.005 for a, b in zip(seen, seen[1:], strict=False))  # sampling error


def test_more_skew_does_not_raise_balancedness():
    seen = [balancedness(TARGET, sigma, 128) for sigma in (0, 0.25, 0.5, 1, 2, 4)]
    assert all(b <= a for a, b in zip(seen, seen[1:], strict=False))


def test_one_gpu_is_balanced_and_repeats_are_equal():
    assert balancedness({**LITE, "gpus": 1}, 2.0, 10) == 1.0
    assert balancedness(DRAFT, 1.6, 77.7, eplb=True, redundant=32) == balancedness(
        DRAFT, 1.6, 77.7, eplb=True, redundant=32
    )


def test_largest_case_is_cheap_and_then_free():
    start = time.process_time()
    first = balancedness(TARGET, 1.41, 97, eplb=True, redundant=32)
    assert time.process_time() - start < 0.3
    start = time.process_time()
    assert all(balancedness(TARGET, 1.41, 97, eplb=True, redundant=32) == first for _ in range(1000))
    assert time.process_time() - start < 0.2


def test_drift_and_a_short_window_cost_balance():
    fresh = balancedness(TARGET, 1.4, 128, eplb=True, redundant=32)
    stale = balancedness(TARGET, 1.4, 128, eplb=True, redundant=32, drift_per_step=1e-4)
    staler = balancedness(TARGET, 1.4, 128, eplb=True, redundant=32, drift_per_step=1e-4, interval_steps=12000)
    one_step = balancedness(TARGET, 1.4, 16, eplb=True, redundant=32, window_steps=1)
    assert fresh > stale + 0.05
    assert stale > staler + 0.05
    assert one_step < balancedness(TARGET, 1.4, 16, eplb=True, redundant=32) - 0.02
    assert balancedness(TARGET, 1.4, 128, drift_per_step=1e-2) == balancedness(TARGET, 1.4, 128)


@pytest.fixture(scope="module")
def fitted() -> SimpleNamespace:
    """Skews from the two published balancednesses without EPLB (F29, F31), at 34 requests of 1 + 5 tokens per GPU."""
    return SimpleNamespace(
        target=fit_skew(**TARGET, tokens_per_gpu=34 * 6, balancedness=0.35),
        draft=fit_skew(**DRAFT, tokens_per_gpu=34 * 5, balancedness=0.21),
    )


def test_fit_reproduces_what_it_was_fitted_to(fitted):
    assert balancedness(TARGET, fitted.target, 34 * 6) == pytest.approx(0.35, abs=0.002)
    assert balancedness(DRAFT, fitted.draft, 34 * 5) == pytest.approx(0.21, abs=0.002)


def test_eplb_predictions_span_the_published_ones_over_the_assumed_batches(fitted):
    """F30, F32: the source does not state the batch; 16 to 72 requests per GPU are assumed."""
    target = [balancedness(TARGET, fitted.target, 6 * n, eplb=True, redundant=32) for n in (16, 34, 72)]
    draft = [balancedness(DRAFT, fitted.draft, 5 * n, eplb=True, redundant=32) for n in (16, 34, 72)]
    assert target[0] <= 0.94 <= target[2]
    assert target[1] == pytest.approx(0.94, abs=0.02)
    assert draft[0] <= 0.89 <= draft[2]


def test_uniform_routing_predictions_meet_the_published_ones():
    """F33, F34: 72 requests per GPU, the target routing 1 + 5 tokens of each, the draft its 5."""
    assert balancedness(TARGET, 0.0, 72 * 6) == pytest.approx(0.96, abs=0.02)
    assert balancedness(DRAFT, 0.0, 72 * 5) == pytest.approx(0.94, abs=0.02)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: balancedness(TARGET, 1.0, 10, redundant=32), "redundant_experts=32 has no effect"),
        (lambda: balancedness({**TARGET, "gpus": 26}, 1.0, 10, eplb=True, redundant=31), "nearest 6, 32"),
        (lambda: balancedness(TARGET, 1.0, 0), "tokens_per_gpu=0"),
        (lambda: balancedness(TARGET, -1.0, 10), "skew_sigma=-1.0"),
        (lambda: balancedness({**TARGET, "gpus": 385}, 1.0, 10), "gpus=385"),
        (lambda: balancedness({**TARGET, "gpus": 0}, 1.0, 10), "gpus=0"),
        (lambda: balancedness({**TARGET, "top_k": 384}, 1.0, 10), "top_k=384"),
        (lambda: balancedness(TARGET, 1.0, 10, eplb=True, window_steps=0), "window_steps=0"),
        (lambda: fit_skew(**TARGET, tokens_per_gpu=100, balancedness=0.99), "balancedness=0.99"),
        (lambda: eplb_placement(np.ones((1, 8)), redundant_experts=0, gpus=2, groups=3), "groups=3"),
    ],
)
def test_bad_input_names_the_value(call, says):
    with pytest.raises(InputError, match=says):
        call()
