"""What a `vllm bench serve --save-detailed` run and its engine's iteration log tell of step times in serving.

With async scheduling the engine logs no step times, but the client has every token's: between arrivals, tokens of one
request come a step apart. What decode steps leave of a fully busy second belongs to the steps that held prompts.
"""

import csv
import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WINDOW_STEPS = 8
"""Decode steps that are averaged: a client's clock and delivery jitter by 1 ms, a step of one request takes 3."""
QUIET_S = 0.02
"""No arrival and no first token this long before a window: a step that holds a prompt delays its neighbours."""
MIN_WINDOWS = 10
SAME_STEP_S = 0.0012
"""Tokens that come closer together than this left the engine in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One client run. `start_s`, `ttft_s`: (requests,); `token_s`: each request's token times; `cached_tokens`."""

    start_s: np.ndarray
    ttft_s: np.ndarray
    token_s: list[np.ndarray]
    cached_tokens: np.ndarray


def read_served(path: Path) -> ServedRun:
    data = json.loads(gzip.decompress(path.read_bytes()))
    start, ttft = np.array(data["start_times"]), np.array(data["ttfts"])
    first = start + ttft
    tokens = [np.concatenate([[f], f + np.cumsum(itl)]) for f, itl in zip(first, data["itls"], strict=True)]
    return ServedRun(start_s=start, ttft_s=ttft, token_s=tokens, cached_tokens=np.array(data["cached_lens"]))


def decode_intervals_ms(runs: list[ServedRun]) -> dict[int, float]:
    """Median time of a pure decode step by batch, where MIN_WINDOWS quiet windows of constant batch show it."""
    seen: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        first = np.array([t[0] for t in run.token_s])
        last = np.array([t[-1] for t in run.token_s])
        stirs = np.sort(np.concatenate([run.start_s, first]))
        for times in run.token_s:
            # The first tokens of a request are delivered together: start at the sixth.
            for i in range(5, len(times) - WINDOW_STEPS, WINDOW_STEPS):
                begin, end = times[i], times[i + WINDOW_STEPS]
                if np.searchsorted(stirs, begin - QUIET_S) != np.searchsorted(stirs, end):
                    continue
                if not ((last > begin) & (last < end)).any():
                    seen[int(((first < begin) & (last >= end)).sum())].append((end - begin) / WINDOW_STEPS * 1e3)
    return {b: float(np.median(v)) for b, v in sorted(seen.items()) if len(v) >= MIN_WINDOWS}


def prompt_steps_ms(iterations: Path, decode_ms: dict[int, float], captured_tokens: int) -> tuple[float, float]:
    """Mean time of a step that holds prompt tokens: (within the captured graph sizes, past them), ms.

    Counts fully busy seconds of the log: 1,000 ms less the decode steps at their measured times.
    """
    batches, times = np.array(list(decode_ms)), np.array(list(decode_ms.values()))
    left: dict[tuple[str, str], float] = defaultdict(lambda: 1000.0)
    small: dict[tuple[str, str], int] = defaultdict(int)
    large: dict[tuple[str, str], int] = defaultdict(int)
    edges: dict[str, list[int]] = {}
    for row in csv.DictReader(gzip.decompress(iterations.read_bytes()).decode().splitlines()):
        key, running = (row["run"], row["second"]), int(row["generation_requests"])
        edges.setdefault(row["run"], [int(row["second"]), 0])[1] = int(row["second"])
        if not int(row["context_requests"]):
            left[key] -= float(np.interp(running, batches, times))
        elif int(row["context_tokens"]) + running <= captured_tokens:
            small[key] += 1
        else:
            large[key] += 1
    whole = [k for k in set(left) | set(small) | set(large) if int(k[1]) not in edges[k[0]]]
    quiet = [k for k in whole if small[k] and not large[k]]
    piecewise = sum(left[k] for k in quiet) / sum(small[k] for k in quiet)
    busy = [k for k in whole if large[k]]
    eager = sum(left[k] - piecewise * small[k] for k in busy) / sum(large[k] for k in busy)
    return piecewise, eager


def frontend_ms(runs: list[ServedRun]) -> float:
    """Median of what TTFT holds beyond the engine: an arrival during step n runs in step n + 2, as step n + 1 is
    already scheduled. Step ends are the moments at which running requests get their tokens."""
    left: list[np.ndarray] = []
    for run in runs:
        delivered = np.sort(np.concatenate([t[2:] for t in run.token_s]))
        step_end = delivered[np.concatenate([[True], np.diff(delivered) > SAME_STEP_S])]
        running = np.searchsorted(step_end, run.start_s)
        inside = (running > 0) & (running + 2 < len(step_end))
        engine_s = step_end[np.minimum(running + 2, len(step_end) - 1)] - run.start_s
        left.append((run.ttft_s - engine_s)[inside])
    return float(np.median(np.concatenate(left)) * 1e3)
