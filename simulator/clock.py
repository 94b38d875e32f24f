"""Simulated time: SimPy's environment counting whole nanoseconds."""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT

LAST = NORMAL + 1
"""First of the priorities of what comes after all else at its time, the lowest of them first."""
FAR_NS = 1_000_000_000
"""Calls that come later than this wait apart, so that what comes soon is found among few."""
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
        self._far: list[Any] = []
        self.now_ns = 0  # a plain attribute: SimPy's `now` is a property, and time is asked for all the time

    @property
    def next_ns(self) -> int:
        """When what is in the queue comes next; NEVER if nothing is."""
        queue: list[Any] = self._queue
        soon_ns = queue[0][0] if queue else NEVER
        return self._far[0][0] if self._far and self._far[0][0] < soon_ns else soon_ns

    def after(self, delay_ns: int, call: Callable[[Any], None], value: Any, priority: int = NORMAL) -> None:
        """Call `call(value)` when `delay_ns` have passed: a timeout without what SimPy needs of one."""
        queue: list[Any] = self._queue if delay_ns <= FAR_NS else self._far
        heappush(queue, (self.now_ns + delay_ns, priority, next(self._eid), call, value))

    def next_place(self) -> int:
        """A place, among what comes at one time, behind all that was scheduled before; for `at`."""
        return next(self._eid)

    def at(self, time_ns: int, place: int, call: Callable[[Any], None], value: Any) -> None:
        """As `after`, at a time to come, as if it had been scheduled when it got its `place`."""
        heappush(self._queue, (time_ns, NORMAL, place, call, value))  # type: ignore[misc]

    def step(self) -> None:
        """Make the calls that come next, then process one event."""
        queue: list[Any] = self._queue
        far = self._far
        while queue or far:
            if far and (not queue or far[0][0] <= queue[0][0]):
                heappush(queue, heappop(far))
                continue
            entry = heappop(queue)
            try:
                self.now_ns, _, _, call, value = entry
            except ValueError:  # an event of SimPy's
                self.now_ns = entry[0]
                heappush(queue, entry)
                break
            self._now = self.now_ns
            call(value)
        super().step()


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
