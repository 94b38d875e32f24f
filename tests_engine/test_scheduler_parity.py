"""The simulator's scheduler decides what vLLM's own decides, step by step, on random streams of requests.

`DIFFERENT` are the streams on which it does not, each for a reason in docs/model/scheduler_parity.md; that they still
differ is asserted too, so that the list stays true.
"""

import random
from collections import Counter

import pytest
import scheduler_streams
from virtual_scheduler import both

STREAMS = 1000
SAME = {
    "chunked": "several prefills of one request",
    "threshold": "several prefills of one request",
    "full": "requests in one step",
    "tight": "preemptions",
    "interval": "prompts held between their chunks",
    "turns": "tokens hit",
    "same_prefix": "tokens hit",
    "remote": "decodes of loaded prompts",
    "remote_seats": "loaded prompts that waited",
    "remote_tight": "preemptions",
}
"""Kinds of streams on which every step is the same, and what of each must have happened."""
DIFFERENT = ("tight_blocks", "tight_turns", "interval_of_one_token")
TRIED = 100


def stream_of(kind, seed):
    return getattr(scheduler_streams, kind)(random.Random(f"{kind} {seed}"))


def happened(stream, steps):
    """What a stream of steps contains, counted."""
    asks = {ask.name: ask for ask in stream.asks}
    chunks, left, found = Counter(), {}, Counter()
    loaded_at = {a.name: a.arrival + a.load_steps for a in stream.asks if a.load_steps is not None}
    for step in steps:
        begun = {name: at for name, at in loaded_at.items() if name in step.scheduled}
        found["loaded prompts that waited"] += sum(step.number > at + 1 for at in begun.values())
        loaded_at = {name: at for name, at in loaded_at.items() if name not in begun}
        for name in step.preempted:
            left.pop(name, None)
        found["preemptions"] += len(step.preempted)
        found["requests in one step"] = max(found["requests in one step"], len(step.scheduled))
        held = [name for name, n in left.items() if n > 0 and name not in step.scheduled]
        found["prompts held between their chunks"] += len(held)
        for name, (new, is_prefill) in step.scheduled.items():
            if is_prefill:
                chunks[name] += 1
                left[name] = left.get(name, len(asks[name].prompt)) - new
            else:
                found["tokens hit"] += max(0, left.pop(name, 0))  # a decode although that many were not computed
                found["decodes of loaded prompts"] += asks[name].load_steps is not None
    found["several prefills of one request"] = sum(n > 1 for n in chunks.values())
    return found


@pytest.mark.parametrize("kind", SAME)
def test_every_step_is_vllms_own(kind, tiny_moe):
    least = 0
    for seed in range(STREAMS):
        stream, steps = stream_of(kind, seed), []
        for engine, simulator in both(stream, tiny_moe):
            assert simulator == engine, f"{kind} {seed}"
            steps.append(engine)
        least += happened(stream, steps)[SAME[kind]]
    assert least > STREAMS // 2


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_is_known_and_every_request_still_ends(kind, tiny_moe):
    differ, lengths = 0, [0, 0]
    for seed in range(TRIED):
        pairs = list(both(stream_of(kind, seed), tiny_moe))
        differ += any(engine != simulator for engine, simulator in pairs)
        for side, steps in enumerate(zip(*pairs, strict=True)):
            lengths[side] += max(step.number for step in steps if step.finished) + 1
    print(f"{kind}: {differ} of {TRIED} streams differ; steps to the last end {lengths[0]} and {lengths[1]}")
    assert differ > 0
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)
