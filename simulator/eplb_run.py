"""EPLB while an instance runs: when it rearranges, what that costs, and which placement of the experts serves.

Every `interval_steps` the experts are placed anew. A synchronous rearrangement stops all ranks and serves at once. An
asynchronous one takes a share of the link while decoding goes on, and serves when its last layer has arrived; a step
takes in one layer at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from rackplan.engine import Deployment, Pool
from rackplan.simulator.clock import Clock
from rackplan.simulator.cost import STEADY, Calibration, PassedOn, PlacedAt, PoolCost, SharedTime
from rackplan.simulator.request import NS_PER_MS, NS_PER_S
from rackplan.simulator.run_options import ExpertRun

if TYPE_CHECKING:  # takes long to import, and most runs need none of it
    from rackplan.simulator.rearrange import Rearrangement

NEVER = 2**62
"""A step that no run comes to."""


class Served(NamedTuple):
    """What steps take under a placement: `cost`, of which the shared times count, and balancedness by tokens per rank.
    """

    cost: PoolCost
    balancedness: Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbModel:
    """EPLB of one pool. `layers`: MoE layers that a rearrangement goes through, the draft's with them; `rearrangement`:
    by whether it is the first; `served`: by placement."""

    interval_steps: int
    use_async: bool
    window_steps: int
    layers: int
    off_ns: float
    run: ExpertRun
    rearrangement: Callable[[bool], Rearrangement]
    served: Callable[[PlacedAt], Served]


def served_by(calibration: Calibration, deployment: Deployment, pool: Pool) -> Callable[[PlacedAt], Served]:
    """What steps of `pool` take by placement; asked once for each placement, and for each octave of tokens."""

    @cache
    def served(placed: PlacedAt) -> Served:
        known: dict[int, float] = {}

        def balancedness(tokens_per_rank: float) -> float:
            bucket = int(tokens_per_rank).bit_length()
            if bucket not in known:
                known[bucket] = calibration.balancedness(deployment, pool, tokens_per_rank, placed)
            return known[bucket]

        return Served(calibration.pool_cost(deployment, pool, placed), balancedness)

    return served


def eplb_of(
    calibration: Calibration,
    deployment: Deployment,
    pool: Pool,
    served: Callable[[PlacedAt], Served],
    run: ExpertRun,
) -> EplbModel | None:
    """EPLB of `pool` as it is deployed, None where it is off or has nothing to balance."""
    eplb, model = deployment.eplb, deployment.model_spec
    if not eplb.enabled or pool.gpus_per_instance == 1:
        return None
    drafts = model.draft if deployment.speculation.draft_tokens and pool.role != "prefill" else None

    @cache
    def rearrangement(first: bool) -> Rearrangement:
        return calibration.rearrangement(deployment, pool, first=first, drift_per_step=run.drift_per_step)

    return EplbModel(
        interval_steps=eplb.interval_steps,
        use_async=eplb.use_async,
        window_steps=eplb.window_steps,
        layers=model.moe_layers + (drafts.layers if drafts else 0),
        off_ns=run.eplb_off_s * NS_PER_S,
        run=run,
        rearrangement=rearrangement,
        served=served,
    )


class Reshared(PassedOn):
    """A `PoolCost` with other shared times."""

    def __init__(self, cost: PoolCost, shared_ms: Callable[[int, int, int, int, float], SharedTime]) -> None:
        super().__init__(cost)
        self.shared_ms = shared_ms


class Eplb:
    """EPLB of one instance. `cost`, `balancedness`: of its steps from now on; `rearranged`: how often it has been.

    `on_change` is called where they change in the midst of steps; the step under way keeps its time.
    """

    def __init__(self, model: EplbModel, env: Clock, cost: PoolCost, on_change: Callable[[], None]) -> None:
        self._model, self._env, self._own, self._on_change = model, env, cost, on_change
        every = model.interval_steps
        # vLLM starts its counter at three quarters of the interval.
        self._due = max(1, every // 4) if model.run.cold_start else every
        self._linear = model.run.cold_start
        self._moving = self._arrived = False
        self._since = self._placed_step = 0
        self._older_from = 2 * every if model.run.drift_per_step and not self._linear else NEVER
        self.rearranged = 0
        self.cost: PoolCost = cost
        self._use(PlacedAt(linear=True) if self._linear else self._fresh())

    def begin(self, step: int) -> float:
        """Before the step that follows `step` steps: for how long all ranks stop, ms."""
        stop_ms = 0.0
        if step >= self._due:
            self._due += self._model.interval_steps
            if not self._moving and self._env.now_ns < self._model.off_ns:
                stop_ms = self._rearrange(step)
        if self._arrived and step >= self._since + self._model.layers:
            self._place(step)
        if step >= self._older_from:
            self._grow_old(step)
        return stop_ms

    def steps_ahead(self, step: int) -> int:
        """Steps until something changes by itself."""
        ahead = min(self._due, self._older_from) - step
        return min(ahead, self._since + self._model.layers - step) if self._arrived else ahead

    def _rearrange(self, step: int) -> float:
        moved = self._model.rearrangement(self._linear)
        if not self._model.use_async:
            self._place(step)
            return moved.total_ms
        self._moving, self._since = True, step
        if moved.link_share:
            self.cost = Reshared(self._own, _beside(self.cost.shared_ms, moved.link_share))
        self._env.after(max(1, round(moved.total_ms * NS_PER_MS)), self._arrive, None)
        return 0.0

    def _arrive(self, _: None) -> None:
        self._arrived = True
        self._on_change()

    def _place(self, step: int) -> None:
        """The new placement serves."""
        self._linear = self._moving = self._arrived = False
        self._placed_step = step
        self.rearranged += 1
        self._use(self._fresh())
        if self._model.run.drift_per_step:
            self._older_from = step + 2 * self._model.interval_steps

    def _fresh(self) -> PlacedAt:
        """While EPLB keeps on rearranging, a placement has its mean age."""
        return STEADY._replace(drift_per_step=self._model.run.drift_per_step)

    def _grow_old(self, step: int) -> None:
        """No rearrangement has come for an interval or more: the placement's age counts, by octaves."""
        model = self._model
        octave = (step - self._placed_step) // model.interval_steps
        octave = 1 << (octave.bit_length() - 1)
        self._older_from = self._placed_step + 2 * octave * model.interval_steps
        age_steps = model.window_steps / 2 + math.sqrt(2) * octave * model.interval_steps
        self._use(PlacedAt(age_steps=age_steps, drift_per_step=model.run.drift_per_step))

    def _use(self, placed: PlacedAt) -> None:
        cost, self.balancedness = self._model.served(placed)
        self.cost = self._own if placed == STEADY else Reshared(self._own, cost.shared_ms)


def _beside(
    shared_ms: Callable[[int, int, int, int, float], SharedTime], link_share: float
) -> Callable[[int, int, int, int, float], SharedTime]:
    """Shared times while something else takes a share of the link: what is sent takes longer."""

    def slowed(widest: int, total: int, prefill: int, chunks: int, balancedness: float) -> SharedTime:
        shared = shared_ms(widest, total, prefill, chunks, balancedness)
        return shared._replace(communication=shared.communication / (1 - link_share))

    return slowed
