"""Simulated time: SimPy's environment counting whole nanoseconds."""

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import simpy
from simpy.events import NORMAL


class _Call:
    """What SimPy's queue holds of a call that is to come."""

    __slots__ = ("call", "value")

    def __init__(self, call: Callable[[Any], None], value: Any) -> None:
        self.call, self.value = call, value


class Clock(simpy.Environment):
    """An environment whose `now` is an integer, because every delay it is given is. Events come in SimPy's order: by
    time, then as they were scheduled."""

    now: int = property(attrgetter("_now"))  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        # SimPy binds these once for an instance of its own class, but at every use for one of a subclass.
        self.timeout, self.event = self.timeout, self.event  # type: ignore[method-assign]

    def after(self, delay_ns: int, call: Callable[[Any], None], value: Any) -> None:
        """Call `call(value)` when `delay_ns` have passed: a timeout without what a process needs of one."""
        heappush(self._queue, (self._now + delay_ns, NORMAL, next(self._eid), _Call(call, value)))  # type: ignore[misc]

    def step(self) -> None:
        """Make the calls and process the timeouts that come next, then one other event. A timeout cannot fail, and must
        not be what a run ends with."""
        queue = self._queue
        while queue:
            due: Any = queue[0][3]
            kind = type(due)
            if kind is _Call:
                self._now = heappop(queue)[0]
                due.call(due.value)
            elif kind is simpy.Timeout:
                self._now = heappop(queue)[0]
                callbacks, due.callbacks = due.callbacks, None
                for callback in callbacks:
                    callback(due)
            else:
                break
        super().step()
