"""How a run is made: how its text suits the draft, what happens meanwhile. Data, as worker processes are sent it."""

import math
from dataclasses import dataclass

from rackplan.engine.errors import InputError
from rackplan.simulator.failures import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRun:
    """What happens to the experts in a run, of which no setting of the engine knows.

    cold_start: they lie in blocks until the first rearrangement, as an engine starts; otherwise EPLB has placed them
    before. eplb_off_s: no rearrangement starts from this time on. drift_per_step: see ExpertLoad. Raises InputError on
    values out of range.
    """

    cold_start: bool = False
    eplb_off_s: float = math.inf
    drift_per_step: float = 0.0

    def __post_init__(self) -> None:
        if not self.eplb_off_s >= 0:
            raise InputError(f"eplb_off_s={self.eplb_off_s}: must be 0 or more seconds")
        if not 0 <= self.drift_per_step < math.inf:
            raise InputError(f"drift_per_step={self.drift_per_step}: must be 0 or more")


STEADY_RUN = ExpertRun()
"""EPLB has placed the experts before the run, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How a workload's text suits the draft. `thinking`: which of the model's measured acceptance lengths it has;
    `acceptance_spread`: see Acceptance. Neither matters without drafts."""

    thinking: bool = True
    acceptance_spread: float = 0.0

    def to_inputs(self) -> dict[str, bool | float]:
        """Its fields by name."""
        return {"thinking": self.thinking, "acceptance_spread": self.acceptance_spread}

    def check_effect(self, draft_tokens: int) -> None:
        """Raises InputError where something is set that nothing would come of."""
        if draft_tokens == 0 and self != USUAL:
            option = "--acceptance-spread" if self.thinking else "--thinking off"
            raise InputError(f"{option}: has no effect without drafts; set speculation.draft_tokens or leave it out")


USUAL = Drafting()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run. Arrivals stop after `duration_s`; what ends before `warmup_s` is not measured; `coalesce=False` takes
    every step by itself (for tests: the results are the same). `drain`: run on until every request has ended.
    `experts`: what happens to them in the run; `drafting`: how the requests' text suits the draft; `failures`:
    instances that are lost for a while; `resubmit`: their requests without a token are sent again."""

    duration_s: float = 600.0
    warmup_s: float = 0.0
    seed: int = 0
    drain: bool = True
    coalesce: bool = True
    experts: ExpertRun = STEADY_RUN
    drafting: Drafting = USUAL
    failures: tuple[Failure, ...] = ()
    resubmit: bool = True
