"""Which exact batches a profile times: shapes that tell the terms of a step's cost apart, the most telling first.

A profile is often cut short, so every beginning of the list spans the whole range: extremes first, then what lies
between. One rank runs one batch; the other ranks of its instance run the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

DECODE_CONTEXT_SHARES = (1 / 64, 1 / 16, 1 / 4, 15 / 16)
CACHED_SHARES = (1 / 16, 1 / 4, 1 / 2)
MIXED_CHUNK_SHARES = (1 / 16, 1 / 4)
MIXED_BATCH_SHARES = (1 / 32, 1 / 4)
SEVERAL_CHUNKS = (4, 2, 8)
SHORTEST_CHUNK = 64
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCase:
    """A batch: `chunks` of `new_tokens` after `context_tokens` cached ones each, and `decode_batch` requests that
    decode, each at `decode_kv_len` tokens, the new one counted. `own_name`: in place of one that states the shape."""

    own_name: str = ""
    chunks: int = 1
    new_tokens: int = 0
    context_tokens: int = 0
    decode_batch: int = 0
    decode_kv_len: int = 0

    @property
    def phase(self) -> str:
        if not self.new_tokens:
            return "decode"
        return "mixed" if self.decode_batch else "prefill"

    @property
    def name(self) -> str:
        if self.own_name:
            return self.own_name
        decode = f"{self.decode_batch}_{self.decode_kv_len}"
        if self.phase == "decode":
            return f"decode_{decode}"
        new = f"{self.chunks}x{self.new_tokens}" if self.chunks > 1 else f"{self.new_tokens}"
        if self.context_tokens:
            new += f"_{self.context_tokens}"
        if self.phase == "mixed":
            return f"mix_{new}_{decode}"
        return f"hit_{new}" if self.context_tokens else f"prefill_{new}"

    @property
    def argument(self) -> str:
        """`NAME=REQS` as `vllm bench forward --case` takes it."""
        count = f"{self.chunks}*" if self.chunks > 1 else ""
        chunks = [f"{count}{self.new_tokens}@{self.new_tokens + self.context_tokens}"] if self.new_tokens else []
        decode = [f"{self.decode_batch}*1@{self.decode_kv_len}"] if self.decode_batch else []
        return f"{self.name}={','.join(chunks + decode)}"

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(new tokens, KV length with them) of each request."""
        chunk = [(self.new_tokens, self.new_tokens + self.context_tokens)] if self.new_tokens else []
        return chunk * self.chunks + [(1, self.decode_kv_len)] * self.decode_batch

    @property
    def tokens(self) -> int:
        """Tokens that one rank computes."""
        return self.chunks * self.new_tokens + self.decode_batch

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that one rank holds, in whole blocks."""
        blocks = self.chunks * -(-(self.new_tokens + self.context_tokens) // BLOCK_TOKENS)
        blocks += self.decode_batch * -(-self.decode_kv_len // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rank can run: tokens a step, requests, KV, and the longest request, all in tokens but for `seqs`."""

    batched_tokens: int
    seqs: int
    kv_tokens: int
    model_len: int

    def allow(self, case: ForwardCase) -> bool:
        """Can a rank run it?"""
        longest = max(kv for _, kv in case.requests)
        return (
            case.tokens <= self.batched_tokens
            and len(case.requests) <= self.seqs
            and case.kv_tokens <= self.kv_tokens
            and longest <= self.model_len
        )


def extremes_first(values: Sequence[int]) -> list[int]:
    """First and last, then the middle of every gap, until all are there."""
    rest = sorted(set(values))
    order = [rest[i] for i in dict.fromkeys((0, len(rest) - 1)) if rest]
    gaps = [(0, len(rest) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(rest[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def powers_of_two(first: int, last: int) -> list[int]:
    """`first`, its doubles, and `last`."""
    found = [first << i for i in range(64) if first << i < last]
    return [*found, last] if last >= first else []


def forward_cases(limits: Limits) -> list[ForwardCase]:
    """All cases, the most telling first: kinds in turn, within each the extremes first."""
    generated = (_decodes(limits), _fresh(limits), _hits(limits), _mixed(limits), _several(limits))
    kinds = [[c for c in kind if limits.allow(c)] for kind in generated]
    in_turn = [c for group in zip_longest(*kinds) for c in group if c is not None]
    return list(dict.fromkeys(in_turn))


def _decodes(limits: Limits) -> Iterator[ForwardCase]:
    """Batches by contexts. A context that the KV pool does not hold for a batch is left out by the limits."""
    contexts = extremes_first([_rounded(s * limits.model_len) for s in DECODE_CONTEXT_SHARES])
    batches = extremes_first(powers_of_two(1, min(limits.seqs, limits.batched_tokens)))
    pairs = [(i + j, b, c) for i, b in enumerate(batches) for j, c in enumerate(contexts)]
    for _, batch, context in sorted(pairs, key=lambda p: p[0]):
        yield ForwardCase(decode_batch=batch, decode_kv_len=context)


def _fresh(limits: Limits) -> Iterator[ForwardCase]:
    for new in extremes_first(powers_of_two(SHORTEST_CHUNK, min(limits.batched_tokens, limits.model_len))):
        yield ForwardCase(new_tokens=new)


def _hits(limits: Limits) -> Iterator[ForwardCase]:
    longest = min(limits.batched_tokens, limits.model_len // 2)
    for cached in reversed(CACHED_SHARES):
        for new in extremes_first(powers_of_two(SHORTEST_CHUNK, longest))[:4]:
            yield ForwardCase(new_tokens=new, context_tokens=_rounded(cached * limits.model_len))


def _mixed(limits: Limits) -> Iterator[ForwardCase]:
    context = _rounded(limits.model_len / 16)
    for chunk in MIXED_CHUNK_SHARES:
        for batch in reversed(MIXED_BATCH_SHARES):
            new, requests = _rounded(chunk * limits.batched_tokens), max(1, int(batch * limits.seqs))
            yield ForwardCase(new_tokens=new, decode_batch=requests, decode_kv_len=context)


def _several(limits: Limits) -> Iterator[ForwardCase]:
    """Several chunks that fill the token budget, and a quarter of it: alone, half of each cached, beside decodes."""
    context, decodes = _rounded(limits.model_len / 16), max(1, limits.seqs // 4)
    for share in (1.0, 1 / 4):
        for chunks in SEVERAL_CHUNKS:
            new = int(share * limits.batched_tokens) // chunks // BLOCK_TOKENS * BLOCK_TOKENS
            if new >= SHORTEST_CHUNK:
                yield ForwardCase(chunks=chunks, new_tokens=new)
                yield ForwardCase(chunks=chunks, new_tokens=new // 2, context_tokens=new // 2)
                beside = new - -(-decodes // chunks)
                if beside > 0:
                    yield ForwardCase(chunks=chunks, new_tokens=beside, decode_batch=decodes, decode_kv_len=context)


def _rounded(tokens: float) -> int:
    """A whole number of blocks, at least one."""
    return max(BLOCK_TOKENS, int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS)
