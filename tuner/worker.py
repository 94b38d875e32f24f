"""Simulations in worker processes. Results depend on what is asked alone, never on which worker answers or when."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rackplan.engine import Deployment
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.tuner.demand import is_open_loop, load_of
from rackplan.tuner.operating_point import OperatingPoint, find_operating_point
from rackplan.tuner.probe import Probe, merge, run_once
from rackplan.tuner.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """Find the operating point of a deployment from load `start`. `bar`: the score to beat (see PlanRequest.score);
    `to_the_edge`: on to the last load that meets the SLOs, past where throughput is flat."""

    deployment: Deployment
    start: float
    options: RunOptions
    most_probes: int
    bar: tuple[float, float] | None
    to_the_edge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """One replication at one load."""

    deployment: Deployment
    load: Load
    options: RunOptions


HOPELESS = 0.9
_request: PlanRequest | None = None


def _set_up(request: PlanRequest) -> None:
    global _request
    _request = request


def _search(task: SearchTask) -> OperatingPoint:
    assert _request is not None
    request = _request
    workload = request.parsed_workload

    def simulate_at(amount: float) -> Probe:
        load = load_of(workload, amount)
        return merge(task.deployment, load, [run_once(task.deployment, workload, load, request.fitted, task.options)])

    def give_up(found: Probe, slack: float) -> bool:
        """Even if throughput grew as far as the slack, it would stay well below the bar."""
        if task.bar is None or request.per != "gpu":
            return False
        return request.achieved_tps(found.metrics) * max(1.0, slack) < HOPELESS * task.bar[0]

    return find_operating_point(
        simulate_at,
        task.start,
        request.slo,
        most_probes=task.most_probes,
        least=0.01 if is_open_loop(workload) else 1.0,
        give_up=give_up,
        to_the_edge=task.to_the_edge,
    )


def _run(task: RunTask) -> dict[str, Any]:
    assert _request is not None
    return run_once(task.deployment, _request.parsed_workload, task.load, _request.fitted, task.options)


class Workers:
    """A pool of processes, one per core, for the length of a `with`."""

    def __init__(self, request: PlanRequest) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child of a threaded parent can hang
        self._pool = ProcessPoolExecutor(
            max_workers=min(8, os.cpu_count() or 1), mp_context=context, initializer=_set_up, initargs=(request,)
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def search(self, tasks: Sequence[SearchTask]) -> list[OperatingPoint]:
        """The operating point of each task, in their order."""
        return list(self._pool.map(_search, tasks))

    def run(self, tasks: Sequence[RunTask]) -> list[dict[str, Any]]:
        """One replication of each task, in their order, as `run_once` gives it."""
        return list(self._pool.map(_run, tasks))
