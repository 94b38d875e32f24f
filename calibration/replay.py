"""Published figures that only a simulation can answer: replays with their arrivals, queues and imbalance.

They (F14, F16 to F20) run prefill alone: requests of one output token on one aggregated instance, prefix cache off,
chunks of 16,384 tokens, the prefill fixes off as in F13 and F15.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rackplan.calibration.figures import Predictor
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.published import MODEL, REPLAY_CHUNK_TOKENS, REPLAY_FIXES_OFF
from rackplan.engine import Deployment, parse_deployment
from rackplan.simulator.agentx import AGENTX
from rackplan.simulator.load import Load, Source, Workload
from rackplan.simulator.metrics import metrics_of
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import SimResult, simulate
from rackplan.simulator.streams import Streams

STAGGER_S = 5.0
MEASURED_S = 1500.0
"""Simulated time that is measured: some 450 prompts a rank."""
WARMUP_S = 50.0
AGENTX_CONCURRENCY = 256
STREAM_ASSUMPTION = (
    "all requests queued at the start of each rank, AgentX session by session, each in its recorded order; mean of 4 "
    "draws"
)
REPLAY_SEEDS = range(4)
"""A run holds some ten sessions, and how long their prompts are moves its throughput by a tenth."""
AGENTX_ASSUMPTION = "prefix cache off as in F13 to F18, requests to the rank with the fewest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStreams:
    """The same prompts to every rank, one output token each; rank r starts `stagger_s` x r later. Saturates.

    A rank's stream is a session whose prompts count as nothing but prefix, so affinity never sends them elsewhere;
    with the prefix cache off they are computed in full.
    """

    ranks: int
    stagger_s: float
    name: str = "rank streams"

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        prompts = _agentx_prompts(streams, round(duration_s))
        return _RankStreamsSource(prompts, self.ranks, self.stagger_s)


class _RankStreamsSource:
    def __init__(self, prompts: np.ndarray, ranks: int, stagger_s: float) -> None:
        self._prompts, self._ranks, self._stagger_s = prompts.tolist(), ranks, stagger_s

    def arrivals(self) -> Iterator[Request]:
        for rank in range(self._ranks):
            at_ns = round(rank * self._stagger_s * NS_PER_S)
            for i, tokens in enumerate(self._prompts):
                yield Request(i * self._ranks + rank, at_ns, tokens, 1, session=rank, reuse_tokens=tokens)

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        return []

    def primed(self) -> list[tuple[int, int]]:
        return [(rank, 1) for rank in range(self._ranks)]


def _agentx_prompts(streams: Streams, count: int) -> np.ndarray:
    """Input tokens of `count` requests of AgentX as a replay sends them: one session after the other, of each the
    requests of all its agents in the order in which they were recorded."""
    trees = AGENTX.corpus()
    prompts: list[np.ndarray] = []
    for i in streams["prompts"].permutation(len(trees)).tolist():
        inputs = np.array([turn.input_tokens for stream in trees[i].streams for turn in stream.turns])
        prompts.append(inputs[np.argsort(np.concatenate(trees[i].turn_ends_s), kind="stable")])
        if sum(map(len, prompts)) >= count:
            break
    return np.concatenate(prompts)[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOnly:
    """A workload whose requests end with their first token."""

    of: Workload
    name: str = "prefill only"

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        return _PrefillOnlySource(self.of.source(load, duration_s, streams))


class _PrefillOnlySource:
    def __init__(self, source: Source) -> None:
        self._source = source

    def arrivals(self) -> Iterator[Request]:
        return map(_one_token, self._source.arrivals())

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        return list(map(_one_token, self._source.finished(request, now_ns)))

    def primed(self) -> list[tuple[int, int]]:
        return self._source.primed()


def _one_token(request: Request) -> Request:
    request.output_tokens = 1
    return request


def prefill_deployment(dep: int, policy: str) -> Deployment:
    """One aggregated instance on GB300 that prefills: chunks of 16,384 tokens, no prefix cache, no drafts."""
    pool = {
        "role": "aggregated",
        "instances": 1,
        "dep": dep,
        "max_num_batched_tokens": REPLAY_CHUNK_TOKENS,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
    }
    return parse_deployment({"model": MODEL, "gpu": "gb300", "pools": [pool], "router": {"policy": policy}})


def _run(
    calibration: FittedCalibration,
    deployment: Deployment,
    workload: Workload,
    load: Load,
    warmup_s: float,
    seed: int = 0,
) -> SimResult:
    engine = FittedCalibration(calibration.file, fixes_off=REPLAY_FIXES_OFF)
    options = RunOptions(duration_s=warmup_s + MEASURED_S, warmup_s=warmup_s, drain=False, seed=seed)
    return simulate(deployment, workload, load, engine, options)


@lru_cache(maxsize=16)
def _streams_tok_s(calibration: FittedCalibration, dep: int, stagger_s: float) -> float:
    """Instance throughput of rank streams while every rank runs, new tok/s, mean over REPLAY_SEEDS."""
    deployment = prefill_deployment(dep, "prefix_affinity")
    workload = RankStreams(ranks=dep, stagger_s=stagger_s)
    runs = (_run(calibration, deployment, workload, Load(), WARMUP_S + dep * stagger_s, seed) for seed in REPLAY_SEEDS)
    return float(np.mean([metrics_of(run)["throughput_new_input_tok_s_per_gpu"] for run in runs])) * dep


def lost_to_stagger_pct(calibration: FittedCalibration, dep: int) -> float:
    """Throughput lost by staggered ranks against mirrored ones, %."""
    return 100 * (1 - _streams_tok_s(calibration, dep, STAGGER_S) / _streams_tok_s(calibration, dep, 0.0))


def agentx_prefill_tok_s(calibration: FittedCalibration, dep: int) -> float:
    """New tok/s/GPU of AgentX without its decoding."""
    deployment = prefill_deployment(dep, "least_requests")
    load = Load(concurrency=AGENTX_CONCURRENCY)
    result = _run(calibration, deployment, PrefillOnly(of=AGENTX), load, WARMUP_S)
    return float(metrics_of(result)["throughput_new_input_tok_s_per_gpu"])


PUBLISHED: dict[str, Predictor] = {
    "F14": Predictor(lambda c: _streams_tok_s(c, 2, STAGGER_S), STREAM_ASSUMPTION),
    "F16": Predictor(lambda c: _streams_tok_s(c, 4, STAGGER_S), STREAM_ASSUMPTION),
    "F17": Predictor(lambda c: lost_to_stagger_pct(c, 2), STREAM_ASSUMPTION),
    "F18": Predictor(lambda c: lost_to_stagger_pct(c, 4), STREAM_ASSUMPTION),
    "F19": Predictor(lambda c: agentx_prefill_tok_s(c, 2), AGENTX_ASSUMPTION),
    "F20": Predictor(lambda c: agentx_prefill_tok_s(c, 4), AGENTX_ASSUMPTION),
}
"""What a simulation makes of each figure, in the figure's unit; all are check rows of gb300-v4.1-flash."""
