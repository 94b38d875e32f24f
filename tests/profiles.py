"""A profile folder of known truth: what an engine with given step costs would have measured."""

import csv
import json
from pathlib import Path

import numpy as np
from test_model_folder import QWEN3_MOE

from rackplan.calibration.batch import Batch, gpu_terms_ms
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.gpu_fit import GpuFit
from rackplan.calibration.library import calibration_file
from rackplan.engine import Deployment, parse_deployment
from rackplan.engine.forward_table import COLUMNS
from rackplan.simulator.arrivals import Row, TraceWorkload
from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

TRUTH = {
    "step_fixed_ms": 2.5,
    "dense_read_efficiency": 0.5,
    "dense_flop_efficiency": 1.5,
    "moe_read_efficiency": 0.5,
    "moe_flop_efficiency": 1.0,
    "decode_request_ms": 0.15,
    "kv_read_efficiency": 0.1,
    "prefill_pair_ms": 2e-5,
    "prefill_context_ms": 1e-3,
    "prefill_chunk_ms": 1.0,
    "comm_fixed_ms": 3.0,
    "link_efficiency": 0.3,
}
LOOP_STEP_MS, LOOP_REQUEST_MS, FRONTEND_MS = 1.2, 0.05, 8.0
DECODES = [(b, k) for b in (1, 4, 8, 16, 32) for k in (512, 2048)]
PREFILLS = [(n, c) for n in (64, 128, 256, 512, 1024) for c in (0, 1024)]


def tiny_model(folder: Path) -> str:
    """A folder with the configuration of a small mixture of experts."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    return str(folder)


def tiny_deployment(model: str, dep: int = 1, **pool: object) -> Deployment:
    """One aggregated instance on CPUs."""
    own = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "async_scheduling": False, **pool}
    pools = [{"role": "aggregated", "instances": 1, "dep": dep, **own}]
    return parse_deployment({"model": model, "gpu": "cpu", "pools": pools})


def true_fit(model: str) -> GpuFit:
    """Step costs of the engine that the folder measures."""
    return GpuFit(model=model, gpu="cpu", unknowns={}, assumed=TRUTH, weight=lambda row: 1.0)


def write_forward(path: Path, model: str, noise: float, dep: int = 1) -> None:
    """A table of exact batches, each off by a random share of standard deviation `noise`."""
    rng = np.random.default_rng(dep)
    cost = true_fit(model).cost({}, dep, served=False)
    cases = [(f"decode_{b}_{k}", "decode", 0, 0, b, k) for b, k in DECODES]
    cases += [(f"prefill_{n}_{c}", "prefill", n, c, 0, 0) for n, c in PREFILLS]
    cases += [("mix_256_16", "mixed", 256, 0, 16, 512)]
    with path.open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(COLUMNS)
        for name, phase, new, cached, decodes, kv in cases:
            batch = Batch(chunks=int(new > 0), new_tokens=new, cached_tokens=cached, decodes=decodes, context_tokens=kv)
            ms = sum(gpu_terms_ms(cost, batch, dep=dep).values()) * (1 + noise * rng.standard_normal())
            requests, tokens = decodes + int(new > 0), decodes + new
            out.writerow([name, phase, dep, new, cached, decodes, kv, requests, tokens, f"{ms * 1e3:.1f}", 1.0])


def write_steps(path: Path, model: str, dep: int = 1, noise: float = 0.01) -> None:
    """A step log whose decode steps take their GPU time and the loop."""
    rng = np.random.default_rng(7)
    cost = true_fit(model).cost({}, dep, served=False)
    lines: list[dict] = [{"config": {"async_scheduling": False, "data_parallel_size": dep}}]
    at_s = 100.0
    for i in range(200):
        decodes = 1 + i % 24
        kv = 600 + 10 * decodes
        gpu = sum(gpu_terms_ms(cost, Batch(decodes=decodes, context_tokens=kv), dep=dep).values())
        gap = (gpu + LOOP_STEP_MS + LOOP_REQUEST_MS * decodes) * (1 + noise * rng.standard_normal())
        lines.append(
            {
                "step": i,
                "t_s": at_s,
                "prefill": [],
                "decode_requests": decodes,
                "decode_tokens": decodes,
                "decode_context_tokens": decodes * kv,
                "running": decodes,
                "waiting": 0,
                "kv_usage": 0.1,
                "preempted": 0,
                "kv_loads": 0,
                "schedule_ms": 0.1,
                "execute_ms": gpu,
                "update_ms": 0.1,
                "gap_ms": gap if i else None,
            }
        )
        at_s += gap / 1e3
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_serve(path: Path, calibration: FittedCalibration, deployment: Deployment, rate: float, prompts: int) -> None:
    """What a client of that engine would have saved: Poisson arrivals, 512 in, 64 out, tokens evenly apart."""
    starts = np.cumsum(np.random.default_rng(3).exponential(1 / rate, prompts))
    rows = tuple(Row(time_s=t, input_tokens=512, output_tokens=64, cached_tokens=0) for t in starts.tolist())
    workload = TraceWorkload(name="truth", rows=rows)
    run = simulate(deployment, workload, Load(), calibration, RunOptions(duration_s=float("inf")))
    order = np.argsort(run.request_id)
    ttft = (run.first_token_ns - run.arrival_ns)[order] / 1e9
    gap = (run.finish_ns - run.first_token_ns)[order] / 1e9 / 63
    result = {
        "start_times": starts.tolist(),
        "input_lens": [512] * prompts,
        "output_lens": [64] * prompts,
        "ttfts": ttft.tolist(),
        "itls": [[g] * 63 for g in gap.tolist()],
        "errors": [""] * prompts,
        "mean_ttft_ms": float(ttft.mean() * 1e3),
        "median_ttft_ms": float(np.median(ttft) * 1e3),
        "mean_tpot_ms": float(gap.mean() * 1e3),
        "output_throughput": 64 * prompts / float((run.finish_ns.max() - run.arrival_ns.min()) / 1e9),
    }
    path.write_text(json.dumps(result))


def true_calibration(model: str) -> FittedCalibration:
    """The engine itself: its GPU, its loop and its front end."""
    host = {"host_step_ms": LOOP_STEP_MS, "host_request_ms": LOOP_REQUEST_MS}
    sync = {"ring_hop_ms": 0.0, "doubling_round_ms": 0.0, "nccl_sync_ms": 0.0}
    base = calibration_file("h200-v2-lite")
    update = {
        "name": "truth",
        "model": model,
        "gpu": "cpu",
        "coefficients": Coefficients.model_validate({**TRUTH, **host, **sync}),
        "frontend_ms": FRONTEND_MS,
        "target_sigma": 0.0,
    }
    return FittedCalibration(base.model_copy(update=update))


def write_profile(folder: Path, *, noise: float = 0.01, runs: bool = True, logs: bool = True) -> str:
    """The whole folder; returns the model's. `runs`: one served run of one rank, `logs`: with its step log."""
    folder.mkdir(exist_ok=True)
    model = tiny_model(folder / "model")
    write_forward(folder / "forward_dep1.csv", model, noise)
    deployment = tiny_deployment(model)
    served = {"name": "r2", "deployment": deployment.to_dict(), "rate_req_s": 2.0, "prompts": 60, "status": "done"}
    identity = {
        "format": 1,
        "model": model,
        "gpu": "cpu",
        "engine_version": "0.32.0+cpu",
        "date": "2026-11-29T00:00:00",
        "command": "rackplan profile",
        "time_kind": "wall",
        "runs": [served] if runs else [],
    }
    (folder / "profile.json").write_text(json.dumps(identity))
    if runs:
        write_serve(folder / "serve_r2.json", true_calibration(model), deployment, 2.0, 60)
    if runs and logs:
        write_steps(folder / "steps_r2.dp0.jsonl", model)
    return model
