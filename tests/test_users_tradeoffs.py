"""Trades that people met and that have two good answers: a chunk's length (U14), a concurrency past the knee (U19)."""

from functools import cache

import numpy as np
import pytest
from models import GivenRequests, aggregated

from rackplan.calibration.library import load_calibration
from rackplan.simulator.load import Load
from rackplan.simulator.metrics import Measured
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.operating_point import find_operating_point
from rackplan.tuner.probe import Probe, merge, run_once
from rackplan.tuner.slo import Slo

# -- U14: 31 decoders and prompts of 4,713 tokens; chunk 1,024 -> 2,048 took P95 ITL 109 -> 186 ms, TTFT 706 -> 644 ms
PROMPT_TOKENS = 4713


@cache
def chunked(tokens: int) -> tuple[float, float, float]:
    """(median TTFT of the long prompts, P95 and P99 of ITL), ms, of DeepSeek-V3 on four GB200."""
    deployment = aggregated(model="deepseek-v3", gpu="gb200", dep=4, max_num_batched_tokens=tokens)
    decoders = [Request(i, 0, 200, 3000) for i in range(31)]
    prompts = [Request(31 + i, round((2 + 0.35 * i) * 1e9), PROMPT_TOKENS, 2) for i in range(160)]
    workload = GivenRequests([*decoders, *prompts])
    result = simulate(deployment, workload, Load(), load_calibration("gb200-v3"), RunOptions())
    measured = Measured(result)
    order = np.argsort(measured.itl_ms)
    below = np.cumsum(measured.itl_weight[order])
    p95, p99 = (measured.itl_ms[order][np.searchsorted(below, q * below[-1])] for q in (0.95, 0.99))
    return float(np.median(measured.ttft_ms[measured.input_tokens == PROMPT_TOKENS])), float(p95), float(p99)


def test_u14_a_longer_chunk_lowers_ttft_and_raises_the_tail_of_itl():
    (short_ttft, short_itl, _), (long_ttft, long_itl, _) = chunked(1024), chunked(2048)
    assert 0.7 < long_ttft / short_ttft < 0.97  # the report: 0.91
    assert 1.3 < long_itl / short_itl < 2.0  # the report: 1.71


def test_u14_no_chunk_is_better_in_both_so_all_are_on_the_front():
    # By P99: a prompt in one or two chunks is too rare to show in P95.
    found = [chunked(n) for n in (1024, 2048, 4096)]
    ttft, p99 = [f[0] for f in found], [f[2] for f in found]
    assert ttft == sorted(ttft, reverse=True)
    assert p99 == sorted(p99)


# -- U19: concurrency 32 -> 64 brought 11 % more throughput and took P99 TTFT from 0.94 to 73 s -----------------------
SEATS = 36
SLO = Slo(p90_interactivity_tok_s_user=20.0, p90_ttft_ms=2000.0)


@cache
def at_concurrency(n: int) -> Probe:
    deployment, load = aggregated(max_num_seqs=SEATS), Load(concurrency=n)
    options = RunOptions(duration_s=600.0, warmup_s=120.0, drain=False)
    run = run_once(deployment, parse_workload("lognormal:2048/1024"), load, load_calibration("h200-v2-lite"), options)
    return merge(deployment, load, [run])


def test_u19_past_the_seats_throughput_gains_little_and_the_tail_of_ttft_all():
    few, many = (at_concurrency(n).metrics for n in (32, 64))
    assert 1.0 < many["total_throughput_tok_s"] / few["total_throughput_tok_s"] < 1.2
    assert many["ttft_ms"]["p99"] > 20 * few["ttft_ms"]["p99"]


def test_u19_a_percentile_of_ttft_holds_the_load_at_the_knee():
    found = find_operating_point(lambda n: at_concurrency(round(n)), 64.0, SLO, most_probes=6, least=1.0)
    assert found.best is not None
    assert 32 <= found.best.load.concurrency <= SEATS + 1  # one request waits at most
    unbound = at_concurrency(64).metrics["total_throughput_tok_s"]
    assert found.best.metrics["total_throughput_tok_s"] > 0.95 * unbound


def test_u19_the_mean_would_not_have_told():
    past = at_concurrency(SEATS + 2)
    assert past.metrics["ttft_ms"]["mean"] < SLO.p90_ttft_ms
    assert not SLO.meets(past.metrics)


@pytest.mark.parametrize("n", [32, 64])
def test_u19_interactivity_alone_would_admit_both(n):
    assert SLO.slack(at_concurrency(n).metrics)["p90_interactivity"] >= 1.0
