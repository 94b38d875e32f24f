"""Request by request beside another simulator of vLLM's scheduler, aisimulate, at constant step times.

    python bench/second_oracle.py FOLDER [--streams 10]     FOLDER is what bench/peers.sh has filled

Both simulate the same random streams: a step takes PREFILL_MS where it computes prompts, DECODE_MS where it decodes,
the sum where it does both. A line for each kind of stream says how many requests have their first and last tokens at
the same times, to a microsecond. docs/model/scheduler_parity.md has the table.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from models import FakeCalibration, LinearCost, with_kv_tokens  # noqa: E402

from rackplan.engine import Deployment, parse_deployment  # noqa: E402
from rackplan.simulator.cost import SharedTime, TransferCost  # noqa: E402
from rackplan.simulator.load import Load  # noqa: E402
from rackplan.simulator.run_options import RunOptions  # noqa: E402
from rackplan.simulator.simulate import simulate  # noqa: E402
from rackplan.simulator.workloads import parse_workload  # noqa: E402

PREFILL_MS, DECODE_MS = 7.3137, 4.1291
"""Of which no sums meet the arrivals, which are whole milliseconds."""
HASHED_TOKENS = 512
"""Tokens of a block in Mooncake's format."""
GB_PER_S = 50.0
ROOMY_TOKENS = 1_000_000
SAME_MS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Rows of a request file and the scheduler that they meet. `kv_tokens`: in blocks of `block_tokens` in the peer."""

    rows: list[dict[str, Any]]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int = ROOMY_TOKENS
    block_tokens: int = 16
    prefix_caching: bool = False
    disaggregated: bool = False


class Constant(LinearCost):
    """Steps that take the same whatever they hold."""

    def attention_ms(self, prefill_tokens, prefill_pairs, prefill_context, decode_requests, decode_context):  # type: ignore[no-untyped-def]
        return 0.0 * (decode_requests + decode_context)

    def shared_ms(self, widest_tokens, total_tokens, prefill_tokens, prefill_chunks, balancedness):  # type: ignore[no-untyped-def]
        ms = PREFILL_MS * (prefill_tokens > 0) + DECODE_MS * (total_tokens > prefill_tokens)
        return SharedTime(ms, 0.0, 0.0, 0.0, 0.0)


# -- streams ---------------------------------------------------------------------------------------------------------
def rows_of(rng: random.Random, n: int, longest: int, answer: int, gap_ms: int) -> list[dict[str, Any]]:
    """No two arrivals at once, so that a request is known by its own; no two prompts with a block in common."""
    rows, at, block = [], 0, 0
    for _ in range(n):
        tokens = rng.randint(1, longest)
        blocks = -(-tokens // HASHED_TOKENS)
        hashes = list(range(block, block + blocks))
        rows.append(
            {"timestamp": at, "input_length": tokens, "output_length": rng.randint(1, answer), "hash_ids": hashes}
        )
        at, block = at + rng.choice([1, 1, rng.randint(1, gap_ms)]), block + blocks
    return rows


def chunked(rng: random.Random) -> Stream:
    return Stream(
        rows=rows_of(rng, 60, 3000, 60, rng.choice([20, 120])),
        max_num_seqs=64,
        max_num_batched_tokens=rng.choice([128, 512, 2048, 8192]),
    )


def seats(rng: random.Random) -> Stream:
    return Stream(rows=rows_of(rng, 60, 800, 40, 40), max_num_seqs=rng.choice([1, 2, 4, 8]), max_num_batched_tokens=512)


def full(rng: random.Random) -> Stream:
    most = rng.choice([8, 16, 24])
    return Stream(
        rows=rows_of(rng, 80, 60, 30, 6), max_num_seqs=most, max_num_batched_tokens=most + rng.choice([0, 1, 5])
    )


def tight(rng: random.Random, block_tokens: int = 2) -> Stream:
    """KV for one to four requests, counted by the token here; the peer's blocks have two tokens at least."""
    rows = rows_of(rng, 40, 600, 200, 40)
    largest = max(row["input_length"] + row["output_length"] for row in rows)
    blocks = -(-rng.randint(largest + 16, 4 * largest) // 16)
    return Stream(
        rows=rows, max_num_seqs=16, max_num_batched_tokens=512, kv_tokens=16 * blocks, block_tokens=block_tokens
    )


def tight_blocks(rng: random.Random) -> Stream:
    return tight(rng, 16)


def prefixes(rng: random.Random) -> Stream:
    """Prompts that begin with one of four documents."""
    rows = rows_of(rng, 60, 1500, 40, 60)
    for row in rows:
        document, blocks = rng.randrange(4), rng.randint(0, 3)
        row["hash_ids"] = [100_000 + 10 * document + i for i in range(blocks)] + row["hash_ids"]
        row["input_length"] += HASHED_TOKENS * blocks
    return Stream(rows=rows, max_num_seqs=32, max_num_batched_tokens=2048, prefix_caching=True)


def prefill_decode(rng: random.Random) -> Stream:
    """Prompts of whole blocks, since the peer hands over whole ones."""
    rows = rows_of(rng, 60, 1500, 40, 60)
    for row in rows:
        row["input_length"] = -(-row["input_length"] // 16) * 16
    return Stream(
        rows=rows,
        max_num_seqs=rng.choice([4, 64]),
        max_num_batched_tokens=2048,
        disaggregated=True,
    )


KINDS: dict[str, Callable[[random.Random], Stream]] = {
    kind.__name__: kind for kind in (chunked, seats, full, tight, tight_blocks, prefixes, prefill_decode)
}


# -- the two sides ---------------------------------------------------------------------------------------------------
def ours(stream: Stream, path: Path) -> dict[int, tuple[float, float]]:
    """(first token, last token), ms, by arrival, ms."""
    deployment = deployment_of(stream)
    transfer = TransferCost(setup_ms=0.0, per_block_ms=0.0, gb_per_s=GB_PER_S, block_tokens=16)
    calibration = FakeCalibration(Constant(), transfer)
    found = simulate(deployment, parse_workload(str(path)), Load(), calibration, RunOptions(duration_s=1e9))
    times = zip(found.arrival_ns, found.first_token_ns, found.finish_ns, strict=True)
    return {round(a / 1e6): (first / 1e6, last / 1e6) for a, first, last in times}


def deployment_of(stream: Stream) -> Deployment:
    roles = ("prefill", "decode") if stream.disaggregated else ("aggregated",)
    knobs = {
        "instances": 1,
        "dep": 1,
        "max_num_seqs": stream.max_num_seqs,
        "max_num_batched_tokens": stream.max_num_batched_tokens,
        "enable_prefix_caching": stream.prefix_caching,
        "async_scheduling": False,
    }
    deployment = parse_deployment(
        {"model": "deepseek-v2-lite", "gpu": "h200", "pools": [{"role": role, **knobs} for role in roles]}
    )
    if stream.kv_tokens < ROOMY_TOKENS:
        return with_kv_tokens(deployment, roles[0], stream.kv_tokens)
    return deployment


def theirs(stream: Stream, path: Path, program: Path) -> dict[int, tuple[float, float]]:
    """The same of the peer."""
    one = ("replicas", "tensor", "pipeline", "attention_data", "moe_tensor", "moe_expert")
    worker = {
        "timing": {"type": "fixed", "prefill_ms": PREFILL_MS, "decode_ms": DECODE_MS},
        "scheduler": {"max_batched_tokens": stream.max_num_batched_tokens, "max_sequences": stream.max_num_seqs},
        "kv_cache": {
            "block_size": stream.block_tokens,
            "prefix_caching": stream.prefix_caching,
            "capacity": {"type": "fixed", "blocks": stream.kv_tokens // stream.block_tokens},
        },
        "parallelism": dict.fromkeys(one, 1),
    }
    engine: dict[str, Any] = {
        "mode": "disaggregated" if stream.disaggregated else "aggregated",
        "model": "Qwen/Qwen3-30B-A3B",
        "hardware": "h200_sxm",
        "backend": "vllm",
        "context_length": 8192,
        "workers": dict.fromkeys(("prefill", "decode") if stream.disaggregated else ("aggregated",), worker),
    }
    if stream.disaggregated:
        token_bytes = deployment_of(stream).model_spec.kv_bytes_per_token
        engine["kv_transfer"] = {"bandwidth_gb_per_second": GB_PER_S, "bytes_per_token": round(token_bytes)}
    source = {"type": "trace", "paths": [str(path)], "format": "mooncake"}
    config = path.with_suffix(".yaml")
    config.write_text(
        json.dumps({"traffic": {"source": source, "load": {"type": "trace_timestamps"}}, "engine": engine})
    )
    out = path.with_suffix("")
    command = [str(program), "predict", "-c", str(config), "--capture-per-request", "--output-dir", str(out)]
    done = subprocess.run([*command, "--overwrite"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{program}: {done.stderr.strip()[-400:]}")
    rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    return {round(row["arrival_time_ms"]): (row["first_token_ms"], row["last_token_ms"]) for row in rows}


def compare(kind: str, streams: int, program: Path, folder: Path) -> str:
    """One line of the table."""
    differences = []
    for seed in range(streams):
        stream = KINDS[kind](random.Random(f"{kind} {seed}"))
        path = folder / f"{kind}-{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in stream.rows))
        here, there = ours(stream, path), theirs(stream, path, program)
        if here.keys() != there.keys():
            raise SystemExit(f"{kind} {seed}: the two did not end the same requests")
        differences += [np.subtract(here[at], there[at]) for at in here]
    off = np.abs(np.array(differences))
    first, last = (int((off[:, i] < SAME_MS).sum()) for i in (0, 1))
    mean = np.array(differences).mean(axis=0)
    return f"| {kind} | {len(off)} | {first} | {last} | {off.max():.1f} | {mean[0]:+.2f}, {mean[1]:+.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", type=Path)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--only", choices=list(KINDS), default=None)
    asked = parser.parse_args()
    program = (asked.peers / "aisimulate" / "bin" / "aisimulate").resolve()
    if not program.is_file():
        parser.error(f"{program}: not there; run bench/peers.sh {asked.peers}")
    print("| kind | requests | same first token | same end | largest difference, ms | mean difference, ms |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in [asked.only] if asked.only else KINDS:
            print(compare(kind, asked.streams, program, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
