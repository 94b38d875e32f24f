"""The front end of an instance: API server processes that hand on tokens and take in requests."""

from rackplan.simulator.request import NS_PER_MS
from rackplan.simulator.step_run import OneStep, StepRun

TURNS = 4
"""Turns of the server's event loop that a request needs before the engine has it. Chosen among 1 to 16 on one served
run with a step log (calibration/served_log.py); each turn waits for the delivery under way."""


class FrontEnd:
    """Works `token_ms` on each token of a delivery, and `turn_ms` on each of the TURNS of a request, which wait while
    it works on tokens and on the turns of others: first come, first served, so that of many requests at once each has
    its first turn before any has its second. The ranks of an instance have a process each and share its requests
    evenly. Tokens do not wait for turns.

    It works on the outputs of `chunk` requests of a rank in one go; a turn that is ready waits for the chunk under way
    and no longer. A delivery is handed on as a whole, behind its last chunk.

    Tokens that come while it is behind go out with those before them, as vLLM merges what a stream has not sent: so it
    is never behind by more than one delivery.
    """

    __slots__ = ("_apart_ns", "_before_ns", "_chunk_ns", "_free_ns", "_run", "_token_ns", "_work_ns", "turn_ns")

    def __init__(self, token_ms: float, turn_ms: float, ranks: int, chunk: int) -> None:
        self._token_ns = token_ms * NS_PER_MS / ranks
        self.turn_ns = round(turn_ms * NS_PER_MS)
        self._apart_ns = self.turn_ns // ranks  # one turn behind another
        self._chunk_ns = max(1, self.work_ns(chunk * ranks))
        self._before_ns = self._work_ns = self._free_ns = 0
        self._run: OneStep | StepRun | None = None

    def work_ns(self, requests: int) -> int:
        """What a delivery of one token each takes."""
        return round(self._token_ns * requests)

    def passing(self, run: OneStep | StepRun, requests: int) -> None:
        """Steps begin, each with a delivery of one token of `requests`: of the step before it."""
        if self._run:
            self._before_ns = self._run.last_delivery_ns(self._run.end_ns, self._before_ns)
        self._run, self._work_ns = run, self.work_ns(requests)

    def turn_done_ns(self, now_ns: int) -> int:
        """How long from now a turn of a request takes that is ready now; it is under way from here on."""
        begin_ns = now_ns if now_ns > self._free_ns else self._free_ns
        if self._run is not None:
            delivered_ns = self._run.last_delivery_ns(now_ns, self._before_ns)
            worked_ns = self._work_ns
            if worked_ns > self._chunk_ns:
                chunks = (begin_ns - delivered_ns) // self._chunk_ns + 1
                worked_ns = min(worked_ns, chunks * self._chunk_ns)
            if delivered_ns + worked_ns > begin_ns:
                begin_ns = delivered_ns + worked_ns
        self._free_ns = begin_ns + self._apart_ns
        return begin_ns + self.turn_ns - now_ns
