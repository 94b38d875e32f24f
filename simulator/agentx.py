"""Generator of agentic coding sessions with the published statistics of the AgentX corpus.

Source: data/agentx_stats.json (393 sessions, 98,827 requests). The corpus itself is not at hand, only quantiles of its
margins, so this is generation from published statistics: each quantity has a quantile function through the published
points, and they are drawn independently of one another; the joint distribution is assumed. What ties them together is
growth: input = kept context + new tokens, context by context, with a compaction where a session's window is full.
`FIT` holds what no statistic states directly; bench/fit_agentx.py finds it.

Reading of the statistics. Prefix hits were counted over hashed blocks of prompts, so the new tokens of a turn include
the previous turn's output where the prompt repeats it, and `reuse_tokens` is at most the previous prompt. New tokens
per turn are those of turns that have a previous one: with 8,000 streams only this agrees with the share of input that
the previous turn holds. Not modelled: main requests that belong to 1,422 side chains are turns of the main stream here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from rackplan.simulator.session_tree import SessionTree, Stream, Turn
from rackplan.simulator.sessions import SessionWorkload
from rackplan.simulator.streams import Streams

# AgentX loops over its 393 sessions; a corpus of this many is drawn once and looped over likewise.
CORPUS_SESSIONS = 512

Array = np.ndarray


class Quantiles:
    """A quantile function: monotone interpolation of points (share, value) in log space."""

    def __init__(self, *points: tuple[float, float]) -> None:
        self._shares, values = np.array(points).T
        self._logs = np.log(values)

    def __call__(self, shares: Array) -> Array:
        return np.exp(np.interp(shares, self._shares, self._logs))


class Lognormal:
    """A lognormal's quantile function, from its median and the standard deviation of its logarithm."""

    def __init__(self, median: float, sigma: float) -> None:
        self._median, self._sigma = median, sigma

    def __call__(self, shares: Array) -> Array:
        from scipy.special import ndtri  # slow to import, and not needed by other workloads

        return self._median * np.exp(self._sigma * ndtri(shares))


# Points at p50, p90, p99 and those of the shares past 300 and 1,800 s are published. The rest shape what lies between:
# low ends after the 49,334 open coding-agent requests of kv-cache-tester (p10, p25 at 0.4 and 0.6 of the median), upper
# ones so that the mean is the published one.
NEW_TOKENS = Quantiles(
    (0, 64), (0.1, 560), (0.25, 900), (0.5, 1664), (0.75, 2950), (0.9, 6200), (0.97, 17000), (0.99, 46722), (1, 120000)
)
MAIN_OUTPUT = Quantiles(
    (0, 8), (0.1, 130), (0.25, 260), (0.5, 616), (0.75, 1450), (0.9, 3502), (0.99, 8300), (1, 24000)
)
# Sub-agents: from the median over all requests and the mean that the totals leave to them.
SUB_OUTPUT = Lognormal(290, 1.3)
GAP_S = Quantiles(
    (0, 0.5), (0.1, 2), (0.25, 2.9), (0.5, 4.9), (0.9, 131.5), (0.955, 300), (0.986, 1800), (0.99, 3257), (1, 86400)
)
# p50 and p90 of main turns give a lognormal whose mean is the published one too; groups and their requests are by p50
# and mean.
MAIN_TURNS, MAX_MAIN_TURNS = Lognormal(65, 1.268), 2500
GROUPS, MAX_GROUPS = Lognormal(4, 1.33), 300
GROUP_REQUESTS, MAX_GROUP_REQUESTS = Lognormal(16, 0.935), 600
# Long gaps are people's; a sub-agent has none. Its gaps are the pooled distribution below this share.
SUB_GAP_SHARE = 0.9
# Sub-agent groups that run at once (published: median of the sessions' peaks).
BURST_GROUPS = 3
# 6,331 sibling streams over the 42,029 - 1,697 requests of groups that are not their first.
SIBLING_SHARE = 0.157
# Share of sub-agents that end before the parent's next turn: 11 of the 63 in the open requests named above.
JOINED_SHARE = 0.17


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFit:
    """What makes contexts grow to the published input lengths. Windows are tokens at which a session compacts."""

    window_p50: float
    window_sigma: float
    window_max: float
    keep_low: float
    keep_high: float
    main_first_p50: float
    sub_first_p50: float
    lead_share: float


# Found by bench/fit_agentx.py: least squared log error of main_isl, sub_isl, all_isl_p50 and the mean input.
FIT = GrowthFit(
    window_p50=683e3, window_sigma=0.69, window_max=945e3, keep_low=0.104, keep_high=0.436, main_first_p50=35.5e3,
    sub_first_p50=42.0e3, lead_share=0.759,
)  # fmt: skip
FIRST_SIGMA = 0.5


@cache
def published() -> dict[str, Any]:
    """The corpus' statistics as published."""
    return json.loads((files("rackplan.simulator") / "data" / "agentx_stats.json").read_text())


def _stratified(rng: np.random.Generator, n: int) -> Array:
    """`n` uniform shares, one in each n-th: totals of a small corpus then come near those of the distribution."""
    return (rng.permutation(n) + rng.random(n)) / n


def _counts(quantile: Lognormal, most: int, rng: np.random.Generator, n: int) -> Array:
    return np.clip(np.rint(quantile(_stratified(rng, n))), 1, most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Streams of one session, main first: turns, who spawns each (stream, turn), and whether it is joined."""

    turns: list[int]
    spawned_by: list[tuple[int, int] | None]
    joined: list[bool]


def _plan_session(main_turns: int, groups: Sequence[int], fit: GrowthFit, rng: np.random.Generator) -> _Plan:
    """Groups start in bursts at main turns; each is a lead and siblings that the lead's turns spawn."""
    plan = _Plan([main_turns], [None], [False])
    for at in range(0, len(groups), BURST_GROUPS):
        spawn_turn = int(rng.integers(main_turns))
        for requests in groups[at : at + BURST_GROUPS]:
            siblings = int(rng.binomial(requests - 1, SIBLING_SHARE))
            lead, lengths = _split_group(requests, siblings, fit.lead_share, rng)
            index = len(plan.turns)
            plan.turns.extend([lead, *lengths])
            plan.spawned_by.append((0, spawn_turn))
            plan.spawned_by.extend((index, int(u * lead)) for u in rng.random(siblings))
            plan.joined.extend((rng.random(siblings + 1) < JOINED_SHARE).tolist())
    return plan


def _split_group(requests: int, siblings: int, lead_share: float, rng: np.random.Generator) -> tuple[int, list[int]]:
    """Turns of the lead and of each sibling: one each, `lead_share` of the rest to the lead, the others at random."""
    rest = requests - 1 - siblings
    if not siblings:
        return 1 + rest, []
    to_lead = int(rng.binomial(rest, lead_share))
    others = np.bincount(rng.integers(siblings, size=rest - to_lead), minlength=siblings)
    return 1 + to_lead, (1 + others).tolist()


def generate_trees(rng: np.random.Generator, sessions: int, fit: GrowthFit = FIT) -> list[SessionTree]:
    """`sessions` session trees, drawn together (stratified), so two calls of half as many give others."""
    main_turns = _counts(MAIN_TURNS, MAX_MAIN_TURNS, rng, sessions)
    with_groups = _stratified(rng, sessions) < published()["sessions_with_subagents"]
    groups = np.zeros(sessions, np.int64)
    groups[with_groups] = _counts(GROUPS, MAX_GROUPS, rng, int(with_groups.sum()))
    requests = np.split(_counts(GROUP_REQUESTS, MAX_GROUP_REQUESTS, rng, int(groups.sum())), np.cumsum(groups)[:-1])
    plans = [_plan_session(int(t), r.tolist(), fit, rng) for t, r in zip(main_turns, requests, strict=True)]
    turns = iter(_draw_turns(plans, fit, rng))
    return [
        SessionTree(
            tuple(
                Stream(kind="sub" if by else "main", turns=next(turns), spawned_by=by, joined=joined)
                for by, joined in zip(p.spawned_by, p.joined, strict=True)
            )
        )
        for p in plans
    ]


def _draw_turns(plans: Sequence[_Plan], fit: GrowthFit, rng: np.random.Generator) -> list[tuple[Turn, ...]]:
    """The turns of every stream, session by session; all streams lie in one flat array, `starts` apart."""
    lengths = np.array([n for p in plans for n in p.turns])
    is_main = np.array([by is None for p in plans for by in p.spawned_by])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    main_turn = np.repeat(is_main, lengths)
    shares = rng.random(len(main_turn))
    outputs = np.where(main_turn, MAIN_OUTPUT(shares), SUB_OUTPUT(shares))
    delays_s = _draw_gaps(main_turn, starts, rng)
    inputs, reuse = _grow_contexts(lengths, starts, is_main, fit, rng)
    columns = (inputs, np.maximum(1, np.rint(outputs)).astype(np.int64), reuse, delays_s)
    flat = list(map(Turn._make, zip(*(c.tolist() for c in columns), strict=True)))
    return [tuple(flat[s : s + n]) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _draw_gaps(main_turn: Array, starts: Array, rng: np.random.Generator) -> Array:
    """Delays, s: 0 before first turns; sub-agents' from the low shares, main turns' so that all pool to `GAP_S`."""
    later = np.ones(len(main_turn), bool)
    later[starts] = False
    main_later = max(1, int((main_turn & later).sum()))
    long_chance = min(1.0, (1 - SUB_GAP_SHARE) * int(later.sum()) / main_later)
    is_long = main_turn & (rng.random(len(main_turn)) < long_chance)
    shares = rng.random(len(main_turn))
    shares = np.where(is_long, SUB_GAP_SHARE + (1 - SUB_GAP_SHARE) * shares, SUB_GAP_SHARE * shares)
    return np.where(later, GAP_S(shares), 0.0)


def _grow_contexts(
    lengths: Array, starts: Array, is_main: Array, fit: GrowthFit, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Input and reused tokens of every turn (turns,). A spawned stream's first turn reuses all but a fresh prompt."""
    streams = len(lengths)
    new = NEW_TOKENS(rng.random(int(lengths.sum())))
    prompt = new[starts].copy()
    first_p50 = np.where(is_main, fit.main_first_p50, fit.sub_first_p50)
    new[starts] = first_p50 * np.exp(FIRST_SIGMA * rng.standard_normal(streams))
    total = np.cumsum(new)
    contexts = total - np.repeat(total[starts] - new[starts], lengths)
    windows = np.full(streams, fit.window_max)
    windows[is_main] = np.minimum(
        Lognormal(fit.window_p50, fit.window_sigma)(_stratified(rng, int(is_main.sum()))), fit.window_max
    )
    windows = np.maximum(windows, 2 * new[starts])
    for index in np.flatnonzero(contexts[starts + lengths - 1] > windows):
        part = contexts[starts[index] : starts[index] + lengths[index]]
        _compact(part, float(windows[index]), fit, rng)
    inputs = np.maximum(1, np.rint(contexts)).astype(np.int64)
    reuse = np.maximum(0, inputs - np.maximum(1, np.rint(new)).astype(np.int64))
    reuse[starts] = np.where(is_main, 0, np.maximum(0, inputs[starts] - np.rint(prompt).astype(np.int64)))
    return inputs, reuse


def _compact(contexts: Array, window: float, fit: GrowthFit, rng: np.random.Generator) -> None:
    """Where a growing context passes `window`, keep a share of it and go on from there. Changes `contexts`."""
    turn = int(np.searchsorted(contexts, window, side="right"))
    while turn < len(contexts):
        before = contexts[turn - 1]
        contexts[turn:] -= before * (1 - rng.uniform(fit.keep_low, fit.keep_high))
        # The turn after a compaction is sent even if its new tokens alone fill a small window.
        turn += 1 + int(np.searchsorted(contexts[turn + 1 :], window, side="right"))


def session_statistics(trees: Sequence[SessionTree]) -> dict[str, Any]:
    """The published statistics, of `trees`: the keys of data/agentx_stats.json that a tree determines."""
    streams = [s for t in trees for s in t.streams]
    lengths = np.array([len(s.turns) for s in streams])
    table = np.array([turn for s in streams for turn in s.turns], dtype=float)
    main = np.repeat(np.array([s.kind == "main" for s in streams]), lengths)
    first = np.zeros(len(table), bool)
    first[np.cumsum(lengths) - lengths] = True
    inputs, outputs, reuse, delays_s = table.T
    main_turns = np.array([len(t.streams[0].turns) for t in trees])
    groups = [_group_requests(t) for t in trees]
    gaps_s = delays_s[~first]
    return {
        "sessions": len(trees),
        "requests": len(table),
        "main_requests": int(main.sum()),
        "subagent_groups": sum(map(len, groups)),
        "subagent_requests": int((~main).sum()),
        "streams": len(streams),
        "input_tokens": int(inputs.sum()),
        "output_tokens": int(outputs.sum()),
        "hit_infinite": float(reuse.sum() / inputs.sum()),
        "hit_prev_in_stream": float(reuse[~first].sum() / inputs.sum()),
        "main_isl": _quantiles(inputs[main], 50, 90, 99),
        "sub_isl": _quantiles(inputs[~main], 50, 90),
        "all_isl_p50": float(np.median(inputs)),
        "all_osl_p50": float(np.median(outputs)),
        "main_osl": _quantiles(outputs[main], 50, 90) | {"mean": float(outputs[main].mean())},
        "new_prefill_per_turn": _quantiles((inputs - reuse)[~first], 50, 99)
        | {"mean": float((inputs - reuse)[~first].mean())},
        "turns_main": _quantiles(main_turns, 50, 90),
        "gap_s": _quantiles(gaps_s, 50, 90, 99)
        | {"frac_gt300": float((gaps_s > 300).mean()), "frac_gt1800": float((gaps_s > 1800).mean())},
        "sessions_with_subagents": float(np.mean([bool(g) for g in groups])),
        "subagent_groups_per_session_p50": float(np.median([len(g) for g in groups if g])),
        "inner_reqs_p50": float(np.median([r for g in groups for r in g])),
    }


def _group_requests(tree: SessionTree) -> list[int]:
    """Requests of each sub-agent that the main stream spawned, with those of the streams that it spawned in turn."""
    root: dict[int, int] = {}
    requests: dict[int, int] = {}
    for index, stream in enumerate(tree.streams):
        if stream.spawned_by is not None:
            root[index] = root.get(stream.spawned_by[0], index)
            requests[root[index]] = requests.get(root[index], 0) + len(stream.turns)
    return list(requests.values())


def _quantiles(values: Array, *percents: int) -> dict[str, float]:
    return {f"p{p}": float(v) for p, v in zip(percents, np.percentile(values, percents), strict=True)}


@cache
def _corpus() -> list[SessionTree]:
    return generate_trees(Streams(0)["sessions"], CORPUS_SESSIONS)


AGENTX = SessionWorkload(name="agentx", corpus=_corpus)
