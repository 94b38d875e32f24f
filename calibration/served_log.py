"""What a step log and the client of one run tell together, where both ran on one machine and so share a clock: the host
work that async scheduling does not hide, and the front end. One aggregated rank whose worker shares its process."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from scipy.stats import theilslopes

from rackplan.calibration.records import ServedRun, Step, StepLog
from rackplan.simulator.frontend import TURNS

LEAST_STEPS = 20
MOST_REQUEST_MS = 40.0
"""No front end that is not overloaded takes longer to hand a request to the engine."""
COARSE_MS, FINE_MS = 1.0, 0.5


def mean_host_terms(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """Over those of several logs that tell; empty where none does."""
    told = [terms for terms in found if terms]
    return {key: float(np.mean([terms[key] for terms in told])) for key in (told[0] if told else ())}


def host_terms(log: StepLog, captured_tokens: int, scale: float = 1.0) -> dict[str, float]:
    """Host work of a decode step and of a request, ms: the time from the begin of a decode step behind an eager one to
    that of the next. The GPU ended when the eager launch did, so nothing hides it. Theil-Sen, since some eager steps
    are bound by the GPU; only those of one prompt count. Empty where fewer than LEAST_STEPS tell. `scale`: of a host
    that takes so much longer."""
    requests, ms = [], []
    for before, step, after in zip(log.steps, log.steps[1:], log.steps[2:], strict=False):
        eager = len(before.prefill) == 1 and before.prefill[0][0] > captured_tokens
        if eager and not step.prefill and step.decode_requests and after.number == before.number + 2:
            requests.append(step.decode_requests)
            ms.append((after.t_s - step.t_s) * 1e3)
    if len(ms) < LEAST_STEPS or len(set(requests)) < 2:
        return {}
    slope, fixed, *_ = theilslopes(ms, requests)
    return {"host_step_ms": max(0.0, float(fixed) * scale), "host_request_ms": max(0.0, float(slope) * scale)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """`total_ms`: from client to engine and back, idle; `token_ms`: work on a token of a delivery; `turn_ms`: of each
    of a request's TURNS, which wait for deliveries and for one another."""

    total_ms: float
    token_ms: float
    turn_ms: float

    def scaled(self, scale: float) -> "Front":
        """On a host that takes `scale` times as long."""
        return Front(total_ms=self.total_ms * scale, token_ms=self.token_ms * scale, turn_ms=self.turn_ms * scale)


def mean_front(fronts: Sequence[Front]) -> Front:
    """Of several runs alike."""
    total, token, turn = np.mean([(f.total_ms, f.token_ms, f.turn_ms) for f in fronts], axis=0).tolist()
    return Front(total_ms=total, token_ms=token, turn_ms=turn)


def front_of(run: ServedRun, log: StepLog) -> Front | None:
    """The front end of one run; None where client and log do not tell of the same requests and tokens by one clock.

    A delivery's last token reaches the client later the more there are: the slope is `token_ms`. What a prompt's first
    token takes beyond that is the way back. The way in, and how much of it is work that other requests wait for,
    are those which put requests best between the begin of the step before their first and that of their first.
    """
    steps = log.steps
    output_s = np.array([s.t_s + (s.schedule_ms + s.execute_ms) / 1e3 for s in steps])
    prompts = np.sort(run.input_tokens)
    if not len(run.token_s) or prompts[0] != prompts[-1]:
        return None
    ended = [sum(sum(c) >= prompts[0] for c in s.prefill) for s in steps]
    made = np.array([s.decode_requests for s in steps]) + ended
    begun = np.repeat(np.arange(len(steps)), [sum(c[1] == 0 for c in s.prefill) for s in steps])
    received_s = np.sort(np.concatenate(run.token_s))
    first_s = np.sort(run.start_s + run.ttft_s)
    if made.sum() != len(received_s) or len(begun) != len(run.start_s) or sum(ended) != len(first_s):
        return None
    last_ms = (received_s[np.cumsum(made) - 1] - output_s) * 1e3
    quiet = _quiet(steps) & (last_ms > 0)
    if quiet.sum() < LEAST_STEPS:
        return None
    token_ms = max(0.0, float(theilslopes(last_ms[quiet], made[quiet])[0]))
    at = np.repeat(np.arange(len(steps)), ended)
    back_ms = float(np.median((first_s - output_s[at]) * 1e3 - token_ms * made[at]))
    begin_s = np.array([s.t_s for s in steps])
    bounds_s = np.append(-np.inf, begin_s)[begun], begin_s[begun]
    in_ms, work_ms = _way_in_ms(run.start_s, output_s, made * token_ms / 1e3, bounds_s)
    return Front(total_ms=in_ms + max(0.0, back_ms), token_ms=token_ms, turn_ms=work_ms / TURNS)


def _quiet(steps: tuple[Step, ...]) -> np.ndarray:
    """Which steps are decodes of as many requests as the step before and the step behind, (steps,)."""
    n = np.array([-1 if s.prefill else s.decode_requests for s in steps])
    same = n[1:] == n[:-1]
    return (n > 0) & np.append(False, same) & np.append(same, False)


def _way_in_ms(
    start_s: np.ndarray, output_s: np.ndarray, work_s: np.ndarray, bounds_s: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """(way from client to engine, work on a request within it), ms."""
    starts, outputs, idle_at = np.sort(start_s).tolist(), output_s.tolist(), (output_s + work_s).tolist()

    def miss_s(way: tuple[float, float]) -> float:
        seen_s = np.sort(_seen_s(starts, outputs, idle_at, (way[0] - way[1]) / 1e3, way[1] / TURNS / 1e3))
        return float(np.mean(np.maximum(seen_s - bounds_s[1], 0.0) + np.maximum(bounds_s[0] - seen_s, 0.0)))

    ways = np.arange(0.0, MOST_REQUEST_MS, COARSE_MS).tolist()
    # Without work nobody waits: the way that is best then bounds the work.
    most_ms = min(((way, way) for way in ways), key=miss_s)[0] + 4 * COARSE_MS
    found = min(((way, work) for way in ways if way <= most_ms for work in ways if work <= way), key=miss_s)
    near = np.arange(-COARSE_MS, COARSE_MS + FINE_MS, FINE_MS).tolist()
    finer = [(found[0] + i, found[1] + j) for i in near for j in near]
    return min((way for way in finer if way[0] >= way[1] >= 0), key=miss_s)


def _seen_s(
    starts: list[float], outputs: list[float], idle_at: list[float], on_the_way_s: float, turn_s: float
) -> list[float]:
    """When the engine sees each request: TURNS turns of one server, which a delivery at `outputs` holds up until
    `idle_at`; turns first come, first served."""
    ready = [(start + on_the_way_s, i, 0) for i, start in enumerate(starts)]
    seen, free, order = [], -np.inf, len(ready)
    while ready:
        at, _, turns = heappop(ready)
        i = bisect_right(outputs, at) - 1
        free = max(at, free, idle_at[i] if i >= 0 else at) + turn_s
        if turns + 1 == TURNS:
            seen.append(free)
        else:
            heappush(ready, (free, order, turns + 1))
            order += 1
    return seen
