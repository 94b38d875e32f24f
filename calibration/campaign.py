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
from rackplan.calibration.served import read_served, stalls_ms
from rackplan.engine import Deployment, model_spec, parse_deployment

CAMPAIGN = Path(__file__).parent / "data" / "h200_dsv2lite" / "campaign"
MODEL, GPU = "deepseek-v2-lite", "h200"
SYNC_FILE, NIXL_FILE, PROXY_FILE = "dp_sync.csv", "nixl.csv", "pd_requests.csv.gz"
LAUNCH_RUN, TRANSFER_RUN = "dep_r8", "pd_r6"
"""The runs that fits use: the lowest rate of DEP2, where steps with a prompt stand apart most often; of 1P1D the middle
rate, so that the checks lie on both sides."""
KV_BLOCK_TOKENS = 16
STEPS_TO_SEE = 2.5
"""Engine steps from the arrival of a prompt's KV to its first token under async scheduling, as it is simulated: half a
step until the host begins one, that step's wait for the GPU, and the step itself."""


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


def _deployment(pools: list[dict[str, object]]) -> Deployment:
    """vLLM 0.33 balances ranks by requests, syncs them by recursive doubling, and its NixlConnector pulls."""
    return parse_deployment(
        {
            "model": MODEL,
            "gpu": GPU,
            "pools": pools,
            "router": {"policy": "least_requests"},
            "dp_sync": {"algorithm": "recursive_doubling"},
            "kv_transfer": {"mode": "pull"},
        }
    )


def served_runs() -> list[CampaignRun]:
    """DEP2 at 8, 12 and 20 req/s, 1P1D at 3, 6 and 10, one GPU with CUDA graphs to 512 and to 4,096 tokens at 6 with
    fixed and variable lengths."""
    dep2, pd = _deployment([_pool("aggregated", 2, 512)]), _deployment([_pool(r, 1, 512) for r in ("prefill", "decode")])
    runs = [CampaignRun(name=f"dep_{r}", deployment=dep2, fitted=f"dep_{r}" == LAUNCH_RUN) for r in ("r8", "r12", "r20")]
    runs += [CampaignRun(name=f"pd_{r}", deployment=pd, fitted=f"pd_{r}" == TRANSFER_RUN) for r in ("r3", "r6", "r10")]
    for captured in (512, 4096):
        one = _deployment([_pool("aggregated", 1, captured)])
        runs += [CampaignRun(name=f"agg8192_graphs{captured}_{load}", deployment=one) for load in ("r6", "r6var")]
    return runs


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


def eager_launch_ep_ms() -> float:
    """Mean launch of an eager step with experts over two GPUs, ms.

    An instance of several GPUs has its workers in processes of their own: tokens leave when a step ends on the GPU, so
    running requests see the launch less what the host was ahead, which was the GPU time of the step before."""
    return float(np.mean(stalls_ms(read_served(CAMPAIGN / f"bench_serve_{LAUNCH_RUN}.json.gz"))))


def transfer() -> Transfer:
    """KV hand-over over NIXL (pull) from TRANSFER_RUN.

    Descriptors: the post's time over the blocks of a prompt. Rate: bytes over what a transfer takes beyond its post,
    less the half step after which its end is noticed. Set-up: what is left between the prefill server's answer and the
    first token, less the steps until then; so it holds the decode server's front end and the post.
    """
    nixl = {r["run"]: r for r in csv.DictReader((CAMPAIGN / NIXL_FILE).open())}[TRANSFER_RUN]
    handed_ms, step_ms = _proxy_times()
    run_bytes = float(nixl["mean_mb"]) * 1e6
    blocks = run_bytes / model_spec(MODEL).kv_bytes_per_token / KV_BLOCK_TOKENS
    post_ms = float(nixl["mean_post_ms"])
    wire_ms = float(nixl["mean_transfer_ms"]) - post_ms - step_ms / 2
    return Transfer(
        setup_ms=handed_ms - wire_ms - STEPS_TO_SEE * step_ms,
        per_block_ms=post_ms / blocks,
        gb_per_s=run_bytes / wire_ms / 1e6,
        block_tokens=KV_BLOCK_TOKENS,
    )


def _proxy_times() -> tuple[float, float]:
    """Means over TRANSFER_RUN: (ms from the prefill server's answer to the first token, ms per decode step)."""
    run = read_served(CAMPAIGN / f"bench_serve_{TRANSFER_RUN}.json.gz")
    step_ms = float(np.mean([np.diff(t).mean() for t in run.token_s])) * 1e3
    with gzip.open(CAMPAIGN / PROXY_FILE, "rt") as f:
        handed = [
            float(r["first_token_ms"]) - float(r["prefill_done_ms"])
            for r in csv.DictReader(f)
            if r["run"] == TRANSFER_RUN
        ]
    return float(np.mean(handed)), step_ms
