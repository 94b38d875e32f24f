"""Bad input: exit 2 or 3 with one line on stderr that names the place, the value and the mend; nothing on stdout."""

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest

from rackplan.cli.main import app, execute

DEPLOYMENT = """\
model: deepseek-v2-lite
gpu: h200
pools:
  - {role: aggregated, instances: 1, dep: 1, max_num_batched_tokens: 8192, max_num_seqs: 64}
"""
LOAD = ["--workload", "fixed:128/4", "--concurrency", "1", "--duration", "1s", "--replications", "1"]
HUGE = "9" * 5000
DEEP = "[" * 100_000


@pytest.fixture
def refused(capsys):
    """Run a command line that must be refused; the one line that it says."""

    def run(*args: object, code: int = 2) -> str:
        assert execute(app, "rackplan", [str(a) for a in args]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert "internal error" not in err
        return err

    return run


@pytest.fixture
def deployment(tmp_path) -> Path:
    path = tmp_path / "d.yaml"
    path.write_text(DEPLOYMENT)
    return path


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--rate", "9" * 400, "too large"),
        ("--rate", "1e3", "write 12.5"),
        ("--rate", "1000000", "requests in 600 s"),
        ("--concurrency", HUGE, "too large"),
        ("--concurrency", "1000000", "write 200000 or less"),
        ("--replications", "0", "1 or more"),
        ("--duration", HUGE + "s", "more than 30 days"),
        ("--duration", "９s", "write 10s"),
        ("--calibration", "", "empty"),
        ("--calibration", "x" * 400, "no such name or file"),
        ("--workload", "x" * 400, "no such form or file"),
        ("--workload", "fixed:" + "9" * 30 + "/1", "give 1 to"),
    ],
)
def test_a_number_or_name_that_cannot_be_is_refused(refused, deployment, option, value, says):
    assert says in refused("simulate", deployment, "--workload", "fixed:1/1", option, value)


def test_a_burstiness_without_end_is_refused(refused, deployment):
    assert "write 20 or less" in refused("simulate", deployment, "--rate", "5", "--cv", "1000000")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: 2020-13-45", "not valid YAML"),
        ("model: " + HUGE, "not valid YAML"),
        (DEEP, "not valid YAML"),
        (DEPLOYMENT + "gpu: gb200\n", ":5: not valid YAML (gpu is given twice)"),
        (DEPLOYMENT.replace("dep: 1,", "dep: 1, dep: 2,"), "dep is given twice"),
        (DEPLOYMENT.replace("deepseek-v2-lite", "gpt"), "d.yaml: model=gpt: unknown"),
        (DEPLOYMENT.replace("h200", "b9"), "d.yaml: gpu=b9: unknown"),
        (DEPLOYMENT.replace("instances: 1", "instances: 1000000"), "1000000 GPUs in all"),
        (DEPLOYMENT.replace("dep: 1", "dep: 1, tp: 3"), "tp=3: dep x tp must divide 64"),
        (DEPLOYMENT.replace("dep: 1", "dep: .nan"), "aggregated.dep='nan': write a whole number"),
        (DEPLOYMENT.replace("aggregated", "both"), "pools.0.role='both'"),
        (DEPLOYMENT + "eplb: []\n", "eplb='[]': give a mapping"),
        ("model: deepseek-v2-lite\ngpu: h200\npools: x\n", "pools='x': give a list"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(refused, deployment, text, says):
    deployment.write_text(text)
    assert says in refused("simulate", deployment, *LOAD)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP, "not a workload's JSON"),
        ('{"timestamp": ' + HUGE + ', "input_length": 1, "output_length": 1}', "not a workload's JSON"),
        ('{"timestamp": 0, "input_length": 1', "truncated or not JSON"),
        ("\0\0\0", "unknown format"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(refused, deployment, tmp_path, text, says):
    trace = tmp_path / "t.jsonl"
    trace.write_text(text)
    line = refused("simulate", deployment, "--workload", trace)
    assert says in line
    assert "t.jsonl" in line
    trace.write_bytes(gzip.compress(text.encode())[:-9])
    assert "t.jsonl" in refused("simulate", deployment, "--workload", trace)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("aggregated.dep=[", "aggregated.dep=[: not a value"),
        ("aggregated.dep=2020-99-99", "not a value"),
        ("aggregated.dep=" + HUGE, "not a value"),
        ("aggregated.dep=1", "has no effect, the deployment has it already"),
        ("model=gpt", "model=gpt: unknown"),
    ],
)
def test_a_change_that_cannot_be_is_refused(refused, deployment, change, says):
    assert says in refused("whatif", deployment, "--set", change, *LOAD)


def test_each_change_must_have_an_effect_and_come_once(refused, deployment):
    new = ["--set", "aggregated.max_num_seqs=8"]
    assert "aggregated.tp=1: has no effect" in refused("whatif", deployment, *new, "--set", "aggregated.tp=1", *LOAD)
    assert "second time" in refused("whatif", deployment, *new, "--set", "aggregated.max_num_seqs=9", *LOAD)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("inputs", [1], "inputs.workload"),
        ("inputs", {"workload": 5}, "inputs.workload='5'"),
        ("load", {"concurrency": "many"}, "load.concurrency='many'"),
        ("load", {"concurrency": 1.5}, "load.concurrency 1.5"),
        ("load", {"rate_req_s": -3}, "load.rate_req_s -3"),
        ("provenance", {"calibration": 7}, "provenance.calibration='7'"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_refused(refused, tmp_path, key, value, says):
    plan = json.loads((Path(__file__).parent / "data" / "plan_example.json").read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan | {key: value}))
    assert says in refused("whatif", path, "--set", "decode.max_num_seqs=8")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("errors", {}, "prefill is missing"),
        ("measured", {}, "prefill is missing"),
        ("frontend_ms", float("inf"), "frontend_ms"),
        ("frontend_ms", 1e300, "frontend_ms"),
        ("host_step_ms", float("inf"), "host_step_ms"),
        ("host_step_ms", 1e300, "host_step_ms"),
    ],
)
def test_a_calibration_that_is_damaged_is_refused(refused, deployment, tmp_path, key, value, says):
    file = json.loads((files("rackplan.calibration") / "data" / "h200-v2-lite.json").read_text())
    (file if key in file else file["coefficients"])[key] = value
    path = tmp_path / "c.json"
    path.write_text(json.dumps(file))
    assert says in refused("simulate", deployment, *LOAD, "--calibration", path)
    assert says in refused("calibration", "predict", path, "--pool", "decode", "--dep", "1")


def test_requests_that_are_all_too_long_are_not_blamed_on_the_duration(refused, deployment):
    deployment.write_text(DEPLOYMENT + "max_model_len: 100\n")
    assert "longer than 100 tokens" in refused("simulate", deployment, *LOAD, code=3)


def test_a_trace_that_ends_in_the_warm_up_says_so(refused, deployment, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5}\n')
    line = refused("simulate", deployment, "--workload", trace, "--concurrency", "1", "--duration", "60s")
    assert "ended in the warm-up of 12 s" in line


def test_a_load_that_was_not_kept_is_a_warning(deployment, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    rows = ({"timestamp": i, "input_length": 2000, "output_length": 200} for i in range(20))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--workload", str(trace), "--concurrency", "1", "--duration", "60s", "--replications", "1", "--json"]
    assert execute(app, "rackplan", ["simulate", str(deployment), *args]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any("the last of them at less than --concurrency" in w for w in warnings)
    assert any("P90 and P99 want" in w for w in warnings)


def test_a_folder_that_cannot_be_written_is_refused_before_planning(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "is a file; give a folder" in refused("plan", "--target-tps", "900k", "--out", out)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("eplb: {enabled: true}", "eplb.enabled=true has no effect"),
        ("dp_sync: {algorithm: ring}", "dp_sync.algorithm=ring has no effect"),
    ],
)
def test_what_the_simulation_does_not_see_is_a_warning(deployment, capsys, setting, says):
    deployment.write_text(DEPLOYMENT + setting + "\n")
    assert execute(app, "rackplan", ["simulate", str(deployment), *LOAD, "--json"]) == 0
    assert any(says in w for w in json.loads(capsys.readouterr().out)["warnings"])
