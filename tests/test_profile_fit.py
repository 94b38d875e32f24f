"""A profile of known truth is fitted back to it; what it does not hold is carried and said; bad files are named."""

import json
from pathlib import Path

import numpy as np
import profiles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration import h200, h200_rows
from rackplan.calibration.batch import Batch, gpu_terms_ms
from rackplan.calibration.file import CalibrationFile, FittedCalibration
from rackplan.calibration.library import calibration_file
from rackplan.calibration.profile import fit_profile
from rackplan.calibration.readers.profile_folder import read_profile
from rackplan.calibration.rows import Row
from rackplan.calibration.served import launch_at_no_tokens_ms, launches_of, prompt_steps, token_launch_ms
from rackplan.calibration.serving import replay_served
from rackplan.engine import InputError

SHAPES = [
    Batch(decodes=2, context_tokens=1000),
    Batch(decodes=12, context_tokens=1000),
    Batch(decodes=24, context_tokens=2000),
    Batch(chunks=1, new_tokens=384, cached_tokens=512),
    Batch(chunks=1, new_tokens=800),
]
"""Inside the measured range, and none of them measured."""


def step_ms(file: CalibrationFile, batch: Batch, dep: int = 1) -> float:
    deployment = profiles.tiny_deployment(file.model, dep)
    cost = FittedCalibration(file).pool_cost(deployment, deployment.pools[0])
    return sum(gpu_terms_ms(cost, batch, dep=dep).values()) + cost.host_ms(batch.decodes + batch.chunks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("profile")
    profiles.write_profile(found)
    return found


@pytest.fixture(scope="module")
def fitted(folder) -> CalibrationFile:
    return fit_profile(folder, "tiny")


def test_steps_between_the_measured_ones_come_out_as_the_engine_takes_them(fitted):
    truth = profiles.true_calibration(fitted.model).file
    for batch in SHAPES:
        assert step_ms(fitted, batch) == pytest.approx(step_ms(truth, batch), rel=0.04), batch


def test_the_stated_holdout_error_is_that_of_the_noise(fitted):
    assert {"decode", "prefill", "all"} <= set(fitted.errors)
    assert fitted.errors["all"].holdout_median_pct < 3
    assert fitted.errors["decode_served_wall"].fit_median_pct < 3


def test_the_served_run_replays_as_its_client_saw_it(folder, fitted):
    run = read_profile(folder).runs[0]
    found = {m.name: m for m in replay_served(run.served, run.deployment, FittedCalibration(fitted))}
    for name, within in (("output throughput", 0.02), ("mean TPOT", 0.04), ("median TTFT", 0.05)):
        assert found[name].predicted == pytest.approx(found[name].measured, rel=within), name
    assert fitted.frontend_ms == pytest.approx(profiles.FRONTEND_MS, abs=3)


def test_host_and_device_of_one_set_of_cores_are_one(fitted):
    assert fitted.coefficients.host_step_ms == 0
    assert fitted.coefficients.eager_floor_ms == 0
    assert any("served steps take" in note for note in fitted.notes)


def test_without_a_step_log_the_client_tells_the_loop(tmp_path):
    profiles.write_profile(tmp_path / "p", logs=False)
    found = fit_profile(tmp_path / "p", "tiny")
    truth = profiles.true_calibration(found.model).file
    batch = Batch(decodes=1, context_tokens=544)
    assert step_ms(found, batch) == pytest.approx(step_ms(truth, batch), rel=0.05)


def test_what_was_not_measured_is_carried_and_named(tmp_path):
    profiles.write_profile(tmp_path / "p", runs=False)
    found = fit_profile(tmp_path / "p", "tiny")
    assert {"link_efficiency", "comm_fixed_ms", "doubling_round_ms", "frontend_ms", "transfer"} <= set(found.carried)
    assert any("No served step" in note for note in found.notes)
    assert found.measured["decode"].dep == (1, 1)


def test_ranks_that_were_served_but_not_profiled_add_what_their_steps_show(tmp_path):
    model = profiles.write_profile(tmp_path / "p")
    two = profiles.tiny_deployment(model, dep=2)
    identity = json.loads((tmp_path / "p" / "profile.json").read_text())
    run = {"name": "dep2", "deployment": two.to_dict(), "rate_req_s": 4.0, "prompts": 60, "status": "done"}
    (tmp_path / "p" / "profile.json").write_text(json.dumps({**identity, "runs": [*identity["runs"], run]}))
    profiles.write_serve(tmp_path / "p" / "serve_dep2.json", profiles.true_calibration(model), two, 4.0, 60)
    for rank in (0, 1):
        profiles.write_steps(tmp_path / "p" / f"steps_dep2.dp{rank}.jsonl", model, dep=2)
    found = fit_profile(tmp_path / "p", "tiny")
    assert "comm_fixed_ms" not in found.carried
    truth = profiles.true_calibration(found.model).file
    for batch in SHAPES[:3]:
        assert step_ms(found, batch, dep=2) == pytest.approx(step_ms(truth, batch, dep=2), rel=0.06), batch


def test_measured_ranks_beat_carried_ones(tmp_path):
    model = profiles.write_profile(tmp_path / "p")
    profiles.write_forward(tmp_path / "p" / "forward_dep2.csv", model, noise=0.01, dep=2)
    found = fit_profile(tmp_path / "p", "tiny")
    truth = profiles.true_calibration(found.model).file
    assert not {"link_efficiency", "comm_fixed_ms"} & set(found.carried)
    for batch in SHAPES:
        assert step_ms(found, batch, dep=2) == pytest.approx(step_ms(truth, batch, dep=2), rel=0.04), batch


def test_a_noisy_row_counts_less(tmp_path):
    profiles.write_profile(tmp_path / "p", noise=0.0, runs=False)
    table = tmp_path / "p" / "forward_dep1.csv"
    clean = fit_profile(tmp_path / "p", "tiny")
    lines = table.read_text().splitlines()
    row = lines[5].split(",")
    off = [*row[:-2], str(float(row[-2]) * 1.5)]
    shifts = {}
    for spread in ("1.0", "200.0"):
        table.write_text("\n".join([*lines[:5], ",".join([*off, spread]), *lines[6:]]) + "\n")
        shifts[spread] = abs(step_ms(fit_profile(tmp_path / "p", "tiny"), SHAPES[1]) - step_ms(clean, SHAPES[1]))
    assert shifts["200.0"] < shifts["1.0"] / 10


def test_a_saved_fit_loads_as_it_was(tmp_path, fitted):
    fitted.save(tmp_path / "tiny.json")
    assert calibration_file(str(tmp_path / "tiny.json")) == fitted


# -- bad input ---------------------------------------------------------------------------------------------------------
def damage(path: Path, change) -> None:
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("profile.json", lambda t: t[:-20], r"profile.json: file: invalid json"),
        ("profile.json", lambda t: t.replace('"format": 1', '"format": 9'), r"profile.json: format: .*got 9"),
        ("profile.json", lambda t: t.replace('"wall"', '"cpu"'), "time_kind"),
        ("profile.json", lambda t: t.replace('"r2"', '"r3"'), r"serve_r3.json: is missing"),
        ("forward_dep1.csv", lambda t: t.replace("median_us", "median_ms"), "column median_us is missing"),
        ("forward_dep1.csv", lambda t: t[: t.rindex(",") - 3].rsplit(",", 1)[0] + "\n", r"forward_dep1.csv:\d+: "),
        ("forward_dep1.csv", lambda t: t.replace("decode_1_512,decode,1", "decode_1_512,decode,1.5"), ":2: ranks=1.5"),
        ("serve_r2.json", lambda t: t.replace('"ttfts": [', '"ttfts": [NaN, '), "ttfts has 61 requests"),
        ("steps_r2.dp0.jsonl", lambda t: t[:-30], r"steps_r2.dp0.jsonl:201: truncated"),
        ("steps_r2.dp0.jsonl", lambda t: t.replace('{"config"', '{"cfg"'), "jsonl:1: config is missing"),
        ("steps_r2.dp0.jsonl", lambda t: t.replace('"update_ms": 0.1', '"update_ms": NaN'), ":2: update_ms='nan'"),
    ],
)
def test_a_damaged_file_is_named_with_its_row(tmp_path, file, change, message):
    profiles.write_profile(tmp_path / "p")
    damage(tmp_path / "p" / file, change)
    with pytest.raises(InputError, match=message):
        read_profile(tmp_path / "p")


def test_too_few_rows_are_refused(tmp_path):
    profiles.write_profile(tmp_path / "p", runs=False)
    table = tmp_path / "p" / "forward_dep1.csv"
    table.write_text("\n".join(x for x in table.read_text().splitlines() if ",prefill," not in x) + "\n")
    with pytest.raises(InputError, match="0 prefill rows"):
        fit_profile(tmp_path / "p", "tiny")


@given(st.data())
def test_a_cut_or_garbled_table_never_gets_past_the_reader_in_silence(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    profiles.write_profile(folder, runs=False)
    table = folder / "forward_dep1.csv"
    text = table.read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    whole = text[:at].endswith("\n")
    table.write_text(text[:at] + data.draw(st.sampled_from(["", "nan", "inf", "-", ",,", "\x00"])))
    found = outcome(folder)
    if isinstance(found, str):
        assert "forward_dep1.csv" in found
        assert "\n" not in found
    else:
        assert whole or len(found) <= text[: at + 1].count("\n")
        assert all(np.isfinite(r.measured_ms) and r.measured_ms > 0 for r in found)


def outcome(folder: Path) -> tuple[Row, ...] | str:
    try:
        return read_profile(folder).rows
    except InputError as e:
        return str(e)


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory) -> CalibrationFile:
    """The fit of the profiles behind h200-v2-lite, as a profile folder would hold them."""
    folder = tmp_path_factory.mktemp("h200")
    one, *two = (h200_rows.PROFILES / name for name in h200_rows.FORWARD_FILES)
    (folder / "forward_dep1.csv").write_text(one.read_text())
    lines = [line for i, table in enumerate(two) for line in table.read_text().splitlines()[min(i, 1) :]]
    kept = [line for line in lines if not line.startswith("decode_48_60000,")]
    (folder / "forward_dep2.csv").write_text("\n".join(kept) + "\n")
    runs = []
    for name, path in h200.SERVED_RUNS.items():
        (folder / f"serve_{name}.json.gz").write_bytes(path.read_bytes())
        runs.append({"name": name, "deployment": h200.served_deployment().to_dict(), "status": "done"})
    identity = {"format": 1, "model": "deepseek-v2-lite", "gpu": "h200", "engine_version": "0.33.0", "runs": runs}
    more = {"date": "2026-11-29", "command": "rackplan profile", "time_kind": "gpu"}
    (folder / "profile.json").write_text(json.dumps({**identity, **more}))
    return fit_profile(folder, "again")


def test_the_generic_fit_of_the_embedded_rows_is_the_embedded_fit(on_gpu):
    shipped = calibration_file("h200-v2-lite").coefficients
    for key in ("step_fixed_ms", "moe_read_efficiency", "kv_read_efficiency", "comm_fixed_ms", "prefill_pair_ms"):
        assert getattr(on_gpu.coefficients, key) == pytest.approx(getattr(shipped, key), rel=0.05), key
    assert on_gpu.coefficients.routing_sigma == pytest.approx(shipped.routing_sigma, rel=0.1)
    assert on_gpu.errors["all"].holdout_median_pct < 3
    assert on_gpu.errors["all"].holdout_p90_pct < 8


def test_launches_and_their_spread_come_from_the_clients(on_gpu):
    shipped = calibration_file("h200-v2-lite").coefficients
    past = launches_of([prompt_steps(r) for r in h200.served_runs()], h200.CAPTURED_TOKENS, eager=True)
    c, token_ms = on_gpu.coefficients, token_launch_ms(past)
    assert c.piecewise_floor_ms == pytest.approx(shipped.piecewise_floor_ms, rel=0.05)
    assert c.eager_token_launch_ms == pytest.approx(token_ms, rel=0.05)
    beside_ms = launch_at_no_tokens_ms(past, token_ms)
    assert c.eager_floor_ms + c.eager_decode_launch_ms == pytest.approx(beside_ms, rel=0.05)
    assert len(on_gpu.coefficients.launch_quantiles) == len(shipped.launch_quantiles)
    assert not {"eager_floor_ms", "launch_quantiles", "frontend_ms"} & set(on_gpu.carried)
    assert {"eager_decode_launch_ms", "host_step_ms", "transfer"} <= set(on_gpu.carried)
    assert 0 < on_gpu.frontend_ms < 20


def test_decode_steps_alone_are_no_load_that_prompts_are_learnt_from(tmp_path):
    profiles.write_profile(tmp_path)
    path = tmp_path / "profile.json"
    identity = json.loads(path.read_text())
    identity["runs"][0]["decode_only"] = True
    path.write_text(json.dumps(identity))
    profile = read_profile(tmp_path)
    assert (len(profile.runs), len(profile.decode_runs)) == (0, 1)
    assert "frontend_ms" in fit_profile(tmp_path, "alone").carried
