"""What a rank's prefix cache holds, by session: a tree of chains in stretches of blocks, least recently used out first.

vLLM hashes a block with all before it, so blocks form a tree, and those that no running request holds are evicted in
the order in which they were last freed, a request's deepest first. A stretch is a run of blocks that were freed
together and have one way on: it stands for them at a cost that does not grow with the context. Blocks are there from
the step that computes them on, so a request hits what another one, still running, has computed; what both hold takes
KV once.
"""

from collections import OrderedDict
from typing import Protocol

from rackplan.simulator.request import Request

BLOCK_TOKENS = 16
"""vLLM's KV block; hits are whole blocks."""


class PrefixCache(Protocol):
    """The prefixes in a rank's KV pool. `tokens`: those that no running request holds, which may be evicted."""

    tokens: int

    def match(self, request: Request) -> int:
        """Leading tokens of `request` that are in KV. Changes nothing."""
        ...

    def held_tokens(self, request: Request, cached_tokens: int) -> int:
        """Of the first `cached_tokens` of `request`, those that running requests hold. Changes nothing."""
        ...

    def begin(self, request: Request, cached_tokens: int) -> int:
        """`request` starts with its first `cached_tokens` from here, and holds them until `end`; how many of them other
        running requests hold."""
        ...

    def grow(self, request: Request, tokens: int) -> None:
        """The first `tokens` of the running `request` may be hit from now on."""
        ...

    def end(self, request: Request, tokens: int) -> int:
        """`request` runs no more and leaves its first `tokens`, 0 where its KV is given back; how many other running
        requests hold."""
        ...

    def evict_to(self, tokens: int) -> None:
        """Drop the least recently used until at most `tokens` are held."""
        ...


class _Stretch:
    """Blocks of the tokens [start, end) of a chain, behind those of `parent`.

    `refs`: running requests that hold them; `children`: stretches that begin at `end`; `is_open`: its request runs and
    computes more; `into`: where its chains go on once it is no stretch of its own any more.
    """

    __slots__ = ("children", "end", "into", "is_open", "parent", "refs", "start")

    def __init__(self, parent: "_Stretch | None", start: int, end: int, refs: int) -> None:
        self.parent, self.start, self.end, self.refs = parent, start, end, refs
        self.children = 0
        self.is_open = False
        self.into: _Stretch | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


_UNTIL_ITS_END = 2**62


class SessionCache:
    """One chain per session: its last turn's tokens. Requests without a session are not kept.

    A request's chain goes on where its `reuse_tokens` end, on the chain of its session or of its `prefix_session`.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._root = _Stretch(None, 0, 0, refs=1)
        self._chains: dict[int, tuple[_Stretch, int]] = {}  # the deepest stretch of a session, and its tokens
        self._own: dict[Request, _Stretch] = {}  # what a running request computes
        self._free: OrderedDict[_Stretch, None] = OrderedDict()

    def match(self, request: Request) -> int:
        return self._find(request)[1]

    def held_tokens(self, request: Request, cached_tokens: int) -> int:
        return _held_tokens(self._find(request)[0], cached_tokens)

    def begin(self, request: Request, cached_tokens: int) -> int:
        if request.session < 0:
            return 0
        found = self._find(request)[0]
        shared = _held_tokens(found, cached_tokens)
        node = self._cut(found, cached_tokens)
        own = self._own[request] = _Stretch(node, cached_tokens, cached_tokens, refs=1)
        own.is_open = True
        node.children += 1
        self._hold(node)
        self._chains[request.session] = own, _UNTIL_ITS_END
        self._restore(request, own)
        return shared

    def grow(self, request: Request, tokens: int) -> None:
        own = self._own.get(request)
        if own is not None:
            own.end = max(own.start, tokens // BLOCK_TOKENS * BLOCK_TOKENS)

    def end(self, request: Request, tokens: int) -> int:
        own = self._own.pop(request, None)
        if own is None:
            return 0
        own.end = max(own.start, tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        own.is_open = False
        self._chains[request.session] = own, own.end
        return self._release(own)

    def evict_to(self, tokens: int) -> None:
        tokens = max(0, tokens)
        while self.tokens > tokens:
            node = next(iter(self._free))  # without children: they were freed before it
            blocks = -((tokens - self.tokens) // BLOCK_TOKENS)
            dropped = min(node.tokens, blocks * BLOCK_TOKENS)
            self.tokens -= dropped
            node.end -= dropped
            if not node.tokens:
                del self._free[node]
                self._remove(node)

    def _find(self, request: Request) -> tuple[_Stretch, int]:
        """(stretch in whose chain they are, leading tokens of `request` that are there)."""
        node, length = self._chain(request.session)
        if request.prefix_session >= 0:
            other, more = self._chain(request.prefix_session)
            if more > length:
                node, length = other, more
        return node, min(length, request.reuse_tokens)

    def _chain(self, session: int) -> tuple[_Stretch, int]:
        """(deepest stretch, tokens) of what is left of a session's chain."""
        found = self._chains.get(session)
        if found is None:
            return self._root, 0
        node, tokens = found
        if node.into is not None:
            while node.into is not None:
                tokens = min(tokens, node.end)
                node = node.into
            self._chains[session] = node, tokens
        return node, min(tokens, node.end)

    def _cut(self, node: _Stretch, at: int) -> _Stretch:
        """The stretch of `node`'s chain that ends at `at`; the one that holds it is divided there."""
        while node.start >= at and node.parent is not None:
            node = node.parent
        if node.end <= at and not node.is_open:
            return node
        upper = _Stretch(node.parent, node.start, at, node.refs)
        upper.children = 1
        node.parent, node.start = upper, at
        if not upper.refs:
            self._free[upper] = None  # held at once
        return upper

    def _restore(self, request: Request, own: _Stretch) -> None:
        """Where the chain that `request` begins like has lost some of that, `request` computes it for both."""
        like = request.prefix_session
        runs = self._chains.get(like, (own, 0))[1] == _UNTIL_ITS_END
        if like >= 0 and not runs and self._chain(like)[1] < request.reuse_tokens:
            self._chains[like] = own, request.reuse_tokens

    def _hold(self, node: _Stretch) -> None:
        """A request more holds `node` and all before it."""
        while node.parent is not None:
            if not node.refs:
                del self._free[node]
                self.tokens -= node.tokens
            node.refs += 1
            node = node.parent

    def _release(self, node: _Stretch) -> int:
        """A request less holds `node` and all before it; the tokens that others still hold. What is free from now on
        and has one way on becomes one stretch."""
        held, below = 0, None
        while node.parent is not None:
            node.refs -= 1
            if node.refs:
                held = max(held, node.end)
            elif not node.tokens:
                self._remove(node)
            else:
                self.tokens += node.tokens
                if below is not None and node.children == 1:
                    below.start, below.parent, node.into = node.start, node.parent, below
                else:
                    self._free[node] = None
                    below = node
            node = node.parent
        return held

    @staticmethod
    def _remove(node: _Stretch) -> None:
        assert node.parent is not None
        node.into = node.parent
        node.parent.children -= 1


def _held_tokens(node: _Stretch, most: int) -> int:
    """Of the first `most` tokens of `node`'s chain, those that running requests hold."""
    while not node.refs:  # whoever holds a stretch holds all before it
        assert node.parent is not None
        node = node.parent
    return min(node.end, most)


def usable_hit(request: Request, cached_tokens: int, replay_tokens: int) -> int:
    """Tokens that need no prefill when `cached_tokens` are cached: whole blocks, never the last token, and less the
    tokens that the model recomputes after a hit (bounded replay)."""
    hit = min(cached_tokens, request.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return max(0, hit - replay_tokens)
