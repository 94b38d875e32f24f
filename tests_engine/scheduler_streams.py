"""Random streams of requests, one kind for each thing that a scheduler decides; the same on every machine."""

import random
from collections.abc import Callable
from dataclasses import replace

from virtual_scheduler import Ask, Stream

Loads = Callable[[random.Random], int | None]
ROOMY = 16_000


def _tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4000) for _ in range(n))


def _asks(
    rng: random.Random, longest_prompt: int, longest_answer: int, most: int = 16, loads: Loads | None = None
) -> tuple[Ask, ...]:
    """Bursts and gaps; short and long prompts."""
    asks, at, gap = [], 0, rng.choice([0, 0, 1, 3, 10])
    for i in range(rng.randint(1, most)):
        at += rng.randint(0, gap)
        prompt = rng.randint(2 if loads else 1, rng.choice([8, longest_prompt]))
        load_steps = loads(rng) if loads else None
        asks.append(
            Ask(
                name=f"{'local' if load_steps is None else 'remote'}-{i:02}",
                prompt=_tokens(rng, prompt),
                answer=_tokens(rng, rng.randint(1, longest_answer)),
                arrival=at,
                load_steps=load_steps,
            )
        )
    return tuple(asks)


def chunked(rng: random.Random) -> Stream:
    """Prompts of up to ten budgets, KV for all."""
    seats = rng.choice([1, 2, 4, 16, 64])
    return Stream(
        asks=_asks(rng, rng.choice([80, 500]), rng.choice([1, 5, 25])),
        max_num_batched_tokens=max(seats, rng.choice([16, 64, 100, 512])),
        max_num_seqs=seats,
        kv_tokens=ROOMY,
    )


def threshold(rng: random.Random) -> Stream:
    """Several prompts in prefill at once, each held to `long_prefill_token_threshold`, so that budgets are shared."""
    seats = rng.choice([2, 4, 16])
    return Stream(
        asks=_asks(rng, rng.choice([80, 500]), rng.choice([1, 5, 25])),
        max_num_batched_tokens=rng.choice([32, 64, 100, 256]),
        max_num_seqs=seats,
        kv_tokens=ROOMY,
        long_prefill_token_threshold=rng.choice([8, 20, 50, 120]),
    )


def full(rng: random.Random) -> Stream:
    """Bursts into a budget that the decodes alone nearly fill."""
    seats = rng.choice([8, 16, 24])
    return Stream(
        asks=_asks(rng, 40, 15, most=40),
        max_num_batched_tokens=seats + rng.choice([0, 1, 5]),
        max_num_seqs=seats,
        kv_tokens=ROOMY,
        long_prefill_token_threshold=rng.choice([0, 0, 4]),
    )


def tight(rng: random.Random, block_tokens: int = 1) -> Stream:
    """KV for a few requests: admission waits for room, and growth preempts."""
    asks = _asks(rng, rng.choice([60, 300]), rng.choice([30, 80]), most=10)
    largest = max(len(a.prompt) + len(a.answer) for a in asks)
    blocks = -(-largest // block_tokens) + rng.randint(0, 2 * largest // block_tokens)
    seats = rng.choice([2, 4, 16])
    return Stream(
        asks=asks,
        max_num_batched_tokens=max(seats, rng.choice([32, 100, 512])),
        max_num_seqs=seats,
        kv_tokens=blocks * block_tokens,
        block_tokens=block_tokens,
        long_prefill_token_threshold=rng.choice([0, 0, 20, 50]),
    )


def tight_blocks(rng: random.Random) -> Stream:
    """The same with vLLM's blocks of 16 tokens."""
    return tight(rng, 16)


def interval(rng: random.Random) -> Stream:
    """Prompts, none of one token, are computed in every n-th step alone, unless more wait than such a step admits."""
    stream = rng.choice([chunked, threshold, full, tight])(rng)
    asks = [replace(a, prompt=a.prompt * 2) if len(a.prompt) == 1 else a for a in stream.asks]
    more = sum(len(a.prompt) == 1 for a in stream.asks)
    return replace(
        stream,
        asks=tuple(asks),
        kv_tokens=stream.kv_tokens + more,
        prefill_schedule_interval=rng.choice([2, 3, 4, 16]),
    )


def interval_of_one_token(rng: random.Random) -> Stream:
    """Prompts of one token are admitted in any step, past two that are held back and then fill the budget."""
    lengths = [2, rng.randint(20, 60), rng.randint(20, 60), *[1] * rng.randint(1, 4)]
    arrivals = [0, 2, 2, *[rng.randint(3, 8) for _ in lengths[3:]]]
    asks = [
        Ask(name=f"local-{i:02}", prompt=_tokens(rng, length), answer=_tokens(rng, 40), arrival=at)
        for i, (length, at) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    return Stream(
        asks=tuple(asks),
        max_num_batched_tokens=9,
        max_num_seqs=8,
        kv_tokens=ROOMY,
        long_prefill_token_threshold=4,
        prefill_schedule_interval=2,
    )


def turns(rng: random.Random) -> Stream:
    """Sessions whose next prompt repeats the last one and its answer; KV for all."""
    asks: list[Ask] = []
    for session in range(rng.randint(1, 4)):
        history: tuple[int, ...] = ()
        before, arrival = None, rng.randint(0, 20)
        for turn in range(rng.randint(1, 4)):
            prompt = history + _tokens(rng, rng.randint(1, 200))
            answer = _tokens(rng, rng.randint(1, 25))
            name = f"s{session}t{turn}"
            asks.append(
                Ask(
                    name=name,
                    prompt=prompt,
                    answer=answer,
                    arrival=arrival,
                    after=before,
                    session=session,
                    reuse_tokens=len(history),
                )
            )
            history, before, arrival = prompt + answer, name, rng.randint(0, 5)
    seats = rng.choice([1, 4, 16])
    return Stream(
        asks=tuple(asks),
        max_num_batched_tokens=max(seats, rng.choice([32, 100, 512])),
        max_num_seqs=seats,
        kv_tokens=ROOMY,
        long_prefill_token_threshold=rng.choice([0, 0, 50]),
        enable_prefix_caching=True,
    )


def tight_turns(rng: random.Random) -> Stream:
    """Sessions in KV for a few turns: hits are lost, and what is preempted finds its own blocks again."""
    stream = turns(rng)
    largest = max(len(a.prompt) + len(a.answer) for a in stream.asks)
    return replace(stream, kv_tokens=16 * (largest // 16 + 1 + rng.randint(0, 20)))


def same_prefix(rng: random.Random) -> Stream:
    """Requests that begin alike and run at the same time."""
    prefix = _tokens(rng, rng.randint(16, 200))
    stream = chunked(rng)
    asks = [
        replace(a, prompt=prefix + a.prompt, session=i, prefix_session=0, reuse_tokens=len(prefix))
        for i, a in enumerate(stream.asks)
    ]
    return replace(stream, asks=tuple(asks), enable_prefix_caching=True)


def remote(rng: random.Random) -> Stream:
    """Prompts whose KV comes from elsewhere, some of them capped, among few that are computed here; seats for all."""
    cap = rng.choice([None, None, 1, 2])
    delays = [rng.randint(0, 6)] if cap else [0, 1, 3, 10]
    local = rng.choice([0.0, 0.3])
    return Stream(
        asks=_asks(rng, 300, 25, loads=lambda r: None if r.random() < local else r.choice(delays)),
        max_num_batched_tokens=8192,
        max_num_seqs=32,
        kv_tokens=ROOMY,
        max_new_kv_loads_per_step=cap,
    )


def remote_seats(rng: random.Random) -> Stream:
    """The same with seats and a token budget for a few, so that loads wait for a seat before they begin."""
    return replace(
        remote(rng),
        max_num_batched_tokens=rng.choice([64, 512]),
        max_num_seqs=rng.choice([2, 4, 16]),
        long_prefill_token_threshold=rng.choice([0, 0, 20]),
    )


def remote_tight(rng: random.Random) -> Stream:
    """The same with KV for a few, by the token, and prompts held for their step: loads leave prompts in prefill what
    they need, and what was loaded is preempted and computed here."""
    stream = remote_seats(rng)
    asks = tuple(replace(a, answer=a.answer * 3) for a in stream.asks)
    largest = max(len(a.prompt) + len(a.answer) for a in asks)
    return replace(
        stream,
        asks=asks,
        kv_tokens=largest + rng.randint(0, largest),
        block_tokens=1,
        prefill_schedule_interval=rng.choice([1, 1, 3]),
    )
