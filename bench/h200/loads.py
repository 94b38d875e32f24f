"""Runs `vllm bench serve` for the loads of one plan, in one process. Run: `loads.py PLAN [--only NAME...] --out DIR`.

Writes DIR/bench_serve_NAME.json.gz (as `--save-detailed` gives it, without the generated text, times to 10 us) and
DIR/metrics_NAME_SERVER.txt.gz, the server's own counters after the run. Commands go to loads_PLAN.run.json. Loads whose
server does not answer, and with --within those that would not end in time, are left out.
"""

import argparse
import gzip
import json
import shlex
import time
import urllib.request
from pathlib import Path

from parts import INPUT_TOKENS, OUTPUT_TOKENS, Load
from plans import loads, servers
from servers import healthy

DROPPED = ("generated_texts",)
ENDS_S = 15
"""Beyond its arrivals, what a load takes: its prompts are made, its last requests end, its result is kept."""


def bench_args(load: Load, model: str, out: Path) -> list[str]:
    rate = [] if load.spread == 0 else ["--random-range-ratio", str(load.spread)]
    return [
        *("--backend", "vllm", "--host", "127.0.0.1", "--port", str(load.port), "--model", model, "--tokenizer", model),
        *(
            "--dataset-name",
            "random",
            "--random-input-len",
            str(INPUT_TOKENS),
            "--random-output-len",
            str(OUTPUT_TOKENS),
            *rate,
            "--ignore-eos",
        ),
        *("--request-rate", str(load.rate), "--num-prompts", str(load.prompts), "--seed", str(load.seed)),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,90,99", "--save-result", "--save-detailed"),
        *("--result-dir", str(out), "--result-filename", f"{load.name}.json"),
    ]


def rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value


def keep(plan: str, load: Load, args: list[str], gpus: int, out: Path) -> None:
    """Compresses the result, reads the servers' counters and records the command."""
    raw = out / f"{load.name}.json"
    result = {
        k: rounded(v) if isinstance(v, list) else v for k, v in json.loads(raw.read_text()).items() if k not in DROPPED
    }
    raw.unlink()
    with gzip.open(out / f"bench_serve_{load.name}.json.gz", "wt") as f:
        json.dump(result, f)
    for name in load.metrics:
        with urllib.request.urlopen(f"http://127.0.0.1:{servers(gpus)[name].port}/metrics", timeout=10) as answer:
            (out / f"metrics_{load.name}_{name}.txt.gz").write_bytes(gzip.compress(answer.read()))
    table = out / f"loads_{plan}.run.json"
    known = json.loads(table.read_text()) if table.exists() else {}
    known[load.name] = {"command": shlex.join(["vllm", "bench", "serve", *args]), "date": result["date"]}
    table.write_text(json.dumps(known, indent=1))
    print("RUN", load.name, *(f"{k}={result[k]:.2f}" for k in SHOWN), f"failed={result['failed']}", flush=True)


SHOWN = ("request_throughput", "output_throughput", "median_ttft_ms", "p90_ttft_ms", "median_tpot_ms", "median_itl_ms")


def why_not(load: Load, gpus: int, left_s: float) -> str | None:
    """Why a load is left out; None where it is not."""
    for port in (load.port, *(servers(gpus)[name].port for name in load.metrics)):
        if not healthy(port):
            return f"port {port} does not answer"
    need_s = load.prompts / load.rate + ENDS_S
    return f"needs {need_s:.0f} s, {left_s:.0f} are left" if need_s > left_s else None


def main() -> None:
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="/tmp/models")
    parser.add_argument("--out", type=Path, default=Path("/tmp/results"))
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    model = f"{args.models}/dsv2lite"
    plan = [x for x in loads(args.gpus)[args.plan] if not args.only or x.name in args.only or not x.kept]
    if args.dry_run:
        for load in plan:
            print(shlex.join(["vllm", "bench", "serve", *bench_args(load, model, args.out)]))
        return
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bench_parser = FlexibleArgumentParser()
    add_cli_args(bench_parser)
    for load in plan:
        if why := why_not(load, args.gpus, begin_s + args.within - time.monotonic()):
            print("RUN", load.name, "left out:", why, flush=True)
            continue
        line = bench_args(load, model, args.out)
        bench(bench_parser.parse_args(line))
        if load.kept:
            keep(args.plan, load, line, args.gpus, args.out)
        else:
            (args.out / f"{load.name}.json").unlink()
        time.sleep(2)  # the last requests' blocks and counters settle


if __name__ == "__main__":
    main()
