"""Names for the lines of KV of a recorded prefix tree, so that a cache with one chain a name hits what was recorded.

A record says of each request with which earlier one it shares the longest prefix, and how many blocks. A name stands
for the prompt of the last request that took it. A request takes the name of its stream where it goes on from there; but
where a later one still needs more of that prompt than this one shares, it gets a name of its own that begins like the
other, and the prompt stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Recorded(NamedTuple):
    """A request of a record, in its order: it shares its first `shared` blocks with request `ref` (-1: with none).
    `is_sent`: False where it is left out of the replay."""

    stream: str
    ref: int
    shared: int
    is_sent: bool = True


class Line(NamedTuple):
    """`name` of the line that a request goes on; `like`: the line that a new name begins like, -1 for none; `shared`:
    blocks that earlier requests of the replay have."""

    name: int
    like: int
    shared: int


@dataclass(slots=True)
class _Tree:
    """Whose each block was first: request i's own blocks are those from `start[i]` on, behind blocks of `parent[i]`."""

    parent: list[int]
    start: list[int]

    def owner(self, i: int, block: int) -> int:
        """Whose is the last of the first `block` blocks of request `i`; -1 for none of them."""
        while i >= 0 and block <= self.start[i]:
            i = self.parent[i]
        return i if block else -1

    def add(self, i: int, block: int) -> None:
        """A further request, which shares its first `block` blocks with request `i`."""
        self.parent.append(self.owner(i, block))
        self.start.append(block)


def prefix_lines(record: Sequence[Recorded]) -> list[Line | None]:
    """The line of each request, None for those that are left out. Costs O(1) a request where trees branch little."""
    tree = _sent_tree(record)
    needs: list[list[tuple[int, int]]] = [[] for _ in record]  # of each request's own blocks: (by whom, how far)
    for i, row in enumerate(record):
        if row.is_sent and tree.parent[i] >= 0:
            needs[tree.parent[i]].append((i, tree.start[i]))
    name_of, place = [-1] * len(record), [0] * len(record)  # each request's name, and its place in that line
    lines: list[list[int]] = []  # by name: the requests whose own blocks it has, the deepest last
    out: list[Line | None] = []
    for i, row in enumerate(record):
        if not row.is_sent:
            out.append(None)
            continue
        parent, shared, like = tree.parent[i], tree.start[i], -1
        if parent >= 0:
            like = name_of[parent]
            line, at = lines[like], place[parent]
            if record[line[-1]].stream == row.stream and not any(
                who > i and depth > shared for owner in line[at:] for who, depth in needs[owner]
            ):
                line[at + 1 :] = [i]
                name_of[i], place[i] = like, at + 1
                out.append(Line(like, -1, shared))
                continue
        name_of[i] = len(lines)
        lines.append([i])
        out.append(Line(name_of[i], like, shared))
    return out


def _sent_tree(record: Sequence[Recorded]) -> _Tree:
    """The tree of the requests that are sent. Blocks of one left out are those of the first that shares them."""
    whole, tree = _Tree([], []), _Tree([], [])
    heirs: dict[int, tuple[int, int]] = {}  # of a request left out: who is sent and shares most of its own, how far
    for i, row in enumerate(record):
        whole.add(row.ref, row.shared if row.ref >= 0 else 0)
        owner, shared = whole.parent[i], whole.start[i]
        while row.is_sent and owner >= 0 and not record[owner].is_sent:
            heir, depth = heirs.get(owner, (-1, 0))
            if shared > depth:
                heirs[owner] = i, shared
            if heir >= 0:
                owner, shared = heir, min(shared, depth)
            else:
                owner, shared = whole.parent[owner], whole.start[owner]
        tree.add(owner, shared if owner >= 0 else 0)
    return tree
