"""A run of steps that is passed in one event, until something comes that one of its steps can see."""

import numpy as np


class StepRun:
    """`ends_ns` (steps,): when each step ends; `begins_ns` (steps,): when the scheduler last looks at its queue for it.
    """

    def __init__(self, begins_ns: np.ndarray, ends_ns: np.ndarray) -> None:
        self.begins_ns, self.ends_ns = begins_ns, ends_ns

    def __len__(self) -> int:
        return len(self.ends_ns)

    @property
    def end_ns(self) -> int:
        return int(self.ends_ns[-1])

    def steps_done(self, now_ns: int) -> int:
        """Steps that have ended by now."""
        return int(np.searchsorted(self.ends_ns, now_ns, side="right"))

    def end_with_current(self, now_ns: int) -> bool:
        """Keep no step after the one under way. True if that is shorter than before."""
        return self._keep(self.steps_done(now_ns) + 1)

    def end_before_next_begin(self, now_ns: int) -> bool:
        """Keep the steps that the scheduler has planned already. True if that is shorter than before."""
        return self._keep(int(np.searchsorted(self.begins_ns, now_ns, side="right")))

    def _keep(self, steps: int) -> bool:
        if steps >= len(self.ends_ns):
            return False
        self.ends_ns = self.ends_ns[:steps]
        return True
