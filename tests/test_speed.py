"""What a run costs, counted: Python calls per request, steps that are timed, ranks that are planned. Counts are the
same on every machine, so a slower algorithm fails here without a clock. Bounds are some 10 % above what stands.
docs/performance.md has the times.
"""

import dis
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, disaggregated, requests

from rackplan.engine import Deployment
from rackplan.simulator.agentx import AGENTX
from rackplan.simulator.clock import Clock
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import _Run as Run
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
    "aggregated": (aggregated(), 20.0, {"all": 182, "time_steps": 3.2, "plan_rank": 1.1, "_live": 4.4}),
    "aggregated DEP4": (aggregated(dep=4), 60.0, {"all": 152, "time_steps": 2.3, "plan_rank": 1.1, "_live": 2.9}),
    "P/D": (
        disaggregated(prefill={"instances": 1}, decode={"dep": 1}),
        20.0,
        {"all": 277, "time_steps": 4.3, "plan_rank": 2.2, "_live": 6.5},
    ),
    "P/D, decode DEP8": (decode_rack(), 60.0, {"all": 267, "time_steps": 3.5, "plan_rank": 2.2, "_live": 5.6}),
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


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="others specialize every loop")
def test_the_loop_over_calls_is_specialized_though_it_is_entered_once() -> None:
    count_calls(aggregated(), 50, 20.0)
    names = {instruction.opname for instruction in dis.get_instructions(Clock.step, adaptive=True)}
    assert any(name.startswith("LOAD_GLOBAL_") for name in names)


def circles_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> int:
    """Objects that refer to one another in a circle and that a run has made and let go of by its end."""
    found = []
    result = Run._result

    def counted(self: Run, warmup_ns: int) -> object:
        found.append(gc.collect())
        return result(self, warmup_ns)

    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_result", counted)
        run()
    return found[0]


@pytest.mark.parametrize("case", list(CASES))
def test_a_run_that_nobody_collects_circles_of_makes_none_of_its_requests(case: str, monkeypatch) -> None:
    deployment, rate_req_s, _ = CASES[case]
    few, many = (circles_of(monkeypatch, lambda: count_calls(deployment, n, rate_req_s)) for n in (100, 1000))  # noqa: B023
    assert many <= few


def test_sessions_make_circles_of_trees_at_most_that_send_nothing_any_more(monkeypatch) -> None:
    calibration, lanes = FakeCalibration(LinearCost(host=0.8, admission=0.1)), 32

    def sessions() -> None:
        options = RunOptions(duration_s=900.0, drain=False)
        simulate(aggregated(max_num_seqs=64), AGENTX, Load(concurrency=lanes), calibration, options)

    sessions()  # what is made once
    assert circles_of(monkeypatch, sessions) <= 8 * lanes


def test_the_simulator_imports_nothing_slow() -> None:
    slow = ("scipy", "optuna", "plotly", "rich", "vllm", "torch")
    code = f"import sys, rackplan.simulator.metrics; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_needs_no_numpy() -> None:
    code = "import sys, rackplan.cli.main; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
