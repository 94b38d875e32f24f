"""The five charts of the report as plotly figures. Colours are Okabe and Ito's, told apart by every kind of sight."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rackplan.cli import wording

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#1a1a1a",
)  # fmt: skip
CAUSE_COLOURS = {
    "compute": BLUE,
    "dp_imbalance": VERMILLION,
    "ep_imbalance": ORANGE,
    "dp_sync": PURPLE,
    "host": "#6b6b6b",
    "transfer_wait": SKY,
    "kv_full": "#7a3b00",
    "admission_cap": "#F0E442",
    "idle": "#d9d9d9",
}
MEMORY_PARTS = {
    "routed_experts_gib": ("Routed experts", BLUE),
    "redundant_experts_gib": ("Redundant experts", SKY),
    "replicated_weights_gib": ("Attention, shared experts, draft", PURPLE),
    "activation_gib": ("Activations", ORANGE),
    "graphs_gib": ("CUDA graphs", "#F0E442"),
    "runtime_gib": ("Runtime", "#6b6b6b"),
    "state_gib": ("State per sequence", VERMILLION),
    "kv_pool_gib": ("KV pool", GREEN),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
GRID = "#e3e3e3"
Document = Mapping[str, Any]


def pareto(plan: Document) -> go.Figure:
    """Tok/s/GPU over tok/s/user: the front of either kind drawn full, what is dominated faint."""
    figure = styled(460)
    for disaggregated, name, colour, symbol in (
        (True, "Prefill/decode", BLUE, "circle"),
        (False, "Aggregated", VERMILLION, "diamond"),
    ):
        points = [p for p in plan.get("pareto", ()) if bool(p["disaggregated"]) == disaggregated]
        best = front(points)
        rest = [p for p in points if p not in best]
        figure.add_trace(_points(rest, f"{name}, dominated", colour, symbol, opacity=0.28, mode="markers"))
        figure.add_trace(_points(best, f"{name}, front", colour, symbol, opacity=1.0, mode="lines+markers"))
    target = plan["target"]
    _vertical(figure, plan["slo"]["p90_interactivity_tok_s_user"], "SLO")
    prediction = plan.get("prediction")
    if prediction:
        metrics = prediction["metrics"]
        if target["count"] == "total":
            per_gpu = target["tps"] / (1 if target["per"] == "gpu" else metrics["gpus"])
            _horizontal(figure, per_gpu, f"target {wording.rate(per_gpu)}")
        figure.add_trace(_chosen(metrics, "Recommended" if plan["feasible"] else "Closest, not recommended"))
    figure.update_xaxes(title_text="P90 interactivity, tok/s/user", rangemode="tozero")
    figure.update_yaxes(title_text="Total tok/s per GPU", rangemode="tozero", tickformat="~s")
    return figure


def front(points: Sequence[Document]) -> list[Document]:
    """The points that no other beats in both rates, by rising tok/s/user."""
    best: list[Document] = []
    for point in sorted(points, key=lambda p: (-p["tok_s_per_user"], -p["tok_s_per_gpu"])):
        if not best or point["tok_s_per_gpu"] > best[-1]["tok_s_per_gpu"]:
            best.append(point)
    return best[::-1]


def latency(plan: Document) -> go.Figure:
    """What share of requests does how well: TTFT, TPOT and interactivity by quantile, with the SLOs."""
    panels = (
        ("ttft_ms", "TTFT, s", 1e-3),
        ("tpot_ms", "TPOT, ms", 1.0),
        ("interactivity_tok_s_user", "tok/s/user", 1.0),
    )
    titles = ("Time to first token", "Time per output token", "Interactivity")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    _style(figure, 360)
    slo = plan["slo"]
    limits = {
        "ttft_ms": slo["p90_ttft_ms"],
        "tpot_ms": 1000 / slo["p90_interactivity_tok_s_user"],
        "interactivity_tok_s_user": slo["p90_interactivity_tok_s_user"],
    }
    curves = (plan.get("prediction") or {}).get("latency_curves") or {}
    for column, (key, label, scale) in enumerate(panels, 1):
        shares, values = _reached(curves.get(key, ()), better_high=key == "interactivity_tok_s_user")
        scaled = [v * scale for v in values]
        line = go.Scatter(
            x=shares, y=scaled, mode="lines", line={"color": BLUE, "width": 2.5}, name=label, showlegend=False,
            hovertemplate="%{x:.0f} % of requests: %{y:.4~g}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(line, row=1, col=column)
        figure.add_hline(
            y=limits[key] * scale, line={"color": BLACK, "dash": "dash", "width": 1.2}, row=1, col=column,
            annotation={"text": "SLO for 90 %", "font": {"size": 12}}, annotation_position="top left",
        )  # fmt: skip
        figure.add_vline(x=90, line={"color": "#8a8a8a", "dash": "dot", "width": 1}, row=1, col=column)
        figure.update_xaxes(
            title_text="% of requests at least this good", range=[0, 101], tickvals=[0, 25, 50, 75, 90, 100],
            row=1, col=column,
        )  # fmt: skip
        top = max([*scaled, limits[key] * scale]) * 1.12
        figure.update_yaxes(title_text=label, range=[0, top], row=1, col=column)
    return figure


def _reached(curve: Sequence[Sequence[float]], better_high: bool) -> tuple[list[float], list[float]]:
    """(% of requests at least this good, value). A curve that rises although more is better counts from the worst."""
    shares = [100 * q for q, _ in curve]
    values = [v for _, v in curve]
    if better_high and values and values[-1] > values[0]:
        shares = [100 - s for s in shares]
    return shares, values


def time_share(plan: Document) -> go.Figure:
    """GPU time by cause, one bar a pool; each adds up to 100 %."""
    prediction = plan.get("prediction") or {}
    bars = [
        (
            f"<b>{escape(p['role'])}</b>, {p['gpus']} GPUs<br>{wording.percent(p['utilization'])} busy",
            p["gpu_time_share"],
        )
        for p in prediction.get("pools", ())
    ]
    if len(bars) > 1:
        bars.append(("<b>all GPUs</b>", prediction["gpu_time_share"]))
    figure = styled(130 + 62 * len(bars), barmode="stack")
    for cause, name in wording.CAUSES.items():
        shares = [100 * b[1].get(cause, 0.0) for b in bars]
        if any(shares):
            figure.add_trace(_bar([b[0] for b in bars], shares, name, CAUSE_COLOURS[cause], "%{x:.1f} %", 4.0, ".0f"))
    figure.update_xaxes(title_text="GPU time, %", range=[0, 100], dtick=10)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def memory(plan: Document) -> go.Figure:
    """GiB on one GPU of each pool, against what the GPU has and what vLLM may use of it."""
    pools = plan.get("memory", ())
    names = [f"<b>{escape(p['role'])}</b><br>{p['gpus_per_instance']} GPUs/instance" for p in pools]
    figure = styled(150 + 62 * len(names), barmode="stack")
    for key, (name, colour) in MEMORY_PARTS.items():
        sizes = [max(0.0, p[key]) for p in pools]
        if any(sizes):
            figure.add_trace(_bar(names, sizes, name, colour, "%{x:.1f} GiB", 12.0, ".0f"))
    hbm = max((p["hbm_gib"] for p in pools), default=0.0)
    if hbm:
        for p, at in zip(pools, range(len(pools)), strict=True):
            edge = {"type": "line", "x0": p["usable_gib"], "x1": p["usable_gib"], "y0": at - 0.4, "y1": at + 0.4}
            figure.add_shape(**edge, line={"color": "#555555", "dash": "dot", "width": 2})
        _vertical(figure, hbm, f"HBM {hbm:.0f} GiB")
    figure.update_xaxes(title_text="GiB per GPU (dotted: the most that vLLM may use)", range=[0, hbm * 1.16 or 1])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def history(plan: Document) -> go.Figure:
    """Every simulated configuration in order, and the best so far among those that meet the SLOs."""
    trials = plan.get("history", ())
    figure = styled(360)
    for meets, name, colour, symbol in (
        (False, "Breaks an SLO", VERMILLION, "x-thin"),
        (True, "Meets the SLOs", BLUE, "circle"),
    ):
        some = [t for t in trials if bool(t["meets"]) == meets]
        figure.add_trace(
            go.Scatter(
                x=[t["trial"] for t in some],
                y=[t["tok_s_per_gpu"] for t in some],
                mode="markers",
                name=name,
                marker={"color": colour, "symbol": symbol, "size": 8, "line": {"color": colour, "width": 1.6}},
                customdata=[[escape(t["label"]), t["p90_interactivity_tok_s_user"]] for t in some],
                hovertemplate="%{customdata[0]}<br>%{y:.3s} tok/s/GPU, %{customdata[1]:.0f} tok/s/user<extra></extra>",
            )  # fmt: skip
        )
    steps, best = [], 0.0
    for t in trials:
        best = max(best, t["tok_s_per_gpu"]) if t["meets"] else best
        steps.append(best or None)
    line = {"color": BLACK, "width": 1.5, "shape": "hv"}
    figure.add_trace(go.Scatter(x=[t["trial"] for t in trials], y=steps, mode="lines", name="Best so far", line=line))
    figure.update_xaxes(title_text="Trial")
    figure.update_yaxes(title_text="Total tok/s per GPU", rangemode="tozero", tickformat="~s")
    return figure


def styled(height: int, **layout: Any) -> go.Figure:
    """An empty figure in the report's style."""
    figure = go.Figure()
    _style(figure, height)
    figure.update_layout(**layout)
    return figure


def _style(figure: go.Figure, height: int) -> None:
    figure.update_layout(
        template="none",
        height=height,
        font={"family": FONT, "size": 14, "color": BLACK},
        margin={"l": 10, "r": 20, "t": 40, "b": 10},
        paper_bgcolor="white",
        plot_bgcolor="white",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hoverlabel={"font": {"family": FONT}},
        bargap=0.3,
    )
    axes: dict[str, Any] = {"gridcolor": GRID, "zeroline": False, "automargin": True, "ticklabelstandoff": 5}
    figure.update_xaxes(**axes, title_font_size=14)
    figure.update_yaxes(**axes, title_font_size=14, title_standoff=16)


def _points(points: Sequence[Document], name: str, colour: str, symbol: str, opacity: float, mode: str) -> go.Scatter:
    return go.Scatter(
        x=[p["tok_s_per_user"] for p in points], y=[p["tok_s_per_gpu"] for p in points], mode=mode, name=name,
        opacity=opacity, line={"color": colour, "width": 1.8}, marker={"color": colour, "symbol": symbol, "size": 8},
        customdata=[[escape(p["label"]), p["gpus"], p["concurrency"], _meets(p)] for p in points],
        hovertemplate="%{customdata[0]}<br>%{y:.3s} tok/s/GPU at %{x:.0f} tok/s/user<br>%{customdata[1]} GPUs, "
        "concurrency %{customdata[2]}, %{customdata[3]}<extra></extra>",
    )  # fmt: skip


def _meets(point: Document) -> str:
    return "meets the SLOs" if point["meets_slo"] else "breaks an SLO"


def _chosen(metrics: Document, name: str) -> go.Scatter:
    marker = {"symbol": "star", "size": 20, "color": ORANGE, "line": {"color": BLACK, "width": 1.5}}
    return go.Scatter(
        x=[metrics["interactivity_tok_s_user"]["p90"]], y=[metrics["throughput_total_tok_s_per_gpu"]],
        mode="markers+text", name=name, marker=marker, text=[name], textposition="top right",
        hovertemplate="%{y:.3s} tok/s/GPU at %{x:.0f} tok/s/user<extra></extra>",
    )  # fmt: skip


def _bar(
    names: Sequence[str], sizes: Sequence[float], name: str, colour: str, hover: str, least: float, form: str
) -> go.Bar:
    """A layer of horizontal stacked bars; a size is written into its bar where it is at least `least`."""
    return go.Bar(
        y=names, x=sizes, name=name, orientation="h",
        marker={"color": colour, "line": {"color": "white", "width": 1}},
        text=[format(s, form) if s >= least else "" for s in sizes],
        textposition="inside", insidetextanchor="middle", textangle=0,
        hovertemplate=f"{name}: {hover}<extra></extra>",
    )  # fmt: skip


def _vertical(figure: go.Figure, x: float, label: str) -> None:
    note = {"text": label, "font": {"size": 13}, "bgcolor": "white"}
    line = {"color": BLACK, "dash": "dash", "width": 1.3}
    figure.add_vline(x=x, line=line, annotation=note, annotation_position="bottom right")


def _horizontal(figure: go.Figure, y: float, label: str) -> None:
    note = {"text": label, "font": {"size": 13}, "bgcolor": "white"}
    line = {"color": BLACK, "dash": "dash", "width": 1.3}
    figure.add_hline(y=y, line=line, annotation=note, annotation_position="bottom left")
