"""Dual-batch overlap: what a step of two halves takes, where it is refused, and what servers are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.dual_batch import in_two_halves
from rackplan.calibration.library import load_calibration
from rackplan.engine import InputError, parse_deployment
from rackplan.engine.placement import Placement
from rackplan.engine.serving import server_commands
from rackplan.simulator.cost import SharedTime

MS = st.floats(0.0, 100.0)


@pytest.mark.parametrize(
    ("computing", "exchange", "step"),
    [(5.0, 1.0, 10.0), (5.0, 5.0, 10.0), (1.0, 5.0, 10.0), (5.0, 4.0, 10.0), (0.0, 3.0, 6.0), (3.0, 0.0, 6.0)],
)
def test_the_longer_of_both_sums_is_what_shows(computing, exchange, step):
    found = in_two_halves(SharedTime(computing, 0.0, 0.0, exchange, 0.0), 0.0)
    assert sum(found) == pytest.approx(step)


@given(MS, MS, MS, MS)
def test_two_halves_take_no_less_than_either_resource_needs_and_no_more_than_one_after_the_other(dense, moe, ep, comm):
    found = in_two_halves(SharedTime(dense, moe, ep, comm, 0.0), 0.0)
    computing = dense + moe + ep
    assert found.communication >= -1e-9
    assert max(2 * computing, 2 * comm) - 1e-9 <= sum(found) <= 2 * (computing + comm) + 1e-9


def step(requests: int, *, enable_dbo: bool, dep: int = 8) -> dict[str, float]:
    calibration = load_calibration("h200-v3")
    deployment, pool = deployment_of("deepseek-v3", "h200", dep=dep)
    if enable_dbo:
        pool = pool.model_copy(update={"enable_dbo": True, "role": "decode"})
    cost = calibration.cost_on(deployment, pool)
    return gpu_terms_ms(cost, Batch(decodes=requests, context_tokens=2000), dep=dep)


def test_below_the_threshold_a_step_is_not_split():
    few = step(31, enable_dbo=True)
    assert few["moe"] == pytest.approx(step(31, enable_dbo=False)["moe"])
    assert few["communication"] > 0


def test_halves_read_again_what_they_touch_and_hide_the_exchange():
    for requests in (32, 256):
        split, whole = step(requests, enable_dbo=True), step(requests, enable_dbo=False)
        assert split["moe"] > whole["moe"]
        assert split["dense"] > whole["dense"]
        assert split["communication"] < 0.2 * whole["communication"]


POOLS = [
    {"role": "prefill", "instances": 1, "dep": 4},
    {"role": "decode", "instances": 1, "dep": 8, "enable_dbo": True},
]
BASE = {"model": "deepseek-v3", "gpu": "gb300", "pools": POOLS}


def test_a_server_is_told_the_overlap_its_thresholds_and_kernels_that_can():
    prefill, decode, *_ = server_commands(parse_deployment(BASE), Placement(model="m", hosts=("a", "b", "c")))
    told = dict(zip(decode.argv, decode.argv[1:], strict=False))
    assert "--enable-dbo" in decode.argv
    assert told["--all2all-backend"] == "deepep_low_latency"
    assert (told["--dbo-decode-token-threshold"], told["--dbo-prefill-token-threshold"]) == ("32", "512")
    assert decode.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enable-dbo" not in prefill.argv


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speculation": {"draft_tokens": 1}}, "with speculation.draft_tokens=1"),
        ({"model": "deepseek-v4.1-flash"}, "tables in host memory"),
        ({"pools": [POOLS[0], {**POOLS[1], "dep": 1, "tp": 8}]}, "dep=1"),
        ({"pools": [{**POOLS[1], "role": "aggregated"}]}, "an aggregated pool runs both"),
    ],
)
def test_what_the_engine_would_not_split_is_refused(changes, why):
    with pytest.raises(InputError, match=rf"enable_dbo=true: .*{why}.*; set false"):
        parse_deployment({**BASE, **changes})
