"""What a `vllm bench serve --save-detailed` run tells of step times in serving.

With async scheduling the engine logs no step times, but the client has every token's: between arrivals, tokens of one
request come a step apart, and around a prompt they tell how long its step took to launch.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from rackplan.calibration.records import ServedRun

WINDOW_STEPS = 8
"""Decode steps that are averaged: a client's clock and delivery jitter by 1 ms, a step of one request takes 3."""
QUIET_S = 0.02
"""No arrival and no first token this long before a window: a step that holds a prompt delays its neighbours."""
MIN_WINDOWS = 10
STALL_MS = 45.0
"""A wait between two tokens that only an eager launch makes: decode steps take 4 to 15 ms, the launches 55 and more."""
SAME_STALL_S = 0.006
QUANTILES = 21
Z90 = 1.645
"""A normal variable is within so many standard deviations in 90 % of cases."""
SAME_STEP_S = 0.0012
"""Tokens that come closer together than this left the engine in one step."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSteps:
    """Steps that held a request's last prompt tokens while others decoded, as one run's client saw them.

    Under async scheduling the host begins a step, launches it, waits for the step before and hands on its tokens; so
    the tokens of two steps leave a launch apart, and a prompt's first token leaves after the next step's launch.
    `new_tokens`: most prompt tokens of one request in the step; `tokens`: of all that end in it; `launch_ms`: between
    the deliveries around its launch; in the order of time.
    """

    new_tokens: np.ndarray
    tokens: np.ndarray
    launch_ms: np.ndarray


def prompt_steps(run: ServedRun) -> PromptSteps:
    """The steps with prompts of one run."""
    delivered = np.sort(np.concatenate(run.token_s))
    step_s = delivered[np.concatenate([[True], np.diff(delivered) > SAME_STEP_S])]
    first = np.array([t[0] for t in run.token_s])
    last = np.array([t[-1] for t in run.token_s])
    steps: dict[int, tuple[int, int, float]] = {}
    prompts = run.input_tokens - (0 if run.cached_tokens is None else run.cached_tokens)
    for own, prompt in zip(first, prompts, strict=True):
        at = int(np.searchsorted(step_s, own, side="right")) - 1
        if at < 3 or not ((first < step_s[at - 3]) & (last > own)).any():
            continue  # nobody was decoding: no delivery tells when the host began
        most, others, _ = steps.get(at, (0, 0, 0.0))
        steps[at] = max(most, int(prompt)), others + int(prompt), (step_s[at - 1] - step_s[at - 2]) * 1e3
    new_tokens, tokens, launch_ms = np.array([steps[at] for at in sorted(steps)]).reshape(-1, 3).T
    return PromptSteps(new_tokens=new_tokens, tokens=tokens, launch_ms=launch_ms)


def launches_of(steps: list[PromptSteps], captured_tokens: int, eager: bool) -> list["Launches"]:
    """Launches of each run's steps with prompt tokens: past the captured graph sizes (`eager`), or within them."""
    past = [s.new_tokens > captured_tokens for s in steps]
    kept = [p if eager else ~p for p in past]
    return [Launches(ms=s.launch_ms[k], tokens=s.tokens[k]) for s, k in zip(steps, kept, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Launches of one run's steps and the new tokens in each, (steps,)."""

    ms: np.ndarray
    tokens: np.ndarray

    def without_tokens(self, token_ms: float) -> np.ndarray:
        """What is left of each launch at no tokens, ms."""
        return self.ms - token_ms * self.tokens


def token_launch_ms(runs: list[Launches]) -> float:
    """What each token adds to a launch: one slope over runs of means of their own, 0 where all have alike."""
    ms = np.concatenate([r.ms - r.ms.mean() for r in runs])
    tokens = np.concatenate([r.tokens - r.tokens.mean() for r in runs])
    spread = float((tokens**2).sum())
    return max(0.0, float((ms * tokens).sum()) / spread) if spread else 0.0


def launch_at_no_tokens_ms(runs: list[Launches], token_ms: float) -> float:
    """Mean launch less what its tokens add. The mean, as it keeps the time that is lost in all."""
    return float(np.concatenate([r.without_tokens(token_ms) for r in runs]).mean())


def launch_quantiles(runs: list[Launches], token_ms: float) -> tuple[float, ...]:
    """Quantiles of launch / mean launch of the run at QUANTILES equal steps, of mean 1 as they are drawn: linear
    between them."""
    expected = [r.ms.mean() + token_ms * (r.tokens - r.tokens.mean()) for r in runs]
    ratios = np.concatenate([r.ms / e for r, e in zip(runs, expected, strict=True)])
    found = np.quantile(ratios, np.linspace(0, 1, QUANTILES))
    found /= ((found[1:] + found[:-1]) / 2).mean()
    return tuple(float(q) for q in found)


def launch_correlation(runs: list[Launches]) -> float:
    """Of the logarithm of a launch with that of the one before it in its run, over runs of means of their own."""
    logs = [np.log(r.ms) - np.log(r.ms).mean() for r in runs if len(r.ms) > 1]
    spread = sum(float((x**2).mean()) * (len(x) - 1) for x in logs)
    return max(0.0, sum(float(x[1:] @ x[:-1]) for x in logs) / spread) if spread else 0.0


def launch_error_ms(runs: list[Launches]) -> float:
    """Half of the 90 % interval in which the mean launch of one more machine lies, by the means of `runs`, one of each
    machine; of one alone, that of its own mean, of which fewer launches tell anew as each follows the one before."""
    if len(runs) > 1:
        spread_ms = float(np.std([r.ms.mean() for r in runs], ddof=1))
        return float(student.ppf(0.95, len(runs) - 1)) * spread_ms * float(np.sqrt(1 + 1 / len(runs)))
    correlation = launch_correlation(runs)
    count = len(runs[0].ms) * (1 - correlation) / (1 + correlation)
    return Z90 * float(runs[0].ms.std() / np.sqrt(count))


def stalls(run: ServedRun) -> Launches:
    """Launches of eager steps that running requests waited for: the wait and the step before it, by which the host was
    ahead. For workers in processes of their own, whose tokens do not wait for the next launch too.

    The step before must be a decode step, whose GPU time is known by its own length. Waits of several requests that
    end together are one step's, and so are the first tokens that come with them; a step of two prompts or more is left
    out, as they may be of different ranks and it takes what the later of these takes."""
    waits = []
    for times in run.token_s:
        gap_ms = np.diff(times) * 1e3
        at = np.flatnonzero((gap_ms[1:] > STALL_MS) & (gap_ms[:-1] < STALL_MS)) + 1
        waits += [(times[i + 1], gap_ms[i] + gap_ms[i - 1]) for i in at]
    end_s, launch_ms = np.array(sorted(waits)).T
    step = np.concatenate([[0], np.cumsum(np.diff(end_s) > SAME_STALL_S)])
    first_s = np.array([t[0] for t in run.token_s])
    ms, tokens = [], []
    for i in range(int(step[-1]) + 1):
        with_it = np.abs(first_s - end_s[step == i].mean()) < SAME_STALL_S
        if with_it.sum() == 1:
            ms.append(np.median(launch_ms[step == i]))
            tokens.append(float(run.input_tokens[with_it][0]))
    return Launches(ms=np.array(ms), tokens=np.array(tokens))
