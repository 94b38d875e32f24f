"""The screen: the verdict first, everything asked for on it, 100 columns, no markup read from strings."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.cli import screen, wording

EXAMPLE = json.loads((Path(__file__).parent / "data" / "plan_example.json").read_text())


@pytest.fixture
def plan():
    return copy.deepcopy(EXAMPLE)


def shown(show, document, capsys):
    show(document, screen.stdout_console())
    return capsys.readouterr().out


def test_the_plan_fits_one_screen_and_says_all(plan, capsys):
    out = shown(screen.show_plan, plan, capsys)
    lines = out.splitlines()
    assert lines[0].startswith(
        "Feasible: 72 GPUs, 20 x prefill DEP2 + 1 x decode DEP32, 954k tok/s/GPU (target 900k total"
    )
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 55
    assert "\x1b" not in out
    for part in ("target_tps=900000", "p90_ttft_ms=10000", "Binds: prefill", "next GPU", "Runners-up", "median abs"):
        assert part in out


def test_an_infeasible_plan_never_reads_like_a_recommendation(plan, capsys):
    plan |= {"feasible": False, "reason": "P90 interactivity is 120 tok/s/user"}
    out = shown(screen.show_plan, plan, capsys)
    assert out.startswith("No plan meets 900k total tok/s per gpu: P90 interactivity is 120")
    assert "Feasible" not in out
    assert "does NOT meet" in out


def test_a_plan_without_any_deployment_still_shows_its_reason(plan, capsys):
    plan |= {"feasible": False, "reason": "no memory", "deployment": None, "prediction": None, "binding": None}
    plan |= {"runners_up": [], "pareto": [], "memory": [], "economics": None}
    assert "no memory" in shown(screen.show_plan, plan, capsys)


def test_strings_are_not_markup(plan, capsys):
    plan["warnings"] = ["[bold]x[/nothing] :smile:"]
    assert "[bold]x[/nothing] :smile:" in shown(screen.show_plan, plan, capsys)


def test_a_simulation_is_shown_from_its_document(plan, capsys):
    document = plan["prediction"] | {k: plan[k] for k in ("inputs", "deployment", "memory", "warnings", "provenance")}
    out = shown(screen.show_simulation, document, capsys)
    assert out.startswith("72 GPUs, 20 x prefill DEP2")
    assert "Where GPU time goes" in out


def test_a_whatif_shows_what_moved_and_why(plan, capsys):
    side = plan["prediction"] | {k: plan[k] for k in ("inputs", "deployment", "memory", "warnings", "provenance")}
    moved = [{"metric": "tpot_ms p90", "base": 6.21, "changed": 7.4, "change_pct": 19.2}]
    document = {"base": side, "changed": side, "changes": {"decode.dep": [32, 16]}, "moved": moved, "why": ["because"]}
    out = shown(screen.show_whatif, document, capsys)
    assert "decode.dep = 32 → 16" in out
    assert "+19.2 %" in out
    assert "because" in out


def test_calibration_tables_are_shown(capsys):
    listed = {
        "name": "a",
        "model": "m",
        "gpu": "h200",
        "rows": 12,
        "errors": {"decode": {"holdout_median_pct": 1.94, "holdout_p90_pct": 4.2}},
    }
    out = shown(screen.show_calibrations, [listed], capsys)
    assert "h200" in out
    assert "12" in out
    assert "1.9 / 4.2 %" in out
    row = {"id": "F01", "what": "step", "unit": "ms", "measured": 88, "predicted": 90, "error_pct": 2.3, "role": "fit"}
    validation = {"name": "a", "rows": [row], "by_metric": [], "summary": {"median_abs_error_pct": 2.3}}
    assert "+2.3 %" in shown(screen.show_validation, validation, capsys)
    step = {"step_ms": 12.0, "terms_ms": {"moe": 6.0}, "interval_ms": [11.0, 13.0], "in_range": False}
    assert shown(screen.show_step, step, capsys).startswith("Warning: outside the measured range")


@given(st.floats(1e-9, 1e15))
def test_a_number_keeps_three_significant_digits(value):
    assert float(wording.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)
    assert "e" not in wording.number(value)


def test_numbers_are_written_as_people_do():
    assert [wording.rate(x) for x in (954213.4, 1.2e6, 6105.2, 999_600)] == ["954k", "1.2M", "6,110", "1M"]
    assert [wording.time_ms(x) for x in (12.34, 3420, 0)] == ["12.3 ms", "3.42 s", "0 ms"]
    assert [wording.percent(x) for x in (0.614, 0.042, 0.0)] == ["61 %", "4.2 %", "0 %"]
    assert wording.number(float("nan")) == "–"


def test_the_target_is_compared_in_what_it_counts(plan):
    metrics = plan["prediction"]["metrics"]
    whole_output = {"tps": 1, "count": "output", "per": "deployment"}
    assert wording.achieved_tps(metrics, whole_output) == metrics["throughput_output_tok_s_per_gpu"] * 72
