"""With prompts that are partly in host memory the simulator's scheduler decides what vLLM's own decides, step by step:
which loads begin, who is in line before whom, and that every request ends however little KV there is."""

import random

import pytest
from host_kv import HostAsk, sides
from virtual_scheduler import Stream, side_by_side

STREAMS = {False: 150, True: 500}
"""By whether KV is tight; where there is room for all, streams are longer and decide less."""


def stream_of(rng: random.Random, tight: bool) -> Stream:
    """Bursts and gaps; KV for a few prompts, where it is `tight`."""
    asks, at, gap, longest = [], 0, rng.choice([0, 0, 1, 3, 10]), rng.choice([60, 300])
    for i in range(rng.randint(1, 12)):
        at += rng.randint(0, gap)
        length = rng.randint(2, longest)
        in_host = 16 * rng.randint(0, (length - 1) // 16) if rng.random() < 0.8 else 0
        asks.append(
            HostAsk(
                name=f"r{i:02}-{in_host}",
                prompt=tuple(rng.randrange(4000) for _ in range(length)),
                answer=tuple(rng.randrange(4000) for _ in range(rng.randint(1, rng.choice([5, 60])))),
                arrival=at,
                session=i,
                reuse_tokens=in_host,
                host_steps=rng.choice([0, 1, 5, 20]),
            )
        )
    largest = max(len(a.prompt) + len(a.answer) for a in asks)
    seats = rng.choice([2, 4, 16])
    return Stream(
        asks=tuple(asks),
        max_num_batched_tokens=max(seats, rng.choice([32, 100, 512])),
        max_num_seqs=seats,
        kv_tokens=largest + rng.randint(0, 2 * largest) if tight else 16_000,
        block_tokens=1,
        long_prefill_token_threshold=rng.choice([0, 0, 20]),
        prefill_schedule_interval=rng.choice([1, 1, 3]),
    )


@pytest.mark.parametrize("tight", [False, True])
def test_every_step_is_vllms_own(tight, tiny_moe):
    loads = preempted = 0
    for seed in range(STREAMS[tight]):
        engine, simulator = sides(stream_of(random.Random(f"{tight} {seed}"), tight), tiny_moe)
        for step, simulated in side_by_side(engine, simulator):
            assert simulated == step, seed
            preempted += len(step.preempted)
        loads += engine.loads
    assert loads > STREAMS[tight]
    assert preempted > 100 or not tight
