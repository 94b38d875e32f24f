"""The command line's notation, and its manners: one line per error, exit codes, clean stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.cli.main import app, execute, plan_app
from rackplan.cli.options import load_base, parse_duration, parse_int, parse_set, parse_tps
from rackplan.engine import InputError
from rackplan.engine.files import write_all

EXAMPLE = Path(__file__).parent / "data" / "plan_example.json"


@pytest.mark.parametrize(("text", "tps"), [("900k", 900e3), ("1.2M", 1.2e6), ("954000", 954e3), (".5m", 5e5)])
def test_a_rate_is_read_with_its_suffix(text, tps):
    assert parse_tps(text) == pytest.approx(tps)


@given(st.integers(1, 10**9))
def test_a_suffix_is_only_a_factor(n):
    assert parse_tps(f"{n}k") == parse_tps(str(n)) * 1000


@pytest.mark.parametrize("text", ["", "x", "-3k", "0", "nan", "inf", "900K/s", "1e6", "9,000"])
def test_a_bad_rate_names_option_value_and_mend(text):
    with pytest.raises(InputError, match="--target-tps .*write 900k") as e:
        parse_tps(text)
    assert text in str(e.value)


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("600s", 600), ("500ms", 0.5), ("2m", 120), ("1.5h", 5400)])
def test_a_time_is_read_with_its_unit(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["10", "0s", "-1s", "ten", "10 sec", ""])
def test_a_time_without_a_unit_is_refused(text):
    with pytest.raises(InputError, match="--p90-ttft.*write 10s"):
        parse_duration(text, "--p90-ttft")


def test_a_change_is_a_dotted_key_and_a_value():
    assert parse_set("decode.dep=16") == ("decode.dep", "16")
    assert parse_set(" eplb.enabled = false ") == ("eplb.enabled", "false")


@pytest.mark.parametrize("text", ["decode.dep", "=16", "decode.dep=", "decode..dep=3", "a b=3"])
def test_a_change_without_key_or_value_is_refused(text):
    with pytest.raises(InputError, match="write decode.dep=16"):
        parse_set(text)


def test_a_count_has_a_least_value():
    assert parse_int("--gpus", 1)("72") == 72
    with pytest.raises(InputError, match="--gpus 0: .*1 or more"):
        parse_int("--gpus", 1)("0")


def test_a_plan_file_states_deployment_workload_and_load():
    base = load_base(EXAMPLE)
    assert (base.deployment.gpus, base.workload, base.concurrency, base.rate_req_s) == (72, "agentx", 3600, None)


def test_a_file_that_is_no_plan_is_named(tmp_path):
    for name, text in (("a.json", "[1]"), ("b.json", "{"), ("c.json", "{}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=name):
            load_base(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        load_base(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan", "--target-tps"),
        ("plan --target-tps fast", "--target-tps fast"),
        ("plan --target-tps 900k --gpus x", "--gpus x"),
        ("plan --target-tps 900k --gpus 0", "--gpus 0"),
        ("plan --target-tps 900k --count all", "one of total, output"),
        ("plan --target-tps 900k --per rack", "one of gpu, deployment"),
        ("plan --target-tps 900k --gpu b9", "one of"),
        ("plan --target-tps 900k --model gpt", "one of"),
        ("plan --target-tps 900k --p90-ttft 10", "--p90-ttft 10"),
        ("plan --target-tps 900k --p90-interactivity 0", "--p90-interactivity 0"),
        ("plan --target-tps 900k --gpuz 3", "--gpuz"),
        ("simulate d.yaml --rate 2 --concurrency 3", "--rate 2: cannot go with --concurrency 3"),
        ("simulate d.yaml --cv 3", "no effect without --rate"),
        ("simulate nowhere.yaml", "nowhere.yaml"),
        ("whatif p.yaml", "--set"),
        ("whatif p.yaml --set dep", "--set dep"),
        ("calibration predict x --pool both --dep 2", "one of prefill, decode"),
        ("bogus", "bogus"),
        ("", "--help"),
    ],
)
def test_bad_input_exits_2_with_one_line(line, says, capsys):
    assert execute(app, "rackplan", line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


@pytest.fixture
def planner():
    """The planner's module, whose answer a test replaces: the manners under test are the command line's own."""
    return pytest.importorskip("rackplan.tuner.plan", reason="the planner is not there")


def test_json_is_alone_on_stdout_and_files_are_written(planner, monkeypatch, tmp_path, capsys):
    example = json.loads(EXAMPLE.read_text())
    seen = []

    def answer(request, progress):
        seen.append(request)
        progress("searching", 0.5)
        return example

    monkeypatch.setattr(planner, "make_plan", answer)
    args = ["--target-tps", "900k", "--p90-ttft", "5s", "--json", "--out", str(tmp_path / "a b")]
    assert execute(plan_app, "plan", args) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == example
    assert "searching" in err
    assert (seen[0].target_tps, seen[0].p90_ttft_ms, seen[0].gpus) == (900e3, 5000.0, 72)
    names = sorted(p.name for p in (tmp_path / "a b").iterdir())
    assert names == ["deployment.yaml", "plan.json", "report.html"]


def test_nothing_that_meets_the_target_exits_3(planner, monkeypatch, tmp_path, capsys):
    example = json.loads(EXAMPLE.read_text()) | {"feasible": False, "reason": "P90 TTFT is 12 s"}
    monkeypatch.setattr(planner, "make_plan", lambda request, progress: example)
    assert execute(app, "rackplan", ["plan", "--target-tps", "2M", "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().out.startswith("No plan meets 900k total tok/s per gpu: P90 TTFT is 12 s")
    assert "does NOT meet" in (tmp_path / "deployment.yaml").read_text()


def test_an_interrupt_exits_130_with_one_line(planner, monkeypatch, tmp_path, capsys):
    def interrupt(request, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "make_plan", interrupt)
    assert execute(plan_app, "plan", ["--target-tps", "900k", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_all({tmp_path / "new": "new", tmp_path / "old" / "x": "x"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "old"]


def test_help_imports_nothing_slow():
    code = (
        "import sys; from rackplan.cli.main import execute, plan_app; execute(plan_app, 'plan', ['--help']);"
        "slow = {'plotly', 'optuna', 'scipy', 'simpy', 'numpy'} & set(sys.modules); sys.exit(str(slow) if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--target-tps" in done.stdout


def test_a_terminal_without_unicode_gets_plain_characters():
    code = "from rackplan.cli import output; output.degrade_to_encoding(); print('P90 \\u2265 150 \\u2192 x \\u4e00')"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "P90 >= 150 -> x ?\n"
