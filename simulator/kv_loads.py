"""Loads of KV into one instance: which step of its scheduler each hand-over begins with.

A load takes KV and no tokens, so one that the scheduler will begin for certain changes nothing of a run of steps under
way: it begins at the boundary at which the scheduler sees it, and the run goes on. All others are queued, and end the
run there.
"""

from collections import deque
from collections.abc import Callable

from rackplan.simulator.clock import NEVER, Clock
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.step_run import OneStep, StepRun


class KvLoads:
    """`start(seq, step_ns, planned_ns)`: a hand-over begins with the step that begins and was planned then; `in_runs`:
    that changes nothing of the instance's steps. Both are set by who hands over. `unseen`: hand-overs that came during
    a single step; `coming`: those that come after what is under way, in order, with their places among what comes at
    one time."""

    __slots__ = ("_called", "_env", "_queue", "coming", "in_runs", "start", "unseen")

    def __init__(self, env: Clock, queue: Callable[[Sequence], None]) -> None:
        self.start: Callable[[Sequence, int, int], None]
        self.in_runs = False
        self.unseen: deque[Sequence] = deque()
        self.coming: deque[tuple[Sequence, int]] = deque()
        self._env, self._queue = env, queue
        self._called = 0  # how many of those that come are calls in the clock's queue

    def expect(self, seq: Sequence, run: OneStep | StepRun | None) -> None:
        """A hand-over comes at its `ready_ns`, no sooner than those before it; `run` is under way."""
        self.coming.append((seq, self._env.next_place()))
        if run is None or seq.ready_ns <= run.end_ns:
            self.foresee(run)

    def foresee(self, run: OneStep | StepRun | None) -> None:
        """`run` is under way, None for none: those that come before its end are taken in by a single step as they are,
        which takes no call, and are called at their time by all else."""
        coming, end_ns = self.coming, run.end_ns if run else NEVER
        is_single = isinstance(run, OneStep)
        while coming and coming[0][0].ready_ns <= end_ns:
            seq, place = coming.popleft()
            if is_single and seq.ready_ns < end_ns and not self._called:
                self.unseen.append(seq)
            else:
                self._called += 1
                self._env.at(seq.ready_ns, place, self._come, seq)

    def _come(self, seq: Sequence) -> None:
        self._called -= 1
        self._queue(seq)

    def take(self, seq: Sequence, ranks: Ranks, run: OneStep | StepRun, now_ns: int, may_be_cut: bool) -> bool:
        """Take in a hand-over that has come while `run` is under way. False if it is still to be queued. `may_be_cut`:
        the run may end with the step under way, whatever is planned."""
        if isinstance(run, OneStep):
            self.unseen.append(seq)
            return True
        planned = run.steps_planned(seq.ready_ns)
        if planned >= run.steps or (may_be_cut and planned > run.steps_done(now_ns) + 1):
            return False
        if not ranks.load_beside(seq, run.steps):
            return False
        self.start(seq, *run.begin_of(planned))
        return True

    def queue_seen(self, ranks: Ranks, visible_before_ns: int) -> None:
        """Queue the hand-overs that the scheduler sees by now; where the plan that comes next would begin their loads
        for certain, they begin."""
        unseen = self.unseen
        while unseen and unseen[0].ready_ns < visible_before_ns:
            seq = unseen.popleft()
            if ranks.load_beside(seq, 0):
                ranks.begun_loads.append(seq)
            else:
                ranks.add(seq)

    def take_unseen(self, ranks: Ranks, run: OneStep | StepRun, now_ns: int, may_be_cut: bool) -> None:
        """`run` begins, of which one step at least was planned before these came."""
        if isinstance(run, OneStep):
            return
        for seq in self.unseen:
            if not self.take(seq, ranks, run, now_ns, may_be_cut):
                ranks.add(seq)
                run.end_before_next_begin(seq.ready_ns)
        self.unseen.clear()
