"""Runs one plan of exact batches and writes each case as it comes. Run: `forward.py PLAN --ranks N --out DIR`.

Writes DIR/bench_forward_PLAN_depN.csv and the log beside it. Columns as in the profiles: new and cached tokens,
decoding requests and their KV length per rank, median over replays in us, spread of the sample medians in percent.
Cases that the CSV already has are left out, so a cut run goes on where it stopped.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from plans import FORWARD, FORWARD_ARGS
from record import record

from rackplan.engine.forward import DONE
from rackplan.engine.forward_table import append_row, done_cases, row_of
from rackplan.engine.profile_cases import ForwardCase


def command(plan: str, ranks: int, models: str, cases: list[ForwardCase], more: list[str]) -> list[str]:
    run = FORWARD[plan]
    start = [sys.executable]
    parallel: list[str] = []
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        parallel = ["--data-parallel-size", str(ranks), "--enable-expert-parallel"]
    named = [a for c in cases for a in ("--case", c.argument)]
    start += ["-m", "vllm.entrypoints.cli.main", "bench", "forward", "--model", f"{models}/{run.model}"]
    return [*start, *parallel, *FORWARD_ARGS.split(), *run.args, *more, *named]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", choices=FORWARD)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", default="/tmp/models")
    parser.add_argument("--out", type=Path, default=Path("/tmp/results"))
    parser.add_argument("--dry-run", action="store_true")
    args, more = parser.parse_known_args()
    table = args.out / f"bench_forward_{args.plan}_dep{args.ranks}.csv"
    cases = {c.name: c for c in FORWARD[args.plan].cases if c.name not in done_cases(table)}
    line = command(args.plan, args.ranks, args.models, list(cases.values()), more)
    if args.dry_run:
        print(shlex.join(line))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    record(args.out / f"{table.stem}.run.json", table.stem, line)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with table.with_suffix(".log").open("a") as log:
        for text in process.stdout:
            log.write(text)
            if match := DONE.search(text):
                name, _, _, median_us, spread = match.groups()
                append_row(table, row_of(cases[name], args.ranks, float(median_us), float(spread)))
                print(name, median_us, spread, flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
