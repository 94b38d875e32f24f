"""Fits `h200-v2-lite` from the profiles in data/h200_dsv2lite. Run as `python -m rackplan.calibration.h200`.

GPU coefficients come from exact batches (bench_forward) and decode steps seen in serving; the host's from the
engine loop with async scheduling off; launch floors and the front end from serving.
docs/model/calibration.md says why.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rackplan.calibration.batch import Batch, gpu_terms_ms
from rackplan.calibration.campaign import (
    GPU,
    LAUNCH_RUN,
    MODEL,
    NIXL_FILE,
    PROXY_FILE,
    SYNC_FILE,
    TRANSFER_RUN,
    dp_sync_ms,
    lone_prompt_ms,
    transfer,
)
from rackplan.calibration.coefficients import Coefficients
from rackplan.calibration.figures import cpu_side
from rackplan.calibration.file import CalibrationFile, MeasuredRange
from rackplan.calibration.fit import Solution, Unknown, bootstrap_intervals, summarise
from rackplan.calibration.gpu_fit import GpuFit
from rackplan.calibration.h200_launches import CAPTURED_TOKENS, host_launches, slowness
from rackplan.calibration.h200_rows import DATA, FORWARD_FILES, PROFILES, profile_rows, served_rows
from rackplan.calibration.profile_gpu import SHORT_CHUNK_TOKENS
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.readers.profile_folder import ProfileRun, read_profile
from rackplan.calibration.records import ServedRun
from rackplan.calibration.rows import Row
from rackplan.calibration.served import PromptSteps, decode_intervals_ms, prompt_steps
from rackplan.calibration.served_log import Front, front_of, host_terms, mean_front, mean_host_terms
from rackplan.engine import Deployment, parse_deployment

SERVED_RUNS = {rate: PROFILES / f"bench_serve_agg8192_{rate}_2048x256.json.gz" for rate in ("r4", "r12")}
LOGGED = {"dep1": PROFILES / "profile_dep1", "turns": PROFILES / "profile_turns"}
"""Profile folders of one rank with step logs, by what their runs' names begin with here. The second served two rates in
turns, four times each, on two machines."""
CALM_LOAD = "load0"
"""The served load of a profile that enters the fit; all others are checks."""
SOURCES = (
    *FORWARD_FILES,
    "engine_loop_steps_1gpu.csv",
    *(path.name for path in SERVED_RUNS.values()),
    *(f"campaign/{name}" for name in (SYNC_FILE, NIXL_FILE, PROXY_FILE)),
    *(f"campaign/bench_serve_{run}.json.gz" for run in (LAUNCH_RUN, TRANSFER_RUN)),
    *(
        f"{folder.name}/{path.name}"
        for folder in LOGGED.values()
        for kind in ("serve", "steps")
        for path in sorted(folder.glob(f"{kind}_dep1_{CALM_LOAD}*"))
    ),
)
SERVED_WEIGHT = 0.25
"""Served rows lie close together, at one context and one prompt length: four count as one exact batch."""
LOOP_CONTEXTS = (512, 2048)
"""The loop's requests share one cached prompt; past 2,048 tokens reading it together is cheaper than in serving."""

MOST_FLOP_EFFICIENCY = 0.8
"""Large matrix products in BF16 reach 0.78 of an H200's peak in AIConfigurator's tables: no layer does better."""
UNKNOWNS = {
    "step_fixed_ms": Unknown(2.0, 0, 20),
    "dense_flop_efficiency": Unknown(0.5, 0.05, MOST_FLOP_EFFICIENCY),
    "moe_read_efficiency": Unknown(0.8, 0.2, 1.2),
    "moe_flop_efficiency": Unknown(0.6, 0.05, MOST_FLOP_EFFICIENCY),
    "roofline_sharpness": Unknown(3.0, 1, 12),
    "link_efficiency": Unknown(0.3, 0.02, 1.2),
    "comm_fixed_ms": Unknown(0.5, 0, 10),
    "decode_request_ms": Unknown(0.005, 0, 1),
    "kv_read_efficiency": Unknown(0.9, 0.2, 1.3),
    "prefill_pair_ms": Unknown(3e-7, 1e-8, 1e-5),
    "prefill_context_ms": Unknown(5e-4, 0, 1e-2),
    "prefill_chunk_ms": Unknown(1.0, 0, 20),
    "prefill_causal_ms": Unknown(1e-7, 0, 1e-5),
    "short_chunk_pairs": Unknown(3.0, 0.3, 10),
    "routing_sigma": Unknown(0.5, 0.01, 3),
}
PROFILE_ONLY = {"profile_fixed_ms": Unknown(0.3, 0, 5)}
"""An exact batch holds a constant that a served step of the same batch does not."""
ALL_UNKNOWNS = UNKNOWNS | PROFILE_ONLY
ASSUMED = {
    "dense_read_efficiency": 0.8,
    "short_chunk_tokens": SHORT_CHUNK_TOKENS[GPU],
}
"""Reading the dense weights is a constant here (0.7 ms): `step_fixed_ms` takes what this prior leaves."""
PARTLY = ("piecewise_floor_ms", "transfer", "admission_token_ms", "frontend_turn_ms", "prefill_chunk_ms")
"""Carried, or told by one kind of run alone: missing.py says which would tell them."""
NOTES = (
    "Served decode steps are shorter than exact batches: by a constant, which a single request shows, and by fewer "
    "experts touched. Exact batches route evenly; served ones are read as skewed, and so are all that is predicted.",
    "Admission is carried from the published GB300 figure F51; not measured here.",
    "DP sync is the all-reduce alone on one host; 2 ranks of NCCL stand for any number.",
    "KV transfer is NIXL's pull over NVLink at 3,000 descriptors a prompt: its rate (8 GB/s) is theirs, not the "
    "link's. The set-up holds the decode server's front end and the post; steps of its engine are counted apart.",
    "The front end's work on a request (7 ms; 5.5 to 9 fit as well) is of pairs of requests that met in one run; a "
    "burst of 256 was taken in at 4 ms each.",
    "decode_48_60000 on DEP2 is left out: 11 ms more than its bytes take, in one row (calibration/h200_rows.py).",
    "Launches of eager steps took 55 to 132 ms, as other processes shared the CPU: they are drawn from the quantiles "
    "of four runs, each following the one before, and a step waits for the latest rank that prefills. Means of runs "
    "of half a minute lay between 58 and 79 ms on one GPU and, on a fifth host, between 84 and 98; DEP2's between 98 "
    "and 128, by the day. `calibration update` brings them to a host's own.",
    "Launches within captured sizes come from prompts of 16 new tokens beside decodes; of longer no fit run tells.",
    "With async scheduling off, prefills after 16,384 cached tokens or more took up to 15 % longer than their GPU time "
    "and host work; unexplained, not in the fit.",
    "Steps of 528 tokens (512 new beside 16 decodes) take 12 % longer than predicted, of 1,024 new tokens 8 % less; "
    "unexplained.",
    "Dense arithmetic runs into its bound (0.8 of peak): dense and expert arithmetic are told apart poorly.",
)

GPU_FIT = GpuFit(
    model=MODEL,
    gpu=GPU,
    unknowns=ALL_UNKNOWNS,
    assumed=ASSUMED,
    weight=lambda row: SERVED_WEIGHT if row.served else 1.0,
)


def _one_token_experts_ms(values: dict[str, float], batch: Batch) -> float:
    """GPU time of a decode batch whose requests are all alike and so choose the experts of one token."""
    cost = GPU_FIT.cost(values, dep=1, served=True)
    terms = gpu_terms_ms(cost, batch, dep=1)
    alone = gpu_terms_ms(cost, Batch(decodes=1, context_tokens=batch.context_tokens), dep=1)
    return sum(terms.values()) - terms["moe"] + alone["moe"]


def loop_pct(values: dict[str, float]) -> list[float]:
    """Errors in % of the wall times of the engine's loop in one process, which no fit uses: it works through the tokens
    too, what a server leaves to its front end.

    Without async scheduling a decode step takes GPU + host. The first steps of a repeat hold prefills. Requests of one
    prompt make the same tokens: steps of 8 to 64 of them took less than the GPU time of as many unlike requests.
    """
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for r in csv.DictReader((PROFILES / "engine_loop_steps_1gpu.csv").open()):
        if r["phase"] == "decode" and int(r["step_index"]) > 1 and int(r["context_tokens"]) in LOOP_CONTEXTS:
            seen[int(r["context_tokens"]), int(r["batch"])].append(float(r["step_ms"]))
    rows = [
        Row(id="", metric="", dep=1, batch=Batch(decodes=b, context_tokens=c), measured_ms=float(np.median(v)))
        for (c, b), v in seen.items()
    ]
    wall = np.array([r.measured_ms for r in rows])
    gpu = np.array([_one_token_experts_ms(values, r.batch) for r in rows])
    requests = np.array([r.batch.decodes for r in rows])
    predicted = gpu + values["host_step_ms"] + values["host_request_ms"] * requests
    return ((predicted / wall - 1) * 100).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """All that is found: coefficients by name, the front end, the GPU solution and its rows, host errors in %."""

    coefficients: dict[str, float]
    launch_quantiles: tuple[float, ...]
    launch_error_ms: float
    profile_fixed_ms: float
    front: Front
    rows: list[Row]
    gpu: Solution
    host_pct: list[float]


def served_runs() -> list[ServedRun]:
    """The client runs that are embedded, in a fixed order."""
    return [read_bench_serve(path) for path in SERVED_RUNS.values()]


@lru_cache(maxsize=1)
def profile_runs() -> dict[str, ProfileRun]:
    """The served runs of the profile folders that are embedded, by name."""
    runs = ((name, run) for name, folder in LOGGED.items() for run in read_profile(folder).runs)
    return {run.name.replace("dep1", name): replace(run, name=run.name.replace("dep1", name)) for name, run in runs}


def calm_runs() -> list[ProfileRun]:
    """Those that enter the fit."""
    return [run for name, run in profile_runs().items() if CALM_LOAD in name]


def launch_steps() -> dict[str, PromptSteps]:
    """Steps with prompts by run: of all that tell launches on one GPU."""
    served = {**dict(zip(SERVED_RUNS, served_runs(), strict=True)), **{run.name: run.served for run in calm_runs()}}
    return {name: prompt_steps(run) for name, run in served.items()}


def served_deployment() -> Deployment:
    """What the served runs ran on: one GPU, chunks of 8,192 tokens, 512 sequences, async scheduling."""
    pool = {"role": "aggregated", "instances": 1, "dep": 1, "max_num_batched_tokens": 8192, "max_num_seqs": 512}
    return parse_deployment({"model": MODEL, "gpu": GPU, "pools": [pool]})


def all_rows() -> list[Row]:
    """What the GPU coefficients are fitted to."""
    return profile_rows() + served_rows(decode_intervals_ms(served_runs()).items())


def fit() -> Fit:
    """The fit without its hold-out: two seconds of CPU, the same on every run."""
    runs = served_runs()
    intervals = decode_intervals_ms(runs)
    rows = profile_rows() + served_rows(intervals.items())
    gpu = GPU_FIT.fit(rows)
    steps = launch_steps()
    scales = slowness(steps)
    logged = [(run.served, run.logs[""][0], scales[run.name]) for run in calm_runs()]
    front = mean_front([f.scaled(scale) for served, log, scale in logged if (f := front_of(served, log))])
    host = mean_host_terms([host_terms(log, CAPTURED_TOKENS, scale) for _, log, scale in logged])
    launches = host_launches(steps, lone_prompt_ms() - front.total_ms)
    return Fit(
        coefficients={
            **cpu_side(),
            **dp_sync_ms(),
            **GPU_FIT.coefficients(gpu.values),
            **host,
            **launches.coefficients,
        },
        launch_quantiles=launches.quantiles,
        launch_error_ms=launches.error_ms,
        profile_fixed_ms=gpu.values["profile_fixed_ms"],
        front=front,
        rows=rows,
        gpu=gpu,
        host_pct=loop_pct({**gpu.values, **host}),
    )


def build() -> CalibrationFile:
    """The whole file: fit, bootstrap intervals, hold-out errors, provenance."""
    found = fit()
    floor_ms = found.coefficients["eager_floor_ms"]
    decode = MeasuredRange(dep=(1, 2), batch=(1, 512), context_tokens=(1024, 60000), new_tokens=(0, 0), drafts=(0, 0))
    prefill = MeasuredRange(dep=(1, 2), batch=(1, 1), context_tokens=(0, 32768), new_tokens=(128, 32768), drafts=(0, 0))
    return CalibrationFile(
        name="h200-v2-lite",
        model=MODEL,
        gpu=GPU,
        engine_version="vLLM 0.33.0",
        date="2026-11-30",
        command="python -m rackplan.calibration.h200",
        sources=tuple(f"data/h200_dsv2lite/{name}" for name in SOURCES),
        rows=tuple(r.id for r in found.rows),
        coefficients=Coefficients.model_validate({**found.coefficients, "launch_quantiles": found.launch_quantiles}),
        coefficient_intervals={
            **bootstrap_intervals(found.gpu, ALL_UNKNOWNS),
            "eager_floor_ms": (floor_ms - found.launch_error_ms, floor_ms + found.launch_error_ms),
        },
        transfer=transfer(found.front.token_ms),
        frontend_ms=found.front.total_ms,
        frontend_token_ms=found.front.token_ms,
        frontend_turn_ms=found.front.turn_ms,
        profile_fixed_ms=found.profile_fixed_ms,
        target_sigma=found.coefficients["routing_sigma"],
        draft_sigma=0.0,
        measured={"decode": decode, "prefill": prefill},
        errors={
            **GPU_FIT.errors(found.rows, found.gpu.values),
            "decode_loop_wall": summarise(found.host_pct, found.host_pct),
        },
        carried=PARTLY,
        notes=NOTES,
    )


if __name__ == "__main__":
    from rackplan.calibration.h200_served import with_served_errors

    file = with_served_errors(build())
    file.save(DATA / f"{file.name}.json")
    for metric, error in file.errors.items():
        print(f"{metric}: {error.model_dump()}")
