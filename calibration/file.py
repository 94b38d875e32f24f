"""A calibration file: what was fitted, from what, how far it may be trusted; and the `Calibration` that it makes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from rackplan.calibration.coefficients import Coefficients, EngineFix
from rackplan.calibration.expert_parts import draft_part, part_balancedness, rearrange_ms, target_part
from rackplan.calibration.physics import PhysicalCost
from rackplan.engine import Deployment, InputError, Pool
from rackplan.simulator.cost import STEADY, PlacedAt, TransferCost

if TYPE_CHECKING:
    from rackplan.simulator.rearrange import Rearrangement

MOST_MS = 3.6e6
"""No constant of a step is longer than an hour: beyond it a file is damaged, or in other units."""
PHASES = ("prefill", "decode")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Transfer(_Part):
    """`TransferCost` as it is stored; the fields mean the same."""

    setup_ms: float = Field(ge=0, le=MOST_MS)
    per_block_ms: float = Field(ge=0, le=MOST_MS)
    gb_per_s: float = Field(gt=0)
    block_tokens: int = Field(ge=1)
    counts_steps: bool = False


class MeasuredRange(_Part):
    """What the rows of one phase spanned, [least, most]. Inside all of them a prediction interpolates."""

    dep: tuple[int, int]
    batch: tuple[int, int]
    context_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    drafts: tuple[int, int]

    def outside(self, **query: int) -> list[str]:
        """One phrase for each queried quantity that lies outside, e.g. 'dep=64 outside 4 to 32'."""
        spans = ((k, v, getattr(self, k)) for k, v in query.items())
        return [f"{k}={v} outside {low} to {high}" for k, v, (low, high) in spans if not low <= v <= high]


class FitError(_Part):
    """Absolute errors, %, of one metric: of the fit on its own rows, and of rows left out of a refit."""

    rows: int
    fit_median_pct: float
    fit_p90_pct: float
    holdout_median_pct: float
    holdout_p90_pct: float
    worst_pct: float


class CalibrationFile(_Part):
    """One engine on one GPU with one model. Times are ms.

    `coefficient_intervals`: 90 % intervals of what was fitted (bootstrap, or the fit's curvature where rows are few).
    `older_engines`: by name, the coefficients of an engine before some fix, where they differ; `fixes`: prefill costs
    that later engines removed (EngineFix).
    `profile_fixed_ms`: what profiles of exact batches hold beyond a served step, which is what is predicted; negative
    where the served step holds the host's loop too.
    `target_sigma`, `draft_sigma`: log-normal skew of expert popularity. `carried`: coefficients that no row of this
    profile told, taken from physics or another calibration. `notes`: what is carried or unidentified.
    """

    name: str
    model: str
    gpu: str
    engine_version: str
    date: str
    command: str
    sources: tuple[str, ...]
    rows: tuple[str, ...]
    coefficients: Coefficients
    coefficient_intervals: dict[str, tuple[float, float]] = {}
    transfer: Transfer
    frontend_ms: float = Field(ge=0, le=MOST_MS)
    frontend_token_ms: float = Field(0.0, ge=0, le=MOST_MS)
    frontend_turn_ms: float = Field(0.0, ge=0, le=MOST_MS)
    profile_fixed_ms: float = Field(0.0, le=MOST_MS)
    target_sigma: float = Field(ge=0)
    draft_sigma: float = Field(ge=0)
    measured: dict[str, MeasuredRange]
    errors: dict[str, FitError]
    fixes: dict[str, EngineFix] = {}
    older_engines: dict[str, dict[str, float]] = {}
    carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @field_validator("coefficients")
    @classmethod
    def _finite(cls, found: Coefficients) -> Coefficients:
        for key, value in found.model_dump().items():
            if isinstance(value, float) and not value <= MOST_MS:
                raise ValueError(f"{key}={value:g} is above {MOST_MS:g}")
        return found

    @field_validator("measured", "errors")
    @classmethod
    def _of_both_phases(cls, found: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.mode == "python" and not found:
            return found  # a fit under way, whose errors come last; a file that is read has them
        if missing := [phase for phase in PHASES if phase not in found]:
            raise ValueError(f"{missing[0]} is missing")
        return found

    def to_json(self) -> str:
        """The file's text; `parse_calibration` reads it back."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the file to `path`."""
        path.write_text(self.to_json())


class FittedCalibration:
    """The simulator's `Calibration` of a file. `fixes_off`: names of fixes to undo; `older`: an older engine's name."""

    def __init__(self, file: CalibrationFile, fixes_off: tuple[str, ...] = (), older: str | None = None) -> None:
        self.file = file
        self.name = file.name
        self.frontend_ms = file.frontend_ms
        self.frontend_token_ms, self.frontend_turn_ms = file.frontend_token_ms, file.frontend_turn_ms
        self.fixes_off = fixes_off
        changes = _named(file, "older_engines", older) if older else {}
        self.coefficients = file.coefficients.model_copy(update=changes)

    def pool_cost(self, deployment: Deployment, pool: Pool, placed: PlacedAt = STEADY) -> PhysicalCost:
        """Raises InputError where the deployment's model or GPU is not the calibrated one."""
        for key in ("model", "gpu"):
            asked, has = getattr(deployment, key), getattr(self.file, key)
            if asked != has:
                raise InputError(f"{key}={asked}: calibration {self.name} was fitted on {has}; choose one for {asked}")
        return self.cost_on(deployment, pool, self.fixes_off, placed)

    def cost_on(
        self, deployment: Deployment, pool: Pool, fixes_off: tuple[str, ...] = (), placed: PlacedAt = STEADY
    ) -> PhysicalCost:
        """The cost with some fixes undone, on whatever GPU the deployment names: for comparing figures."""
        fixes = tuple(_named(self.file, "fixes", name) for name in fixes_off)
        cost = PhysicalCost(self.coefficients, deployment, pool, fixes)
        part = draft_part(deployment, pool, self.file.draft_sigma)
        if part and part.skew_sigma:
            cost.draft_balancedness = partial(part_balancedness, part, deployment, pool, placed=placed)
        return cost

    def transfer_cost(self, deployment: Deployment) -> TransferCost:
        return TransferCost(**self.file.transfer.model_dump())

    def balancedness(
        self, deployment: Deployment, pool: Pool, tokens_per_rank: float, placed: PlacedAt = STEADY
    ) -> float:
        """Mean / max of routed tokens per GPU in a step. One popularity of experts serves prefill and decode alike,
        as one text does."""
        return part_balancedness(
            target_part(deployment, self.file.target_sigma), deployment, pool, tokens_per_rank, placed
        )

    def rearrangement(
        self, deployment: Deployment, pool: Pool, *, first: bool, drift_per_step: float
    ) -> Rearrangement:
        """One rearrangement of EPLB, target and draft, over the fitted share of NVLink."""
        from rackplan.simulator.rearrange import Rearrangement

        draft = draft_part(deployment, pool, self.file.draft_sigma)
        parts = [target_part(deployment, self.file.target_sigma), *([draft] if draft else [])]
        link_gb_per_s = deployment.gpu_spec.nvlink_gb_s / 2 * min(1.0, self.coefficients.link_efficiency)
        return Rearrangement(
            *rearrange_ms(
                parts, deployment, pool, link_gb_per_s=link_gb_per_s, first=first, drift_per_step=drift_per_step
            )
        )


def _named(file: CalibrationFile, field: str, name: str) -> Any:
    known = getattr(file, field)
    if name not in known:
        raise InputError(f"{field}={name}: unknown to calibration {file.name}; one of {', '.join(known) or '(none)'}")
    return known[name]


def parse_calibration(text: str, where: str) -> CalibrationFile:
    """A `CalibrationFile` from JSON. Raises InputError with the file, the key, the value and the mend."""
    try:
        return CalibrationFile.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"])) or "file"
        raise InputError(
            f"{where}: {key}: {first['msg']} (got {first.get('input')!r:.80}); refit or correct it"
        ) from None
