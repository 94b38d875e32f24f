"""The cap on new KV loads, on vLLM's own scheduler, step by step."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_kv import Loop, make_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rackplan.engine.vllm_plugin.scheduler import CAP, LOG_DIR, RackplanAsyncScheduler, RackplanScheduler

KINDS = [(RackplanScheduler, Scheduler, 1), (RackplanAsyncScheduler, AsyncScheduler, 2)]
requests = st.lists(
    st.tuples(
        st.sampled_from(["remote", "local"]),
        st.integers(2, 600),  # prompt tokens
        st.integers(1, 6),  # output tokens
        st.integers(0, 8),  # step of arrival
        st.integers(1, 6),  # steps until the KV has arrived
    ),
    min_size=1,
    max_size=14,
)


def run(kind, depth, model, monkeypatch, cap, work, blocks=200, aborted=()):
    """(names that started in each step, the scheduler) after everything has finished."""
    monkeypatch.delenv(LOG_DIR, raising=False)
    monkeypatch.setenv(CAP, str(cap)) if cap else monkeypatch.delenv(CAP, raising=False)
    loop = Loop(make_scheduler(kind, model, blocks=blocks), depth)
    loading: dict[str, int] = {}
    delays = {f"{where}-{i}": delay for i, (where, _, _, _, delay) in enumerate(work)}
    for now in range(400):
        for i, (where, prompt, output, arrival, _) in enumerate(work):
            if arrival == now:
                loop.add(f"{where}-{i}", prompt, output)
        for name, step in aborted:
            if step == now:
                loop.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        loop.step({name for name, due in loading.items() if due == now})
        for name, request in loop.scheduler.requests.items():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in loading:
                loading[name] = now + delays[name]
        if now > 8 and not loop.scheduler.requests and not any(o.num_scheduled_tokens for o, _, _ in loop.in_flight):
            return loop.started, loop.scheduler
    raise AssertionError(f"still there after 400 steps: {list(loop.scheduler.requests)}")


@pytest.mark.parametrize(("kind", "base", "depth"), KINDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(work=requests, cap=st.integers(1, 3), blocks=st.integers(12, 40))
def test_no_step_starts_more_loaded_requests_than_the_cap_and_all_finish(
    kind, base, depth, tiny_moe, work, cap, blocks
):
    with pytest.MonkeyPatch.context() as patch:
        started, _ = run(kind, depth, tiny_moe, patch, cap, work, blocks)
    assert max(sum(name.startswith("remote-") for name in names) for names in started) <= cap
    assert sorted(name for names in started for name in names) == sorted(f"{w[0]}-{i}" for i, w in enumerate(work))


@pytest.mark.parametrize(("kind", "base", "depth"), KINDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(work=requests)
def test_without_a_cap_or_with_a_wide_one_the_steps_are_vllms_own(kind, base, depth, tiny_moe, work):
    with pytest.MonkeyPatch.context() as patch:
        expected, _ = run(base, depth, tiny_moe, patch, None, work)
        assert run(kind, depth, tiny_moe, patch, None, work)[0] == expected
        assert run(kind, depth, tiny_moe, patch, 99, work)[0] == expected


def burst(count):
    return [("remote", 300, 3, 0, 2)] * count


@pytest.mark.parametrize(("kind", "base", "depth"), KINDS)
def test_a_burst_starts_at_the_cap_every_step_in_the_order_of_arrival(kind, base, depth, tiny_moe, monkeypatch):
    free, _ = run(base, depth, tiny_moe, monkeypatch, None, burst(6))
    assert max(map(len, free)) == 6
    started, _ = run(kind, depth, tiny_moe, monkeypatch, 2, burst(6))
    assert [names for names in started if names] == [[f"remote-{i}", f"remote-{i + 1}"] for i in (0, 2, 4)]


def test_a_request_that_found_no_room_counts_in_the_step_in_which_it_starts(tiny_moe, monkeypatch):
    monkeypatch.setenv(CAP, "1")
    loop = Loop(make_scheduler(RackplanScheduler, tiny_moe))
    for i in range(3):
        loop.add(f"remote-{i}", 300, 3)
    loop.step({f"remote-{i}" for i in range(3)})
    with monkeypatch.context() as patch:
        patch.setattr(loop.scheduler.kv_cache_manager, "allocate_slots", lambda *args, **kwargs: None)
        loop.step(set())
    for _ in range(3):
        loop.step(set())
    assert loop.started == [[], [], ["remote-0"], ["remote-1"], ["remote-2"]]


def test_a_request_aborted_while_the_cap_holds_it_back_is_forgotten(tiny_moe, monkeypatch):
    work = [*burst(4), ("local", 20, 20, 0, 1)]
    started, scheduler = run(RackplanScheduler, 1, tiny_moe, monkeypatch, 1, work, aborted=[("remote-3", 4)])
    assert not any("remote-3" in names for names in started)
    assert not scheduler._kv_arrived
    assert scheduler.kv_cache_manager.usage == 0


def test_the_log_counts_the_loads_of_each_step(tiny_moe, monkeypatch, tmp_path):
    monkeypatch.setenv(CAP, "2")
    monkeypatch.setenv(LOG_DIR, str(tmp_path))
    loop = Loop(make_scheduler(RackplanScheduler, tiny_moe))
    for i in range(5):
        loop.add(f"remote-{i}", 300, 2)
    for now in range(12):
        loop.step({f"remote-{i}" for i in range(5)} if now == 1 else set())
    lines = [json.loads(line) for line in (tmp_path / "steps_engine.dp0.jsonl").read_text().splitlines()]
    assert lines[0]["config"]["max_new_kv_loads_per_step"] == 2
    assert [step["kv_loads"] for step in lines[1:] if step["kv_loads"]] == [2, 2, 1]
    # Of a prompt whose KV was loaded, the last token is computed here.
    assert sum(tokens for step in lines[1:] for tokens, _ in step["prefill"]) == 5
    assert all(context == 299 for step in lines[1:] for _, context in step["prefill"])


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_cap_that_is_no_positive_integer_is_refused(value, tiny_moe, monkeypatch):
    monkeypatch.setenv(CAP, value)
    with pytest.raises(ValueError, match=f"{CAP}={value}"):
        make_scheduler(RackplanScheduler, tiny_moe)


def test_a_cap_where_no_kv_is_loaded_is_refused(tiny_moe, monkeypatch):
    monkeypatch.setenv(CAP, "2")
    with pytest.raises(ValueError, match="loads no KV"):
        make_scheduler(RackplanScheduler, tiny_moe, role="kv_producer")


CLASSES = [RackplanScheduler, RackplanAsyncScheduler]


@pytest.mark.parametrize(("kind", "other"), [CLASSES, CLASSES[::-1]])
def test_the_class_for_the_other_kind_of_scheduling_is_refused_by_name(kind, other, tiny_moe):
    with pytest.raises(ValueError, match=f"use {other.__name__}$"):
        make_scheduler(kind, tiny_moe, async_scheduling=kind is RackplanScheduler)
