"""Steps that are passed in one event: one, or several of which nothing changes but the context."""

import numpy as np

from rackplan.simulator.cost import SharedTime
from rackplan.simulator.request import NS_PER_MS
from rackplan.simulator.step import StepTimes


class StepSums:
    """Sums over steps that have passed. `sync_ms`: by which they would be shorter without the DP sync; the rest as in
    StepTimes."""

    __slots__ = ("attention_mean_ms", "attention_ms", "gpu_ms", "shared", "steps", "sync_ms", "wall_ns")

    def __init__(
        self,
        steps: int,
        wall_ns: float,
        gpu_ms: float,
        sync_ms: float,
        attention_ms: float,
        attention_mean_ms: float,
        shared: SharedTime,
    ) -> None:
        self.steps, self.wall_ns, self.gpu_ms, self.sync_ms = steps, wall_ns, gpu_ms, sync_ms
        self.attention_ms, self.attention_mean_ms, self.shared = attention_ms, attention_mean_ms, shared


class OneStep(StepSums):
    """A single step, which nothing can cut, and the sums over it. `end_ns`: when it ends; `delivery_ns`: how long after
    its end the step before hands on its tokens, since this one's launch comes first; `next_lead_ms`, `next_seen_ms`:
    see StepTimes."""

    __slots__ = ("_delivers_at_ns", "_wall_ns", "delivery_ns", "end_ns", "next_lead_ms", "next_seen_ms")

    def __init__(self, times: StepTimes, now_ns: int) -> None:
        wall_ns = round(times.wall_ms * NS_PER_MS)
        self._wall_ns = wall_ns if wall_ns > 1 else 1
        self.end_ns = now_ns + self._wall_ns
        self.steps, self.wall_ns = 1, float(self._wall_ns)
        self.gpu_ms, self.shared = times.gpu_ms, times.shared
        self.sync_ms = times.wall_ms - times.wall_without_sync_ms
        self.attention_ms, self.attention_mean_ms = times.attention_ms, times.attention_mean_ms
        self.next_lead_ms, self.next_seen_ms = times.next_lead_ms, times.next_seen_ms
        late_ms = times.launch_ms - times.lead_ms
        self.delivery_ns = round(late_ms * NS_PER_MS) if late_ms > 0.0 else 0
        self._delivers_at_ns = now_ns + self.delivery_ns

    @property
    def walls_ns(self) -> list[int]:
        """How long each step of the run takes."""
        return [self._wall_ns]

    def last_delivery_ns(self, now_ns: int, before_ns: int) -> int:
        """When tokens were last handed on until now; `before_ns`: when before this step."""
        at_ns = self._delivers_at_ns
        return at_ns if at_ns <= now_ns else before_ns

    def wall_ns_at(self, now_ns: int) -> int:
        """How long the step takes that is under way at `now_ns`."""
        return self._wall_ns

    def sums(self) -> StepSums:
        """Of the step."""
        return self


class StepRun:
    """Several steps, until something comes that one of them can see. The scheduler last looks at its queue for a step
    at `begins_ns`."""

    __slots__ = ("_began_ns", "_begins_ns", "_ends_ns", "_times", "_walls_ns", "end_ns", "steps")

    def __init__(self, times: StepTimes, now_ns: int) -> None:
        self._times = times
        self._walls_ns = np.maximum(1, np.rint(times.wall_ms * NS_PER_MS)).astype(np.int64)
        self._began_ns = now_ns
        self._ends_ns = now_ns + self._walls_ns.cumsum()
        self._begins_ns = self._ends_ns - self._walls_ns - np.rint(times.seen_ms * NS_PER_MS).astype(np.int64)
        self.steps = len(self._walls_ns)
        self.end_ns = int(self._ends_ns[-1])

    @property
    def walls_ns(self) -> list[int]:
        return self._walls_ns[: self.steps].tolist()

    @property
    def delivery_ns(self) -> int:
        """As in OneStep."""
        return round(max(0.0, self._times.launch_ms - float(self._times.lead_ms[0])) * NS_PER_MS)

    def last_delivery_ns(self, now_ns: int, before_ns: int) -> int:
        """As in OneStep."""
        i = min(self.steps_done(now_ns), self.steps - 1)
        while i >= 0:
            late_ms = max(0.0, self._times.launch_ms - float(self._times.lead_ms[i]))
            at_ns = int(self._ends_ns[i] - self._walls_ns[i]) + round(late_ms * NS_PER_MS)
            if at_ns <= now_ns:
                return at_ns
            i -= 1
        return before_ns

    @property
    def next_lead_ms(self) -> float:
        return float(self._times.next_lead_ms[self.steps - 1])

    @property
    def next_seen_ms(self) -> float:
        return float(self._times.next_seen_ms[self.steps - 1])

    def wall_ns_at(self, now_ns: int) -> int:
        """As in OneStep."""
        return int(self._walls_ns[min(self.steps_done(now_ns), self.steps - 1)])

    def sums(self) -> StepSums:
        """Of the steps that are left of it."""
        n, t, add = self.steps, self._times, np.add.reduce  # as `sum` does, without its wrapper
        attention_ms = float(add(t.attention_ms[:n]))
        return StepSums(
            n,
            float(self.end_ns - self._began_ns),
            float(add(t.gpu_ms[:n])),
            float(add((t.wall_ms - t.wall_without_sync_ms)[:n])) if t.wall_without_sync_ms is not t.wall_ms else 0.0,
            attention_ms,
            float(add(t.attention_mean_ms[:n])) if t.attention_mean_ms is not t.attention_ms else attention_ms,
            t.shared,
        )

    def steps_done(self, now_ns: int) -> int:
        """Steps that have ended by now."""
        return min(self.steps, int(self._ends_ns.searchsorted(now_ns, side="right")))

    def steps_planned(self, now_ns: int) -> int:
        """Steps for which the scheduler has looked at its queue by now."""
        return int(self._begins_ns.searchsorted(now_ns, side="right"))

    def begin_of(self, step: int) -> tuple[int, int]:
        """When the step with that number, 1 or more, begins, and when it is planned."""
        return int(self._ends_ns[step - 1]), int(self._begins_ns[step])

    def end_with_done(self, now_ns: int) -> bool:
        """Keep the steps that have ended. True if that is shorter than before."""
        return self._keep(self.steps_done(now_ns))

    def end_with_current(self, now_ns: int) -> bool:
        """Keep no step after the one under way. True if that is shorter than before."""
        return self._keep(self.steps_done(now_ns) + 1)

    def end_before_next_begin(self, now_ns: int) -> bool:
        """Keep the steps that the scheduler has planned already. True if that is shorter than before."""
        return self._keep(self.steps_planned(now_ns))

    def _keep(self, steps: int) -> bool:
        if steps >= self.steps:
            return False
        self.steps, self.end_ns = steps, int(self._ends_ns[steps - 1])
        return True
