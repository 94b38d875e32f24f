"""The highest load at which a deployment still meets the SLOs: a bracketing search with queueing's own hints."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rackplan.tuner.probe import Probe
from rackplan.tuner.slo import Slo

CLOSE_ENOUGH = 1.04
"""The bracket's ratio at which the search ends."""
MOST_GROWTH, MOST_SHRINKAGE = 8.0, 2.5
FAR = 1.5
MOST_EXTRA_PROBES = 3
"""A search that is still this many times better than the SLOs may take some probes more."""
QUEUE_SHARE = 0.75
"""Of the P90 TTFT objective, what a lighter load aims at."""
FLAT = 1.05
"""More load that raises throughput by less than this only grows the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """`best`: the probe with the highest throughput that meets the SLOs, None if none did; `probes`: all, in order."""

    best: Probe | None
    probes: tuple[Probe, ...]
    slo: Slo

    @property
    def nearest(self) -> Probe:
        """`best`, else the probe that comes closest to the SLOs."""
        return self.best or max(self.probes, key=lambda p: min(self.slo.slack(p.metrics).values()))


@dataclass(frozen=True, slots=True)
class _End:
    """One end of the bracket: a load, and how many times better than the tightest SLO it is."""

    load: float
    slack: float


def find_operating_point(
    simulate_at: Callable[[float], Probe],
    start: float,
    slo: Slo,
    *,
    most_probes: int,
    least: float,
    give_up: Callable[[Probe, float], bool] = lambda probe, slack: False,
    to_the_edge: bool = False,
) -> OperatingPoint:
    """Search from load `start`, never below `least`.

    `give_up(probe, slack)` ends the search once a load meets the SLOs. Otherwise it ends where the bracket is narrow
    or, unless `to_the_edge`, where more load no longer raises throughput.
    """
    probes: list[Probe] = []
    good: _End | None = None
    bad: _End | None = None
    load = max(least, start)
    budget = most_probes
    while len(probes) < budget:
        found = simulate_at(load)
        probes.append(found)
        slack = _slack(found, slo)
        if slack >= 1.0:
            flat = good is not None and not to_the_edge and not _grew(probes)
            good = _End(load, slack)
            if flat or give_up(found, slack):
                break
            if slack > FAR and bad is None and budget < most_probes + MOST_EXTRA_PROBES:
                budget += 1  # the estimate that the search started from was far too low
        else:
            bad = _End(load, slack)
        following = _next_load(good, bad, found, slo)
        whole = found.load.concurrency is not None or following >= 8
        load = max(least, float(round(following)) if whole else following)
        if _settled(load, good, bad):
            break
    meeting = [p for p in probes if slo.meets(p.metrics)]
    best = max(meeting, key=lambda p: p.metrics["total_throughput_tok_s"], default=None)
    return OperatingPoint(best=best, probes=tuple(probes), slo=slo)


def _slack(found: Probe, slo: Slo) -> float:
    return max(0.1, min(slo.slack(found.metrics).values()))


def _settled(load: float, good: _End | None, bad: _End | None) -> bool:
    """Would `load` tell nothing new? While no load meets the SLOs, every lighter one does:
    a search may end without an answer only at the lightest, or for want of probes."""
    if bad and load == bad.load:
        return True
    if good is None:
        return False
    narrow = bad is not None and bad.load < CLOSE_ENOUGH * good.load
    return narrow or math.isclose(load, good.load, rel_tol=CLOSE_ENOUGH - 1)


def _grew(probes: list[Probe]) -> bool:
    last, before = (p.metrics["total_throughput_tok_s"] for p in (probes[-1], probes[-2]))
    return last > FLAT * before


def _next_load(good: _End | None, bad: _End | None, found: Probe, slo: Slo) -> float:
    if good and bad:
        share = math.log(good.slack) / max(1e-9, math.log(good.slack) - math.log(max(bad.slack, 1e-6)))
        # Where log slack, linear in log load, is just above 0; kept off the ends of the bracket.
        return good.load * (bad.load / good.load) ** min(0.85, max(0.15, 0.95 * share))
    if good:
        return good.load * min(MOST_GROWTH, max(1.15, good.slack))
    assert bad is not None
    lighter = lighter_load(bad.load, found, slo)
    return lighter if found.load.concurrency is None else float(math.floor(lighter))


def lighter_load(load: float, found: Probe, slo: Slo) -> float:
    """The load that a probe which breaks an SLO at `load` points to, at least 3 % lighter.

    Of a broken TTFT by Little's law: the excess of waiting is so many requests too many. Of a broken interactivity in
    proportion to what is missing.
    """
    metrics, slack = found.metrics, slo.slack(found.metrics)
    served = metrics["request_throughput_req_s"]
    if slack["p90_ttft"] >= 1.0:
        lighter = load * max(0.5, slack["p90_interactivity"] ** 2.5)
    elif found.load.concurrency is None:
        lighter = 0.93 * min(load, served)
    else:
        lighter = load - served * (metrics["ttft_ms"]["p90"] - QUEUE_SHARE * slo.p90_ttft_ms) / 1e3
    return max(load / MOST_SHRINKAGE, min(0.97 * load, lighter))
