"""Plans, simulations, what-ifs and calibrations on one 100-column screen; colour only where the terminal has it."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rackplan.cli import wording
from rackplan.cli.wording import number, percent, rate, time_ms

WIDTH = 100
PERCENTILES = ("p50", "p90", "p99")
SHORT_CAUSES = {
    "compute": "compute",
    "dp_imbalance": "DP imb.",
    "ep_imbalance": "EP imb.",
    "dp_sync": "DP sync",
    "host": "host",
    "transfer_wait": "KV wait",
    "kv_full": "KV full",
    "admission_cap": "cap",
    "idle": "idle",
    "failed": "down",
}
Document = Mapping[str, Any]


def stdout_console() -> Console:
    """At most 100 columns, and 100 where the output is piped; strings are literal, never markup."""
    width = WIDTH
    if sys.stdout.isatty():
        width = min(WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def show_plan(plan: Document, console: Console, files: Sequence[Path] = ()) -> None:
    """The whole answer of `plan`, verdict first; warnings come before any number that they qualify."""
    feasible = plan["feasible"]
    console.print(Text(wording.verdict(plan), style="bold green" if feasible else "bold red"))
    console.print(
        f"Subject to {wording.slo_phrase(plan['slo'])}. Inputs: {wording.inputs_phrase(plan['inputs'])}", style="dim"
    )
    _warnings(plan, console)
    if plan.get("deployment") and plan.get("prediction"):
        title = "Deployment" if feasible else "Best that was found (it does NOT meet the request)"
        prediction = plan["prediction"]
        _deployment(plan["deployment"], prediction, plan.get("memory", ()), console, title)
        _prediction(prediction, f"Prediction {wording.load_phrase(plan.get('load'))}, 95 % intervals", console)
        _time_share(prediction, console)
        _economics(plan.get("economics"), console)
    _binding(plan.get("binding"), console)
    _runners_up(plan.get("runners_up", ()), plan["target"]["count"], console)
    _provenance(plan["provenance"], console)
    if files:
        console.print("Written: " + ", ".join(map(str, files)), soft_wrap=True)


def show_simulation(document: Document, console: Console) -> None:
    """What `simulate` found out about one given deployment."""
    metrics = document["metrics"]
    headline = (
        f"{wording.gpus_phrase(metrics['gpus'])}, {wording.deployment_phrase(document['deployment'])}: "
        f"{rate(metrics['throughput_total_tok_s_per_gpu'])} total tok/s/GPU, "
        f"P90 interactivity {number(metrics['interactivity_tok_s_user']['p90'])} tok/s/user, "
        f"P90 TTFT {time_ms(metrics['ttft_ms']['p90'])}"
    )
    console.print(headline, style="bold")
    console.print(f"Inputs: {wording.inputs_phrase(document['inputs'])}", style="dim")
    _warnings(document, console)
    _deployment(document["deployment"], document, document.get("memory", ()), console, "Deployment")
    _prediction(document, "Prediction, 95 % intervals", console)
    _time_share(document, console)
    _provenance(document["provenance"], console)


def show_whatif(document: Document, console: Console) -> None:
    """Base against changed on the same arrivals: what moved, and why."""
    changes = document["changes"]
    console.print("What if " + ", ".join(f"{k} = {_change(v)}" for k, v in changes.items()), style="bold")
    console.print(f"Inputs: {wording.inputs_phrase(document['base']['inputs'])}", style="dim")
    for side in ("base", "changed"):
        deployment = document[side]["deployment"]
        console.print(f"{side:8}{wording.deployment_phrase(deployment)} · {wording.options_phrase(deployment)}")
        _warnings(document[side], console)
    table = _table("What moved, on the same arrivals", "Metric", "Base", "Changed", "Change")
    for row in document["moved"]:
        change = row.get("change_pct")
        shift = "–" if change is None else f"{change:+.1f} %"
        table.add_row(row["metric"], number(row["base"], 4), number(row["changed"], 4), shift)
    console.print(table)
    if not document["moved"]:
        console.print("Nothing moved.")
    for reason in document["why"]:
        console.print(f"• {reason}")
    _provenance(document["base"]["provenance"], console)


def show_calibrations(rows: Iterable[Document], console: Console) -> None:
    """The list of calibrations, with the hold-out error of what a step costs."""
    phases = ("prefill", "decode")
    table = _table("Calibrations", "Name", "Model", "GPU", "Rows", *(f"{p}, hold-out" for p in phases))
    for row in rows:
        errors = [row["errors"].get(p) for p in phases]
        shown = [f"{e['holdout_median_pct']:.1f} / {e['holdout_p90_pct']:.1f} %" if e else "–" for e in errors]
        table.add_row(row["name"], row["model"], row["gpu"], str(row["rows"]), *shown)
    console.print(table)
    console.print("Hold-out errors of a step's time: median / P90 of rows that a fit did not see.", style="dim")


def show_calibration(document: Document, console: Console) -> None:
    """One calibration file with its provenance, as YAML."""
    import yaml

    console.print(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=WIDTH).rstrip())


def show_validation(document: Document, console: Console) -> None:
    """Measured against predicted, row by row; `check` rows took no part in the fit."""
    table = _table(f"Calibration {document['name']}", "Row", "What", "Unit", "Measured", "Predicted", "Error", "Role")
    for row in document["rows"]:
        error = row.get("error_pct")
        table.add_row(
            str(row["id"]),
            str(row["what"]),
            str(row["unit"]),
            number(row["measured"], 4),
            number(row["predicted"], 4),
            "–" if error is None else f"{error:+.1f} %",
            str(row["role"]),
        )
    console.print(table)
    groups = _table("By metric", "Metric", "Rows", "P50 error", "P50 magnitude", "Worst", "At")
    for m in document["by_metric"]:
        errors = (f"{m['p50_pct']:+.1f} %", f"{m['p50_abs_pct']:.1f} %", f"{m['worst_pct']:+.1f} %")
        groups.add_row(str(m["metric"]), str(m["rows"]), *errors, str(m["worst_id"]))
    console.print(groups)
    for order in document.get("rank_order", []):
        ranks = _table(wording.order_title(order), *wording.ORDER_HEADER)
        for cells in wording.order_rows(order):
            ranks.add_row(*cells)
        console.print(ranks)
        console.print(wording.order_verdict(order))
    console.print(wording.flat(document["summary"]), style="bold")


def show_step(document: Document, console: Console) -> None:
    """One step's time by term; outside the measured range that is said first."""
    if not document["in_range"]:
        console.print("Warning: outside the measured range; this is extrapolated", style="yellow")
    low, high = document["interval_ms"]
    console.print(f"Step {time_ms(document['step_ms'])} (interval {time_ms(low)} to {time_ms(high)})", style="bold")
    table = _table("", "Term", "ms", "Of the step")
    for term, value in document["terms_ms"].items():
        table.add_row(str(term), number(value), percent(value / document["step_ms"] if document["step_ms"] else None))
    console.print(table)


def show_diff(document: Document, console: Console) -> None:
    """Two calibrations: terms that differ, and the steps that they make."""
    before, after = document["before"], document["after"]
    console.print(f"{before['name']} ({before['engine_version']}) -> {after['name']} ({after['engine_version']})")
    table = _table("Terms", "Term", "Before", "After", "Change", "Sure")
    for t in document["terms"]:
        change = "–" if t["change_pct"] is None else f"{t['change_pct']:+.1f} %"
        sure = {True: "intervals apart", False: "intervals meet", None: "no interval"}[t["changed"]]
        spans = (_spanned(t["before"], t["before_interval"]), _spanned(t["after"], t["after_interval"]))
        table.add_row(t["term"], *spans, change, sure)
    console.print(table)
    steps = _table("Steps", "Pool", "DEP", "Batch", "Context", "New", "Before, ms", "After, ms", "Change")
    for s in document["steps"]:
        shape = (s["pool"], str(s["dep"]), str(s["batch"]), str(s["context"]), str(s["new"] or "–"))
        mark = "" if s["in_range"] else " *"
        steps.add_row(*shape, number(s["before_ms"]), number(s["after_ms"]), f"{s['change_pct']:+.1f} %{mark}")
    console.print(steps)
    console.print("* outside the measured range of one of the two", style="dim")


def _spanned(value: float, interval: Sequence[float] | None) -> str:
    return f"{number(value)} [{number(interval[0])}, {number(interval[1])}]" if interval else number(value)


def show_operators(document: Document, console: Console) -> None:
    """Shares of a GPU's peak that measured matrix products reach, and the rows that did not pass."""
    title = f"Matrix products on {document['gpu']}"
    table = _table(title, "Data type", "Rows", "Of peak arithmetic", "Of memory's rate")
    for d in document["dtypes"]:
        table.add_row(d["dtype"], str(d["rows"]), percent(d["flop_share"]), percent(d["read_share"]))
    console.print(table)
    for line in document["dropped"]:
        console.print(f"Dropped: {line}", style="yellow")


def show_update(document: Document, console: Console) -> None:
    """A live engine against its calibration: by part of a request, and what was refitted."""
    load = document["load"]
    console.print(
        f"Live load: {number(load['rate_req_s'])} requests/s of {number(load['input_tokens'])} in, "
        f"{number(load['output_tokens'])} out; {number(load['running'])} running"
    )
    table = _table("Mean times", "Part", "Measured, ms", "Expected, ms", "Tolerance", "Drifted", "Term", "Was", "Now")
    for t in document["terms"]:
        times = (number(t["measured_ms"]), number(t["expected_ms"]), f"+-{number(t['tolerance_ms'])}")
        term = (t["coefficient"], number(t["before"]), number(t["after"]))
        table.add_row(t["term"], *times, "yes" if t["drifted"] else "no", *term)
    console.print(table)
    for note in document["notes"]:
        console.print(note)
    if document.get("file"):
        console.print(f"Written: {document['file']}", style="bold")


def _table(title: str, *columns: str) -> Table:
    """A table without rules; the first column holds words, and so do those that are not numbers by nature."""
    words = {"What", "Unit", "Role", "Why not", "Configuration", "Term", "Pool", "Sure", "Metric", "At"}
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    table.show_edge = False
    for i, column in enumerate(columns):
        left = i == 0 or column in words
        table.add_column(column, justify="left" if left else "right", no_wrap=column not in words)
    return table


def _warnings(document: Document, console: Console) -> None:
    for warning in document.get("warnings", ()):
        console.print(f"Warning: {warning}", style="yellow")


def _deployment(
    deployment: Document, prediction: Document, memory: Sequence[Document], console: Console, title: str
) -> None:
    table = _table(
        title, "Pool", "Inst.", "DEP", "GPUs", "Chunk", "Max seqs", "KV loads", "KV pool/GPU", "KV tok/rank", "Busy"
    )
    for i, pool in enumerate(deployment["pools"]):
        plan = memory[i] if i < len(memory) else {}
        loads = pool.get("max_new_kv_loads_per_step")
        table.add_row(
            pool["role"],
            str(pool["instances"]),
            f"{pool['dep']}" + (f" TP{pool['tp']}" if pool.get("tp", 1) > 1 else ""),
            str(wording.pool_gpus(pool)),
            str(pool["max_num_batched_tokens"]),
            str(pool["max_num_seqs"]),
            f"{loads}/step" if loads is not None else "no cap" if pool["role"] == "decode" else "–",
            f"{number(plan['kv_pool_gib'])} GiB" if "kv_pool_gib" in plan else "–",
            rate(plan.get("kv_tokens")),
            percent(prediction["utilization"].get(pool["role"])),
        )
    console.print(table)
    console.print(f"{deployment['model']} on {deployment['gpu']} · {wording.options_phrase(deployment)}")


def _prediction(prediction: Document, title: str, console: Console) -> None:
    metrics, ci95 = prediction["metrics"], prediction.get("ci95") or {}
    table = _table("", "", "P50", "P90", "P99")
    for key, name, form in (
        ("ttft_ms", "TTFT", time_ms),
        ("tpot_ms", "TPOT", time_ms),
        ("itl_ms", "ITL", time_ms),
        ("interactivity_tok_s_user", "Interactivity, tok/s/user", number),
    ):
        bounds = ci95.get(key) or {}
        table.add_row(name, *(_with_interval(form, metrics[key][p], bounds.get(p)) for p in PERCENTILES))
    gpus = metrics["gpus"]
    console.print(f"\n{title}", style="bold")
    for count in ("total", "output"):
        key = f"throughput_{count}_tok_s_per_gpu"
        per_gpu = metrics[key]
        value = _with_interval(rate, per_gpu, ci95.get(key))
        meaning = "cached + new input + output" if count == "total" else "generated tokens only"
        console.print(f"{rate(per_gpu * gpus):>8} tok/s {count:6} = {value} tok/s/GPU   ({meaning})")
    console.print(table)


def _with_interval(form: Any, value: float, bounds: Sequence[float] | None) -> str:
    """12.3 ms [11.9, 12.7]: the bounds in the value's own form, without its unit where they share it."""
    middle = str(form(value))
    if not bounds:
        return middle
    unit = middle.partition(" ")[2]
    ends = [str(form(b)) for b in bounds]
    if all(end.partition(" ")[2] == unit for end in ends):
        ends = [end.partition(" ")[0] for end in ends]
    return f"{middle} [{', '.join(ends)}]"


def _time_share(prediction: Document, console: Console) -> None:
    pools = [(p["role"], p["gpu_time_share"]) for p in prediction.get("pools", ())]
    rows = [*pools, ("all GPUs", prediction["gpu_time_share"])] if len(pools) != 1 else pools
    causes = [c for c in SHORT_CAUSES if c != "failed" or c in prediction["gpu_time_share"]]
    table = _table("Where GPU time goes (each row adds up to 100 %)", "Pool", *(SHORT_CAUSES[c] for c in causes))
    for name, shares in rows:
        table.add_row(name, *(percent(shares.get(cause, 0.0)) for cause in causes))
    console.print(Padding(table, (1, 0, 0, 0), expand=False))


def _economics(economics: Document | None, console: Console) -> None:
    if economics:
        console.print(
            f"Cost {wording.usd(economics['usd_per_m_tokens_total'])} per M tokens, "
            f"{wording.usd(economics['usd_per_m_output_tokens'])} per M output tokens at "
            f"{wording.usd(economics['usd_per_gpu_hour'])} per GPU-hour; revenue "
            f"{wording.usd(economics['revenue_usd_per_gpu_hour'])} per GPU-hour"
        )


def _binding(binding: Document | None, console: Console) -> None:
    if binding:
        console.print(f"Binds: {binding['resource']}. {binding['why']}")
        console.print(f"The next GPU: {binding['next_gpu']}")


def _runners_up(rows: Sequence[Document], count: str, console: Console) -> None:
    if not rows:
        return
    table = _table("Runners-up", "Configuration", "GPUs", f"{count} tok/s/GPU", "P90 tok/s/user", "P90 TTFT", "Why not")
    for row in rows:
        metrics = row["metrics"]
        table.add_row(
            row["label"],
            number(metrics["gpus"], 6),
            rate(metrics[f"throughput_{count}_tok_s_per_gpu"]),
            number(metrics["interactivity_tok_s_user"]["p90"]),
            time_ms(metrics["ttft_ms"]["p90"]),
            row["why_not"],
        )
    console.print(Padding(table, (1, 0, 0, 0), expand=False))


def _provenance(provenance: Document, console: Console) -> None:
    errors = provenance.get("calibration_error") or {}
    # Of step times the others are parts; served_* are of whole runs.
    phases = {k: e for k, e in errors.items() if k in ("prefill", "decode") or k.startswith("served_")}
    error = wording.flat(phases or errors)
    console.print(f"Calibration {provenance['calibration']}" + (f"; its error: {error}" if error else ""))
    if provenance.get("in_range") is False:
        console.print("Part of this is outside the calibration's measured range: extrapolated", style="yellow")
    notes = list(provenance.get("notes", ()))
    urgent = [n for n in notes if n.startswith("extrapolated")]
    if len(notes) > len(urgent):
        more = f"{len(notes) - len(urgent)} notes on what it was fitted to: "
        console.print(f"{more}rackplan calibration show {provenance['calibration']}", style="dim")
    for note in urgent:
        console.print(f"Note: {note}", style="dim")


def _change(value: Any) -> str:
    """A change as `new`, or `old → new` where both are given."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"{wording.plain(value[0])} → {wording.plain(value[1])}"
    if isinstance(value, Mapping) and {"base", "changed"} <= set(value):
        return f"{wording.plain(value['base'])} → {wording.plain(value['changed'])}"
    return wording.plain(value)
