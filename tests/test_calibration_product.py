"""validate, diff and update on calibrations of one's own: a drift that was put in is found, named and refitted."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import profiles
import pytest

from rackplan.calibration import h200
from rackplan.calibration.against import validate_against
from rackplan.calibration.diff import diff
from rackplan.calibration.file import CalibrationFile, FittedCalibration
from rackplan.calibration.library import calibration_file
from rackplan.calibration.live import workload_of
from rackplan.calibration.profile import fit_profile
from rackplan.calibration.readers.prometheus import HISTOGRAMS, EngineMetrics, parse_metrics
from rackplan.calibration.update import update
from rackplan.calibration.validate import validate
from rackplan.cli.main import app, execute
from rackplan.cli.validation_report import predicted_over_measured, render_validation
from rackplan.engine import InputError, parse_deployment
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import Measured
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

TINY = "tiny.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("product") / "profile"
    profiles.write_profile(found)
    return found


@pytest.fixture(scope="module")
def own(folder) -> Path:
    path = folder.parent / TINY
    fit_profile(folder, "tiny").save(path)
    return path


def calibration(*args: object) -> int:
    return execute(app, "rackplan", ["calibration", *map(str, args)])


# -- validate ----------------------------------------------------------------------------------------------------------
def test_a_calibration_is_checked_against_a_whole_profile(folder, own):
    found = validate_against(str(own), [folder], None)
    metrics = {m["metric"]: m for m in found["by_metric"]}
    assert metrics["decode_gpu_dep1"]["rows"] == len(profiles.DECODES)
    assert metrics["decode_gpu_dep1"]["p50_abs_pct"] < 3
    assert abs(metrics["mean TPOT"]["worst_pct"]) < 5
    worst = max((r for r in found["rows"] if r["metric"] == "prefill_gpu_dep1"), key=lambda r: abs(r["error_pct"]))
    assert metrics["prefill_gpu_dep1"]["worst_id"] == worst["id"]
    assert metrics["prefill_gpu_dep1"]["worst_pct"] == pytest.approx(worst["error_pct"])
    assert {r["role"] for r in found["rows"]} == {"check"}


def test_the_page_plots_every_row_and_opens_without_a_net(folder, own, tmp_path):
    assert calibration("validate", own, "--against", folder, "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "decode_32_512_dep1" in page
    assert "Predicted against measured, ms" in page
    assert "<script src" not in page
    rows = validate_against(str(own), [folder], None)["rows"]
    figure = predicted_over_measured([r for r in rows if r["unit"] == "ms"], "ms")
    points = [t for t in figure.data if t.mode == "markers"]
    assert sum(len(t.x) for t in points) == sum(r["unit"] == "ms" for r in rows)


def test_a_page_escapes_what_files_are_called(folder, own):
    document = validate_against(str(own), [folder], None)
    rows = [{**document["rows"][0], "id": "<b>x", "what": "<i>y"}]
    assert "<b>x" not in render_validation({**document, "rows": rows, "by_metric": []})


def test_ones_own_file_has_no_rows_of_its_own(own):
    with pytest.raises(InputError, match="its rows do not ship"):
        validate(str(own))


def test_results_need_their_deployment(own, folder, capsys):
    assert calibration("validate", own, "--against", folder / "serve_r2.json") == 2
    assert "needs --deployment" in capsys.readouterr().err


# -- diff --------------------------------------------------------------------------------------------------------------
def changed(file: CalibrationFile, path: Path, **coefficients: float) -> Path:
    update_ = {"coefficients": file.coefficients.model_copy(update=coefficients), "name": "other"}
    file.model_copy(update=update_).save(path)
    return path


def test_a_diff_names_the_term_that_changed_and_what_it_makes_of_steps(own, tmp_path):
    file = calibration_file(str(own))
    longer = changed(file, tmp_path / "b.json", step_fixed_ms=file.coefficients.step_fixed_ms + 1.0)
    found = diff(str(own), str(longer))
    assert [t["term"] for t in found["terms"]] == ["step_fixed_ms"]
    assert all(s["after_ms"] - s["before_ms"] == pytest.approx(1.0) for s in found["steps"])
    assert any(s["in_range"] for s in found["steps"])
    assert not all(s["in_range"] for s in found["steps"])
    assert diff(str(own), str(own))["terms"] == []
    json.dumps(found)


def test_a_diff_tells_sure_changes_from_unsure_ones(tmp_path):
    file = calibration_file("h200-v2-lite")
    c = file.coefficients
    moved = {
        k: (low + 10 * c.step_fixed_ms, high + 10 * c.step_fixed_ms) if k == "step_fixed_ms" else (low, high)
        for k, (low, high) in file.coefficient_intervals.items()
    }
    after = file.model_copy(
        update={
            "coefficients": c.model_copy(
                update={"step_fixed_ms": 11 * c.step_fixed_ms, "kv_read_efficiency": 0.93, "host_step_ms": 3.5}
            ),
            "coefficient_intervals": moved,
        }
    )
    after.save(tmp_path / "after.json")
    sure = {t["term"]: t["changed"] for t in diff("h200-v2-lite", str(tmp_path / "after.json"))["terms"]}
    assert sure == {"step_fixed_ms": True, "kv_read_efficiency": False, "host_step_ms": None}


def test_unlike_calibrations_are_not_compared(own):
    with pytest.raises(InputError, match="compare like ones"):
        diff("h200-v2-lite", str(own))


# -- update ------------------------------------------------------------------------------------------------------------
DEPLOYMENT = parse_deployment(
    {
        "model": "deepseek-v2-lite",
        "gpu": "h200",
        "pools": [{"role": "aggregated", "instances": 1, "dep": 1, "max_num_seqs": 512}],
    }
)
SECONDS, RATE, REQUESTS = 100.0, 8.0, 800
BOUNDS = {
    "TTFT": np.geomspace(0.001, 10, 60),
    "TPOT": np.geomspace(0.001, 1, 60),
    "E2E": np.geomspace(0.1, 100, 60),
    "queue": np.geomspace(0.001, 10, 60),
    "prefill": np.geomspace(0.001, 10, 60),
    "input": np.geomspace(10, 20_000, 60),
    "output": np.geomspace(1, 5_000, 60),
}


def scrape(values: dict[str, np.ndarray], running: float) -> str:
    """What an engine would say after requests with these times, s, and lengths."""
    lines = [f'vllm:{k}{{engine="0"}} {v}' for k, v in (("num_requests_running", running), ("num_requests_waiting", 0))]
    lines += ['vllm:kv_cache_usage_perc{engine="0"} 0.1']
    lines += [
        f'vllm:{k}_total{{engine="0"}} {len(values["TTFT"]) * 100}' for k in ("prompt_tokens", "generation_tokens")
    ]
    for name, series in HISTOGRAMS.items():
        for bound in (*BOUNDS[name], math.inf):
            le = "+Inf" if math.isinf(bound) else repr(float(bound))
            lines.append(f'{series}_bucket{{engine="0",le="{le}"}} {int((values[name] <= bound).sum())}')
        lines.append(f'{series}_sum{{engine="0"}} {float(values[name].sum())}')
        lines.append(f'{series}_count{{engine="0"}} {len(values[name])}')
    return "\n".join(lines) + "\n"


def engine(file: CalibrationFile) -> str:
    """The metrics of an engine that is as `file` says, after a load of 2,048 in and 256 out."""
    lengths = {"input": np.full(REQUESTS, 2048.0), "output": np.full(REQUESTS, 256.0), "E2E": np.full(REQUESTS, 3.0)}
    filler = {k: np.full(REQUESTS, 0.01) for k in ("TTFT", "TPOT", "queue", "prefill")}
    shape = parse_metrics(scrape({**lengths, **filler}, 10), "shape")
    workload = workload_of(shape, REQUESTS / RATE, seed=99)
    options = RunOptions(duration_s=math.inf, seed=99)
    m = Measured(simulate(DEPLOYMENT, workload, Load(), FittedCalibration(file), options))
    values = {
        "TTFT": m.ttft_ms / 1e3,
        "TPOT": m.tpot_ms / 1e3,
        "E2E": m.e2e_ms / 1e3,
        "queue": (m.queue_ms - file.frontend_ms) / 1e3,
        "prefill": (m.ttft_ms - m.queue_ms) / 1e3,
        "input": m.input_tokens.astype(float),
        "output": m.output_tokens.astype(float),
    }
    return scrape(values, 10)


def window(file: CalibrationFile) -> EngineMetrics:
    nothing = {k: np.empty(0) for k in HISTOGRAMS}
    return parse_metrics(engine(file), "engine").since(parse_metrics(scrape(nothing, 10), "before"))


def drifted(**changes: float) -> CalibrationFile:
    file = calibration_file("h200-v2-lite")
    own = {k: v for k, v in changes.items() if k != "frontend_ms"}
    update_ = {"coefficients": file.coefficients.model_copy(update=own)}
    return file.model_copy(update={**update_, **{k: v for k, v in changes.items() if k == "frontend_ms"}})


def test_an_engine_that_does_as_expected_has_not_drifted():
    document, refitted = update("h200-v2-lite", window(drifted()), SECONDS, DEPLOYMENT)
    assert refitted is None
    assert not document["drifted"]
    assert document["load"]["rate_req_s"] == pytest.approx(RATE)
    for r in document["rows"]:
        assert abs(r["error_pct"]) < 15, r


@pytest.mark.parametrize(
    ("term", "coefficient", "to"),
    [("TPOT", "step_fixed_ms", 4.5), ("prefill", "eager_floor_ms", 110.0), ("front end", "frontend_ms", 40.0)],
)
def test_a_drift_is_found_on_its_term_and_refitted(term, coefficient, to):
    document, refitted = update("h200-v2-lite", window(drifted(**{coefficient: to})), SECONDS, DEPLOYMENT)
    terms = {t["term"]: t for t in document["terms"]}
    assert document["drifted"]
    assert terms[term]["drifted"]
    assert terms[term]["coefficient"] == coefficient
    assert refitted is not None
    assert terms[term]["after"] == pytest.approx(to, rel=0.1)
    if term != "prefill":  # longer launches delay the requests that decode, so TPOT moves with them
        assert [t["term"] for t in document["terms"] if t["drifted"]] == [term]
    assert refitted.coefficients.kv_read_efficiency == calibration_file("h200-v2-lite").coefficients.kv_read_efficiency


def test_an_endpoint_is_scraped_twice_and_the_refit_written(tmp_path, capsys):
    nothing = scrape({k: np.empty(0) for k in HISTOGRAMS}, 10)
    answers = [nothing, engine(drifted(step_fixed_ms=4.5))]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "d.yaml").write_text(DEPLOYMENT.to_yaml())
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    try:
        # Requests of 100 s in half a second: too fast to serve, so only the plumbing is looked at.
        args = ("--deployment", tmp_path / "d.yaml", "--out", tmp_path / "live.json", "--over", "0.5s")
        code = calibration("update", "h200-v2-lite", "--metrics", url, *args)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert code == 0
    assert answers == []
    assert calibration_file(str(tmp_path / "live.json")).name == "h200-v2-lite-live"
    assert "Written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sources", "message"), [(("a.txt",), "give one URL, or two files"), (("a.txt", "b.txt"), "cannot be read")]
)
def test_bad_sources_are_named(tmp_path, capsys, sources, message):
    (tmp_path / "d.yaml").write_text(DEPLOYMENT.to_yaml())
    args = [a for s in sources for a in ("--metrics", s)]
    out = ("--deployment", tmp_path / "d.yaml", "--out", tmp_path / "x.json")
    assert calibration("update", "h200-v2-lite", *args, *out) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_two_files_of_a_restarted_engine_are_refused(tmp_path, capsys):
    (tmp_path / "d.yaml").write_text(DEPLOYMENT.to_yaml())
    (tmp_path / "a.txt").write_text(engine(drifted()))
    (tmp_path / "b.txt").write_text(scrape({k: np.empty(0) for k in HISTOGRAMS}, 10))
    args = ("--metrics", tmp_path / "a.txt", "--metrics", tmp_path / "b.txt", "--deployment", tmp_path / "d.yaml")
    assert calibration("update", "h200-v2-lite", *args, "--out", tmp_path / "x.json") == 2
    assert "restarted" in capsys.readouterr().err


def test_the_served_runs_that_ship_validate_by_metric():
    rows = validate("h200-v2-lite")
    assert {m["metric"] for m in rows["by_metric"]} >= {"mean TPOT", "median TTFT", "decode_gpu_dep2"}
    assert h200.SERVED_RUNS
