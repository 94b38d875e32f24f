"""DeepSeek-V3's knobs: what narrower instances, smaller dispatch and larger batches do (F62 to F65), and those that
vLLM no longer has."""

from dataclasses import replace

import numpy as np
import pytest

from rackplan.calibration import published_v3
from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.figures import fit_value
from rackplan.calibration.library import load_calibration
from rackplan.calibration.physics import PhysicalCost
from rackplan.engine import InputError, parse_deployment
from rackplan.engine.parser_table import parser_table

V3 = ("deepseek-v3", "gb200")
PROMPT = Batch(chunks=1, new_tokens=2048)


def prefill(tokens: int, dep: int, **coefficients: float) -> dict[str, float]:
    """GPU time of `tokens` of prompts of 2,048 a rank, ms by term."""
    deployment, pool = deployment_of(*V3, dep=dep, tokens=max(8192, tokens))
    found = load_calibration("gb200-v3").coefficients.model_copy(update=coefficients)
    batch = replace(PROMPT, chunks=max(1, tokens // 2048), new_tokens=min(2048, tokens))
    return gpu_terms_ms(PhysicalCost(found, deployment, pool), batch, dep=dep)


def volume_ms(tokens: int, dep: int, **coefficients: float) -> float:
    return prefill(tokens, dep, comm_fixed_ms=0.0, comm_rank_ms=0.0, **coefficients)["communication"]


def test_f65_dispatch_in_nvfp4_takes_a_quarter_of_fp16s_bytes():
    fp4, fp16 = (volume_ms(8192, 4, dispatch_bytes=b, combine_bytes=1e-9) for b in (0.5, 2.0))
    assert fp4 / fp16 == pytest.approx(fit_value("F65"))
    assert load_calibration("gb200-v3").coefficients.dispatch_bytes == 2.0 * fit_value("F65")


def test_f64_two_ranks_exchange_half_of_what_four_do():
    # Half lies between what a GPU receives at as many tokens of its own (a third) and at as many of all (two thirds).
    own, all_together = (volume_ms(n, 2) / volume_ms(8192, 4) for n in (8192, 16384))
    assert own == pytest.approx(1 / 3)
    assert all_together == pytest.approx(2 / 3)
    assert own < 0.5 < all_together


def test_an_all_gather_takes_what_nccl_took_within_15_pct():
    found = published_v3.all_gather_us(load_calibration("gb200-v3").coefficients.model_dump())
    assert np.abs(found / published_v3.all_gathers()[:, 2] - 1).max() < 0.15


def test_f63_moe_throughput_rises_with_the_batch_and_is_flat_from_64k():
    rate = {n: n / prefill(n, 2)["moe"] for n in (1024, 4096, 16384, 65536, 131072)}
    assert rate[1024] < 0.6 * rate[65536]
    assert rate[4096] < rate[16384] <= rate[65536]
    assert rate[65536] == pytest.approx(rate[131072], rel=0.02)


def test_f62_attention_throughput_is_flat_from_16k_to_64k():
    rates = [n / prefill(n, 2)["attention"] for n in (16384, 32768, 65536)]
    assert rates == pytest.approx([rates[-1]] * 3, rel=0.02)


@pytest.mark.parametrize("key", ["moe_dp_chunk_size", "fused_moe_chunk_size"])
def test_a_chunk_size_that_no_known_release_has_is_refused(key):
    pool = {"role": "aggregated", "instances": 1, "dep": 4, key: 256}
    with pytest.raises(InputError, match=rf"aggregated\.{key}: unknown key; remove it"):
        parse_deployment({"model": V3[0], "gpu": V3[1], "pools": [pool]})


@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_no_known_release_reads_the_moe_chunk_variables(release):
    gone = {"VLLM_MOE_DP_CHUNK_SIZE", "VLLM_ENABLE_MOE_DP_CHUNK", "VLLM_FUSED_MOE_CHUNK_SIZE"}
    assert not gone & set(parser_table(release).environment)
