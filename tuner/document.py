"""Parts that the plan, simulation and what-if documents share."""

from rackplan import __version__
from rackplan.calibration.file import CalibrationFile
from rackplan.simulator.load import Load
from rackplan.tuner.probe import Probe


def load_document(load: Load) -> dict:
    """A load as the documents state it."""
    return {"concurrency": load.concurrency, "rate_req_s": load.rate_req_s, "cv": load.cv}


def deployment_document(found: Probe) -> dict:
    """The contract's `prediction`."""
    return {
        "metrics": found.metrics,
        "ci95": found.ci95,
        "gpu_time_share": found.gpu_time_share,
        "utilization": found.utilization,
        "pools": found.pools,
        "latency_curves": found.latency_curves,
    }


def provenance_of(file: CalibrationFile, found: Probe, seed: int) -> dict:
    """Whence the numbers: calibration, its errors, and whether it has seen batches like these."""
    outside = _outside(file, found)
    return {
        "calibration": file.name,
        "calibration_error": {
            phase: {
                "holdout_median_pct": e.holdout_median_pct,
                "holdout_p90_pct": e.holdout_p90_pct,
                "worst_pct": e.worst_pct,
                "rows": e.rows,
            }
            for phase, e in file.errors.items()
        },
        "engine_version": file.engine_version,
        "rackplan_version": __version__,
        "seed": seed,
        "in_range": not outside,
        "notes": [*(f"extrapolated: {x}" for x in outside), *file.notes],
    }


def _outside(file: CalibrationFile, found: Probe) -> list[str]:
    """Mean batches of the run that lie outside the calibration's measured ranges."""
    metrics, deployment = found.metrics, found.deployment
    counts = metrics["request_throughput_req_s"]
    served = max(1e-9, counts)
    mean_input = (
        (metrics["throughput_total_tok_s_per_gpu"] - metrics["throughput_output_tok_s_per_gpu"])
        * metrics["gpus"]
        / served
    )
    drafts = deployment.speculation.draft_tokens
    decoding_s = max(0.0, metrics["e2e_ms"]["mean"] - metrics["ttft_ms"]["mean"]) / 1e3
    out = []
    for pool in deployment.pools:
        if pool.role == "prefill":
            query = {"dep": pool.dep, "context_tokens": round(mean_input * metrics["prefix_hit_share"])}
            measured = file.measured.get("prefill")
        else:
            batch = max(1, round(served * decoding_s / (pool.dep * pool.instances)))
            query = {"dep": pool.dep, "batch": batch, "context_tokens": round(mean_input), "drafts": drafts}
            measured = file.measured.get("decode")
        if measured:
            out += [f"{pool.role} {x}" for x in measured.outside(**query)]
    return out
