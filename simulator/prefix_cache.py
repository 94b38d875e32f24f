"""What a rank's prefix cache holds, by session: a tree of chains in stretches of blocks, least recently used out first.

vLLM hashes a block with all before it, so blocks form a tree, and those that no running request holds are evicted in
the order in which they were last freed, a request's deepest first. A stretch is a run of blocks that were freed
together and have one way on: it stands for them at a cost that does not grow with the context. Blocks are there from
the step that computes them on, so a request hits what another one, still running, has computed; what both hold takes
KV once. Blocks to which no session's chain leads any more can never be hit: they only wait to be evicted, and such
stretches become one where they are neighbours in that order. So there are as many as sessions, however many turns.
"""

from typing import Any, Protocol

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

    def begin(self, request: Request, cached_tokens: int, tokens: int = 0) -> int:
        """`request` starts with its first `cached_tokens` from here, and holds them until `end`; how many of them other
        running requests hold. Its first `tokens` may be hit from now on."""
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

    `refs`: running requests that hold them; `children`: stretches that begin at `end`; `sessions`: those whose chains
    end here; `is_open`: its request runs and computes more; `into`: where its chains go on once it is no stretch of its
    own any more. `older`, `newer`: its neighbours in the order of eviction, while no request holds it.
    """

    __slots__ = ("children", "end", "into", "is_open", "newer", "older", "parent", "refs", "sessions", "start")

    def __init__(self, parent: "_Stretch | None", start: int, end: int, refs: int) -> None:
        self.parent, self.refs = parent, refs  # of more than three at once Python would make a tuple
        self.start, self.end = start, end
        self.children = self.sessions = 0
        self.is_open = False
        self.into: _Stretch | None = None
        self.older: Any = None
        self.newer: Any = None

    def end_at(self, tokens: int) -> None:
        """The first `tokens` of its chain are computed: whole blocks of them count."""
        end = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self.end = end if end > self.start else self.start

    def put_before(self, newer: "_Stretch") -> None:
        """Stand before `newer` in the order of eviction."""
        older = newer.older
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def take_out(self) -> None:
        """Leave the order of eviction."""
        older, newer = self.older, self.newer
        older.newer, newer.older = newer, older
        self.older = self.newer = None  # else what is gone would keep alive what went before


_UNTIL_ITS_END = 2**62


class SessionCache:
    """One chain per session: its last turn's tokens. Requests without a session are not kept.

    A request's chain goes on where its `reuse_tokens` end, on the chain of its session or of its `prefix_session`.
    """

    def __init__(self) -> None:
        self.tokens = 0
        # The order of eviction is a ring: the root's `newer` is next to go, and what is freed stands before the root.
        self._root = root = _Stretch(None, 0, 0, refs=1)
        root.older = root.newer = root
        self._chains: dict[int, tuple[_Stretch, int]] = {}  # the deepest stretch of a session, and its tokens
        self._own: dict[Request, _Stretch] = {}  # what a running request computes
        self._matched: Request | None = None  # what was last looked for, if nothing has changed since
        self._matched_at = root

    def match(self, request: Request) -> int:
        self._matched_at, tokens = self._find(request)
        self._matched = request
        return tokens

    def held_tokens(self, request: Request, cached_tokens: int) -> int:
        return _held_tokens(self._find(request)[0], cached_tokens)

    def begin(self, request: Request, cached_tokens: int, tokens: int = 0) -> int:
        if request.session < 0:
            return 0
        found = self._matched_at if self._matched is request else self._find(request)[0]
        self._matched = None
        shared = _held_tokens(found, cached_tokens)
        node = self._cut(found, cached_tokens)
        end = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        own = self._own[request] = _Stretch(node, cached_tokens, end if end > cached_tokens else cached_tokens, 1)
        own.is_open = True
        node.children += 1
        self._hold(node)
        self._lead(request.session, own, _UNTIL_ITS_END)
        if request.prefix_session >= 0:
            self._restore(request, own)
        return shared

    def grow(self, request: Request, tokens: int) -> None:
        own = self._own.get(request)
        if own is not None:
            own.end_at(tokens)
            self._matched = None

    def end(self, request: Request, tokens: int) -> int:
        own = self._own.pop(request, None)
        if own is None:
            return 0
        self._matched = None
        own.end_at(tokens)
        own.is_open = False
        session, led = request.session, self._chains.get(request.session)
        if led is not None and led[0] is own:
            self._chains[session] = own, own.end
        else:
            self._lead(session, own, own.end)
        return self._release(own)

    def evict_to(self, tokens: int) -> None:
        tokens = max(0, tokens)
        self._matched = None
        while self.tokens > tokens:
            node: _Stretch = self._root.newer  # without children: they were freed before it
            blocks = -((tokens - self.tokens) // BLOCK_TOKENS)
            dropped = min(node.end - node.start, blocks * BLOCK_TOKENS)
            self.tokens -= dropped
            node.end -= dropped
            if node.end == node.start:
                node.take_out()
                if node.parent is not None:
                    self._remove(node, node.parent)

    def _find(self, request: Request) -> tuple[_Stretch, int]:
        """(stretch in whose chain they are, leading tokens of `request` that are there)."""
        node, length = self._chain(request.session)
        if request.prefix_session >= 0:
            other, more = self._chain(request.prefix_session)
            if more > length:
                node, length = other, more
        return node, length if length < request.reuse_tokens else request.reuse_tokens

    def _chain(self, session: int) -> tuple[_Stretch, int]:
        """(deepest stretch, tokens) of what is left of a session's chain."""
        found = self._chains.get(session)
        if found is None:
            return self._root, 0
        node, tokens = found
        into = node.into
        if into is not None:
            while into is not None:
                tokens = min(tokens, node.end)
                node, into = into, into.into
            self._chains[session] = node, tokens
        return node, tokens if tokens < node.end else node.end

    def _cut(self, node: _Stretch, at: int) -> _Stretch:
        """The stretch of `node`'s chain that ends at `at`, to be held at once; the one that has it is divided there."""
        while node.start >= at and node.parent is not None:
            node = node.parent
        if node.end <= at and not node.is_open:
            return node
        upper = _Stretch(node.parent, node.start, at, node.refs)
        upper.children = 1
        node.parent, node.start = upper, at
        return upper

    def _lead(self, session: int, node: _Stretch, tokens: int) -> None:
        """The chain of `session` is from now on the first `tokens` of that which ends with `node`."""
        before = self._chains.get(session)
        self._chains[session] = node, tokens
        if before is None or before[0] is not node:
            node.sessions += 1
            if before is not None:
                self._unlead(before[0])

    def _unlead(self, node: _Stretch) -> None:
        """A session's chain ends with `node` no more. What no chain leads to is cut off from the tree."""
        while node.into is not None:
            node = node.into
        node.sessions -= 1
        while not (node.sessions or node.children or node.refs):
            parent = node.parent
            assert parent is not None
            parent.children -= 1
            node.parent = None
            self._join_neighbours(node)
            node = parent

    def _join_neighbours(self, node: _Stretch) -> None:
        """Of stretches that are cut off one after the other is evicted: they may be one."""
        for other in (node.older, node.newer):
            if other.parent is None and other is not self._root:
                other.end += node.end - node.start
                node.take_out()
                node = other

    def _restore(self, request: Request, own: _Stretch) -> None:
        """Where the chain that `request` begins like has lost some of that, `request` computes it for both."""
        like = request.prefix_session
        runs = self._chains.get(like, (own, 0))[1] == _UNTIL_ITS_END
        if not runs and self._chain(like)[1] < request.reuse_tokens:
            self._lead(like, own, request.reuse_tokens)

    def _hold(self, node: _Stretch) -> None:
        """A request more holds `node` and all before it."""
        while node.parent is not None:
            if not node.refs:
                if node.newer is not None:  # else it has just been cut
                    node.take_out()
                self.tokens -= node.end - node.start
            node.refs += 1
            node = node.parent

    def _release(self, node: _Stretch) -> int:
        """A request less holds `node` and all before it; the tokens that others still hold. What is free from now on
        and has one way on becomes one stretch."""
        held, below = 0, None
        while (parent := node.parent) is not None:
            node.refs -= 1
            if node.refs:
                if node.end > held:
                    held = node.end
            elif node.end == node.start:
                self._remove(node, parent)
            else:
                self.tokens += node.end - node.start
                if below is not None and node.children == 1:
                    below.start, below.parent, node.into = node.start, parent, below
                    below.sessions += node.sessions
                else:
                    node.put_before(self._root)
                    below = node
            node = parent
        return held

    @staticmethod
    def _remove(node: _Stretch, parent: _Stretch) -> None:
        node.into = parent
        parent.children -= 1
        parent.sessions += node.sessions


def _held_tokens(node: _Stretch, most: int) -> int:
    """Of the first `most` tokens of `node`'s chain, those that running requests hold."""
    while not node.refs:  # whoever holds a stretch holds all before it
        assert node.parent is not None
        node = node.parent
    return node.end if node.end < most else most


def usable_hit(request: Request, cached_tokens: int, replay_tokens: int) -> int:
    """Tokens that need no prefill when `cached_tokens` are cached: whole blocks, never the last token, and less the
    tokens that the model recomputes after a hit (bounded replay)."""
    most = request.input_tokens - 1
    hit = (cached_tokens if cached_tokens < most else most) // BLOCK_TOKENS * BLOCK_TOKENS - replay_tokens
    return hit if hit > 0 else 0
