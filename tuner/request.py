"""What a plan is asked for, with its parts resolved."""

from dataclasses import dataclass
from functools import cached_property

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.library import default_calibration, load_calibration
from rackplan.engine import GpuSpec, InputError, ModelSpec, gpu_spec, model_spec
from rackplan.simulator.load import Workload
from rackplan.simulator.run_options import USUAL, Drafting
from rackplan.simulator.workloads import parse_workload
from rackplan.tuner.slo import Slo


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """`target_tps` counts total (cached input + new input + output) or output tokens, per GPU or of the deployment.

    `gpus`: the most that may be used. `trials`: deployments that the search looks at, those that screening drops
    included. Raises InputError where parts are wrong, when they are first used.
    """

    model: str
    gpu: str
    gpus: int
    target_tps: float
    count: str
    per: str
    workload: str
    p90_interactivity_tok_s_user: float
    p90_ttft_ms: float
    seed: int
    trials: int
    calibration: str | None = None
    drafting: Drafting = USUAL

    @property
    def slo(self) -> Slo:
        return Slo(p90_interactivity_tok_s_user=self.p90_interactivity_tok_s_user, p90_ttft_ms=self.p90_ttft_ms)

    @cached_property
    def model_spec(self) -> ModelSpec:
        return model_spec(self.model, self.gpu)

    @cached_property
    def gpu_spec(self) -> GpuSpec:
        return gpu_spec(self.gpu)

    @cached_property
    def calibration_name(self) -> str:
        return self.calibration or default_calibration(self.model, self.gpu)

    @cached_property
    def fitted(self) -> FittedCalibration:
        fitted = load_calibration(self.calibration_name)
        for key in ("model", "gpu"):
            if getattr(fitted.file, key) != getattr(self, key):
                raise InputError(
                    f"--calibration {self.calibration_name}: fitted on {fitted.file.model} on {fitted.file.gpu}, "
                    f"not on {self.model} on {self.gpu}; choose another"
                )
        return fitted

    @cached_property
    def parsed_workload(self) -> Workload:
        return parse_workload(self.workload)

    def achieved_tps(self, metrics: dict) -> float:
        """What a run reaches, counted as the target is."""
        per_gpu = metrics[f"throughput_{self.count}_tok_s_per_gpu"]
        return per_gpu if self.per == "gpu" else per_gpu * metrics["gpus"]

    def score(self, metrics: dict) -> tuple[float, float]:
        """What is maximised: per GPU the throughput; of a deployment the fewest GPUs, then the throughput."""
        return self.score_of(self.achieved_tps(metrics), metrics["gpus"])

    def score_of(self, tps: float, gpus: float) -> tuple[float, float]:
        """The score of reaching `tps`, counted as the target is, with `gpus`. A deployment that misses the target comes
        behind all that reach it, by what it misses."""
        if self.per == "gpu":
            return (tps, 0.0)
        if tps >= self.target_tps:
            return (-float(gpus), tps)
        return (-self.gpus * (2.0 - tps / self.target_tps), tps)

    def to_inputs(self) -> dict:
        """Every effective input."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "target_tps": self.target_tps,
            "count": self.count,
            "per": self.per,
            "workload": self.workload,
            "p90_interactivity_tok_s_user": self.p90_interactivity_tok_s_user,
            "p90_ttft_ms": self.p90_ttft_ms,
            "seed": self.seed,
            "trials": self.trials,
            "calibration": self.calibration_name,
            **self.drafting.to_inputs(),
        }
