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
        self.held = [0.0] * n
        self._base, self._base_vector = _cells(n)
        self._step_cell = np.zeros(())
        self._ranks, self._kv_tokens, self.acceptance = ranks, float(kv_tokens), acceptance
        self._ends: dict[int, list[Sequence]] = {}  # by their last step, in order of start
        self._end_steps: list[int] = []  # a heap
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

    def hold_if_room(self, r: int, tokens: int, step: int) -> bool:
        """As `hold`, if rank `r` then has KV for the step that follows `step` steps; else False."""
        growth = self.growth[r]
        room = self._kv_tokens - self.held[r] - self._base[r] - growth * step - tokens  # as `room`, without its call
        if room < 0:
            return False
        self.held[r] += tokens
        if growth:
            until = step + int((room - SPARE_TOKENS) / growth)
            if until < self.roomy_until:
                self.roomy_until = until
        return True

    def start(self, seq: Sequence, tokens: int, context: float) -> None:
        """`seq`, which has entered, decodes `tokens` further tokens from the next step on, from a context of `context`.
        """
        steps = self.acceptance.steps(seq.request.id, tokens)
        r, step = seq.rank, self.step
        seq.start_step = step
        seq.finish_step = finish = step + steps
        seq.start_context, seq.done_tokens = float(context), 0.0
        seq.growth = growth = tokens / steps
        seq.generated_tokens = seq.request.output_tokens - tokens
        if seq.preemptions:  # the end that it was to have before may be at the same step
            for ends in self._ends.values():
                if seq in ends:
                    ends.remove(seq)
        self._ranks[r].decoding[seq] = None
        self.running += 1
        self.requests[r] += 1
        self.growth[r] += growth
        self._base[r] += context - growth * step
        self._bound_room(r)
        self._started += 1
        seq.start_place = self._started
        self._end_at(finish, seq)

    def _end_at(self, step: int, seq: Sequence) -> None:
        ends = self._ends.get(step)
        if ends is None:
            self._ends[step] = [seq]
            heapq.heappush(self._end_steps, step)
        else:
            ends.append(seq)

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
        running = [seq for finish, ends in self._ends.items() for seq in ends if seq.finish_step == finish]
        running.sort(key=lambda seq: seq.start_place)
        self._ends, self._end_steps = {}, []
        for seq in running:
            self._go_on(seq)
            self._end_at(seq.finish_step, seq)
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
        step, ended = self.step, []
        while self._end_steps and self._end_steps[0] <= step:
            for seq in self._ends.pop(heapq.heappop(self._end_steps)):
                if seq.finish_step == step:  # else it was preempted since
                    ended.append(seq)
        return ended

    def steps_to_next_end(self) -> int:
        """Steps until some request ends; at least one must be decoding."""
        while True:
            step = self._end_steps[0]
            for seq in self._ends[step]:
                if seq.finish_step == step:
                    return step - self.step
            del self._ends[heapq.heappop(self._end_steps)]  # all were preempted since

    def most_requests(self) -> float:
        """Decoding requests of the rank with most."""
        requests = self.request_vector
        return requests.item(requests.argmax())  # several times as fast as its maximum

    def context(self, r: int) -> float:
        """Sum of the contexts of rank `r`, tokens."""
        return self._base[r] + self.growth[r] * self.step

    def contexts(self) -> np.ndarray:
        """Sum of contexts (ranks,), tokens."""
        self._step_cell[()] = self.step  # numpy takes half as long to multiply with it as with a number
        contexts: np.ndarray = self.growth_vector * self._step_cell
        contexts += self._base_vector
        return contexts

    def room(self, r: int, step: int) -> float:
        """KV tokens of rank `r` that no request needs in the step that follows `step` steps, if nothing else changes.
        """
        return self._kv_tokens - self.held[r] - self._base[r] - self.growth[r] * step

    def steps_with_room(self, steps: int) -> int:
        """At most `steps`, fewer where the one after them finds no KV; 0 where the next one does."""
        if self.step + steps <= self.roomy_until:
            return steps
        room = self._kv_tokens - np.array(self.held) - self.contexts()
        if (room < self.growth_vector * steps).any():
            return 1 + int(np.floor(room / np.maximum(self.growth_vector, 1e-12)).min())
        return steps

    def ranks_short_of_room(self) -> list[int]:
        """Ranks whose next step finds no KV."""
        short = self.contexts() + np.array(self.held) > self._kv_tokens
        self.roomy_until = 2**62
        for r, requests in enumerate(self.requests):
            if requests:
                self._bound_room(r)
        return np.flatnonzero(short).tolist() if short.any() else []

    def _bound_room(self, r: int) -> None:
        """Keep `roomy_until` true of rank `r`, which decodes and holds or adds more than before. What frees KV only
        puts it off."""
        step, growth = self.step, self.growth[r]
        room = self._kv_tokens - self.held[r] - self._base[r] - growth * step  # as `room`, without its call
        until = step + int((room - SPARE_TOKENS) / growth)
        if until < self.roomy_until:
            self.roomy_until = until
