"""The closed loop that replays session trees.

Replay rules, after the AgentX benchmark: concurrency is the number of live trees (lanes); a lane that ends its tree
takes the next one, from the start; sub-agents cost no concurrency. The time in which a tree has nothing in flight is
at most 300 s: where it would be longer, all its timers move forward. A lane's start is drawn by the time of its tree's
main stream, on which each delay is at most 300 s; each stream in play there is primed once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from rackplan.simulator.arrivals import check_load, gamma_times
from rackplan.simulator.load import Load, Source
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.session_tree import MAX_DELAY_S, SessionTree, Stream, service_s
from rackplan.simulator.streams import Streams

# Lanes start between these shares of their tree's main stream, by time.
START_SHARES = (0.25, 0.75)
MAX_IDLE_NS = int(MAX_DELAY_S * NS_PER_S)


class _Run:
    """Stream `index` of a lane's tree in play. `turn`: the next to send; `like`: the session that its first turn begins
    like; `spawns`: streams by the turn that starts them; `joins`: the streams it waits for; `awaited`: its parent waits
    for it; `ready_ns`: None if busy."""

    __slots__ = (
        "awaited",
        "index",
        "joins",
        "lane",
        "like",
        "ready_ns",
        "session",
        "spawns",
        "stream",
        "turn",
        "turns",
    )

    def __init__(self, lane: "_Lane", index: int, session: int, turn: int, like: int = -1) -> None:
        self.lane, self.index, self.session, self.turn, self.like = lane, index, session, turn, like
        self.stream: Stream = lane.tree.streams[index]
        self.turns = self.stream.turns
        self.spawns = lane.tree.spawned.get(index)
        self.joins = 0
        self.awaited = False
        self.ready_ns: int | None = None


class _Lane:
    """One live tree: its streams in play by index, the sessions of sub-agents that have ended, and those of lines.

    `in_flight`: requests that were sent and have not ended; `held`: streams whose turn is so far off that it may move.
    """

    __slots__ = ("held", "idle_sessions", "in_flight", "runs", "sessions", "tree")

    def __init__(self, tree: SessionTree) -> None:
        self.tree = tree
        self.runs: dict[int, _Run] = {}
        self.idle_sessions: list[int] = []
        self.sessions: dict[int, int] = {}
        self.in_flight = 0
        self.held: list[_Run] = []


class SessionSource:
    """Plays trees. With a concurrency: that many lanes from mid-tree on, each followed by the next tree of `trees`,
    over and over; with a rate: trees arrive at rate / mean requests of a tree, each from its start.

    Nothing is sent at or after `duration_s`. Costs O(1) per request. A session is a line of KV: streams in play never
    share one, but a new sub-agent takes over that of an ended one of its tree, whose leading tokens (instructions, tool
    descriptions) are its own too, and begins like a live one where none has ended. Only a tree's first finds neither.
    A recorded tree says so itself (`Stream.lines`).
    """

    def __init__(self, trees: Sequence[SessionTree], load: Load, duration_s: float, streams: Streams) -> None:
        self._trees = trees
        self._load = load
        self._duration_s = duration_s
        self._streams = streams
        self._end_ns = duration_s * NS_PER_S
        self._next_tree = 0
        self._request_ids, self._session_ids = count(), count()
        self._in_flight: dict[int, _Run] = {}  # by request
        self._primed: dict[int, int] = {}  # tokens by session
        self._first: list[Request] = []
        for _ in range(load.concurrency or 0):
            self._start_midway(streams["lanes"])
        self._first.sort(key=lambda r: (r.arrival_ns, r.id))

    def arrivals(self) -> Iterator[Request]:
        yield from self._first
        rate_req_s = self._load.rate_req_s
        if rate_req_s is not None:
            trees_per_s = rate_req_s * len(self._trees) / sum(t.requests for t in self._trees)
            rng = self._streams["arrivals"]
            for time_ns in gamma_times(trees_per_s, self._load.cv, self._duration_s, rng):
                yield from self._start_tree(time_ns)

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        run = self._in_flight.pop(request.id)
        lane = run.lane
        lane.in_flight -= 1
        started: list[Request] = []
        if run.spawns is not None:
            for child in run.spawns.get(run.turn, ()):
                started += self._start_stream(lane, child, now_ns)
                if lane.tree.streams[child].joined:
                    self._await(lane, run.index, child)
        run.turn += 1
        out = self._go_on(run, now_ns)
        if started:
            out = started + out
        return out + self._send_held(lane, now_ns) if lane.held else out

    def primed(self) -> list[tuple[int, int]]:
        return list(self._primed.items())

    def _go_on(self, run: _Run, now_ns: int) -> list[Request]:
        """What follows in a lane when nothing of stream `run` is in flight: its next turn, its end, a wait."""
        turns, ready_ns = run.turns, run.ready_ns
        if run.turn >= len(turns):
            return [] if run.joins else self._end_stream(run, now_ns)
        if ready_ns is None:
            ready_ns = run.ready_ns = now_ns + int(turns[run.turn].delay_s * NS_PER_S)
        if run.joins:
            return []
        if ready_ns - now_ns > MAX_IDLE_NS:
            run.lane.held.append(run)
            return []
        return self._send(run, ready_ns if ready_ns > now_ns else now_ns)

    def _end_stream(self, run: _Run, now_ns: int) -> list[Request]:
        lane, stream = run.lane, run.stream
        del lane.runs[run.index]
        if stream.kind == "sub" and not stream.lines:
            lane.idle_sessions.append(run.session)
        if run.awaited and stream.spawned_by is not None:
            parent = lane.runs[stream.spawned_by[0]]
            parent.joins -= 1
            return self._go_on(parent, now_ns)
        if lane.runs or self._load.concurrency is None:
            return []
        return self._start_tree(now_ns)

    def _start_tree(self, now_ns: int) -> list[Request]:
        if now_ns >= self._end_ns:
            return []
        lane = self._take_lane()
        return self._start_stream(lane, 0, now_ns) + self._send_held(lane, now_ns)

    def _take_lane(self) -> _Lane:
        tree = self._trees[self._next_tree % len(self._trees)]
        self._next_tree += 1
        return _Lane(tree)

    def _start_stream(self, lane: _Lane, index: int, now_ns: int) -> list[Request]:
        idle = lane.idle_sessions
        if lane.tree.streams[index].lines:
            run = _Run(lane, index, -1, 0)
        elif idle:
            run = _Run(lane, index, idle.pop(), 0)
        else:
            like = next((r.session for r in lane.runs.values() if r.stream.kind == "sub"), -1)
            run = _Run(lane, index, next(self._session_ids), 0, like)
        lane.runs[index] = run
        return self._go_on(run, now_ns)

    def _send(self, run: _Run, at_ns: int) -> list[Request]:
        if at_ns >= self._end_ns:
            return []
        run.ready_ns = None
        lane, turn, lines = run.lane, run.turn, run.stream.lines
        input_tokens, output_tokens, reuse_tokens, _ = run.turns[turn]
        session, like = run.session, -1 if turn else run.like
        if lines:
            session, like = (self._session_of(lane, line) for line in lines[turn])
        request_id = next(self._request_ids)
        self._in_flight[request_id] = run
        lane.in_flight += 1
        return [Request(request_id, at_ns, input_tokens, output_tokens, session, reuse_tokens, like)]

    def _send_held(self, lane: _Lane, now_ns: int) -> list[Request]:
        """Held turns that are near by now. Where nothing of the tree is in flight, all its timers move forward until
        the first is. (What outlasts MAX_IDLE_NS in flight may keep a held turn waiting for its end.)"""
        held, lane.held = lane.held, []
        first_ns = min((run.ready_ns or 0 for run in held), default=0)
        early_ns = first_ns - now_ns - MAX_IDLE_NS
        if early_ns > 0 and not lane.in_flight:
            for run in lane.runs.values():
                if run.ready_ns is not None:
                    run.ready_ns -= early_ns
        return [request for run in held for request in self._go_on(run, now_ns)]

    def _session_of(self, lane: _Lane, line: int) -> int:
        """The session that stands for a line of a recorded tree in this lane; -1 for none."""
        if line < 0:
            return -1
        if line not in lane.sessions:
            lane.sessions[line] = next(self._session_ids)
        return lane.sessions[line]

    def _start_midway(self, rng: np.random.Generator) -> None:
        """Put a lane's tree where a uniform point of its main stream's time finds it, with every stream as it is then.

        Requests in flight at that point count as sent: their streams go on with the turn after.
        """
        lane = self._take_lane()
        ends_s = lane.tree.turn_ends_s
        at_s = float(rng.uniform(*START_SHARES)) * float(ends_s[0][-1])
        starts_s, last_s = lane.tree.spans_s
        for index in ((starts_s <= at_s) & (last_s > at_s)).nonzero()[0].tolist():
            stream = lane.tree.streams[index]
            turn = int(ends_s[index].searchsorted(at_s, side="right"))
            left_s = float(ends_s[index][min(turn, len(stream.turns) - 1)]) - at_s
            if turn < len(stream.turns) and left_s < service_s(stream.turns[turn]):
                turn += 1
            if turn < len(stream.turns):
                self._resume(lane, index, turn, at_s)
        if not lane.runs:  # all was in flight
            self._resume(lane, 0, len(lane.tree.streams[0].turns) - 1, at_s)
        for index, run in lane.runs.items():
            for child in (run.spawns or {}).get(run.turn - 1, ()):
                if child in lane.runs and lane.tree.streams[child].joined:
                    self._await(lane, index, child)
        for run in list(lane.runs.values()):
            self._first += self._go_on(run, 0)
        self._first += self._send_held(lane, 0)

    def _resume(self, lane: _Lane, index: int, turn: int, at_s: float) -> None:
        """Stream `index` is about to send `turn`."""
        stream = lane.tree.streams[index]
        run = lane.runs[index] = _Run(lane, index, -1 if stream.lines else next(self._session_ids), turn)
        turns = stream.turns
        sent_s = float(lane.tree.turn_ends_s[index][turn]) - service_s(turns[turn])
        run.ready_ns = max(0, int((sent_s - at_s) * NS_PER_S))
        if not turn:
            return
        held = turns[turn - 1].input_tokens + turns[turn - 1].output_tokens
        if not stream.lines:
            self._primed[run.session] = held
            return
        line, like = stream.lines[turn]
        goes_on = stream.lines[turn - 1][0] == line
        self._prime(lane, line if like < 0 else like, held if goes_on else turns[turn].reuse_tokens)

    def _prime(self, lane: _Lane, line: int, tokens: int) -> None:
        """A line of a recorded tree holds `tokens` before time 0."""
        session = self._session_of(lane, line)
        if tokens:
            self._primed[session] = max(tokens, self._primed.get(session, 0))

    def _await(self, lane: _Lane, parent: int, child: int) -> None:
        lane.runs[parent].joins += 1
        lane.runs[child].awaited = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWorkload:
    """Trees to play, of a fixed `corpus`: a seed draws where its lanes start. `notes`: what its reader left out."""

    name: str
    corpus: Callable[[], Sequence[SessionTree]]
    notes: tuple[str, ...] = ()

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        """Closed loop of `load.concurrency` trees, or trees arriving so that requests come at `load.rate_req_s`."""
        check_load(load, self.name)
        return SessionSource(self.corpus(), load, duration_s, streams)
