"""Simulated time: SimPy's environment counting whole nanoseconds."""

from collections.abc import Callable
from heapq import heappop
from operator import attrgetter
from typing import Any

import simpy


class Clock(simpy.Environment):
    """An environment whose `now` is an integer, because every delay it is given is. Events come in SimPy's order."""

    now: int = property(attrgetter("_now"))  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        # SimPy binds these once for an instance of its own class, but at every use for one of a subclass.
        self.timeout, self.event = self.timeout, self.event  # type: ignore[method-assign]

    def after(self, delay_ns: int, call: Callable[[simpy.Event], None], value: Any = None) -> None:
        """Call `call` with an event of `value` when `delay_ns` have passed."""
        event = self.timeout(delay_ns, value)
        assert event.callbacks is not None
        event.callbacks.append(call)

    def step(self) -> None:
        """Process the timeouts that are next, which cannot fail and must not be what a run ends with, and one event."""
        queue = self._queue
        while queue and type(queue[0][3]) is simpy.Timeout:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
        super().step()
