"""Launches of eager steps in the served runs on H200: what `h200-v2-lite` holds of the host's speed.

A launch takes what the host's CPU makes of it. Hosts differ, and so do the minutes of one: the same calm load launched
in 58 to 79 ms. So a file holds the level of one host, that of the first of MACHINES; how far others lie apart is its
error. How launches spread within a run, and what tokens add, comes from all.

What else a host does follows its launches: the front end took 13.2, 12.3 and 11.0 ms on machines that launched in 79,
74 and 64. So what a machine with step logs tells of the host is brought to the file's by their launches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rackplan.calibration.campaign import ep_launches
from rackplan.calibration.h200_rows import SERVED_PROMPT
from rackplan.calibration.served import (
    Launches,
    PromptSteps,
    launch_at_no_tokens_ms,
    launch_correlation,
    launch_error_ms,
    launch_quantiles,
    launches_of,
    token_launch_ms,
)

CAPTURED_TOKENS = 512
MACHINES = (
    ("r4", "r12"),
    ("dep1_load0",),
    ("turns_load0", "turns_load0_2"),
    ("turns_load0_3", "turns_load0_4"),
)
"""Runs on one GPU that tell launches, by the machine that they ran on; the first is the file's."""


def slowness(steps: Mapping[str, PromptSteps]) -> dict[str, float]:
    """By run: how much longer a launch takes on the file's host than on the run's. `steps`: by run."""
    means = [m.ms.mean() for m in by_machine(launches_by_run(steps, eager=True))]
    return {name: float(means[0] / mean) for names, mean in zip(MACHINES, means, strict=True) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaunches:
    """Means by coefficient, ms; quantiles of launch / mean; half of the 90 % interval of one host more, ms."""

    coefficients: dict[str, float]
    quantiles: tuple[float, ...]
    error_ms: float


def launches_by_run(steps: Mapping[str, PromptSteps], eager: bool) -> dict[str, Launches]:
    """Launches beside decodes of the runs of MACHINES, past the captured sizes (`eager`) or within them."""
    return {name: launches_of([steps[name]], CAPTURED_TOKENS, eager)[0] for runs in MACHINES for name in runs}


def by_machine(runs: Mapping[str, Launches]) -> list[Launches]:
    """Of each machine that has some."""
    found = []
    for names in MACHINES:
        ms, tokens = (np.concatenate([getattr(runs[n], what) for n in names]) for what in ("ms", "tokens"))
        if len(ms):
            found.append(Launches(ms=ms, tokens=tokens))
    return found


def host_launches(steps: Mapping[str, PromptSteps], alone_ms: float) -> HostLaunches:
    """`steps`: by run; `alone_ms`: launch of a prompt of SERVED_PROMPT tokens beside which nothing decodes.

    What tokens add is of the runs on one GPU: of DEP2's every step has as many."""
    eager, ep = launches_by_run(steps, eager=True), ep_launches()
    one_gpu = list(eager.values())
    token_ms = token_launch_ms(one_gpu)
    lone_ms = alone_ms - token_ms * SERVED_PROMPT
    beside_ms = launch_at_no_tokens_ms(by_machine(eager)[:1], token_ms)
    return HostLaunches(
        coefficients={
            "piecewise_floor_ms": launch_at_no_tokens_ms(by_machine(launches_by_run(steps, eager=False))[:1], 0.0),
            "eager_floor_ms": lone_ms,
            "eager_decode_launch_ms": beside_ms - lone_ms,
            "eager_ep_launch_ms": launch_at_no_tokens_ms([ep], token_ms) - beside_ms,
            "eager_token_launch_ms": token_ms,
            "launch_correlation": launch_correlation(one_gpu),
        },
        quantiles=launch_quantiles([*one_gpu, ep], token_ms),
        error_ms=launch_error_ms(by_machine(eager)),
    )
