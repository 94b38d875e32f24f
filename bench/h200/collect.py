"""Turns a campaign's raw files into the small ones that are kept. Run: `collect.py RESULTS DEST [--gpus N]`.

DEST gets: bench_forward_*.csv and dp_sync.csv as they are; bench_serve_*.json.gz; `serving.csv` (one row a run);
`nixl.csv` (transfers of each run, from the decode server's counters); `pd_requests.csv.gz` (the proxy's times);
`iterations.csv.gz` (what each engine step held, for servers whose log says so); `runs.json` (command, environment,
versions, GPU, driver and date of everything). Paths of the machine are cut to their last parts.
"""

import argparse
import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from plans import loads

MODEL = "deepseek-v2-lite (random weights)"
SHOWN = [
    *("date", "num_prompts", "request_rate", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "output_throughput", "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "p90_tpot_ms", "median_itl_ms", "p90_itl_ms", "median_e2el_ms"),
]
STEP = re.compile(
    r"(\d\d-\d\d \d\d:\d\d:\d\d) .*Engine (\d+): Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, .*elapsed time: ([\d.]+) ms( \(dummy\))?, .*usage: ([\d.]+)%"
)
COUNTER = re.compile(r"^vllm:nixl_(\w+)_(count|sum)\{.*\} (\S+)$", re.M)
MACHINE = re.compile(r"/\S*?/(?=python3\b|proxy\.py|models/|results\b)")


def load_json(path: Path) -> dict:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


@contextmanager
def zipped(path: Path) -> Iterator[io.StringIO]:
    """A text file, compressed when closed, of the same bytes whenever it is written."""
    text = io.StringIO()
    yield text
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def serving(raw: Path, dest: Path) -> dict[str, tuple[datetime, datetime]]:
    """Copies the runs, writes serving.csv and returns each run's window: `date` is when its client ended."""
    windows = {}
    with (dest / "serving.csv").open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["run", *SHOWN])
        for path in sorted(raw.glob("bench_serve_*.json.gz")):
            run = path.name.removeprefix("bench_serve_").removesuffix(".json.gz")
            result = load_json(path) | {"model_id": MODEL, "tokenizer_id": MODEL}
            (dest / path.name).write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
            values = [result[k] for k in SHOWN]
            out.writerow([run, *(round(v, 3) if isinstance(v, float) else v for v in values)])
            end = datetime.strptime(result["date"], "%Y%m%d-%H%M%S")
            windows[run] = end - timedelta(seconds=result["duration"] + 2), end
    return windows


def iterations(
    raw: Path, dest: Path, windows: dict[str, tuple[datetime, datetime]], servers_of: dict[str, tuple]
) -> None:
    counts_of = "context_requests,context_tokens,generation_requests"
    columns = f"run,server,second,engine,iteration,{counts_of},logged_ms,kv_usage_pct,dummy"
    with zipped(dest / "iterations.csv.gz") as f:
        f.write(columns + "\n")
        for run, (begin, end) in sorted(windows.items()):
            for server in servers_of[run]:
                for line in (raw / f"{server}.log").read_text(errors="replace").splitlines():
                    if not (match := STEP.search(line)):
                        continue
                    stamp, engine, *counts, ms, dummy, kv = match.groups()
                    when = datetime.strptime(f"{end.year}-{stamp}", "%Y-%m-%d %H:%M:%S")
                    if begin <= when <= end:
                        second = int((when - begin).total_seconds())
                        f.write(
                            ",".join([run, server, str(second), engine, *counts, ms, kv, str(int(bool(dummy)))]) + "\n"
                        )


def nixl(raw: Path, dest: Path, runs: list[str]) -> None:
    """Differences of the decode server's counters from run to run; the first run's hold the warm-up's transfers too."""
    before: dict[tuple[str, str], float] = {}
    with (dest / "nixl.csv").open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["run", "transfers", "mean_transfer_ms", "mean_post_ms", "mean_mb", "mean_descriptors"])
        for run in runs:
            path = raw / f"metrics_{run}_decode.txt.gz"
            counters = gzip.decompress(path.read_bytes()).decode()
            now = {(a, b): float(c) for a, b, c in COUNTER.findall(counters)}
            new = {k: v - before.get(k, 0.0) for k, v in now.items()}
            before, count = now, new["xfer_time_seconds", "count"]
            parts = (
                ("xfer_time_seconds", 1e3),
                ("post_time_seconds", 1e3),
                ("bytes_transferred", 1e-6),
                ("num_descriptors", 1),
            )
            out.writerow([run, int(count), *(round(new[name, "sum"] / count * scale, 3) for name, scale in parts)])


def proxy_times(raw: Path, dest: Path, plan: list[tuple[str, int]]) -> None:
    """Rows in the order of arrival, named by run, ms since the run's first arrival; rows past the plan are left out."""
    rows = sorted(csv.reader((raw / "proxy.csv").open()), key=lambda r: r[1])[:-1]  # the header sorts last
    with zipped(dest / "pd_requests.csv.gz") as f:
        f.write("run,arrival_ms,prefill_done_ms,first_token_ms,end_ms\n")
        for run, count in plan:
            mine, rows = rows[:count], rows[count:]
            for row in mine:
                f.write(",".join([run, *(f"{(float(t) - float(mine[0][1])) * 1e3:.1f}" for t in row[1:])]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    args = parser.parse_args()
    raw, dest = args.raw, args.dest
    dest.mkdir(parents=True, exist_ok=True)
    plans = loads(args.gpus)
    for path in (*raw.glob("bench_forward_*.csv"), *raw.glob("dp_sync.csv")):
        # Without the carriage returns of Python's csv default.
        (dest / path.name).write_text(path.read_text().replace("\r\n", "\n"))
    windows = serving(raw, dest)
    iterations(raw, dest, windows, {x.name: x.metrics for plan in plans.values() for x in plan})
    nixl(raw, dest, [x.name for x in plans["pd"] if x.name in windows])
    proxy_times(raw, dest, [(x.name, x.prompts) for x in plans["pd"]])
    known: dict = {}
    for path in sorted(raw.glob("*.run.json")):
        known |= load_json(path)
    text = MACHINE.sub("", json.dumps(known, indent=1))
    (dest / "runs.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
