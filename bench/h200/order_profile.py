"""Turns what order.py's plans measured into a profile folder, which `rackplan calibration validate --against` reads.
Run: `order_profile.py DEST RESULTS... --gpus N`; RESULTS of more than one machine are put together. `--logs PATTERN...`
keeps of the step logs those whose names, as `1p1d_b8192_r6_1.prefill-0.dp0`, match one.

DEST gets serve_NAME.json.gz and, cut to each load, the step logs steps_NAME.ROLE-i.dpN.jsonl.gz of its servers;
profile.json with the deployment of each load as rackplan simulates it; runs.json (commands, environment, versions).
Client and step logs share the machine's monotonic clock. Only loads of which no request failed are done.
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from collect import MACHINE, MODEL, load_json
from order import PLANS, Ordered, order_loads, ordered
from parts import INPUT_TOKENS, OUTPUT_TOKENS, Load

from rackplan.engine.profile import FILE, Profile, ServedRun

NAME = "deepseek-v2-lite"


def cut_steps(log: Path, begin_s: float, end_s: float) -> str:
    """The configuration, its model by name, and the steps that were scheduled in that time."""
    first, *steps = log.read_text().splitlines(keepends=True)
    config = json.loads(first)["config"] | {"model": NAME}
    kept = (s for s in steps if s.endswith("\n") and begin_s <= json.loads(s)["t_s"] <= end_s)
    return json.dumps({"config": config}) + "\n" + "".join(kept)


def keep(text: str, path: Path) -> None:
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def run_of(load: Load, of: Ordered, raw: Path, dest: Path, logs: Sequence[str]) -> ServedRun:
    """The load's files written, and what profile.json says of it. `logs`: patterns of the step logs to keep."""
    result = load_json(raw / f"bench_serve_{load.name}.json.gz") | {"model_id": MODEL, "tokenizer_id": MODEL}
    keep(json.dumps(result), dest / f"serve_{load.name}.json.gz")
    begin_s = min(result["start_times"])
    for role, server in of.servers.items():
        for log in sorted(raw.glob(f"steps_{server}.dp*.jsonl")):
            rank = log.stem.removeprefix(f"steps_{server}.")
            name = f"{load.name}.{role}.{rank}"
            if any(fnmatchcase(name, pattern) for pattern in logs):
                text = cut_steps(log, begin_s, begin_s + result["duration"] + 1)
                keep(text, dest / f"steps_{name}.jsonl.gz")
    failed = load.prompts - result["completed"]
    return ServedRun(
        name=load.name,
        deployment=of.deployment.to_dict(),
        rate_req_s=load.rate,
        prompts=load.prompts,
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        status="failed" if failed else "done",
        reason=f"{failed} requests failed" if failed else None,
    )


def identity(known: dict[str, Any], command: str) -> dict[str, Any]:
    """What identifies the profile, from the servers' records."""
    first = next(v for v in known.values() if "versions" in v)
    versions = first["versions"]
    return {
        "model": NAME,
        "gpu": "h200",
        "engine_version": versions["vllm"].rsplit(".", 1)[0],
        "date": first["date"],
        "command": command,
        "versions": versions,
        "gpus": first["gpus"],
        "environment": {k: v for k, v in first["environment"].items() if not k.startswith(("CUDA_VIS", "RACKPLAN"))},
        "time_kind": "gpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--logs", nargs="*", default=["*"])
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    runs = []
    known: dict[str, Any] = {}
    for raw in args.raw:
        for plan in PLANS:
            at = {o.port: o for o in ordered(plan, args.gpus)}
            done = [x for x in order_loads(args.gpus)[plan] if (raw / f"bench_serve_{x.name}.json.gz").exists()]
            runs += [run_of(load, at[load.port], raw, args.dest, args.logs) for load in done]
            record = raw / f"loads_{plan}.run.json"
            known |= load_json(record) if record.exists() else {}
        known |= load_json(raw / "servers.run.json")
    command = f"bench/h200/campaign.sh {' and '.join(PLANS)}, {args.gpus} GPUs"
    profile = Profile(**identity(known, command), runs=runs)
    (args.dest / FILE).write_text(profile.model_dump_json(indent=1) + "\n")
    (args.dest / "runs.json").write_text(MACHINE.sub("", json.dumps(known, indent=1)) + "\n")
    print(len(runs), "loads,", sum(r.status == "failed" for r in runs), "with failed requests")


if __name__ == "__main__":
    main()
