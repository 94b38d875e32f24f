"""The search: Optuna proposes, screening drops what cannot win, the simulator finds each survivor's operating point.

Optuna runs in one process, by ask and tell in batches of a fixed size, so that a seed gives the same study on any
number of cores; only simulations run in parallel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import optuna

from rackplan.engine import Deployment
from rackplan.engine.flags import kv_transfer_modes
from rackplan.simulator.run_options import RunOptions
from rackplan.tuner.demand import Demand, is_open_loop
from rackplan.tuner.operating_point import OperatingPoint
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Candidate, Screening
from rackplan.tuner.space import (
    CAPS,
    CHUNKS,
    INTERVALS,
    REDUNDANT,
    SEATS,
    WINDOWS,
    Knobs,
)
from rackplan.tuner.worker import SearchTask, Workers

BATCH = 4
LAYOUTS = 16
"""Layouts that are offered to the search; the best by screening, aggregated ones always among them."""
LEAST_AGGREGATED = 3
WORTH_SIMULATING = 0.85
"""Screening knows means only: a candidate is dropped where it promises less than this share of the best promise."""
PROBES = 3
PILOT_WIDTHS = 3
START_BELOW = 0.93
"""Searches start at this share of the estimated capacity: a queue that has built up tells little."""
LAST_RESORT = 4
"""Trials that are tried again from the lightest load where none met the SLOs, and the probes of each."""
LAST_RESORT_PROBES = 8
FEW_REQUESTS = 10
"""An open loop and sessions that pause have no lone request; their lightest load brings about so many in the time that
is measured."""
MOST_SIMULATED = 10
"""Candidates that are simulated at most, pilots counted: what a minute on two cores allows."""
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A simulated candidate. `score`: see PlanRequest.score; None where no load meets the SLOs."""

    number: int
    candidate: Candidate
    point: OperatingPoint
    score: tuple[float, float] | None

    @property
    def deployment(self) -> Deployment:
        return self.candidate.deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`trials`: simulated ones, best first; `screened`: proposals that screening dropped; `layouts`: offered."""

    trials: list[Trial]
    screened: int
    layouts: list[Candidate]


def horizon(e2e_s: float, request: PlanRequest, demand: Demand) -> RunOptions:
    """A short run: a life of a request to warm up, two where all clients start at once and their first requests queue
    like none after them; and a life to measure."""
    warmup = max(14.0, (1.1 if demand.pauses else 2.1) * e2e_s)
    measured = max(10.0, e2e_s)
    return RunOptions(
        duration_s=warmup + measured, warmup_s=warmup, seed=request.seed, drain=False, drafting=request.drafting
    )


def offered_layouts(screened: list[Candidate]) -> list[Candidate]:
    """The best layouts by screening, with the best aggregated ones always among them."""
    aggregated = [c for c in screened if not c.layout.disaggregated][:LEAST_AGGREGATED]
    rest = [c for c in screened if c not in aggregated][: LAYOUTS - len(aggregated)]
    return sorted(rest + aggregated, key=lambda c: (-c.score, c.layout))


class Search:
    """One study over the offered layouts and all knobs, after a pilot that corrects the screening."""

    def __init__(self, request: PlanRequest, screening: Screening, workers: Workers) -> None:
        self.request, self.screening, self.workers = request, screening, workers
        self.demand = screening.demand
        self.trials: list[Trial] = []
        self.screened = 0
        self._known: dict[str, Trial] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=request.seed, multivariate=True, n_startup_trials=12)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)

    def pilot(self, screened: list[Candidate]) -> None:
        """Simulate the best candidate of the better prefill widths and the best aggregated one, and learn from them."""
        best: dict[int, Candidate] = {}
        for c in screened:
            best.setdefault(c.layout.prefill_dep if c.layout.disaggregated else 0, c)
        promising = [c for width, c in best.items() if width][:PILOT_WIDTHS]
        aggregated = best.get(0) or self.screening.aggregated_anyway()
        self._simulate(promising + ([aggregated] if aggregated else []))
        self.screening.learn([(t.candidate, t.point.nearest) for t in self.trials])

    def run(self, screened: list[Candidate], progress: Progress) -> SearchResult:
        """Search among the `screened` candidates' layouts until the trials or MOST_SIMULATED are used up."""
        offered = offered_layouts(screened)
        self._offered = {c.layout.label: c for c in offered}
        self._best_promise = max(c.score for c in offered)
        for candidate in self._first_proposals(offered):
            self.study.enqueue_trial(_parameters(candidate.layout.label, candidate.knobs))
        asked = 0
        while asked < self.request.trials and len(self.trials) < MOST_SIMULATED:
            batch = [self.study.ask() for _ in range(min(BATCH, self.request.trials - asked))]
            asked += len(batch)
            self._evaluate(batch)
            best = max((t.score[0] for t in self.trials if t.score), default=None)
            shown = "none meets the SLOs yet" if best is None else f"best so far {abs(best):,.0f}"
            text = f"searching: {asked} of {self.request.trials} proposals, {len(self.trials)} simulated, {shown}"
            progress(text, max(asked / self.request.trials, len(self.trials) / MOST_SIMULATED))
        order = sorted(self.trials, key=lambda t: (t.score is None, tuple(-x for x in t.score or ()), t.number))
        return SearchResult(trials=order, screened=self.screened, layouts=offered)

    def last_resort(self, result: SearchResult) -> SearchResult:
        """The trials closest to the SLOs again, from the lightest load up. Searches start near capacity and look at few
        loads; that nothing meets the SLOs may be said only of a request that is served alone."""
        closest = sorted(result.trials, key=lambda t: (-self._slack(t), t.number))[:LAST_RESORT]
        tasks = [self._lightest(t) for t in closest]
        again = []
        for trial, point in zip(closest, self.workers.search(tasks), strict=True):
            again.append(replace(trial, point=point, score=self._score(point)))
        rest = [t for t in result.trials if t not in closest]
        by_closeness = sorted(again, key=lambda t: (t.score is None, -self._slack(t), t.number))
        best_first = sorted(by_closeness, key=lambda t: t.score or (-math.inf,), reverse=True)
        return replace(result, trials=[*best_first, *rest])

    def _lightest(self, trial: Trial) -> SearchTask:
        task = self._task(trial.candidate, None)
        measured_s = task.options.duration_s - task.options.warmup_s
        start = FEW_REQUESTS / measured_s
        if not is_open_loop(self.request.parsed_workload):  # clients alone, or so many sessions that pause
            start = start / self.demand.rate_req_s if self.demand.pauses else 1.0
        return replace(task, start=start, most_probes=LAST_RESORT_PROBES, to_the_edge=True)

    def _slack(self, trial: Trial) -> float:
        return min(self.request.slo.slack(trial.point.nearest.metrics).values())

    def _first_proposals(self, offered: list[Candidate]) -> list[Candidate]:
        """The best few by screening, and the best aggregated one."""
        first = offered[:6]
        aggregated = [c for c in offered if not c.layout.disaggregated][:1]
        return first + [c for c in aggregated if c not in first]

    def _evaluate(self, batch: list[optuna.Trial]) -> None:
        waiting: list[tuple[optuna.Trial, Candidate]] = []
        for trial in batch:
            proposal = self._propose(trial)
            candidate = self.screening.candidate(*proposal)
            if candidate is None:
                trial.set_constraint("feasible", 1.0)
                self.study.tell(trial, self.request.score_of(0.0, self.request.gpus)[0])
                self.screened += 1
            elif not self._worth(candidate):
                self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                self.screened += 1
            else:
                waiting.append((trial, candidate))
        self._simulate([candidate for _, candidate in waiting])
        for trial, candidate in waiting:
            self._tell(trial, self._known[_key(candidate)])

    def _simulate(self, candidates: list[Candidate]) -> None:
        """Find the operating points of those that are not known yet."""
        fresh = {_key(c): c for c in candidates if _key(c) not in self._known}
        bar = max((t.score for t in self.trials if t.score), default=None)
        points = self.workers.search([self._task(c, bar) for c in fresh.values()])
        for (key, candidate), point in zip(fresh.items(), points, strict=True):
            found = Trial(number=len(self.trials), candidate=candidate, point=point, score=self._score(point))
            self._known[key] = found
            self.trials.append(found)

    def _score(self, point: OperatingPoint) -> tuple[float, float] | None:
        return self.request.score(point.best.metrics) if point.best else None

    def _tell(self, trial: optuna.Trial, found: Trial) -> None:
        trial.set_constraint("feasible", 0.0 if found.score else max(1e-6, 1.0 - self._slack(found)))
        self.study.tell(trial, self.request.score(found.point.nearest.metrics)[0])

    def _propose(self, trial: optuna.Trial) -> tuple:
        layout = self._offered[trial.suggest_categorical("layout", list(self._offered))].layout
        knobs = Knobs(
            chunk=trial.suggest_categorical("chunk", CHUNKS),
            seats=trial.suggest_categorical("seats", SEATS),
            cap=trial.suggest_categorical("cap", CAPS),
            redundant=trial.suggest_categorical("redundant", REDUNDANT),
            window=trial.suggest_categorical("window", WINDOWS),
            interval=trial.suggest_categorical("interval", INTERVALS),
            drafts=trial.suggest_int("drafts", 0, self.request.model_spec.max_draft_tokens),
            mode=trial.suggest_categorical("mode", kv_transfer_modes(self.request.gpu_spec.device)),
        )
        return layout, knobs

    def _worth(self, candidate: Candidate) -> bool:
        best = self._best_promise
        if self.request.per == "gpu":
            return candidate.score >= WORTH_SIMULATING * best
        return candidate.score >= best / WORTH_SIMULATING  # both negative: GPUs, or what the target is missed by

    def _task(self, candidate: Candidate, bar: tuple[float, float] | None) -> SearchTask:
        e2e_s = candidate.estimate.e2e_s(self.demand)
        return SearchTask(
            deployment=candidate.deployment,
            start=self._start_load(candidate, e2e_s),
            options=horizon(e2e_s, self.request, self.demand),
            most_probes=PROBES,
            bar=bar,
        )

    def _start_load(self, candidate: Candidate, e2e_s: float) -> float:
        """The estimate's rate as a load: a rate, or the closed loop's units that make it."""
        rate = candidate.estimate.rate_req_s or 1.0  # nothing promised: start where requests just come
        if is_open_loop(self.request.parsed_workload):
            return START_BELOW * rate
        # A unit's rate was played with requests of `played_e2e_s`; the rest of its cycle is its own.
        cycle_s = max(e2e_s, 1 / self.demand.rate_req_s - self.demand.played_e2e_s + e2e_s)
        return max(1.0, START_BELOW * rate * cycle_s)


def _parameters(label: str, knobs: Knobs) -> dict:
    return {
        "layout": label,
        "chunk": knobs.chunk,
        "seats": knobs.seats,
        "cap": knobs.cap,
        "redundant": knobs.redundant,
        "window": knobs.window,
        "interval": knobs.interval,
        "drafts": knobs.drafts,
        "mode": knobs.mode,
    }


def _key(candidate: Candidate) -> str:
    return f"{candidate.layout.label} {candidate.knobs}"
