"""The front end: requests wait for tokens, runs of steps leave what single steps do, and logs tell its terms again."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, LinearCost, aggregated, requests

from rackplan.calibration import h200
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import calibration_file
from rackplan.calibration.profile import fit_profile
from rackplan.calibration.records import ServedRun, Step, StepLog
from rackplan.calibration.served_log import _seen_s, _way_in_ms, front_of, host_terms
from rackplan.calibration.serving import replay_served
from rackplan.simulator.clock import Clock
from rackplan.simulator.frontend import TURNS
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate


def run(token_ms, turn_ms=2.0, reqs=None, coalesce=True, seed=0, dep=1, chunk=128):
    calibration = FakeCalibration(LinearCost(host=0.8, floor=6.0))
    calibration.frontend_ms, calibration.frontend_token_ms, calibration.frontend_turn_ms = 10.0, token_ms, turn_ms
    if reqs is None:
        rng = np.random.default_rng(seed)
        reqs = requests(np.cumsum(rng.exponential(0.01, 60)), rng.integers(200, 3000, 60), rng.integers(2, 80, 60))
    options = RunOptions(coalesce=coalesce)
    deployment = aggregated(dep=dep, instances=2, output_proc_chunk_size=chunk)
    return simulate(deployment, GivenRequests(reqs), Load(), calibration, options)


def same(a, b) -> bool:
    return all((getattr(a, k) == getattr(b, k)).all() for k in ("request_id", "first_token_ns", "finish_ns"))


@given(st.integers(0, 1000), st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([1, 2]), st.sampled_from([1, 8, 128]))
def test_runs_of_steps_leave_the_front_end_as_single_steps_do(seed, token_ms, dep, chunk):
    coalesced, single = (run(token_ms, seed=seed, dep=dep, chunk=chunk, coalesce=c) for c in (True, False))
    assert same(coalesced, single)


@given(st.integers(0, 1000), st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([1, 2]))
def test_a_chunk_that_holds_every_output_of_a_step_changes_nothing(seed, token_ms, dep):
    assert same(run(token_ms, seed=seed, dep=dep, chunk=60), run(token_ms, seed=seed, dep=dep, chunk=10_000))


def test_a_turn_waits_for_the_chunk_under_way_and_no_longer():
    # 80 requests of an instance decode, 0.1 ms a token; two more come, each with TURNS turns.
    late = requests([0.0] * 160 + [1.5, 1.6], 100, [400] * 160 + [2, 2])
    free_ms = np.sort(run(0.0, reqs=late).scheduled_ns)[-2:] / 1e6
    wait_ms = {}
    for chunk in (1, 20, 128):
        found = run(0.1, reqs=late, chunk=chunk)
        wait_ms[chunk] = np.sort(found.scheduled_ns)[-2:] / 1e6 - free_ms
        assert (wait_ms[chunk] < TURNS * 0.1 * min(chunk, 81) + 10.0).all()  # and a step
    assert wait_ms[1].sum() < wait_ms[20].sum() < wait_ms[128].sum()


@pytest.mark.parametrize("dep", [1, 2])
def test_turns_that_are_foreseen_are_those_that_come(dep, monkeypatch):
    foreseen = [run(0.1, seed=seed, dep=dep) for seed in range(5)]
    monkeypatch.setattr(Clock, "next_ns", 0)  # something may come at once, so each turn is an event
    assert all(same(a, run(0.1, seed=seed, dep=dep)) for seed, a in enumerate(foreseen))


def test_an_idle_front_end_takes_its_time_whatever_its_turns():
    one = requests([0.0], 100, 3)
    at = {run(token_ms, turn, one).scheduled_ns[0] for token_ms, turn in ((0.0, 0.0), (0.1, 0.5), (0.1, 2.5))}
    assert at == {10_000_000}


def test_requests_that_come_at_once_wait_for_the_turns_of_one_another():
    # Two instances with one server each: of n requests there, each has its first turns before any has its last.
    n, turn_ms = 8, 2.0
    many = run(0.1, turn_ms, requests([0.0] * 2 * n, 100, 1))
    ready_ms = 10.0 - TURNS * turn_ms
    first_ms = ready_ms + ((TURNS - 1) * n + 1) * turn_ms
    assert np.sort(many.scheduled_ns)[0] / 1e6 == pytest.approx(first_ms, abs=1e-5)
    assert many.first_token_ns.max() / 1e6 > ready_ms + TURNS * n * turn_ms


def test_ranks_have_a_server_each():
    at_once = requests([0.0] * 16, 100, 1)
    one, two = (run(0.1, 2.0, at_once, dep=dep).scheduled_ns.min() for dep in (1, 2))
    assert two < one


@given(st.floats(2.0, 9.0), st.floats(0.0, 4.0), st.integers(0, 50))
def test_requests_that_meet_tell_the_work_on_each(work_ms, on_the_way_ms, seed):
    rng = np.random.default_rng(seed)
    start_s = np.cumsum(rng.exponential(0.03, 300))
    output_s = np.arange(0.0, start_s[-1] + 1, 0.002)
    idle = (output_s + 0.0001).tolist()
    seen_s = np.sort(_seen_s(start_s.tolist(), output_s.tolist(), idle, on_the_way_ms / 1e3, work_ms / TURNS / 1e3))
    bounds_s = seen_s - 0.001, seen_s + 0.001
    way_ms, found_ms = _way_in_ms(start_s, output_s, np.full(len(output_s), 0.0001), bounds_s)
    assert found_ms == pytest.approx(work_ms, abs=1.0)
    assert way_ms == pytest.approx(work_ms + on_the_way_ms, abs=1.0)


def test_requests_wait_for_the_tokens_of_others_and_no_longer_than_their_turns():
    late = requests([0.0] * 80 + [0.5, 0.52], 100, [400] * 80 + [2, 2])
    busy, free = (run(token_ms, reqs=late) for token_ms in (0.1, 0.0))
    wait_ms = np.sort(busy.scheduled_ns)[-2:] / 1e6 - np.sort(free.scheduled_ns)[-2:] / 1e6
    assert (wait_ms > 1.0).all()
    assert (wait_ms < TURNS * 0.1 * 41 + 10.0).all()  # 40 requests an instance, and a step


@given(st.floats(0.02, 0.2), st.floats(0.005, 0.05))
def test_log_and_client_tell_the_front_end_again(token_ms, host_ms):
    n, first_ms = 40, 5.0
    steps, tokens, starts = [], [[] for _ in range(n)], []
    now = 0.0
    for i in range(12 * n):  # a request every twelfth step, which then decodes to the end
        begins = i % 12 == 0
        decodes = (i + 11) // 12
        prefill = ((1000, 0),) if begins else ()
        wall = 60.0 if begins else 3.0 + host_ms * decodes if i % 12 == 1 else 12.0
        end = now + wall
        made = decodes + begins
        steps.append(Step(
            number=i, t_s=now / 1e3, prefill=prefill, decode_requests=decodes, decode_tokens=decodes,
            decode_context_tokens=1000 * decodes, running=made, schedule_ms=0.0, execute_ms=wall, update_ms=0.0,
            gap_ms=wall,
        ))  # fmt: skip
        if begins:
            starts.append(now / 1e3 - 0.009)
        for k in range(made):
            out = token_ms * made + (first_ms if begins and k == made - 1 else 0.0)
            tokens[k].append((end + out) / 1e3)
        now = end
    served = ServedRun(
        start_s=np.array(starts), ttft_s=np.array([t[0] for t in tokens]) - starts,
        end_s=np.array([t[-1] for t in tokens]), input_tokens=np.full(n, 1000),
        output_tokens=np.array([len(t) for t in tokens]), cached_tokens=None,
        token_s=[np.array(t) for t in tokens], metrics={},
    )  # fmt: skip
    log = StepLog(config={}, steps=tuple(steps))
    assert host_terms(log, 512) == pytest.approx({"host_step_ms": 3.0, "host_request_ms": host_ms}, rel=0.02)
    front = front_of(served, log)
    assert front is not None
    assert front.token_ms == pytest.approx(token_ms, rel=0.05)
    assert front_of(served, StepLog(config={}, steps=tuple(steps[:-1]))) is None  # of other tokens


def test_two_runs_of_a_day_tell_the_host_alike():
    (log,) = h200.profile_runs()["dep1_load1"].logs[""]
    shipped = calibration_file("h200-v2-lite").coefficients
    found = host_terms(log, h200.CAPTURED_TOKENS)
    for requests_ in (16, 64, 128):
        ms = found["host_step_ms"] + found["host_request_ms"] * requests_
        assert ms == pytest.approx(shipped.host_step_ms + shipped.host_request_ms * requests_, rel=0.2)


def test_a_profile_with_one_served_run_predicts_its_others(tmp_path):
    """Bounds as measured, with room: throughput of the burst is 9 % off, mean TPOT near the knee 10 %."""
    shutil.copytree(h200.LOGGED["dep1"], tmp_path / "p")
    path = tmp_path / "p" / "profile.json"
    identity = json.loads(path.read_text())
    kept = [r for r in identity["runs"] if r["name"] == "dep1_load0"]
    path.write_text(json.dumps({**identity, "runs": kept}))
    fitted = fit_profile(tmp_path / "p", "one")
    assert not {"frontend_ms", "frontend_token_ms", "host_step_ms", "eager_floor_ms"} & set(fitted.carried)
    bounds = {
        "dep1_load0": {"output throughput": 3, "mean TPOT": 7, "median TTFT": 5, "P90 TTFT": 7},
        "dep1_load1": {"output throughput": 3, "mean TPOT": 14, "median TTFT": 12, "P90 TTFT": 10},
        "dep1_pilot": {"output throughput": 12, "mean TPOT": 5, "median TTFT": 25, "P90 TTFT": 18},
    }
    for name, most in bounds.items():
        measured = h200.profile_runs()[name]
        found = {m.name: m for m in replay_served(measured.served, measured.deployment, FittedCalibration(fitted))}
        for metric, pct in most.items():
            assert found[metric].predicted == pytest.approx(found[metric].measured, rel=pct / 100), (name, metric)
