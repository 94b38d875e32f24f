"""The decoding requests of an instance: how many, how long their contexts are, which KV is left, and who ends when.

A request's context grows by a constant per step, so a rank's is base + growth x step and needs no update as steps pass.
"""

import heapq

import numpy as np

from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.scheduler import Rank, Sequence


class DecodeBatch:
    """`requests`, `growth`, `held` (ranks,): decoding requests, tokens that they add per step, and KV tokens of prompts
    in prefill or hand-over. `step`: lockstep steps so far; `running`: decoding requests of all ranks."""

    def __init__(self, ranks: list[Rank], kv_tokens: int, acceptance: Acceptance) -> None:
        n = len(ranks)
        self.step = 0
        self.running = 0
        self.requests, self.growth, self.held = np.zeros(n), np.zeros(n), np.zeros(n)
        self._ranks, self._kv_tokens, self._acceptance = ranks, kv_tokens, acceptance
        self._base = np.zeros(n)
        self._ends: list[tuple[int, int, Sequence]] = []
        self._started = 0

    def start(self, seq: Sequence, tokens: int, context: int) -> None:
        """`seq` decodes `tokens` further tokens from the next step on, from a context of `context`."""
        steps = self._acceptance.steps(seq.request.id, tokens)
        r = seq.rank
        seq.start_step, seq.finish_step = self.step, self.step + steps
        seq.start_context, seq.growth = context, tokens / steps
        seq.generated_tokens = seq.request.output_tokens - tokens
        self._ranks[r].decoding[seq] = None
        self.running += 1
        self.requests[r] += 1
        self.growth[r] += seq.growth
        self._base[r] += context - seq.growth * seq.start_step
        self._started += 1
        heapq.heappush(self._ends, (seq.finish_step, self._started, seq))

    def stop(self, seq: Sequence) -> float:
        """Take `seq` out; its context by now, tokens."""
        r = seq.rank
        del self._ranks[r].decoding[seq]
        self.running -= 1
        self.requests[r] -= 1
        self.growth[r] -= seq.growth
        self._base[r] -= seq.start_context - seq.growth * seq.start_step
        if not self.requests[r]:  # no rounding residue
            self.growth[r] = self._base[r] = 0.0
        seq.finish_step = -1
        return seq.start_context + seq.growth * (self.step - seq.start_step)

    def pop_ended(self) -> Sequence | None:
        """A request whose last step has passed; it is still to be stopped. None if there is none."""
        while self._ends and self._ends[0][0] <= self.step:
            seq = heapq.heappop(self._ends)[2]
            if seq.finish_step == self.step:
                return seq
        return None

    def steps_to_next_end(self) -> int:
        """Steps until some request ends; at least one must be decoding."""
        while self._ends[0][2].finish_step != self._ends[0][0]:  # preempted since
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def contexts(self) -> np.ndarray:
        """Sum of contexts (ranks,), tokens."""
        return self._base + self.growth * self.step

    def room(self, r: int, step: int) -> float:
        """KV tokens of rank `r` that no request holds after `step` steps, if nothing else changes."""
        return float(self._kv_tokens - self.held[r] - self._base[r] - self.growth[r] * step)

    def steps_with_room(self, steps: int) -> int:
        """At most `steps`, fewer where KV runs out before; 0 where it does in the next step."""
        room = self._kv_tokens - self.held - self.contexts()
        if (room < self.growth * steps).any():
            return int(np.floor(room / np.maximum(self.growth, 1e-12)).min())
        return steps

    def ranks_short_of_room(self) -> list[int]:
        """Ranks whose next step finds no KV."""
        short = self.contexts() + self.growth + self.held > self._kv_tokens
        return np.flatnonzero(short).tolist() if short.any() else []
