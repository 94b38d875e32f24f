"""One measured time of one exact batch: what every fit of step times compares with."""

from dataclasses import dataclass, replace

from rackplan.calibration.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured step time. `metric`: the error summary that it counts in; `served`: seen in serving, else in a
    profile of exact batches. `spread_pct`: of the measurement's samples, 0 where it was not given. `drafts`: tokens
    that each decode verifies."""

    id: str
    metric: str
    dep: int
    batch: Batch
    measured_ms: float
    served: bool = False
    spread_pct: float = 0.0
    drafts: int = 0

    @property
    def phase(self) -> str:
        """prefill, decode or mixed."""
        if not self.batch.prefill_tokens:
            return "decode"
        return "mixed" if self.batch.decodes else "prefill"

    def named(self) -> "Row":
        """With the metric of an exact batch of its phase and ranks."""
        return replace(self, metric=f"{self.phase}_gpu_dep{self.dep}")
