"""The highest load at which a deployment still meets the SLOs: a bracketing search in the logarithm of the load."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rackplan.tuner.probe import Probe
from rackplan.tuner.slo import Slo

CLOSE_ENOUGH = 1.04
"""The bracket's ratio at which the search ends."""
MOST_GROWTH = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """`best`: the probe with the highest throughput that meets the SLOs, None if none did; `probes`: all, in order."""

    best: Probe | None
    probes: tuple[Probe, ...]

    @property
    def nearest(self) -> Probe:
        """`best`, else the probe that breaks the SLOs least."""
        return self.best or self.probes[-1]


def find_operating_point(
    simulate_at: Callable[[float], Probe],
    start: float,
    slo: Slo,
    *,
    most_probes: int,
    least: float,
    hopeless: Callable[[Probe, float], bool],
) -> OperatingPoint:
    """Search from load `start`; `simulate_at(load)`. Throughput grows with load until an SLO breaks, so the answer lies
    where the tightest SLO has no slack left. `hopeless(probe, slack)` ends the search early once a load meets the SLOs.
    """
    probes: list[Probe] = []
    good: tuple[float, float] | None = None  # (load, slack)
    bad: tuple[float, float] | None = None
    load = max(least, start)
    while len(probes) < most_probes:
        found = simulate_at(load)
        probes.append(found)
        slack = min(slo.slack(found.metrics).values()) if found.metrics["requests"]["measured"] else 0.1
        if slack >= 1.0:
            good = (load, slack)
            if hopeless(found, slack):
                break
        else:
            bad = (load, slack)
        if not bad and good:
            following = load * min(MOST_GROWTH, max(1.15, slack))
        elif not good and bad:
            if load <= least:
                break
            following = max(least, load * max(1 / MOST_GROWTH, 0.85 * bad[1]))
        else:
            assert good is not None
            assert bad is not None
            if bad[0] / good[0] < CLOSE_ENOUGH:
                break
            following = _between(good, bad)
        load = _whole(following, least, load)
        if any(math.isclose(load, x) for x in (good or (0.0,))[:1] + (bad or (0.0,))[:1]):
            break
    meeting = [p for p in probes if slo.meets(p.metrics)]
    best = max(meeting, key=lambda p: p.metrics["total_throughput_tok_s"], default=None)
    return OperatingPoint(best=best, probes=tuple(probes))


def _between(good: tuple[float, float], bad: tuple[float, float]) -> float:
    """Where log slack, linear in log load, is just above 0; kept off the ends of the bracket."""
    (x0, s0), (x1, s1) = good, bad
    share = math.log(s0) / max(1e-9, math.log(s0) - math.log(max(s1, 1e-6)))
    return x0 * (x1 / x0) ** min(0.85, max(0.15, 0.95 * share))


def _whole(load: float, least: float, previous: float) -> float:
    """A closed loop has whole clients: round where the load is large enough for it not to matter elsewhere."""
    return max(least, float(round(load))) if previous >= 8 and load >= 8 else max(least, load)
