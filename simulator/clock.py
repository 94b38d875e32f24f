"""Simulated time: SimPy's environment counting whole nanoseconds."""

import simpy


class Clock(simpy.Environment):
    """An environment whose `now` is an integer, because every delay it is given is."""

    @property
    def now(self) -> int:
        return self._now  # type: ignore[return-value]
