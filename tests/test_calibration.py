"""Embedded calibrations: they refit to what is shipped, keep their error budgets, and refuse what they cannot know."""

import json

import pytest

from rackplan.calibration import campaign, h200, h200_rows, h200_v3, published, published_v3
from rackplan.calibration.figures import figures, fit_value
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import (
    calibration_file,
    default_calibration,
    list_calibrations,
    load_calibration,
    show,
)
from rackplan.calibration.predict import predict
from rackplan.calibration.readers.forward_csv import forward_rows
from rackplan.calibration.validate import CHECKS, validate
from rackplan.engine import InputError, model_spec, parse_deployment

NAMES = ("gb200-v3", "gb300-v4.1-flash", "h200-v2-lite", "h200-v3")


def test_h200_refits_to_the_embedded_file():
    shipped, found = calibration_file("h200-v2-lite"), h200.fit()
    for key, value in found.coefficients.items():
        assert getattr(shipped.coefficients, key) == pytest.approx(value, rel=1e-3), key
    front = (shipped.frontend_ms, shipped.frontend_token_ms, shipped.frontend_turn_ms)
    assert front == pytest.approx((found.front.total_ms, found.front.token_ms, found.front.turn_ms), rel=1e-3)
    transfer = campaign.transfer(found.front.token_ms)
    assert shipped.transfer.model_dump() == pytest.approx(transfer.model_dump(), rel=1e-3)


def test_h200_v3_refits_to_the_embedded_file():
    shipped = calibration_file("h200-v3")
    for key, value in h200_v3.draft_of(h200_v3.fit().values).coefficients.model_dump().items():
        assert getattr(shipped.coefficients, key) == pytest.approx(value, rel=1e-3), key


def test_slices_of_a_model_cost_in_proportion_to_their_layers():
    # What a layer costs is the same in a slice and in the whole, so 4 layers less 2 are two MoE layers.
    values = h200_v3.fit().values
    batches = [(n, r) for n, r in h200_v3.rows() if r.id == "decode_16_1024_dep1"]
    two, four = h200_v3.predict_ms(values, tuple(sorted(batches, key=lambda b: b[0])))
    whole = model_spec("deepseek-v3", "h200")
    assert h200_v3.slice_of(whole.layers).flops_per_token_dense["decode"] == pytest.approx(
        whole.flops_per_token_dense["decode"],
        rel=0.05,  # one dense layer in place of three
    )
    assert 1.9 < four / two < 3  # three MoE layers and the dense one, against one and one


def test_dp_sync_predicts_the_measured_all_reduce_at_every_width():
    # Not a fit of one width: hops and rounds must carry from 2 ranks to 16.
    found = campaign.dp_sync_ms()
    assert found["ring_hop_ms"] * 15 == pytest.approx(2.448, rel=0.2)
    assert found["ring_hop_ms"] == pytest.approx(0.224, rel=0.2)
    assert found["doubling_round_ms"] * 4 == pytest.approx(0.301, rel=0.2)
    assert found["doubling_round_ms"] == pytest.approx(0.071, rel=0.2)


def test_kv_transfer_is_what_the_counters_say():
    found = campaign.transfer(token_ms=0.1)
    blocks = 2048 / found.block_tokens
    assert blocks * found.per_block_ms == pytest.approx(7.328)  # the mean post of 1P1D at 6 requests/s
    assert 0 < found.setup_ms < 63.1  # of what lay between the prefill's answer and the first token


def test_rows_that_are_left_out_are_measured_and_named():
    every = {r.id for name in h200_rows.FORWARD_FILES for r in forward_rows(h200_rows.PROFILES / name)}
    assert set(h200_rows.LEFT_OUT) <= every
    assert every - set(h200_rows.LEFT_OUT) == {r.id.removesuffix("_again") for r in h200_rows.profile_rows()}


def test_published_fits_refit_to_the_embedded_files():
    sigmas = (published.target_sigma(), published.draft_sigma())
    refit = published.draft_of(published.fit_figures(list(published.FIT_ROWS), sigmas).values, sigmas)
    v3 = published_v3.draft_of(published_v3.fit_figures().values)
    for file in (refit, v3):
        shipped = calibration_file(file.name)
        for key, value in file.coefficients.model_dump().items():
            assert getattr(shipped.coefficients, key) == pytest.approx(value, rel=1e-3), (file.name, key)
        for fix, cost in file.fixes.items():
            assert shipped.fixes[fix].model_dump() == pytest.approx(cost.model_dump(), rel=1e-3), fix


def test_h200_holdout_stays_within_its_budget():
    every = calibration_file("h200-v2-lite").errors["all"]
    assert every.holdout_median_pct < 3
    assert every.holdout_p90_pct < 8


def test_fits_use_fit_rows_alone():
    assert all(figures()[id].role == "fit" for id in (*published.FIT_ROWS, *published_v3.FIT_ROWS))
    # F57 may be fitted to and is not: TP's all-reduces are not modelled.
    checks = {id for rows in CHECKS.values() for id in rows}
    assert {id for id in checks if figures()[id].role == "fit"} == {"F57"}
    assert not checks & {*published.FIT_ROWS, *published_v3.FIT_ROWS}
    with pytest.raises(InputError, match="F06 is a check row"):
        fit_value("F06")


def test_check_rows_keep_a_median_error_under_15_pct():
    found = validate("gb300-v4.1-flash")
    assert {r["id"] for r in found["rows"] if r["role"] == "check"} == set(CHECKS["gb300-v4.1-flash"])
    assert found["summary"]["check_median_abs_pct"] < 15
    assert validate("gb200-v3")["summary"]["check_median_abs_pct"] < 15
    assert validate("h200-v3")["summary"]["check_median_abs_pct"] < 15


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pool", "batch", "context", "new"), [("decode", 16, 8192, None), ("prefill", 1, 4096, 2048)])
def test_terms_add_up_to_the_step(name, pool, batch, context, new):
    found = predict(name, pool=pool, dep=2, batch=batch, context=context, new=new)
    assert sum(found["terms_ms"].values()) == pytest.approx(found["step_ms"])
    assert min(found["terms_ms"].values()) >= 0
    assert found["interval_ms"][0] < found["step_ms"] < found["interval_ms"][1]
    json.dumps(found)


def test_prediction_says_when_it_extrapolates_and_widens():
    inside = predict("h200-v2-lite", pool="decode", dep=1, batch=64, context=4096)
    outside = predict("h200-v2-lite", pool="decode", dep=8, batch=64, context=4096)
    assert inside["in_range"]
    assert not outside["in_range"]
    assert any("dep=8 outside 1 to 2" in note for note in outside["notes"])

    def width(p):
        return (p["interval_ms"][1] - p["interval_ms"][0]) / p["step_ms"]

    assert width(outside) == pytest.approx(2 * width(inside), rel=0.02)  # relative to predicted, not to measured


def test_a_prefill_past_the_captured_graphs_shows_the_launch_floor():
    found = predict("h200-v2-lite", pool="prefill", dep=1, new=2048)
    assert found["step_ms"] > 1.5 * found["gpu_ms"]


def test_an_eager_launch_takes_longer_beside_decodes_and_with_experts_spread():
    calibration = load_calibration("h200-v2-lite")
    deployment = {
        width: parse_deployment(
            {
                "model": "deepseek-v2-lite",
                "gpu": "h200",
                "pools": [{"role": role, "instances": 1, "dep": width} for role in ("prefill", "decode")],
            }
        )
        for width in (1, 2)
    }
    launch = {
        (pool.role, width): calibration.pool_cost(d, pool).launch_floor_ms(2048, 1)
        for width, d in deployment.items()
        for pool in d.pools
    }
    assert launch["prefill", 1] < launch["decode", 1] < launch["decode", 2]
    assert launch["prefill", 1] < launch["prefill", 2]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"pool": "both", "dep": 1}, "pool=both: one of prefill, decode"),
        ({"pool": "decode", "dep": 0}, "dep=0: must be at least 1"),
        ({"pool": "decode", "dep": 1, "new": 5}, "new=5 has no effect"),
        ({"pool": "prefill", "dep": 1, "new": 0}, "new=0: must be at least 1"),
        ({"pool": "decode", "dep": 1, "drafts": 3}, "takes at most 0"),
    ],
)
def test_bad_queries_name_the_value(query, message):
    with pytest.raises(InputError, match=message):
        predict("h200-v2-lite", **query)


def test_library_names_what_there_is(tmp_path):
    assert [row["name"] for row in list_calibrations()] == list(NAMES)
    assert default_calibration("deepseek-v2-lite", "h200") == "h200-v2-lite"
    with pytest.raises(InputError, match="there is deepseek-v3 on gb200"):
        default_calibration("deepseek-v3", "gb300")
    with pytest.raises(InputError, match="one of gb200-v3, gb300-v4.1-flash, h200-v2-lite, h200-v3"):
        load_calibration("h100")
    broken = tmp_path / "mine.json"
    broken.write_text(json.dumps({**show("gb200-v3"), "frontend_ms": -1}))
    with pytest.raises(InputError, match=r"mine.json: frontend_ms: .*got -1"):
        load_calibration(str(broken))


def test_a_saved_calibration_loads_as_it_was(tmp_path):
    file = calibration_file("gb300-v4.1-flash")
    file.save(tmp_path / "copy.json")
    assert load_calibration(str(tmp_path / "copy.json")).file == file


def test_another_model_or_gpu_is_refused():
    pools = [{"role": "aggregated", "instances": 1, "dep": 2}]
    deployment = parse_deployment({"model": "deepseek-v3", "gpu": "gb300", "pools": pools})
    with pytest.raises(InputError, match="model=deepseek-v3: calibration gb300-v4.1-flash was fitted on deepseek-v4"):
        load_calibration("gb300-v4.1-flash").pool_cost(deployment, deployment.pools[0])


def test_older_engine_and_unknown_fix():
    file = calibration_file("gb300-v4.1-flash")
    before, after = FittedCalibration(file, older="before_cpu_fixes"), FittedCalibration(file)
    assert before.coefficients.admission_token_ms > 6 * after.coefficients.admission_token_ms
    with pytest.raises(InputError, match="older_engines=never: unknown"):
        FittedCalibration(file, older="never")


def test_skewed_experts_are_balanced_by_eplb_and_random_weights_need_none():
    pools = [{"role": "aggregated", "instances": 1, "dep": 32}]
    base = {"model": "deepseek-v4.1-flash", "gpu": "gb300", "pools": pools}
    off = parse_deployment(base)
    on = parse_deployment({**base, "eplb": {"enabled": True, "redundant_experts": 32}})
    calibration = load_calibration("gb300-v4.1-flash")
    assert calibration.balancedness(off, off.pools[0], 432) == pytest.approx(0.35, abs=0.01)
    assert calibration.balancedness(on, on.pools[0], 432) > 0.9
