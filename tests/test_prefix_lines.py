"""Lines of a recorded prefix tree: a cache with one chain a line hits what the prompts themselves share."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rackplan.simulator.prefix_cache import BLOCK_TOKENS, SessionCache
from rackplan.simulator.prefix_lines import Recorded, prefix_lines
from rackplan.simulator.request import Request

Prompt = tuple[int, ...]


def common(a: Prompt, b: Prompt) -> int:
    """Leading blocks that two prompts share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def recorded(prompts: list[tuple[str, Prompt, bool]]) -> list[Recorded]:
    """As a record has it: the earlier prompt that shares the most, the first of such."""
    record = []
    for i, (stream, prompt, is_sent) in enumerate(prompts):
        shared = [common(prompt, before) for _, before, _ in prompts[:i]]
        most = max(shared, default=0)
        record.append(Recorded(stream, shared.index(most) if most else -1, most, is_sent))
    return record


@st.composite
def records(draw: st.DrawFn) -> list[tuple[str, Prompt, bool]]:
    """Prompts of up to three streams that go on from any earlier prompt, some of them left out."""
    prompts: list[tuple[str, Prompt, bool]] = []
    for i in range(draw(st.integers(1, 14))):
        kept: Prompt = ()
        if prompts:
            before = draw(st.sampled_from([p for _, p, _ in prompts]))
            kept = before[: draw(st.integers(0, len(before)))]
        own = tuple(100 * i + n for n in range(draw(st.integers(0 if kept else 1, 3))))
        prompts.append((draw(st.sampled_from("abc")), kept + own, draw(st.integers(0, 4)) > 0))
    return prompts


@settings(max_examples=500)
@given(records())
def test_a_cache_that_never_evicts_hits_what_the_prompts_share(prompts):
    cache, sent = SessionCache(), []
    for (_, prompt, is_sent), line in zip(prompts, prefix_lines(recorded(prompts)), strict=True):
        assert (line is not None) == is_sent
        if line is None:
            continue
        shared = max((common(prompt, before) for before in sent), default=0)
        assert line.shared == shared
        tokens = len(prompt) * BLOCK_TOKENS
        request = Request(0, 0, tokens, 1, line.name, shared * BLOCK_TOKENS, line.like)
        assert cache.match(request) == shared * BLOCK_TOKENS
        cache.begin(request, shared * BLOCK_TOKENS)
        cache.end(request, tokens)
        sent.append(prompt)


@given(records())
def test_a_line_is_of_one_stream_and_begins_like_one_before_it(prompts):
    stream_of: dict[int, str] = {}
    for (stream, _, _), line in zip(prompts, prefix_lines(recorded(prompts)), strict=True):
        if line is None:
            continue
        assert stream_of.setdefault(line.name, stream) == stream
        assert line.like < line.name
        assert line.like < 0 or line.like in stream_of


def test_a_detour_gets_a_name_of_its_own_and_the_prompt_stays():
    # The second shares one block with the first, the third goes on from all of the first.
    lines = prefix_lines([Recorded("a", -1, 0), Recorded("a", 0, 1), Recorded("a", 0, 5)])
    assert lines == [(0, -1, 0), (1, 0, 1), (0, -1, 5)]


def test_a_compaction_takes_the_name_where_nothing_goes_back():
    lines = prefix_lines([Recorded("a", -1, 0), Recorded("a", 0, 1), Recorded("a", 1, 2)])
    assert lines == [(0, -1, 0), (0, -1, 1), (0, -1, 2)]
