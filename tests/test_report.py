"""The report: one file that needs nothing else, whose five charts a browser draws, whose text is escaped."""

import copy
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rackplan.cli import charts, report

EXAMPLE = json.loads((Path(__file__).parent / "data" / "plan_example.json").read_text())
CHARTS = ("pareto", "latency", "time", "memory", "history")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,4000",
    "--virtual-time-budget=8000",
    "--enable-logging=stderr",
    "--dump-dom",
]


@pytest.fixture
def plan():
    return copy.deepcopy(EXAMPLE)


def without_scripts(html):
    return re.sub(r"<script.*?</script>", "", html, flags=re.S)


def test_the_report_loads_nothing_from_elsewhere(plan):
    html = report.render_report(plan)
    assert not re.findall(r"<script[^>]+src=", html)
    page = without_scripts(html)
    assert not re.findall(r"""(?:src|href|url\(|@import)\s*=?\s*["']?\s*(?:https?:)?//""", page)
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_text_of_the_plan_is_escaped(plan):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    plan["warnings"] = [evil]
    plan["inputs"]["workload"] = evil
    plan["binding"]["why"] = evil
    plan["pareto"][0]["label"] = evil
    plan["runners_up"][0]["label"] = evil
    plan["history"][0]["label"] = evil
    plan["provenance"]["notes"] = [evil]
    html = report.render_report(plan)
    assert "<script>alert" not in html
    assert "<img src=x" not in html


def test_an_infeasible_report_never_recommends(plan):
    plan |= {"feasible": False, "reason": "P90 TTFT is 12 s"}
    page = without_scripts(report.render_report(plan))
    assert "No plan meets" in page
    assert "Feasible:" not in page
    assert "Closest, not recommended" in str(charts.pareto(plan).data[-1].name)


def test_a_plan_without_any_deployment_has_a_report(plan):
    plan |= {"feasible": False, "reason": "no memory", "deployment": None, "prediction": None, "binding": None}
    plan |= {"runners_up": [], "pareto": [], "history": [], "memory": [], "economics": None}
    assert "no memory" in report.render_report(plan)


def test_the_front_is_what_no_point_beats(plan):
    points = plan["pareto"]
    best = charts.front(points)
    rates = [(p["tok_s_per_user"], p["tok_s_per_gpu"]) for p in points]
    for p in points:
        beaten = any(
            u >= p["tok_s_per_user"] and g >= p["tok_s_per_gpu"] and (u, g) != (p["tok_s_per_user"], p["tok_s_per_gpu"])
            for u, g in rates
        )
        assert (p in best) is not beaten


def test_every_bar_of_gpu_time_adds_up_to_100(plan):
    figure = charts.time_share(plan)
    for i in range(len(figure.data[0].y)):
        assert sum(layer.x[i] for layer in figure.data) == pytest.approx(100)


def test_memory_bars_end_where_vllm_may_use_no_more(plan):
    figure = charts.memory(plan)
    for i, pool in enumerate(plan["memory"]):
        assert sum(layer.x[i] for layer in figure.data) == pytest.approx(pool["usable_gib"], abs=0.01)


def test_interactivity_curves_read_the_same_from_either_end():
    falling = charts._reached([[0.1, 200.0], [0.9, 150.0]], better_high=True)
    rising = charts._reached([[0.1, 150.0], [0.9, 200.0]], better_high=True)
    assert sorted(zip(*falling, strict=True)) == sorted(zip(*rising, strict=True))


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_five_charts_without_an_error(plan, tmp_path):
    path = tmp_path / "a report.html"
    report.write_report(plan, path)
    shown = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    page = re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.S)
    for name in CHARTS:
        chart = page.split(f'id="chart-{name}"', 1)[1].split('id="chart-', 1)[0]
        assert 'class="main-svg"' in chart, name
        assert re.search(r'<path[^>]* d="M', chart), name
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
