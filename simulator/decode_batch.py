"""The requests that an instance runs: how many a rank has, how long their contexts are, which KV is left, and who ends
when.

A request's context grows by a constant per step, so a rank's is base + growth x step and needs no update as steps pass.
Numbers are kept by rank in cells that are read one by one where one rank changes and as vectors where all count.
"""

import heapq
import math
from array import array

import numpy as np

from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.rank import Rank
from rackplan.simulator.sequence import Sequence

SPARE_TOKENS = 1.0
"""By which a bound on KV room is kept clear of rounding."""


def _cells(n: int) -> tuple[array, np.ndarray]:
    """(n,) zeros, as numbers and as the vector that they are."""
    cells = array("d", bytes(8 * n))
    return cells, np.frombuffer(cells)


class DecodeBatch:
    """`requests`, `growth`, `held` (ranks,): decoding requests, tokens that they add per step, and KV tokens of prompts
    in prefill or hand-over. `step`: lockstep steps so far; `running`: decoding requests of all ranks. `occupants`
    (ranks,): requests that decode or are in prefill; `idle_ranks`: ranks without any. `acceptance`: steps of a request.
    `roomy_until`: no rank runs out of KV up to this step, and maybe none later.
    """

    def __init__(self, ranks: list[Rank], kv_tokens: int, acceptance: Acceptance) -> None:
        n = len(ranks)
        self.step = 0
        self.running = 0
        self.occupants, self.idle_ranks = [0] * n, n
        self.requests, self.request_vector = _cells(n)
        self.growth, self.growth_vector = _cells(n)
        self.held, self._held_vector = _cells(n)
        self._base, self._base_vector = _cells(n)
        self._ranks, self._kv_tokens, self.acceptance = ranks, kv_tokens, acceptance
        self._ends: list[tuple[int, int, Sequence]] = []
        self._started = 0
        self.roomy_until = 2**62

    def enter(self, r: int, requests: int) -> None:
        """`requests` more are on rank `r`."""
        if not self.occupants[r]:
            self.idle_ranks -= 1
        self.occupants[r] += requests

    def leave(self, r: int) -> None:
        """One request less is on rank `r`."""
        self.occupants[r] -= 1
        if not self.occupants[r]:
            self.idle_ranks += 1

    def hold(self, r: int, tokens: int) -> None:
        """`tokens` of KV are taken by a prompt in prefill or hand-over."""
        self.held[r] += tokens
        if self.growth[r]:
            self._bound_room(r)

    def start(self, seq: Sequence, tokens: int, context: int) -> None:
        """`seq`, which has entered, decodes `tokens` further tokens from the next step on, from a context of `context`.
        """
        steps = self.acceptance.steps(seq.request.id, tokens)
        r, step = seq.rank, self.step
        seq.start_step = step
        seq.finish_step = finish = step + steps
        seq.start_context, seq.done_tokens = context, 0.0
        seq.growth = growth = tokens / steps
        seq.generated_tokens = seq.request.output_tokens - tokens
        if seq.preemptions:  # the end that it was to have before may be at the same step
            self._ends = [end for end in self._ends if end[2] is not seq]
            heapq.heapify(self._ends)
        self._ranks[r].decoding[seq] = None
        self.running += 1
        self.requests[r] += 1
        self.growth[r] += growth
        self._base[r] += context - growth * step
        self._bound_room(r)
        self._started += 1
        heapq.heappush(self._ends, (finish, self._started, seq))

    def stop(self, seq: Sequence) -> float:
        """Take `seq` out; its context by now, tokens."""
        r = seq.rank
        del self._ranks[r].decoding[seq]
        self.running -= 1
        self.leave(r)
        self.requests[r] -= 1
        self.growth[r] -= seq.growth
        self._base[r] -= seq.start_context - seq.growth * seq.start_step
        if not self.requests[r]:  # no rounding residue
            self.growth[r] = self._base[r] = 0.0
        seq.finish_step = -1
        return seq.start_context + seq.growth * (self.step - seq.start_step)

    def change_acceptance(self, acceptance: Acceptance) -> None:
        """From the next step on steps yield as `acceptance` says. A request keeps the share of its way that it has
        gone, so where it stands does not depend on how often this changes."""
        self.acceptance = acceptance
        for r, requests in enumerate(self.requests):
            if requests:
                self.growth[r] = self._base[r] = 0.0
        running = sorted([(order, seq) for finish, order, seq in self._ends if seq.finish_step == finish])
        for _, seq in running:
            self._go_on(seq)
        self._ends = [(seq.finish_step, order, seq) for order, seq in running]
        heapq.heapify(self._ends)
        self.roomy_until = self.step

    def _go_on(self, seq: Sequence) -> None:
        step, whole = self.step, seq.request.output_tokens - seq.generated_tokens
        new = seq.growth * (step - seq.start_step)
        seq.done_tokens += new
        seq.start_context += new
        left = whole - seq.done_tokens
        steps = max(1, math.ceil(left * self.acceptance.steps(seq.request.id, whole) / whole - 1e-6))
        seq.start_step, seq.finish_step, seq.growth = step, step + steps, left / steps
        self.growth[seq.rank] += seq.growth
        self._base[seq.rank] += seq.start_context - seq.growth * step

    def pop_ended(self) -> list[Sequence]:
        """Requests whose last step has passed, in order of their start; they are still to be stopped."""
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self.step:
            seq = heapq.heappop(ends)[2]
            if seq.finish_step == self.step:
                ended.append(seq)
        return ended

    def steps_to_next_end(self) -> int:
        """Steps until some request ends; at least one must be decoding."""
        while self._ends[0][2].finish_step != self._ends[0][0]:  # preempted since
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def context(self, r: int) -> float:
        """Sum of the contexts of rank `r`, tokens."""
        return self._base[r] + self.growth[r] * self.step

    def contexts(self) -> np.ndarray:
        """Sum of contexts (ranks,), tokens."""
        return self._base_vector + self.growth_vector * self.step

    def room(self, r: int, step: int) -> float:
        """KV tokens of rank `r` that no request needs in the step that follows `step` steps, if nothing else changes.
        """
        return self._kv_tokens - self.held[r] - self._base[r] - self.growth[r] * step

    def steps_with_room(self, steps: int) -> int:
        """At most `steps`, fewer where the one after them finds no KV; 0 where the next one does."""
        if self.step + steps <= self.roomy_until:
            return steps
        room = self._kv_tokens - self._held_vector - self.contexts()
        if (room < self.growth_vector * steps).any():
            return 1 + int(np.floor(room / np.maximum(self.growth_vector, 1e-12)).min())
        return steps

    def ranks_short_of_room(self) -> list[int]:
        """Ranks whose next step finds no KV."""
        short = self.contexts() + self._held_vector > self._kv_tokens
        self.roomy_until = 2**62
        for r, requests in enumerate(self.requests):
            if requests:
                self._bound_room(r)
        return np.flatnonzero(short).tolist() if short.any() else []

    def _bound_room(self, r: int) -> None:
        """Keep `roomy_until` true of rank `r`, which decodes and holds or adds more than before. What frees KV only
        puts it off."""
        until = self.step + int((self.room(r, self.step) - SPARE_TOKENS) / self.growth[r])
        if until < self.roomy_until:
            self.roomy_until = until
