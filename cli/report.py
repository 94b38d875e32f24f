"""The report of a plan: one HTML file with its charts, script and style inside, so that it opens anywhere offline."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rackplan.cli import output, wording
from rackplan.cli.wording import number, rate, time_ms
from rackplan.engine.files import write_all

Document = Mapping[str, Any]


def write_outputs(plan: Document, out: Path) -> list[Path]:
    """Write plan.json, deployment.yaml (where there is one) and report.html to `out`; returns what was written.

    All or nothing: a failure leaves what was there. Raises InputError where `out` cannot be written.
    """
    import yaml

    texts = {out / "plan.json": output.to_json(plan)}
    if plan.get("deployment"):
        head = "" if plan["feasible"] else "# The best that was found; it does NOT meet the request.\n"
        texts[out / "deployment.yaml"] = head + yaml.safe_dump(plan["deployment"], sort_keys=False)
    texts[out / "report.html"] = render_report(plan)
    write_all(texts)
    return list(texts)


def write_report(plan: Document, path: Path) -> None:
    """Write the report of `plan` (the plan document) to `path`, whole or not at all."""
    write_all({path: render_report(plan)})


def render_report(plan: Document) -> str:
    """The report's HTML. All text of the plan is escaped."""
    return page(
        title=f"rackplan: {wording.target_phrase(plan['target'])}",
        header="\n".join(_header(plan)),
        sections=_sections(plan),
        footer=_footer(plan["provenance"]),
    )


def page(*, title: str, header: str, sections: Iterable[str], footer: str = "") -> str:
    """One HTML file with its script and style inside. `title`, `footer`: text; `header`, `sections`: HTML."""
    from plotly.offline import get_plotlyjs

    template = Template((files("rackplan.cli") / "templates" / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        header=header,
        plotly_js=get_plotlyjs(),
        sections="\n".join(sections),
        footer=escape(footer),
    )


def _header(plan: Document) -> Iterable[str]:
    kind = "feasible" if plan["feasible"] else "infeasible"
    heading = f"<h1>{escape(wording.verdict(plan))}</h1><p>Subject to {escape(wording.slo_phrase(plan['slo']))}.</p>"
    yield f'<div class="verdict {kind}">{heading}</div>'
    yield from (f'<p class="warning">{escape(w)}</p>' for w in plan.get("warnings", ()))
    yield _facts(plan)
    yield f'<p class="quiet">Every effective input: <code>{escape(wording.inputs_phrase(plan["inputs"]))}</code></p>'


def _sections(plan: Document) -> Iterable[str]:
    from rackplan.cli import charts

    yield from _answer(plan)
    yield section(
        "Throughput against interactivity",
        "Each point is one deployment at one load in a short run; the star has longer runs, several of them.",
    )
    yield chart(charts.pareto(plan), "pareto")
    if plan.get("prediction"):
        yield section("Prediction", f"{wording.load_phrase(plan.get('load')).capitalize()}, with 95 % intervals.")
        yield _prediction_table(plan["prediction"])
    yield section(
        "Latency", "What share of requests is at least this good; at 90 % a curve should be on the SLO's good side."
    )
    yield chart(charts.latency(plan), "latency")
    yield section("Utilisation and lost time", "Where every second of GPU time goes, by pool.")
    yield chart(charts.time_share(plan), "time")
    yield section("Memory per GPU", "What fills one GPU of each pool.")
    yield chart(charts.memory(plan), "memory")
    if plan.get("runners_up"):
        yield section("Runners-up")
        yield _runners_up_table(plan["runners_up"], plan["target"]["count"])
    yield section("Search history", "The configurations in the order in which they were simulated.")
    yield chart(charts.history(plan), "history")
    if plan.get("economics"):
        yield section("Economics")
        yield table(("", ""), [(k.replace("_", " "), wording.plain(v)) for k, v in plan["economics"].items()])
    yield section("How sure is this", "What the prediction stands on, and its error where it was checked.")
    yield _calibration_table(plan["provenance"])


def _answer(plan: Document) -> Iterable[str]:
    """The deployment and what limits it."""
    if plan.get("deployment"):
        yield section("Deployment" if plan["feasible"] else "Best that was found; it does NOT meet the request")
        yield _deployment_table(plan)
    if plan.get("binding"):
        b = plan["binding"]
        yield section("What binds", f"Binding resource: {b['resource']}. {b['why']}. The next GPU: {b['next_gpu']}.")


def section(title: str, caption: str = "") -> str:
    """A heading and the line under it."""
    return f"<h2>{escape(title)}</h2>" + (f'<p class="quiet">{escape(caption)}</p>' if caption else "")


def chart(figure: Any, name: str) -> str:
    """A figure's HTML; the page holds plotly's script once."""
    settings = {"displayModeBar": False, "responsive": True}
    height = f"{figure.layout.height}px"
    return str(
        figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"chart-{name}", default_height=height, config=settings
        )
    )


def _facts(plan: Document) -> str:
    prediction = plan.get("prediction")
    if not prediction:
        return ""
    metrics = prediction["metrics"]
    facts = [
        (number(metrics["gpus"], 6), "GPUs"),
        (rate(metrics["throughput_total_tok_s_per_gpu"]), "total tok/s/GPU"),
        (rate(metrics["throughput_output_tok_s_per_gpu"]), "output tok/s/GPU"),
        (number(metrics["interactivity_tok_s_user"]["p90"]), "P90 tok/s/user"),
        (time_ms(metrics["ttft_ms"]["p90"]), "P90 TTFT"),
    ]
    if plan.get("economics"):
        facts.append((wording.usd(plan["economics"]["usd_per_m_tokens_total"]), "per M tokens"))
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for value, name in facts)
    return f'<div class="facts">{cells}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric_from: int = 99) -> str:
    """An HTML table; columns from `numeric_from` on are aligned right."""

    def row(cells: Sequence[str], tag: str) -> str:
        aligned = (f"<{tag}{' class=n' if i >= numeric_from else ''}>" for i in range(len(cells)))
        return "<tr>" + "".join(f"{a}{escape(c)}</{tag}>" for a, c in zip(aligned, cells, strict=True)) + "</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if any(header) else ""
    body = "".join(row(r, "td") for r in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _deployment_table(plan: Document) -> str:
    deployment = plan["deployment"]
    shown = [k for k in deployment["pools"][0] if k not in ("role", "offload")]
    header = ("Pool", "GPUs", *(k.replace("_", " ") for k in shown))
    rows = [(p["role"], str(wording.pool_gpus(p)), *(wording.plain(p[k]) for k in shown)) for p in deployment["pools"]]
    flipped = [(name, *(row[i] for row in rows)) for i, name in enumerate(header)]
    note = f"{deployment['model']} on {deployment['gpu']} · {wording.options_phrase(deployment)}"
    return f"<p>{escape(note)}</p>" + table(flipped[0], flipped[1:], 1)


def _prediction_table(prediction: Document) -> str:
    metrics, ci95 = prediction["metrics"], prediction.get("ci95") or {}
    rows: list[tuple[str, ...]] = []
    for key, value in metrics.items():
        bounds = ci95.get(key)
        if key == "requests":  # counts, in plan.json
            continue
        if isinstance(value, Mapping):
            rows.append(
                (_metric(key), *(_interval(value[p], (bounds or {}).get(p)) for p in ("mean", "p50", "p90", "p99")))
            )
        else:
            rows.append((_metric(key), _interval(value, bounds if key != "gpus" else None), "", "", ""))
    return table(("", "Mean", "P50", "P90", "P99"), rows, 1)


def _metric(key: str) -> str:
    """throughput_total_tok_s_per_gpu as throughput total, tok/s/GPU."""
    for suffix, unit in (
        ("_tok_s_per_gpu", "tok/s/GPU"),
        ("_tok_s_user", "tok/s/user"),
        ("_tok_s", "tok/s"),
        ("_req_s", "req/s"),
        ("_ms", "ms"),
    ):
        if key.endswith(suffix):
            name = key.removesuffix(suffix).replace("_", " ")
            return f"{name.upper() if len(name) < 5 else name.capitalize()}, {unit}"
    return "GPUs" if key == "gpus" else key.replace("_", " ").capitalize()


def _interval(value: float, bounds: Sequence[float] | None) -> str:
    return f"{number(value, 4)} [{number(bounds[0], 4)}, {number(bounds[1], 4)}]" if bounds else number(value, 4)


def _runners_up_table(rows: Sequence[Document], count: str) -> str:
    header = ("Configuration", "Load", "Why not", "GPUs", f"{count} tok/s/GPU", "P90 tok/s/user", "P90 TTFT")
    body = []
    for row in rows:
        m = row["metrics"]
        numbers = (
            number(m["gpus"], 6),
            rate(m[f"throughput_{count}_tok_s_per_gpu"]),
            number(m["interactivity_tok_s_user"]["p90"]),
            time_ms(m["ttft_ms"]["p90"]),
        )
        body.append((row["label"], wording.load_phrase(row.get("load")), row["why_not"], *numbers))
    return table(header, body, 3)


def _calibration_table(provenance: Document) -> str:
    rows = [("Calibration", str(provenance["calibration"]))]
    errors = provenance.get("calibration_error") or {}
    rows += [(f"Error: {k.replace('_', ' ')}", wording.plain(v)) for k, v in errors.items()]
    rows.append(("Within the measured range", wording.plain(provenance.get("in_range"))))
    rows += [("Note", str(note)) for note in provenance.get("notes", ())]
    return table(("", ""), rows)


def _footer(provenance: Document) -> str:
    return (
        f"rackplan {provenance.get('rackplan_version')}, engine version {provenance.get('engine_version')}, "
        f"seed {provenance.get('seed')}. A prediction, not a measurement."
    )
