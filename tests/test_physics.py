"""Laws of the step-time model: any coefficients, any batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.experts import experts_touched
from rackplan.calibration.library import load_calibration
from rackplan.calibration.physics import PhysicalCost, padded_tokens
from rackplan.engine.deployment import WeightOffload

NAMES = ("h200-v2-lite", "gb300-v4.1-flash", "gb200-v3")


def gpu_ms(name, batch, dep=2, drafts=0):
    calibration = load_calibration(name)
    deployment, pool = deployment_of(calibration.file.model, calibration.file.gpu, dep=dep, drafts=drafts)
    return sum(gpu_terms_ms(calibration.pool_cost(deployment, pool), batch, dep=dep, drafts=drafts).values())


@given(st.sampled_from(NAMES), st.integers(1, 400), st.integers(1, 200_000), st.integers(0, 100_000))
def test_decode_time_never_falls_with_batch_or_context(name, batch, context, more):
    base = gpu_ms(name, Batch(decodes=batch, context_tokens=context))
    assert gpu_ms(name, Batch(decodes=batch, context_tokens=context + more)) >= base
    assert gpu_ms(name, Batch(decodes=batch + 1, context_tokens=context)) >= base


@given(st.sampled_from(NAMES), st.integers(1, 32_768), st.integers(0, 200_000), st.integers(1, 4096))
def test_prefill_time_never_falls_with_new_or_cached_tokens(name, new, cached, more):
    base = gpu_ms(name, Batch(chunks=1, new_tokens=new, cached_tokens=cached))
    assert gpu_ms(name, Batch(chunks=1, new_tokens=new + more, cached_tokens=cached)) >= base
    assert gpu_ms(name, Batch(chunks=1, new_tokens=new, cached_tokens=cached + more)) >= base


@given(st.sampled_from(NAMES), st.floats(0.1, 1.0))
def test_imbalance_never_saves_time(name, balancedness):
    calibration = load_calibration(name)
    deployment, pool = deployment_of(calibration.file.model, calibration.file.gpu, dep=4)
    shared = calibration.pool_cost(deployment, pool).shared_ms(4096, 16384, 16384, 4, balancedness)
    assert min(shared) >= 0


def test_attention_is_linear_in_each_argument_and_elementwise():
    calibration = load_calibration("gb300-v4.1-flash")
    cost = calibration.pool_cost(*deployment_of("deepseek-v4.1-flash", "gb300", dep=2, drafts=5))
    one = np.abs(np.random.default_rng(0).normal(size=(5, 3, 2)))
    assert cost.attention_ms(*(2 * one)) == pytest.approx(2 * cost.attention_ms(*one))
    assert cost.attention_ms(*one).shape == (3, 2)


@pytest.mark.parametrize(("tokens", "padded"), [(0, 0), (1, 1), (3, 4), (9, 16), (257, 272), (512, 512), (513, 513)])
def test_tokens_pad_to_captured_sizes(tokens, padded):
    assert padded_tokens(tokens, 512) == padded


@given(st.integers(1, 100_000))
def test_experts_touched_lie_between_top_k_and_all(tokens):
    assert 6 - 1e-9 <= experts_touched(tokens, 64, 6) <= 64


def test_a_wider_instance_reads_fewer_experts_per_gpu():
    one_layer = {d: gpu_terms(d)["moe"] for d in (4, 8, 16, 32)}
    assert sorted(one_layer.values(), reverse=True) == list(one_layer.values())


def gpu_terms(dep):
    calibration = load_calibration("gb300-v4.1-flash")
    cost = calibration.pool_cost(*deployment_of("deepseek-v4.1-flash", "gb300", dep=dep, drafts=5))
    return gpu_terms_ms(cost, Batch(decodes=64, context_tokens=131072), dep=dep, drafts=5)


def test_sync_grows_linearly_on_a_ring_and_logarithmically_by_doubling():
    def sync_ms(algorithm, dep):
        calibration = load_calibration("gb300-v4.1-flash")
        deployment, pool = deployment_of("deepseek-v4.1-flash", "gb300", dep=dep, algorithm=algorithm)
        return calibration.pool_cost(deployment, pool).dp_sync_ms()

    assert sync_ms("ring", 32) == pytest.approx(10.8)
    assert sync_ms("recursive_doubling", 32) == pytest.approx(1.5)
    assert sync_ms("ring", 16) == pytest.approx(10.8 * 15 / 31)
    assert sync_ms("recursive_doubling", 16) == pytest.approx(1.2)
    assert sync_ms("nccl", 32) == sync_ms("nccl", 2)
    assert sync_ms("ring", 1) == 0


def test_undoing_a_fix_costs_time_and_only_in_prefill():
    calibration = load_calibration("gb300-v4.1-flash")
    deployment, pool = deployment_of("deepseek-v4.1-flash", "gb300", dep=2)
    after: PhysicalCost = calibration.cost_on(deployment, pool)
    for fix in calibration.file.fixes:
        before = calibration.cost_on(deployment, pool, (fix,))
        prefill, decode = Batch(chunks=1, new_tokens=32768, cached_tokens=131072), Batch(decodes=8, context_tokens=8192)
        assert sum(gpu_terms_ms(before, prefill, dep=2).values()) > sum(gpu_terms_ms(after, prefill, dep=2).values())
        assert gpu_terms_ms(before, decode, dep=2) == pytest.approx(gpu_terms_ms(after, decode, dep=2))


def test_weight_offload_waits_only_where_a_layer_loads_longer_than_others_compute() -> None:
    def wait_ms(tokens: int, **offload: int) -> float:
        deployment, pool = deployment_of("deepseek-v3", "gb200", dep=2, tokens=65536)
        pool = pool.model_copy(update={"offload": WeightOffload(**offload)})
        cost = load_calibration("gb200-v3").cost_on(deployment, pool)
        return cost.shared_ms(tokens, 2 * tokens, 2 * tokens, 2, 1.0).weight_wait

    assert wait_ms(65536, group_size=2) == 0.0  # 40 ms of a layer hide the 14 ms that the next one loads
    # 128 experts x 24.8 MB over 225 GB/s are 14.1 ms; every second of 58 MoE layers at 64 tokens has little to hide it.
    assert 29 * 14.1 * 0.8 < wait_ms(64, group_size=2) < 29 * 14.1
    assert wait_ms(64, group_size=2) > wait_ms(64, group_size=4) > wait_ms(64, group_size=0) == 0.0
    assert wait_ms(2048, group_size=4, prefetch_step=1) > wait_ms(2048, group_size=4, prefetch_step=3)
