"""A session tree: an agent's turns, the sub-agents that they spawn, and the time that it takes to play. Data only."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

MAX_DELAY_S = 300.0
# Where a lane stands at its start depends on how long requests took before; nothing later depends on these.
NOMINAL_TTFT_S, NOMINAL_TPOT_S = 1.0, 0.01


class Turn(NamedTuple):
    """One request of a stream; a tuple, because a corpus holds hundreds of thousands.

    `reuse_tokens`: leading tokens of the input that the stream's previous turn holds; in a spawned stream's first turn,
    those that an earlier stream of the tree holds; where the stream has `lines`, those that the turn's line holds.
    `delay_s`: think or tool time between the end of the previous turn
    (a first turn: of the turn that spawned the stream) and this one, as recorded, uncapped.
    """

    input_tokens: int
    output_tokens: int
    reuse_tokens: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Turns one after another on one growing context.

    `spawned_by`: (stream, turn) in the tree whose end starts this one; None for the first. `joined`: the spawning
    stream's next turn waits for the end of this one, and of the streams that are joined to it. `lines`: of each turn,
    the line of KV in the tree that it goes on and the one that this begins like (prefix_lines.py), as a record has
    them; None where all turns go on one.
    """

    kind: Literal["main", "sub"]
    turns: tuple[Turn, ...]
    spawned_by: tuple[int, int] | None = None
    joined: bool = False
    lines: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class SessionTree:
    """Stream 0 is the main one; every other is spawned by a turn of a stream before it."""

    streams: tuple[Stream, ...]

    @cached_property
    def spawned(self) -> dict[int, dict[int, list[int]]]:
        """Streams by the stream, then by its turn, that starts them."""
        by_turn: dict[int, dict[int, list[int]]] = {}
        for index, stream in enumerate(self.streams):
            if stream.spawned_by is not None:
                parent, turn = stream.spawned_by
                by_turn.setdefault(parent, {}).setdefault(turn, []).append(index)
        return by_turn

    @cached_property
    def turn_ends_s(self) -> list[np.ndarray]:
        """By stream, when its turns end (turns,): delays capped, joins waited for, requests of nominal time."""
        ends: list[np.ndarray] = [np.empty(0)] * len(self.streams)

        def play(index: int, start_s: float) -> float:
            now_s, times, spawns = start_s, [], self.spawned.get(index, {})
            free_s = start_s  # when the joined streams that were spawned have ended
            for turn_index, turn in enumerate(self.streams[index].turns):
                now_s = max(free_s, now_s + min(turn.delay_s, MAX_DELAY_S)) + service_s(turn)
                times.append(now_s)
                for child in spawns.get(turn_index, ()):
                    child_end_s = play(child, now_s)
                    if self.streams[child].joined:
                        free_s = max(free_s, child_end_s)
            ends[index] = np.array(times)
            return max(now_s, free_s)

        play(0, 0.0)
        return ends

    @cached_property
    def spans_s(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends) of the streams on the times of `turn_ends_s`."""
        ends = self.turn_ends_s
        spawns = [s.spawned_by for s in self.streams]
        starts = [float(ends[s[0]][s[1]]) if s else 0.0 for s in spawns]
        return np.array(starts), np.array([e[-1] for e in ends])

    @property
    def requests(self) -> int:
        return sum(len(s.turns) for s in self.streams)


def service_s(turn: Turn) -> float:
    """Nominal time of a request."""
    return NOMINAL_TTFT_S + NOMINAL_TPOT_S * turn.output_tokens
