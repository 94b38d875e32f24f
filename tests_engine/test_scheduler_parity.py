"""The simulator's scheduler decides what vLLM's own decides, step by step, on random streams of requests."""

import random

import pytest
import scheduler_streams
from virtual_scheduler import both

STREAMS = 1000
SAME = ("chunked", "threshold", "full", "tight", "turns", "remote")
"""Kinds of streams on which every step is the same."""


@pytest.mark.parametrize("kind", SAME)
def test_every_step_is_vllms_own(kind, tiny_moe):
    make = getattr(scheduler_streams, kind)
    for seed in range(STREAMS):
        for engine, simulator in both(make(random.Random(f"{kind} {seed}")), tiny_moe):
            assert simulator == engine, f"{kind} {seed}"
