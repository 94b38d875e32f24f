"""What readers return: runs as clients saw them, engine steps as the engine logged them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

METRICS = {
    "output throughput": "tok/s",
    "mean TPOT": "ms",
    "median TPOT": "ms",
    "P90 TPOT": "ms",
    "P99 TPOT": "ms",
    "mean TTFT": "ms",
    "median TTFT": "ms",
    "P90 TTFT": "ms",
    "P99 TTFT": "ms",
}
"""Metrics of a served run by name, and their units: whatever the client calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One client run, requests that failed left out, in the order they were sent. Arrays are (requests,), times s.

    `token_s`: each request's token times; it, `ttft_s` and `end_s` are empty where the client kept none.
    `cached_tokens`: None where the client did not say; `metrics`: by name, as in METRICS. `concurrency`: requests in
    flight of a closed loop, None where requests were sent whatever the engine did.
    """

    start_s: np.ndarray
    ttft_s: np.ndarray
    end_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    cached_tokens: np.ndarray | None
    token_s: list[np.ndarray]
    metrics: Mapping[str, float]
    concurrency: int | None = None

    @property
    def mean_context(self) -> int:
        """Context of a decoding request halfway through its output, tokens."""
        return round(float(np.mean(self.input_tokens + self.output_tokens / 2)))


def closed_loop(clients: int | None, requests: int) -> int | None:
    """`clients` that each waited for its request's end before the next of `requests`; None of a burst: none did."""
    return clients if clients is not None and clients < requests else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one rank, from the step log. `prefill`: (new, context) tokens of each chunk. Times are ms, but `t_s`:
    seconds on the engine's clock when it was scheduled. `gap_ms`: between the outputs of the step before and of this.
    """

    number: int
    t_s: float
    prefill: tuple[tuple[int, int], ...]
    decode_requests: int
    decode_tokens: int
    decode_context_tokens: int
    running: int
    schedule_ms: float
    execute_ms: float
    update_ms: float
    gap_ms: float | None

    @property
    def requests(self) -> int:
        return self.decode_requests + len(self.prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """The steps of one rank in order, and the configuration that its engine ran with."""

    config: Mapping[str, Any]
    steps: tuple[Step, ...]
