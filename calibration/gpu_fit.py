"""The fit of GPU time to exact batches and served steps: the same for the embedded files and for a profile folder.

Least squares on relative errors of a sum of physical terms; what differs is which coefficients the rows can tell.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from rackplan.calibration.batch import deployment_of, gpu_terms_ms
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.file import FitError
from rackplan.calibration.fit import Solution, Unknown, solve, summarise
from rackplan.calibration.physics import PhysicalCost
from rackplan.calibration.rows import Row
from rackplan.engine import Deployment, Pool

NO_HOST = {"host_step_ms": 0.0, "ring_hop_ms": 0.0, "doubling_round_ms": 0.0, "nccl_sync_ms": 0.0}
REFIT_STEPS = 25
"""Of a refit without some rows, which starts at the optimum of all: what more would move is told by no row."""
PROFILE_FIXED = "profile_fixed_ms"
"""Not a coefficient: a constant that exact batches hold beyond a served step of the same batch."""


@cache
def _pool_of(model: str, gpu: str, dep: int, drafts: int, capture_size: int) -> tuple[Deployment, Pool]:
    deployment, pool = deployment_of(model, gpu, dep=dep, drafts=drafts)
    return deployment, pool.model_copy(update={"max_cudagraph_capture_size": capture_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """What is fitted and how. `assumed`: coefficients that the rows cannot tell. `weight`: of a row's residual.

    `prior`: residuals beyond those of the rows, from the values. `capture_size`: tokens up to which CUDA graphs pad.
    """

    model: str
    gpu: str
    unknowns: Mapping[str, Unknown]
    assumed: Mapping[str, float]
    weight: Callable[[Row], float]
    prior: Callable[[dict[str, float]], np.ndarray] = field(default=lambda values: np.empty(0))
    capture_size: int = 512

    def coefficients(self, values: Mapping[str, float]) -> dict[str, float]:
        """Coefficients of the GPU by name at these values, what is assumed included."""
        return {**self.assumed, **{k: v for k, v in values.items() if k != PROFILE_FIXED}}

    def cost(self, values: Mapping[str, float], dep: int, served: bool, drafts: int = 0) -> PhysicalCost:
        """Step costs of an instance of `dep` ranks without its host. Exact batches route evenly, served ones not."""
        even = {} if served else {"routing_sigma": 0.0}
        found = Coefficients.model_validate({**NO_HOST, **self.coefficients(values), **even})
        return PhysicalCost(found, *_pool_of(self.model, self.gpu, dep, drafts, self.capture_size))

    def predict_ms(self, values: Mapping[str, float], rows: Sequence[Row]) -> np.ndarray:
        """GPU time of each row, ms, the constant of exact batches included, (rows,)."""
        costs = {kind: self.cost(values, *kind) for kind in {(r.dep, r.served, r.drafts) for r in rows}}
        terms = [
            gpu_terms_ms(costs[r.dep, r.served, r.drafts], r.batch, dep=r.dep, drafts=r.drafts).values() for r in rows
        ]
        fixed_ms = values.get(PROFILE_FIXED, 0.0)
        return np.array([sum(t) for t in terms]) + np.array([0.0 if r.served else fixed_ms for r in rows])

    def error_pct(self, values: Mapping[str, float], rows: Sequence[Row]) -> np.ndarray:
        """Signed errors of the GPU time of `rows`, % of what was measured, (rows,)."""
        return (self.predict_ms(values, rows) / np.array([r.measured_ms for r in rows]) - 1) * 100

    def fit(
        self, rows: Sequence[Row], start: Mapping[str, float] | None = None, most_steps: int | None = None
    ) -> Solution:
        """Least squares over relative errors of `rows`, from `start` or the unknowns' own starts."""
        measured = np.array([r.measured_ms for r in rows])
        weight = np.sqrt([self.weight(r) for r in rows])
        unknowns = {k: u._replace(start=start[k] or u.start) if start else u for k, u in self.unknowns.items()}

        def residuals(values: dict[str, float]) -> np.ndarray:
            return np.concatenate([weight * (self.predict_ms(values, rows) / measured - 1), self.prior(values)])

        return solve(unknowns, residuals, most_steps)

    def holdout_pct(self, rows: Sequence[Row], values: Mapping[str, float]) -> dict[str, list[float]]:
        """Errors by metric when every row's context, then every row's batch, is left out of the fit. Served rows have
        one context, without which nothing would tell how serving routes; they are left out by batch alone."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            b = row.batch
            if not row.served:
                groups[("context", b.chunks, b.cached_tokens, b.context_tokens)].append(i)
            groups[("batch", b.new_tokens, b.decodes)].append(i)
        errors: dict[str, list[float]] = defaultdict(list)
        for left_out in groups.values():
            kept = [r for i, r in enumerate(rows) if i not in set(left_out)]
            if not kept:
                continue
            refit = self.fit(kept, values, REFIT_STEPS).values
            for i, error in zip(left_out, self.error_pct(refit, [rows[i] for i in left_out]), strict=True):
                errors[rows[i].metric].append(float(error))
        return errors

    def errors(self, rows: Sequence[Row], values: Mapping[str, float]) -> dict[str, FitError]:
        """Error summaries by metric, and over the exact batches pooled as decode, prefill and all."""
        held, fitted = self.holdout_pct(rows, values), defaultdict(list)
        for row, error in zip(rows, self.error_pct(values, rows), strict=True):
            fitted[row.metric].append(float(error))
        pooled = {m: summarise(fitted[m], held[m]) for m in fitted}
        for phase in ("decode", "prefill", "all"):
            metrics = [m for m in fitted if "_gpu_" in m and (phase == "all" or m.startswith(phase))]
            pooled[phase] = summarise([e for m in metrics for e in fitted[m]], [e for m in metrics for e in held[m]])
        return pooled
