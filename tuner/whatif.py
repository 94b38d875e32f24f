"""What changes if: a deployment and changes to it, on the same arrivals, side by side."""

from typing import Any

import yaml

from rackplan.engine import Deployment, Eplb, InputError, parse_deployment
from rackplan.simulator.failures import Failure
from rackplan.simulator.run_options import USUAL, Drafting
from rackplan.tuner.evaluate import simulate_document
from rackplan.tuner.run_settings import CONDITIONS, PREFIX, expert_run, run_document

SHOWN = (
    ("gpus", "GPUs"),
    ("throughput_total_tok_s_per_gpu", "total tok/s/GPU"),
    ("throughput_output_tok_s_per_gpu", "output tok/s/GPU"),
    ("total_throughput_tok_s", "total tok/s"),
    ("request_throughput_req_s", "req/s"),
    ("ttft_ms.p50", "TTFT P50, ms"),
    ("ttft_ms.p90", "TTFT P90, ms"),
    ("tpot_ms.p50", "TPOT P50, ms"),
    ("tpot_ms.p90", "TPOT P90, ms"),
    ("itl_ms.p99", "ITL P99, ms"),
    ("interactivity_tok_s_user.p90", "P90 interactivity, tok/s/user"),
    ("e2e_ms.p90", "E2E P90, ms"),
    ("prefix_hit_share", "prefix hits, share of input"),
)
MOVED_PCT = 0.5
"""Less than this is left out as not moved; runs share their arrivals, so differences are not noise of the load."""


def compare(
    base: Deployment,
    changes: list[tuple[str, str]],
    *,
    workload: str,
    concurrency: int | None,
    rate: float | None,
    duration_s: float,
    calibration: str | None,
    replications: int,
    seed: int,
    drafting: Drafting = USUAL,
    failures: tuple[Failure, ...] = (),
    resubmit: bool = True,
) -> dict[str, Any]:
    """{"base", "changed": simulation documents, "changes", "moved", "why"}.

    Keys that begin with `run.` are of the run (ExpertRun), and drift is of both sides; `failures` are of the changed
    side; `resubmit`: their requests are sent again. Raises InputError on a change that cannot be or has no effect,
    InfeasibleError where the changed deployment does not fit its GPUs."""
    of_run = [(key.removeprefix(PREFIX), text) for key, text in changes if key.startswith(PREFIX)]
    changed, effective = apply_changes(base, [pair for pair in changes if not pair[0].startswith(PREFIX)])
    drafting.check_effect(max(d.speculation.draft_tokens for d in (base, changed)))
    values = values_of(of_run)
    run = expert_run(values, changed, f"--set {PREFIX}")
    always = expert_run({k: v for k, v in values.items() if k in CONDITIONS}, changed, f"--set {PREFIX}")
    was, becomes = run_document(always), run_document(run)
    effective |= {PREFIX + k: {"base": was[k], "changed": becomes[k]} for k in values}
    if failures:
        effective["fail"] = {"base": None, "changed": [str(f) for f in failures]}
    load: dict[str, Any] = {
        "workload": workload,
        "concurrency": concurrency,
        "rate": rate,
        "cv": 1.0,
        "duration_s": duration_s,
        "calibration": calibration,
        "replications": replications,
        "seed": seed,
        "drafting": drafting,
    }
    before = simulate_document(base, **load, run=always)
    after = simulate_document(changed, **load, run=run, failures=failures, resubmit=resubmit)
    return {
        "base": before,
        "changed": after,
        "changes": effective,
        "moved": _moved(before["metrics"], after["metrics"]),
        "why": _why(before, after),
    }


def apply_changes(base: Deployment, changes: list[tuple[str, str]]) -> tuple[Deployment, dict[str, Any]]:
    """(changed deployment, {key: {"base", "changed"}}). A key is `role.field` of a pool, or a field of the deployment;
    what a change takes with it (EPLB off resets its other settings) is among the changes."""
    data = base.to_dict()
    effective: dict[str, Any] = {}
    asked = values_of(changes)
    taken: dict[str, Any] = {}
    if asked.get("eplb.enabled") is False:
        taken = {f"eplb.{field}": usual for field, usual in Eplb().model_dump(mode="json").items()}
        taken |= {f"{p['role']}.redundant_experts": None for p in data["pools"] if p["redundant_experts"]}
    for key, value in {**taken, **asked}.items():
        for holder, field in _holders(data, key):
            if holder[field] != value:
                effective[key] = {"base": holder[field], "changed": value}
                holder[field] = value
        if key in asked and key not in effective:
            raise InputError(f"--set {key}={value}: has no effect, the deployment has it already; set another value")
    return parse_deployment(data, "--set"), effective


def values_of(changes: list[tuple[str, str]], option: str = "--set") -> dict[str, Any]:
    """The values by key, read as a deployment's YAML would be."""
    values: dict[str, Any] = {}
    for key, text in changes:
        if key in values:
            raise InputError(f"{option} {key}={text}: sets {key} a second time; give it once")
        try:
            values[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise InputError(f"{option} {key}={text:.40}: not a value; write it as in a deployment's YAML") from None
    return values


def _holders(data: dict[str, Any], key: str) -> list[tuple[dict[str, Any], str]]:
    """Where a dotted key's value lives: one place, or one in each pool of a role."""
    head, _, field = key.partition(".")
    pools = [p for p in data["pools"] if p["role"] == head]
    if pools:
        return [_descend(pool, field, key, data) for pool in pools]
    if not field and isinstance(data.get(head), (dict, list)):
        raise InputError(f"--set {key}: is a group; name a field of it, as in {key}.{_example(data[head])}")
    return [_descend(data, key, key, data)]


def _descend(holder: Any, path: str, key: str, data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    *groups, field = path.split(".")
    for group in groups:
        holder = holder.get(group) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or field not in holder or field == "pools":
        roles = sorted({p["role"] for p in data["pools"]})
        names = [*(f"{r}.dep" for r in roles), "eplb.enabled", "speculation.draft_tokens", "dp_sync.algorithm"]
        raise InputError(f"--set {key}: no such key; as in {', '.join(names)}")
    return holder, field


def _example(group: Any) -> str:
    return next(iter(group)) if isinstance(group, dict) else "role"


def _moved(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for path, name in SHOWN:
        a, b = _at(before, path), _at(after, path)
        change = (b / a - 1) * 100 if a else None
        if a != b and (change is None or abs(change) >= MOVED_PCT):
            rows.append({"metric": name, "base": a, "changed": b, "change_pct": change})
    return rows


def _at(metrics: dict[str, Any], path: str) -> float:
    value: Any = metrics
    for part in path.split("."):
        value = value[part]
    return float(value)


def _why(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the simulation shows behind the differences, largest first."""
    found: list[tuple[float, str]] = []
    olds, news = ({p["role"]: p for p in d["pools"]} for d in (before, after))
    for role in olds.keys() & news.keys():
        old, new = olds[role], news[role]
        for cause in old["gpu_time_share"] | new["gpu_time_share"]:
            share = old["gpu_time_share"].get(cause, 0.0)
            shift = new["gpu_time_share"].get(cause, 0.0) - share
            if abs(shift) >= 0.01 and cause != "compute":
                name = cause.replace("_", " ")
                found.append((abs(shift), f"{role}: {name} {share:.1%} -> {share + shift:.1%} of its GPU time"))
        shift = new["utilization"] - old["utilization"]
        if abs(shift) >= 0.02:
            text = f"{role}: busy {old['utilization']:.0%} -> {new['utilization']:.0%} of the time"
            found.append((abs(shift), text))
    batches = [_batch_per_rank(d) for d in (before, after)]
    if abs(batches[1] / max(1e-9, batches[0]) - 1) >= 0.05:
        steps = [d["metrics"]["itl_ms"]["mean"] for d in (before, after)]
        text = (
            f"decoding: {batches[0]:.1f} -> {batches[1]:.1f} requests per rank at once, "
            f"steps of {steps[0]:.1f} -> {steps[1]:.1f} ms"
        )
        found.append((abs(batches[1] / max(1e-9, batches[0]) - 1), text))
    rooms = zip(before["memory"], after["memory"], strict=False)
    for old, new in rooms:
        if old["role"] == new["role"] and abs(new["kv_tokens"] / max(1, old["kv_tokens"]) - 1) >= 0.02:
            text = f"{old['role']}: KV room per rank {old['kv_tokens']:,} -> {new['kv_tokens']:,} tokens"
            found.append((0.05, text))
    found.sort(key=lambda f: (-f[0], f[1]))
    new_warnings = [w for w in after["warnings"] if w not in before["warnings"]]
    return [text for _, text in found[:6]] + new_warnings


def _batch_per_rank(document: dict[str, Any]) -> float:
    """Requests that decode on a rank at once, by Little's law."""
    metrics = document["metrics"]
    decoding_s = (metrics["e2e_ms"]["mean"] - metrics["ttft_ms"]["mean"]) / 1e3
    ranks = sum(p["dep"] * p["instances"] for p in document["deployment"]["pools"] if p["role"] != "prefill")
    return float(metrics["request_throughput_req_s"] * decoding_s / ranks)
