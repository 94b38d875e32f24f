"""What the campaign on two H200s tells (data/h200_dsv2lite/campaign): DP sync, KV hand-over, launches with expert
parallelism, and the served runs that fits did not see.

How it was measured: bench/h200/README.md. One run of each kind enters a fit and says so; the others are checks.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rackplan.calibration.file import Transfer
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.records import ServedRun
from rackplan.calibration.served import Launches, stalls
from rackplan.engine import Deployment, model_spec, parse_deployment
from rackplan.engine.deployment import Eplb
from rackplan.simulator.kv_transfer import steps_waited

CAMPAIGN = Path(__file__).parent / "data" / "h200_dsv2lite" / "campaign"
MODEL, GPU = "deepseek-v2-lite", "h200"
SYNC_FILE, NIXL_FILE, PROXY_FILE = "dp_sync.csv", "nixl.csv", "pd_requests.csv.gz"
LAUNCH_RUN, TRANSFER_RUN = "dep_r8", "pd_r6"
"""The runs that fits use: the lowest rate of DEP2, where steps with a prompt stand apart most often; of 1P1D the middle
rate, so that the checks lie on both sides."""
KV_BLOCK_TOKENS = 16
STEPS_TO_SEE = 3.0
"""Engine steps of a hand-over under async scheduling that are simulated: half a step until one begins that plans it;
then, from when the scheduler may run the request to its first token, half a step until the host begins one, that step's
wait for the GPU, and the step itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """One served run: its name in the campaign, what it ran on, and whether a fit used it."""

    name: str
    deployment: Deployment
    fitted: bool = False

    @property
    def path(self) -> Path:
        return CAMPAIGN / f"bench_serve_{self.name}.json.gz"


def _pool(role: str, dep: int, captured: int) -> dict[str, object]:
    return {
        "role": role,
        "instances": 1,
        "dep": dep,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 512,
        "enable_prefix_caching": False,
        "max_cudagraph_capture_size": captured,
    }


def _deployment(pools: list[dict[str, object]], **parts: dict[str, object]) -> Deployment:
    return parse_deployment({"model": MODEL, "gpu": GPU, "pools": pools, **parts})


def served_runs() -> list[CampaignRun]:
    """DEP2 at 8, 12 and 20 req/s, 1P1D at 3, 6 and 10, one GPU with CUDA graphs to 512 and to 4,096 tokens at 6 with
    fixed and variable lengths; the canary of a 1P1D deployment at 6; DEP2 at 12 with Zipf routing, EPLB off and on.
    vLLM 0.33 balances ranks by requests and syncs them by recursive doubling; its NixlConnector pulls."""
    by_requests: dict[str, object] = {"policy": "least_requests"}
    dep2 = _deployment([_pool("aggregated", 2, 512)], router=by_requests, dp_sync={"algorithm": "recursive_doubling"})
    pd = _deployment([_pool(role, 1, 512) for role in ("prefill", "decode")], kv_transfer={"mode": "pull"})
    eplb = dep2.model_copy(update={"eplb": Eplb(enabled=True, window_steps=200, interval_steps=400)})
    canary = _deployment(
        [_pool("prefill", 1, 512), {**_pool("decode", 1, 512), "max_new_kv_loads_per_step": 4}],
        kv_transfer={"mode": "pull"},
    )
    on = {name: dep2 for name in ("dep_r8", "dep_r12", "dep_r20")} | {name: pd for name in ("pd_r3", "pd_r6", "pd_r10")}
    for captured in (512, 4096):
        one = _deployment([_pool("aggregated", 1, captured)])
        on |= {f"agg8192_graphs{captured}_{load}": one for load in ("r6", "r6var")}
    on |= {"pd_deploy_canary": canary, "skew_r12": dep2, "skew_eplb_r12": eplb}
    fitted = (LAUNCH_RUN, TRANSFER_RUN)
    return [CampaignRun(name=name, deployment=d, fitted=name in fitted) for name, d in on.items()]


def dp_sync_ms() -> dict[str, float]:
    """Coefficients of DP sync, ms, from the all-reduce alone on one host: medians of 2 to 16 ranks, by least squares
    on relative errors. Ring per hop, recursive doubling per round, NCCL as measured with 2 ranks."""
    seen: dict[str, list[tuple[float, float]]] = {"gloo": [], "doubling": [], "nccl": []}
    for r in csv.DictReader((CAMPAIGN / SYNC_FILE).open()):
        ranks = int(r["ranks"])
        parts = {"gloo": ranks - 1, "doubling": np.ceil(np.log2(ranks)), "nccl": 1}[r["algorithm"]]
        seen[r["algorithm"]].append((float(parts), float(r["median_us"]) / 1e3))

    def slope(name: str) -> float:
        parts, ms = np.array(seen[name]).T
        share = parts / ms  # minimises sum of (slope x parts / ms - 1)^2
        return float(share.sum() / (share**2).sum())

    return {"ring_hop_ms": slope("gloo"), "doubling_round_ms": slope("doubling"), "nccl_sync_ms": slope("nccl")}


def ep_launches() -> Launches:
    """Eager steps of LAUNCH_RUN, with experts over two GPUs and requests that decode.

    An instance of several GPUs has its workers in processes of their own: tokens leave when a step ends on the GPU, so
    running requests see the launch less what the host was ahead, which was the GPU time of the step before."""
    return stalls(read_bench_serve(CAMPAIGN / f"bench_serve_{LAUNCH_RUN}.json.gz"))


def lone_prompt_ms() -> float:
    """Mean time of a prompt of 2,048 tokens that found an idle prefill server and had it alone, front end included:
    the launch of an eager step in which nothing decodes. Source: the proxy's times of TRANSFER_RUN."""
    arrived, done = _proxy_times("arrival_ms", "prefill_done_ms")
    others = (arrived[:, None] < done) & (done[:, None] > arrived)  # of each pair: in the server at once
    return float((done - arrived)[others.sum(axis=1) == 1].mean())


def transfer(token_ms: float) -> Transfer:
    """KV hand-over over NIXL (pull) from TRANSFER_RUN. `token_ms`: the front end's work on a token of a delivery.

    Descriptors: the post's time over the blocks of a prompt. Rate: bytes over what a transfer takes beyond its post,
    less the half step after which its end is noticed. Set-up: what is left between the prefill server's answer and the
    first token, less the steps until then and the delivery; so it holds the decode server's front end and the post.
    """
    nixl = {r["run"]: r for r in csv.DictReader((CAMPAIGN / NIXL_FILE).open())}[TRANSFER_RUN]
    prefilled, first = _proxy_times("prefill_done_ms", "first_token_ms")
    handed_ms = float((first - prefilled).mean())
    run = read_bench_serve(CAMPAIGN / f"bench_serve_{TRANSFER_RUN}.json.gz")
    step_ms = float(np.mean([np.diff(t).mean() for t in run.token_s])) * 1e3
    steps = steps_waited(async_scheduling=True) + STEPS_TO_SEE
    run_bytes = float(nixl["mean_mb"]) * 1e6
    blocks = run_bytes / model_spec(MODEL).kv_bytes_per_token / KV_BLOCK_TOKENS
    post_ms = float(nixl["mean_post_ms"])
    wire_ms = float(nixl["mean_transfer_ms"]) - post_ms - step_ms / 2
    return Transfer(
        setup_ms=handed_ms - wire_ms - steps * step_ms - token_ms * running_at_first(run),
        per_block_ms=post_ms / blocks,
        gb_per_s=run_bytes / wire_ms / 1e6,
        block_tokens=KV_BLOCK_TOKENS,
        counts_steps=True,
    )


def running_at_first(run: ServedRun) -> float:
    """Requests whose tokens come with a first token, itself counted, on the mean."""
    first, last = (np.array([t[i] for t in run.token_s]) for i in (0, -1))
    return float(np.mean([((first <= t) & (last > t)).sum() for t in first]))


def _proxy_times(*columns: str) -> list[np.ndarray]:
    """Columns of TRANSFER_RUN's requests, ms, each (requests,)."""
    with gzip.open(CAMPAIGN / PROXY_FILE, "rt") as f:
        rows = [r for r in csv.DictReader(f) if r["run"] == TRANSFER_RUN]
    return [np.array([float(r[column]) for r in rows]) for column in columns]
