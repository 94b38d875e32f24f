"""The prefix cache of traces that state each prompt's blocks: an entry per block, least recently used out first."""

from collections import OrderedDict
from itertools import islice

from rackplan.simulator.request import Request


class _Held:
    """Blocks that a running request holds, from the first on; `seen`: how many of its blocks were looked at."""

    __slots__ = ("blocks", "seen")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks, self.seen = blocks, len(blocks)


class BlockCache:
    """vLLM's own order: blocks that no running request holds go in the order in which they were freed, a request's
    deepest first. Two requests that compute one block at the same time count it twice, and leave it once."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tokens_of: dict[int, int] = {}
        self._refs: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._held: dict[Request, _Held] = {}

    def match(self, request: Request) -> int:
        hit = 0
        for block in request.hash_ids or ():
            if block not in self._tokens_of:
                break
            hit += request.block_tokens
        return min(hit, request.input_tokens)

    def held_tokens(self, request: Request, cached_tokens: int) -> int:
        held = 0
        for block in islice(request.hash_ids or (), -(-cached_tokens // request.block_tokens)):
            if block not in self._refs:
                break
            held += self._tokens_of[block]
        return held

    def begin(self, request: Request, cached_tokens: int, tokens: int = 0) -> int:
        if request.hash_ids is None:
            return 0
        shared = self.held_tokens(request, cached_tokens) if cached_tokens else 0
        blocks = list(request.hash_ids[: -(-cached_tokens // request.block_tokens)])
        for block in blocks:
            self._hold(block)
        self._held[request] = _Held(blocks)
        self.grow(request, tokens)
        return shared

    def grow(self, request: Request, tokens: int) -> None:
        held = self._held.get(request)
        if held is None:
            return
        ids, size = request.hash_ids or (), request.block_tokens
        while held.seen < len(ids) and tokens >= min((held.seen + 1) * size, request.input_tokens):
            block = ids[held.seen]
            if block not in self._refs:
                self._tokens_of.setdefault(block, min(size, request.input_tokens - held.seen * size))
                self._hold(block)
                held.blocks.append(block)
            held.seen += 1

    def end(self, request: Request, tokens: int) -> int:
        self.grow(request, tokens)
        held = self._held.pop(request, None)
        left = 0
        for block in reversed(held.blocks if held else ()):
            self._refs[block] -= 1
            if self._refs[block]:
                left += self._tokens_of[block]
            else:
                del self._refs[block]
                self._free[block] = None
                self.tokens += self._tokens_of[block]
        return left

    def evict_to(self, tokens: int) -> None:
        tokens = max(0, tokens)
        while self.tokens > tokens:
            self.tokens -= self._tokens_of.pop(self._free.popitem(last=False)[0])

    def _hold(self, block: int) -> None:
        if block in self._free:
            del self._free[block]
            self.tokens -= self._tokens_of[block]
        self._refs[block] = self._refs.get(block, 0) + 1
