"""The JSON that other programs read, from the commands as they are installed: its shape, its exit codes, its order."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RACKPLAN = Path(sys.executable).with_name("rackplan")
pytestmark = pytest.mark.skipif(not RACKPLAN.exists(), reason="rackplan is not installed beside this Python")

DEPLOYMENT = "model: deepseek-v2-lite\ngpu: h200\npools: [{role: aggregated, instances: 1, dep: 1}]\n"
SIMULATE = "simulate d.yaml --workload fixed:2048/256 --rate 4 --duration 30s --replications 2 --seed 7 --json"
PLAN = (
    "plan --target-tps 2k --model deepseek-v2-lite --gpu h200 --gpus 1 --workload fixed:2048/256 "
    "--p90-interactivity 150 --p90-ttft 2s --trials 1 --seed 7 --json"
)
RATES = {
    "throughput_total_tok_s_per_gpu",
    "throughput_output_tok_s_per_gpu",
    "throughput_new_input_tok_s_per_gpu",
    "output_throughput_tok_s",
    "request_throughput_req_s",
    "gpus",
}
LATENCIES = {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "interactivity_tok_s_user"}
SPREAD = {"mean", "p50", "p90", "p99"}


def start(line: str, folder: Path) -> "subprocess.Popen[str]":
    (folder / "d.yaml").write_text(DEPLOYMENT)
    command = [str(RACKPLAN), *line.split()]
    # Each process hashes strings its own way: an answer that depends on the order of a set would differ.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process that ends within a minute."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def ran(line: str, folder: Path) -> tuple[int, str, str]:
    return ended(start(line, folder))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> tuple[int, str, str]:
    return ran(SIMULATE, tmp_path_factory.mktemp("simulate"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> list[tuple[int, str, str, Path]]:
    """The same plan twice, by two processes at once, each in a folder of its own."""
    folders = [tmp_path_factory.mktemp(f"plan {i}") for i in (1, 2)]
    running = [start(PLAN, folder) for folder in folders]
    return [(*ended(process), folder) for process, folder in zip(running, folders, strict=True)]


@pytest.fixture(params=["simulate", "plan"])
def document(request, simulated, planned) -> dict[str, Any]:
    _, out, err = simulated if request.param == "simulate" else planned[0][:3]
    assert out, err
    return json.loads(out)


def part_of(document: dict[str, Any]) -> dict[str, Any]:
    """Where the metrics are: a plan has them in its prediction."""
    return document.get("prediction", document)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def test_a_simulation_has_its_parts(simulated):
    code, out, err = simulated
    assert code == 0, err
    assert {"inputs", "metrics", "gpu_time_share", "utilization", "memory", "provenance"} <= set(json.loads(out))


def test_a_plan_has_its_parts(planned):
    code, out, err, _ = planned[0]
    assert code == 0, err
    plan = json.loads(out)
    parts = "feasible target deployment prediction binding runners_up pareto memory economics provenance"
    assert set(parts.split()) <= set(plan)
    assert plan["feasible"] is True
    assert plan["target"] == {"tps": 2000.0, "count": "total", "per": "gpu"}
    assert {"metrics", "ci95", "gpu_time_share", "utilization"} <= set(plan["prediction"])
    assert {"resource", "why", "next_gpu"} <= set(plan["binding"])


def test_rates_and_latencies_are_finite_numbers_of_at_least_0(document):
    metrics = part_of(document)["metrics"]
    assert set(metrics) >= RATES | LATENCIES
    values = [metrics[k] for k in RATES]
    for name in LATENCIES:
        assert set(metrics[name]) == SPREAD
        values += metrics[name].values()
    assert all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in values)


def test_percentiles_are_in_order_and_interactivity_is_the_inverse_of_tpot(document):
    metrics = part_of(document)["metrics"]
    for name in LATENCIES - {"interactivity_tok_s_user"}:
        assert metrics[name]["p50"] <= metrics[name]["p90"] <= metrics[name]["p99"]
    reached = metrics["interactivity_tok_s_user"]
    assert reached["p50"] >= reached["p90"] >= reached["p99"]
    for quantile in ("p50", "p90", "p99"):  # means over replications of inverses, so not to the last digit
        assert reached[quantile] == pytest.approx(1000 / metrics["tpot_ms"][quantile], rel=0.02)


def test_rates_per_gpu_and_of_the_whole_agree(document):
    metrics = part_of(document)["metrics"]
    whole = metrics["throughput_output_tok_s_per_gpu"] * metrics["gpus"]
    assert metrics["output_throughput_tok_s"] == pytest.approx(whole, rel=1e-6)
    parts = metrics["throughput_output_tok_s_per_gpu"] + metrics["throughput_new_input_tok_s_per_gpu"]
    assert metrics["throughput_total_tok_s_per_gpu"] >= parts * (1 - 1e-9)


def test_shares_of_gpu_time_add_up_to_1(document):
    part = part_of(document)
    for share in (part["gpu_time_share"], *(p["gpu_time_share"] for p in part["pools"])):
        assert sum(share.values()) == pytest.approx(1.0, abs=1e-6)
        assert min(share.values()) >= 0
    assert all(0 <= u <= 1 for u in part["utilization"].values())


def test_intervals_have_the_metrics_shape_and_hold_them(document):
    part = part_of(document)
    for name in LATENCIES:
        for quantile, value in part["metrics"][name].items():
            low, high = part["ci95"][name][quantile]
            assert low <= value <= high
    for name in RATES - {"gpus"}:
        low, high = part["ci95"][name]
        assert low <= part["metrics"][name] <= high


def test_the_front_is_of_points_that_no_other_beats(planned):
    front = [(p["tok_s_per_gpu"], p["tok_s_per_user"]) for p in json.loads(planned[0][1])["pareto"]]
    assert front
    assert not [1 for a in front for b in front if a != b and a[0] >= b[0] and a[1] >= b[1]]


def test_every_number_is_json(document):
    assert not [path for path, v in leaves(document) if isinstance(v, float) and not math.isfinite(v)]


def test_the_same_seed_gives_a_byte_identical_simulation(simulated, tmp_path):
    assert ran(SIMULATE, tmp_path)[1] == simulated[1]


def test_the_same_seed_gives_a_byte_identical_plan(planned):
    (_, first, _, here), (_, second, _, there) = planned
    assert first == second
    for name in ("plan.json", "deployment.yaml", "report.html"):
        assert (here / "out" / name).read_bytes() == (there / "out" / name).read_bytes()


def test_stdout_is_the_document_alone_and_the_file_is_the_same(planned):
    _, out, err, folder = planned[0]
    assert out.startswith("{")
    assert out.endswith("}\n")
    assert json.loads((folder / "out" / "plan.json").read_text()) == json.loads(out)
    assert "%" in err  # progress went to stderr


def test_a_written_deployment_is_the_plans_and_runs(planned):
    _, out, _, folder = planned[0]
    line = "simulate out/deployment.yaml --workload fixed:2048/256 --rate 1 --duration 20s --replications 1 --json"
    code, again, err = ran(line, folder)
    assert code == 0, err
    assert json.loads(again)["deployment"] == json.loads(out)["deployment"]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("simulate d.yaml --workload fixed:2048 --json", 2, "fixed:2048"),
        ("plan --target-tps fast --json", 2, "--target-tps fast"),
        (PLAN.replace("interactivity 150", "interactivity 90000"), 3, ""),
    ],
)
def test_failures_have_their_exit_code_and_one_line(line, code, says, tmp_path):
    got, out, err = ran(line, tmp_path)
    assert got == code, err
    if code == 2:
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert says in err
        assert [p.name for p in tmp_path.iterdir()] == ["d.yaml"]  # nothing half-written
    else:
        answer = json.loads(out)
        assert answer["feasible"] is False
        assert answer["reason"]
        assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_a_deployment_that_does_not_fit_exits_3_with_the_shortfall(tmp_path):
    (tmp_path / "big.yaml").write_text(
        "model: deepseek-v3\ngpu: gb200\npools: [{role: aggregated, instances: 1, dep: 1}]\n"
    )
    code, out, err = ran("simulate big.yaml --workload fixed:2048/256 --rate 1 --json", tmp_path)
    assert (code, out) == (3, "")
    assert "GiB short" in err
    assert err.count("\n") == 1
