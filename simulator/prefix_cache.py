"""What a rank's prefix cache still holds, by session or by block, least recently used out first.

A session's blocks are one chain that vLLM frees from its tail, so one number per session (the length of the prefix that
is left) says the same as its blocks do, at a cost that does not grow with the context.
"""

from collections import OrderedDict
from typing import Protocol

from rackplan.simulator.request import Request

BLOCK_TOKENS = 16
"""vLLM's KV block; hits are whole blocks."""


class PrefixCache(Protocol):
    """The evictable part of a rank's KV pool: prefixes of requests that have ended."""

    tokens: int

    def match(self, request: Request) -> int:
        """Leading tokens of `request` that are cached. Changes nothing."""
        ...

    def take(self, request: Request) -> None:
        """`request` starts: what it hits is pinned by it and no longer counted here."""
        ...

    def store(self, request: Request, tokens: int) -> None:
        """`request` ended with `tokens` in its KV: they may be hit from now on."""
        ...

    def evict_to(self, tokens: int) -> None:
        """Drop the least recently used until at most `tokens` are held."""
        ...


class SessionCache:
    """One prefix length per session; requests without a session are not kept."""

    def __init__(self) -> None:
        self.tokens = 0
        self._length: OrderedDict[int, int] = OrderedDict()

    def match(self, request: Request) -> int:
        length = self._length.get(request.session, 0)
        if request.prefix_session >= 0:
            length = max(length, self._length.get(request.prefix_session, 0))
        return min(request.reuse_tokens, length)

    def take(self, request: Request) -> None:
        self.tokens -= self._length.pop(request.session, 0)

    def store(self, request: Request, tokens: int) -> None:
        if request.session < 0:
            return
        self.tokens += tokens - self._length.pop(request.session, 0)
        self._length[request.session] = tokens

    def evict_to(self, tokens: int) -> None:
        tokens = max(0, tokens)
        while self.tokens > tokens:
            session, length = self._length.popitem(last=False)
            kept = max(0, length - (self.tokens - tokens))
            self.tokens -= length - kept
            if kept:  # the tail goes first; what is left stays the oldest
                self._length[session] = kept
                self._length.move_to_end(session, last=False)


class BlockCache:
    """One entry per hashed block, for traces that state the blocks of each prompt."""

    def __init__(self) -> None:
        self.tokens = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def match(self, request: Request) -> int:
        hit = 0
        for block in request.hash_ids or ():
            if block not in self._blocks:
                break
            hit += request.block_tokens
        return min(hit, request.input_tokens)

    def take(self, request: Request) -> None:
        for block in request.hash_ids or ():
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def store(self, request: Request, tokens: int) -> None:
        # Deepest first, so that within one request the tail is the first to be evicted.
        for block in reversed(request.hash_ids or ()):
            if block not in self._blocks:
                self.tokens += request.block_tokens
            self._blocks[block] = request.block_tokens
            self._blocks.move_to_end(block)

    def evict_to(self, tokens: int) -> None:
        tokens = max(0, tokens)
        while self.tokens > tokens:
            self.tokens -= self._blocks.popitem(last=False)[1]


def usable_hit(request: Request, cached_tokens: int, replay_tokens: int) -> int:
    """Tokens that need no prefill when `cached_tokens` are cached: whole blocks, never the last token, and less the
    tokens that the model recomputes after a hit (bounded replay)."""
    hit = min(cached_tokens, request.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return max(0, hit - replay_tokens)
