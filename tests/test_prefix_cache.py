"""The prefix cache of sessions hits what an LRU over blocks hits, counts shared KV once, and costs the same at any
context."""

import random
import sys
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FakeCalibration, GivenRequests, aggregated, with_kv_tokens

from rackplan.simulator.block_cache import BlockCache
from rackplan.simulator.load import Load
from rackplan.simulator.prefix_cache import BLOCK_TOKENS, PrefixCache, SessionCache, usable_hit
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate


class Blocks:
    """The reference: every block by itself, as vLLM keeps them."""

    def __init__(self) -> None:
        self.refs: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict()

    def hit(self, blocks: list[int]) -> int:
        return next((i for i, b in enumerate(blocks) if b not in self.refs and b not in self.free), len(blocks))

    def begin(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.refs[block] = self.refs.get(block, 0) + 1

    def end(self, blocks: list[int], answer: list[int]) -> None:
        self.refs.update(dict.fromkeys(answer, 1))
        for block in reversed(blocks + answer):
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                self.free[block] = None


class Play:
    """Requests that begin, run beside one another and end, on the cache and on the reference. `content`: blocks of the
    sessions that have lost none of theirs; `running`: (request, its blocks, those it holds in the cache)."""

    def __init__(self, rng: random.Random, hashed: bool = False) -> None:
        self.rng, self.hashed = rng, hashed
        self.cache: PrefixCache = BlockCache() if hashed else SessionCache()
        self.blocks = Blocks()
        self.capacity = rng.choice([30, 100, 400])
        self.content: dict[int, list[int]] = {}
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.ids = self.sessions = self.fresh = 0
        self.held = self.hits = 0

    def new_blocks(self, most: int) -> list[int]:
        n = self.rng.randint(0, most)
        self.fresh += n
        return list(range(self.fresh - n, self.fresh))

    def begin(self) -> None:
        """A turn of a session that does not run, or the first of one that begins like another, which may."""
        rng, like, session = self.rng, -1, self.sessions
        known = sorted(s for s, c in self.content.items() if self.blocks.hit(c) == len(c))
        reuse: list[int] = []
        if known and rng.random() < 0.8:
            like = rng.choice(known)
            content = self.content[like]
            reuse = content[: rng.choice([len(content), rng.randint(0, len(content))])]
            if like not in self.running and rng.random() < 0.6:
                session, like = like, -1
        self.sessions = max(self.sessions, session + 1)
        prompt = reuse + self.new_blocks(12)
        tokens = len(prompt) * BLOCK_TOKENS + 1
        request = Request(self.ids, 0, tokens, 1, session, len(reuse) * BLOCK_TOKENS, like)
        if self.hashed:
            request.hash_ids, request.block_tokens = tuple(prompt), BLOCK_TOKENS
        self.ids += 1
        cached = usable_hit(request, self.cache.match(request), 0)
        assert cached == self.blocks.hit(prompt) * BLOCK_TOKENS
        self.hits += cached
        self.held += tokens - self.cache.begin(request, cached)
        self.cache.grow(request, tokens)
        self.blocks.begin(prompt)
        self.content[session] = prompt
        self.running[session] = request, prompt

    def end(self) -> None:
        session = self.rng.choice(sorted(self.running))
        request, prompt = self.running.pop(session)
        answer = [] if self.hashed else self.new_blocks(6)
        self.held -= request.input_tokens - self.cache.end(request, (len(prompt) + len(answer)) * BLOCK_TOKENS)
        self.blocks.end(prompt, answer)
        self.content[session] = prompt + answer

    def step(self) -> None:
        if self.running and self.rng.random() < 0.5:
            self.end()
        else:
            self.begin()
        room = max(0, self.capacity - len(self.blocks.refs))
        self.cache.evict_to(room * BLOCK_TOKENS)
        while len(self.blocks.free) > room:
            self.blocks.free.popitem(last=False)
        assert self.cache.tokens == len(self.blocks.free) * BLOCK_TOKENS
        # A prompt's last token is in no block of its own here, so that many tokens are held beside the blocks.
        assert self.held == len(self.blocks.refs) * BLOCK_TOKENS + len(self.running)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.booleans())
def test_hits_and_room_are_those_of_an_lru_over_blocks_for_chains_that_branch(seed: int, hashed: bool) -> None:
    play = Play(random.Random(seed), hashed)
    for _ in range(60):
        play.step()


def test_the_streams_of_that_test_hit_share_and_evict() -> None:
    plays = [Play(random.Random(seed)) for seed in range(20)]
    for play in plays:
        for _ in range(60):
            play.step()
    assert all(play.hits > 0 for play in plays)
    assert any(max(play.blocks.refs.values(), default=0) > 1 for play in plays)
    assert any(play.blocks.hit(c) < len(c) for play in plays for c in play.content.values())


def calls_of(context_tokens: int) -> int:
    """Python calls of 50 turns of 10 sessions on contexts of that length, some of them evicted in part."""
    cache, calls = SessionCache(), 0

    def on_event(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        for i in range(500):
            request = Request(i, 0, context_tokens + i // 10 * 160, 1, i % 10, context_tokens + i // 10 * 160 - 160)
            cache.begin(request, usable_hit(request, cache.match(request), 0))
            cache.grow(request, request.input_tokens)
            cache.end(request, request.input_tokens)
            cache.evict_to(9 * context_tokens)
    finally:
        sys.setprofile(before)
    return calls


def test_a_turn_costs_the_same_at_any_context() -> None:
    assert calls_of(1_000_000) <= 1.05 * calls_of(20_000)


def stretches(cache: SessionCache) -> int:
    """Of blocks that no request holds."""
    node, n = cache._root.newer, 0
    while node is not cache._root:
        node, n = node.newer, n + 1
    return n


def test_turns_that_recompute_the_end_of_their_hit_leave_as_many_stretches_as_sessions() -> None:
    cache, sessions, turns, replay = SessionCache(), 20, 200, 128
    for i in range(sessions * turns):
        tokens = 4096 + i // sessions * 320
        request = Request(i, 0, tokens, 1, i % sessions, tokens - 320)
        cached = usable_hit(request, cache.match(request), replay)
        assert cached == (tokens - 320 - replay if i >= sessions else 0)
        cache.begin(request, cached)
        cache.end(request, tokens)
    # What each turn recomputed is held a second time until it is evicted: what was there before cannot be hit.
    assert cache.tokens == sessions * (4096 + (turns - 1) * (320 + replay))
    assert stretches(cache) <= 2 * sessions
    cache.evict_to(sessions * 4096)
    assert cache.tokens == sessions * 4096
    assert stretches(cache) <= sessions


@pytest.mark.parametrize("hashed", [False, True])
def test_requests_that_begin_alike_and_run_at_once_compute_their_prefix_once(hashed: bool) -> None:
    """KV for 6,500 tokens runs six requests of 4,000 + 100 + 200 that share 4,000 beside one another."""
    prefix, n = 4096, 6
    reqs = [Request(i, i * 50_000_000, prefix + 100, 200, i, prefix, 0) for i in range(n)]
    if hashed:
        for i, r in enumerate(reqs):
            r.hash_ids, r.session = (*range(8), 100 + i), -1
    workload = GivenRequests(reqs)
    workload.hashed = hashed  # type: ignore[attr-defined]
    result = simulate(
        with_kv_tokens(aggregated(), "aggregated", 6500), workload, Load(), FakeCalibration(), RunOptions()
    )
    by_id = np.argsort(result.request_id)
    assert result.cached_tokens[by_id].tolist() == [0] + [prefix] * (n - 1)
    assert result.pools[0].preemptions == 0
    assert (result.scheduled_ns[by_id][1:] < result.finish_ns.min()).all()  # all run before the first ends


def test_what_a_request_recomputes_of_the_chain_that_it_begins_like_serves_both() -> None:
    cache = SessionCache()
    first, like = Request(0, 0, 320, 1, session=0), Request(1, 0, 200, 1, session=1, reuse_tokens=160, prefix_session=0)
    cache.begin(first, 0)
    cache.end(first, 320)
    cache.evict_to(0)
    cache.begin(like, cache.match(like))
    cache.end(like, 192)
    assert cache.match(Request(2, 0, 400, 1, session=0, reuse_tokens=320)) == 160
