"""Simulated time: SimPy's environment counting whole nanoseconds."""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT

LAST = NORMAL + 1
"""First of the priorities of what comes after all else at its time, the lowest of them first."""
STRETCH_BITS = 27
FAR_NS = 1 << STRETCH_BITS
"""Calls that come later than this wait apart, by the stretch of so long (134 ms) that they come in, and are put in
order when it begins: what comes soon is found among few."""
NEVER = 2**62
"""A time, ns, that no run comes to."""

Sleeps = Generator[int | None, None, None]
"""What a process yields: how long it sleeps, ns; None until it is woken."""


class Clock(simpy.Environment):
    """An environment whose time is an integer, because every delay it is given is: `now_ns`. Events come in SimPy's
    order: by time, then as they were scheduled. Its queue also holds calls, which are entries one longer than SimPy's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._far: dict[int, list[Any]] = {}  # by the number of their stretch
        self._stretches: list[int] = []  # a heap of these numbers
        self._begun: list[Any] = []  # what is left of the stretch that has begun, the next one last
        self._far_ns = NEVER  # nothing of all these comes before this
        self.now_ns = 0  # a plain attribute: SimPy's `now` is a property, and time is asked for all the time

    @property
    def now(self) -> int:
        return self.now_ns

    def schedule(self, event: Any, priority: Any = NORMAL, delay: Any = 0) -> None:
        """Have one of SimPy's events come in `delay` ns."""
        self._now = self.now_ns
        super().schedule(event, priority, delay)

    @property
    def next_ns(self) -> int:
        """Nothing comes before this; NEVER if nothing is to come."""
        queue: list[Any] = self._queue
        return queue[0][0] if queue and queue[0][0] < self._far_ns else self._far_ns

    def after(self, delay_ns: int, call: Callable[[Any], None], value: Any, priority: int = NORMAL) -> None:
        """Call `call(value)` when `delay_ns` have passed: a timeout without what SimPy needs of one."""
        time_ns = self.now_ns + delay_ns
        entry: Any = (time_ns, priority, next(self._eid), call, value)
        if delay_ns <= FAR_NS:
            heappush(self._queue, entry)
            return
        stretch = time_ns >> STRETCH_BITS
        waiting = self._far.get(stretch)
        if waiting is None:
            self._far[stretch] = [entry]
            heappush(self._stretches, stretch)
            self._far_ns = min(self._far_ns, stretch << STRETCH_BITS)
        else:
            waiting.append(entry)

    def next_place(self) -> int:
        """A place, among what comes at one time, behind all that was scheduled before; for `at`."""
        return next(self._eid)

    def at(self, time_ns: int, place: int, call: Callable[[Any], None], value: Any) -> None:
        """As `after`, at a time to come, as if it had been scheduled when it got its `place`."""
        heappush(self._queue, (time_ns, NORMAL, place, call, value))  # type: ignore[misc]

    def step(self) -> None:
        """Make the calls that come next, then process one event."""
        queue: list[Any] = self._queue
        while True:  # Python 3.11 specializes no loop that is entered once and tests a condition
            if not queue or queue[0][0] >= self._far_ns:
                if self._fetch():
                    continue
                if not queue:
                    break
            entry = heappop(queue)
            try:
                self.now_ns, _, _, call, value = entry
            except ValueError:  # an event of SimPy's
                self.now_ns = entry[0]
                heappush(queue, entry)
                break
            call(value)
        super().step()

    def _fetch(self) -> bool:
        """Put what comes next of what was far off among what comes soon. False if nothing is."""
        begun, stretches = self._begun, self._stretches
        if begun:
            heappush(self._queue, begun.pop())
        elif stretches:
            # From here on time is in this stretch or behind it, so that no call for it comes any more.
            begun = self._begun = sorted(self._far.pop(heappop(stretches)), reverse=True)
        else:
            return False
        self._far_ns = begun[-1][0] if begun else stretches[0] << STRETCH_BITS if stretches else NEVER
        return True


class Process:
    """A SimPy process that only sleeps: no event is made for each of its sleeps. `is_active`: it is running now."""

    __slots__ = ("_clock", "_next_sleep", "_sleeps", "is_active")

    def __init__(self, clock: Clock, sleeps: Sleeps) -> None:
        self._clock, self._next_sleep = clock, sleeps
        self._sleeps = 0  # how many have ended
        self.is_active = False
        self.interrupt()

    def wake(self) -> None:
        """End its sleep after all that was scheduled for now before."""
        self._clock.after(0, self._resume, self._sleeps)

    def interrupt(self) -> None:
        """End its sleep before anything else happens."""
        self._clock.after(0, self._resume, self._sleeps, URGENT)

    def _resume(self, sleep: int) -> None:
        if sleep != self._sleeps:
            return  # that one was ended before its time
        self._sleeps += 1
        self.is_active = True
        delay_ns = next(self._next_sleep, None)
        self.is_active = False
        if delay_ns is not None:
            self._clock.after(delay_ns, self._resume, self._sleeps)
