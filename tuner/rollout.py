"""Does a deployment that runs do what was predicted? A canary load, replayed in the simulator, metric by metric.

The replay takes the lengths that the client recorded, and of an open loop the arrivals, so both met the same load, and
what differs is the engine's or the calibration's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.serving import ServedMetric, replay_served
from rackplan.engine import Deployment, InputError
from rackplan.engine.bench_serve import BenchLoad, run_bench, time_limit_s
from rackplan.engine.deploy_state import Record
from rackplan.engine.local import Verdict, Verify
from rackplan.engine.servers import Report
from rackplan.simulator.lengths import LengthsWorkload
from rackplan.simulator.workloads import parse_workload

WARM_PROMPTS = 8
"""Requests before the canary, at least: the first of an engine compile and allocate, and are nobody's measure. A closed
loop warms with all its requests at once, since the largest step is what allocates."""
JUDGED = ("output throughput", "mean TPOT", "median TTFT")
"""Metrics that decide; the others are shown. Tails of a short canary say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The load that a new deployment is judged by. `tolerance_pct`: how far a judged metric may be worse than
    predicted; better is never a reason to roll back."""

    input_tokens: int
    output_tokens: int
    prompts: int
    rate_req_s: float | None
    concurrency: int | None
    tolerance_pct: float

    def load(self, name: str, seed: int, prompts: int | None = None) -> BenchLoad:
        """The client's load of that name."""
        return BenchLoad(
            name=name,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            prompts=prompts or self.prompts,
            rate_req_s=self.rate_req_s,
            concurrency=self.concurrency,
            seed=seed,
        )


def make_canary(
    deployment: Deployment,
    *,
    workload: str | None,
    concurrency: int | None,
    rate_req_s: float | None,
    prompts: int,
    tolerance_pct: float,
) -> Canary:
    """The canary of a plan's load. Raises InputError where the client cannot send that workload or has no load, or
    where a request is longer than the deployment takes."""
    if workload is None:
        raise InputError("--workload: the deployment states none; give fixed:ISL/OSL, or --no-canary")
    parsed = parse_workload(workload)
    if not isinstance(parsed, LengthsWorkload) or parsed.sigma:
        raise InputError(
            f"--workload {workload}: the canary's client sends fixed lengths; give fixed:ISL/OSL, or --no-canary"
        )
    if concurrency is None and rate_req_s is None:
        raise InputError("--concurrency: the deployment states no load; give it or --rate, or --no-canary")
    longest = parsed.input_p50 + parsed.output_p50
    if longest > deployment.context_limit:
        raise InputError(f"--workload {workload}: {longest} tokens; max_model_len={deployment.context_limit}")
    return Canary(
        input_tokens=parsed.input_p50,
        output_tokens=parsed.output_p50,
        prompts=prompts,
        rate_req_s=rate_req_s,
        concurrency=concurrency,
        tolerance_pct=tolerance_pct,
    )


def verify_with(canary: Canary | None, calibration: FittedCalibration | None, report: Report) -> Verify:
    """What a deployment is judged by once it runs. No canary keeps it; no calibration measures without judging."""

    def verify(record: Record) -> Verdict:
        if canary is None:
            return Verdict(keep=True)
        path = Path(record.folder) / "serve_canary.json"
        warm = max(WARM_PROMPTS, min(canary.concurrency or 0, canary.prompts))
        report(f"canary load: {warm} requests to warm up, {canary.prompts} to measure")
        for name, seed, prompts in (("warm", 1, warm), ("canary", 2, canary.prompts)):
            load = canary.load(name, seed, prompts)
            measured = run_bench(
                load,
                python=record.launch.python,
                url=record.url,
                model=record.launch.model,
                path=path.with_name(f"serve_{name}.json"),
                timeout_s=time_limit_s(load),
            )
        if calibration is None:
            return Verdict(keep=True, result={"measured": _shown(measured)})
        found = replay_served(read_bench_serve(path), record.launch.deployment, calibration)
        return judge(found, canary.tolerance_pct, calibration.name)

    return verify


def judge(found: list[ServedMetric], tolerance_pct: float, calibration: str) -> Verdict:
    """Keep, unless a judged metric is worse than predicted by more than the tolerance."""
    rows = [
        {
            "name": m.name,
            "unit": m.unit,
            "measured": m.measured,
            "predicted": m.predicted,
            "error_pct": 100 * (m.predicted / m.measured - 1) if m.measured else None,
            "worse_pct": worse_pct(m),
        }
        for m in found
    ]
    result = {"calibration": calibration, "tolerance_pct": tolerance_pct, "metrics": rows}
    worst = max((m for m in found if m.name in JUDGED), key=worse_pct, default=None)
    if worst is None or worse_pct(worst) <= tolerance_pct:
        return Verdict(keep=True, result=result)
    return Verdict(
        keep=False,
        reason=(
            f"{worst.name} is {worst.measured:.4g} {worst.unit} where {worst.predicted:.4g} was predicted, "
            f"{worse_pct(worst):.0f} % worse (tolerance {tolerance_pct:g} %)"
        ),
        result=result,
    )


def worse_pct(metric: ServedMetric) -> float:
    """How much worse the measured value is than the predicted one, %; negative where it is better."""
    if not metric.measured or not metric.predicted:
        return 0.0
    if "throughput" in metric.name:
        return 100 * (1 - metric.measured / metric.predicted)
    return 100 * (metric.measured / metric.predicted - 1)


def _shown(result: dict[str, Any]) -> dict[str, float]:
    keys = ("request_throughput", "output_throughput", "median_ttft_ms", "mean_tpot_ms")
    return {k: float(result[k]) for k in keys if k in result}
