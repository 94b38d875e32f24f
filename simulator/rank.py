"""Queues and prefix cache of one data-parallel rank."""

from collections import deque
from itertools import islice

from rackplan.simulator.host_tier import HostTier
from rackplan.simulator.prefix_cache import PrefixCache
from rackplan.simulator.sequence import Sequence

Chunk = tuple[Sequence, int]
"""Prompt tokens that a request computes in a step."""


def chunk_tokens(chunks: list[Chunk]) -> int:
    """New tokens of all `chunks`."""
    tokens = 0
    for _, new in chunks:
        tokens += new
    return tokens


class Rank:
    """`waiting`: requests in line; `holding`: requests that hold KV for what is loaded of their prompt and do not run
    yet, in the order in which their loads began; `partial`: prompts in prefill, in order of admission; `decoding`: in
    order of their first decode; `admitted`: how many were, ever; `is_saturated`: the last step that might admit a
    prompt left one waiting; `begun`: requests whose load the last plan began."""

    __slots__ = ("admitted", "begun", "cache", "decoding", "holding", "host", "is_saturated", "partial", "waiting")

    def __init__(self, cache: PrefixCache, host: HostTier | None = None) -> None:
        self.cache, self.host = cache, host
        self.begun: list[Sequence] = []
        self.holding: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.partial: list[Sequence] = []
        self.decoding: dict[Sequence, None] = {}
        self.admitted = 0
        self.is_saturated = False

    def has_waiting(self, visible_before_ns: int) -> bool:
        """Is there a request without KV that came before?"""
        waiting = self.waiting
        return bool(waiting and waiting[0].ready_ns < visible_before_ns)

    def only_decodes(self) -> bool:
        """Has it nothing but requests that decode, and loads under way?"""
        return not (self.waiting or self.partial or (self.holding and self.has_kv_in_line()))

    def has_kv_in_line(self) -> bool:
        """Is there a request that is to start with KV that it holds?"""
        for seq in self.holding:  # noqa: SIM110 - `any` costs more than what it goes through
            if not seq.is_loading:
                return True
        return False

    def resumable(self, visible_before_ns: int) -> list[Sequence]:
        """Those of `holding` whose load has ended."""
        resumable = []
        for seq in self.holding:  # a comprehension costs more than what it goes through
            if not seq.is_loading and seq.ready_ns < visible_before_ns:
                resumable.append(seq)
        return resumable

    def reserved_tokens(self, chunks: list[Chunk]) -> int:
        """KV that prompts in prefill and `holding` still need, once `chunks` are computed."""
        if not (self.partial or self.holding):
            return 0
        tokens = -chunk_tokens(chunks)
        for seq in self.partial:
            tokens += seq.prompt_tokens - seq.computed_tokens
        for seq in self.holding:
            tokens += seq.prompt_tokens - seq.loaded_tokens
        return tokens

    def last_admitted(self) -> Sequence:
        """The running request that vLLM preempts first. Raises ValueError if none runs."""
        return max((*self.decoding, *self.partial), key=lambda seq: seq.place)

    def is_shared(self, visible_before_ns: int) -> bool:
        """Is there more than one request? Those whose KV is on its way count."""
        seen = len(self.decoding) + len(self.partial) + len(self.holding)
        return seen + sum(seq.ready_ns < visible_before_ns for seq in islice(self.waiting, 2)) > 1

    def begin_load(self, seq: Sequence, cached: int, tokens: int) -> None:
        """`seq` takes KV for the first `tokens` of its prompt, and waits for what follows the `cached` ones."""
        seq.computed_tokens, seq.loaded_tokens, seq.is_loading = cached, tokens, True
        self.holding.append(seq)
        self.begun.append(seq)
