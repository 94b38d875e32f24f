"""What a run costs, counted: Python calls per request, steps that are timed, ranks that are planned. Counts are the
same on every machine, so a slower algorithm fails here without a clock. Bounds are some 10 % above what stands.
docs/performance.md has the times.
"""

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, disaggregated, requests

from rackplan.engine import Deployment
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Python function calls of a run: all of them, and by name."""

    total: int
    by_name: Counter[str]


def count_calls(deployment: Deployment, n: int, rate_req_s: float, output_tokens: int = 128) -> Calls:
    """Of simulating `n` evenly spaced requests of 512 tokens."""
    workload = GivenRequests(requests(np.arange(n) / rate_req_s, 512, output_tokens))
    calibration = FakeCalibration(LinearCost(host=0.8, admission=0.1))
    names: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names[frame.f_code.co_name] += 1

    gc.collect()  # closing an earlier run's processes would count
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        result = simulate(deployment, workload, Load(), calibration, RunOptions())
    finally:
        sys.setprofile(before)
        gc.enable()
    assert len(result.finish_ns) == n
    return Calls(total=names.total(), by_name=names)


def decode_rack() -> Deployment:
    """Two prefill instances and one decode instance of eight ranks."""
    return disaggregated(prefill={"dep": 2, "instances": 2}, decode={"dep": 8})


CASES = {
    "aggregated": (aggregated(), 20.0, {"all": 185, "time_steps": 3.2, "plan_rank": 1.1, "_live": 4.4}),
    "aggregated DEP4": (aggregated(dep=4), 60.0, {"all": 155, "time_steps": 2.3, "plan_rank": 1.1, "_live": 2.9}),
    "P/D": (
        disaggregated(prefill={"instances": 1}, decode={"dep": 1}),
        20.0,
        {"all": 285, "time_steps": 4.3, "plan_rank": 2.2, "_live": 6.5},
    ),
    "P/D, decode DEP8": (decode_rack(), 60.0, {"all": 275, "time_steps": 3.5, "plan_rank": 2.2, "_live": 5.6}),
}
"""Deployment, requests/s, and the most calls per request. `_live`: times that an instance's process goes on."""


@pytest.mark.parametrize("case", list(CASES))
def test_a_request_takes_a_bounded_number_of_calls(case: str) -> None:
    deployment, rate_req_s, most = CASES[case]
    n = 1000
    calls = count_calls(deployment, n, rate_req_s)
    found = {"all": calls.total / n} | {name: calls.by_name[name] / n for name in most if name != "all"}
    assert all(found[name] > 0 for name in most)
    assert {name: count for name, count in found.items() if count > most[name]} == {}


@pytest.mark.parametrize("case", ["aggregated", "P/D, decode DEP8"])
def test_ten_times_the_requests_take_ten_times_the_calls(case: str) -> None:
    deployment, rate_req_s, _ = CASES[case]
    few, many = (count_calls(deployment, n, rate_req_s).total for n in (300, 3000))
    assert many <= 10.5 * few


def test_longer_answers_take_no_more_calls_where_nothing_else_happens() -> None:
    # One request at a time: its steps are passed together, 256 at most.
    _, short, long = (count_calls(aggregated(), 50, 0.1, tokens).total for tokens in (100, 100, 250))  # the first warms
    assert long == short
    assert count_calls(aggregated(), 50, 0.1, 2500).by_name["time_steps"] <= 50 * (1 + 2500 // 256 + 1)


def test_the_simulator_imports_nothing_slow() -> None:
    slow = ("scipy", "optuna", "plotly", "rich", "vllm", "torch")
    code = f"import sys, rackplan.simulator.metrics; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_needs_no_numpy() -> None:
    code = "import sys, rackplan.cli.main; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
