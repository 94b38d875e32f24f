"""What a new deployment is judged by, and the commands that put it on the engine (here a pretended one)."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_local_deploy import Rack

from rackplan.calibration.library import calibration_file
from rackplan.calibration.serving import ServedMetric
from rackplan.cli.main import app, execute
from rackplan.engine import InputError
from rackplan.engine.bench_serve import BenchLoad, bench_argv
from rackplan.tuner.rollout import judge, make_canary, worse_pct

POSITIVE = st.floats(0.01, 1e6)


@pytest.fixture
def rack(tmp_path):
    rack = Rack(tmp_path)
    yield rack
    for process in rack.running():
        process.kill()


def metric(name: str, measured: float, predicted: float) -> ServedMetric:
    return ServedMetric(name=name, unit="ms", measured=measured, predicted=predicted)


@given(measured=POSITIVE, predicted=POSITIVE)
def test_slower_than_predicted_is_worse_and_faster_never_is(measured, predicted):
    slower = worse_pct(metric("mean TPOT", measured, predicted))
    assert (slower > 0) == (measured > predicted)
    less = worse_pct(metric("output throughput", measured, predicted))
    assert (less > 0) == (measured < predicted)


@given(measured=POSITIVE, predicted=POSITIVE, tolerance=st.floats(1, 200))
def test_a_deployment_is_kept_unless_a_judged_metric_is_worse_by_more_than_the_tolerance(
    measured, predicted, tolerance
):
    found = [metric("mean TPOT", measured, predicted), metric("P99 TTFT", 1e9, 1.0)]
    verdict = judge(found, tolerance, "cal")
    assert verdict.keep == (worse_pct(found[0]) <= tolerance)
    assert verdict.keep or "mean TPOT" in (verdict.reason or "")
    assert [m["name"] for m in verdict.result["metrics"]] == ["mean TPOT", "P99 TTFT"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"workload": None}, "--workload: the deployment states none"),
        ({"workload": "agentx"}, "--workload agentx: the canary's client sends fixed lengths"),
        ({"workload": "lognormal:100/10"}, "sends fixed lengths"),
        ({"rate_req_s": None}, "--concurrency: the deployment states no load"),
        ({"workload": "fixed:2000/100"}, "2100 tokens; max_model_len=1024"),
    ],
)
def test_a_canary_that_cannot_be_sent_is_said_before_anything_starts(rack, asked, told):
    usual = {"workload": "fixed:128/16", "concurrency": None, "rate_req_s": 2.0, "prompts": 10, "tolerance_pct": 25.0}
    with pytest.raises(InputError, match=told):
        make_canary(rack.launch().deployment, **{**usual, **asked})


def test_a_load_has_a_rate_or_a_concurrency():
    sizes = {"name": "x", "input_tokens": 1, "output_tokens": 1, "prompts": 1}
    with pytest.raises(ValueError, match="one of the two"):
        BenchLoad(**sizes)
    with pytest.raises(ValueError, match="one of the two"):
        BenchLoad(**sizes, rate_req_s=1, concurrency=1)


def test_the_clients_command_states_the_load(tmp_path):
    load = BenchLoad(name="x", input_tokens=7, output_tokens=5, prompts=3, concurrency=2, spread=0.5)
    argv = bench_argv(load, python="py", url="http://h:1", model="m", out=tmp_path / "r.json")
    pairs = dict(zip(argv, argv[1:], strict=False))
    assert (pairs["--request-rate"], pairs["--max-concurrency"]) == ("inf", "2")
    assert (pairs["--random-input-len"], pairs["--random-output-len"]) == ("7", "5")
    assert pairs["--random-range-ratio"] == "0.5"


# -- the commands -----------------------------------------------------------------------------------------------------
def command(rack: Rack, *args: str) -> int:
    return execute(app, "rackplan", [*args, "--state", str(rack.state.folder)])


def deploy(rack: Rack, *more: str) -> int:
    plan = rack.folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(rack.launch().deployment.to_dict()))
    where = ("--python", str(rack.python), "--port", str(rack.port))
    return command(rack, "deploy", str(plan), *where, *more)


def test_deploy_status_stop_rollback_by_their_commands(rack, capsys):
    assert deploy(rack, "--workload", "fixed:128/16", "--rate", "5", "--requests", "12", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["phase"] == "serving"
    assert record["result"]["measured"]["median_ttft_ms"] == 100.0
    assert command(rack, "status") == 0
    assert "serving: 1 x aggregated DEP1" in capsys.readouterr().out
    assert command(rack, "stop") == 0
    assert capsys.readouterr().out == "2 processes ended\n"
    assert command(rack, "rollback") == 0
    assert "Serving at" in capsys.readouterr().out
    assert command(rack, "stop") == 0
    assert command(rack, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["current"] is None


def test_an_engine_that_fails_exits_4_with_one_line(rack, capsys):
    rack.faults("die")
    assert deploy(rack, "--no-canary") == 4
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: aggregated-0 ended while starting: RuntimeError: no memory")
    assert rack.running() == []


def test_an_interpreter_without_vllm_is_bad_input(rack, capsys):
    plan = rack.folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(rack.launch().deployment.to_dict()))
    assert command(rack, "deploy", str(plan), "--python", "/nonexistent/python", "--no-canary") == 2
    assert "--python /nonexistent/python: cannot be run" in capsys.readouterr().err


def test_status_of_a_machine_that_never_served(rack, capsys):
    assert command(rack, "status") == 0
    assert capsys.readouterr().out == "Nothing serves on this machine.\n"


def test_a_deployment_slower_than_predicted_is_rolled_back_and_the_comparison_kept(rack, capsys):
    file = calibration_file("h200-v2-lite").model_copy(update={"model": rack.model, "gpu": "cpu"})
    calibration = rack.folder / "calibration.json"
    file.save(calibration)
    load = ("--workload", "fixed:128/16", "--rate", "5", "--requests", "12", "--calibration", str(calibration))
    assert deploy(rack, *load, "--tolerance", "400") == 0
    assert "Canary against h200-v2-lite" in capsys.readouterr().out
    kept = rack.state.read().current
    predicted = {m["name"]: m["predicted"] for m in kept.result["metrics"]}
    assert predicted["mean TPOT"] > 0
    rack.faults("slow")
    assert deploy(rack, *load, "--tolerance", "5") == 4
    err = capsys.readouterr().err.splitlines()[-1]
    assert "% worse (tolerance 5 %); rolled back" in err
    assert rack.state.read().current.launch == kept.launch


def test_a_model_of_ones_own_is_planned_for_an_engine_on_cpus_and_the_plan_is_deployable(rack):
    file = calibration_file("h200-v2-lite").model_copy(update={"model": rack.model, "gpu": "cpu"})
    calibration = rack.folder / "calibration.json"
    file.save(calibration)
    out = rack.folder / "plan"
    asked = ("--target-tps", "1", "--count", "output", "--per", "deployment", "--workload", "fixed:64/16")
    slos = ("--p90-interactivity", "0.1", "--p90-ttft", "60s", "--trials", "3")
    where = ("--gpu", "cpu", "--gpus", "2", "--calibration", str(calibration), "--out", str(out))
    assert execute(app, "rackplan", ["plan", "--model", rack.model, *asked, *slos, *where]) == 0
    plan = str(out / "plan.json")
    script = ("--target", "shell", "--out", str(rack.folder / "script"))
    assert execute(app, "rackplan", ["deploy", plan, *script]) == 0
