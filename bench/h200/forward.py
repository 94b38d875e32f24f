"""Runs one plan of exact batches and writes each case as it comes. Run: `forward.py PLAN --ranks N --out DIR`.

Writes DIR/bench_forward_PLAN_depN.csv and the log beside it. Columns as in the profiles: new and cached tokens,
decoding requests and their KV length per rank, median over replays in us, spread of the sample medians in percent.
Cases that the CSV already has are left out, so a cut run goes on where it stopped.
"""

import argparse
import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

from plans import FORWARD, FORWARD_ARGS, Case, case_argument
from record import record

COLUMNS = [
    "case",
    "phase",
    "ranks",
    "new_tokens",
    "context_tokens",
    "decode_batch",
    "decode_kv_len",
    "requests_per_rank",
    "tokens_per_rank",
    "median_us",
    "spread_pct",
]
DONE = re.compile(r"\[forward\] (\S+): (\d+) reqs, (\d+) tokens, median ([\d.]+) us, sample spread ([\d.]+)%")


def command(plan: str, ranks: int, models: str, cases: list[Case], more: list[str]) -> list[str]:
    run = FORWARD[plan]
    start = [sys.executable]
    parallel: list[str] = []
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        parallel = ["--data-parallel-size", str(ranks), "--enable-expert-parallel"]
    named = [a for c in cases for a in ("--case", case_argument(c))]
    start += ["-m", "vllm.entrypoints.cli.main", "bench", "forward", "--model", f"{models}/{run.model}"]
    return [*start, *parallel, *FORWARD_ARGS.split(), *run.args, *more, *named]


def finished(path: Path) -> set[str]:
    return {r["case"] for r in csv.DictReader(path.open())} if path.exists() else set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", choices=FORWARD)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", default="/tmp/models")
    parser.add_argument("--out", type=Path, default=Path("/tmp/results"))
    parser.add_argument("--dry-run", action="store_true")
    args, more = parser.parse_known_args()
    table = args.out / f"bench_forward_{args.plan}_dep{args.ranks}.csv"
    cases = {c[0]: c for c in FORWARD[args.plan].cases if c[0] not in finished(table)}
    line = command(args.plan, args.ranks, args.models, list(cases.values()), more)
    if args.dry_run:
        print(shlex.join(line))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    record(args.out / f"{table.stem}.run.json", table.stem, line)
    new = not table.exists()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with table.open("a", newline="", buffering=1) as f, table.with_suffix(".log").open("a") as log:
        out = csv.writer(f)
        if new:
            out.writerow(COLUMNS)
        for text in process.stdout:
            log.write(text)
            if match := DONE.search(text):
                name, requests, tokens, median_us, spread = match.groups()
                _, phase, *shape = cases[name]
                out.writerow([name, phase, args.ranks, *shape, requests, tokens, median_us, spread])
                print(name, median_us, spread, flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
