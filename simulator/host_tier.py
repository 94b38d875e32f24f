"""A rank's KV tier in host memory: prompts that were computed, least recently used out first.

vLLM's native offloading copies each block of a prompt to host memory once it is computed, and looks there for what
follows a hit in HBM. What it finds is loaded while the request waits; it takes KV from the start of the load on.
"""

from rackplan.simulator.prefix_cache import PrefixCache, usable_hit
from rackplan.simulator.request import Request


class HostTier:
    """`capacity_tokens`: of KV in host memory for one rank. `bytes_per_ns`: the link, one load after the other."""

    def __init__(self, cache: PrefixCache, capacity_tokens: int, token_bytes: float, bytes_per_ns: float) -> None:
        self._cache, self._capacity_tokens = cache, capacity_tokens
        self._token_bytes, self._bytes_per_ns = token_bytes, bytes_per_ns
        self._free_at_ns = 0

    def hit(self, request: Request, replay_tokens: int) -> int:
        """Leading tokens of `request` that need no prefill once they are loaded."""
        return usable_hit(request, self._cache.match(request), replay_tokens)

    def store(self, request: Request, tokens: int) -> None:
        """The first `tokens` of `request` are computed."""
        known = usable_hit(request, min(tokens, self._cache.match(request)), 0)
        self._cache.begin(request, known)
        self._cache.end(request, tokens)
        self._cache.evict_to(self._capacity_tokens)

    def load_ns(self, tokens: int, now_ns: int) -> int:
        """Book a load of `tokens` that starts at `now_ns`: how long it takes, behind those before it."""
        begin = max(now_ns, self._free_at_ns)
        self._free_at_ns = begin + round(tokens * self._token_bytes / self._bytes_per_ns)
        return self._free_at_ns - now_ns
