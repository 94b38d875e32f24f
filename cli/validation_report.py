"""The page of a validation: predicted against measured by metric, and the tables, in one HTML file without a net."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from rackplan.cli.charts import BLACK, BLUE, VERMILLION, styled
from rackplan.cli.report import chart, page, section, table
from rackplan.cli.wording import ORDER_HEADER, number, order_rows, order_title, order_verdict

Document = Mapping[str, Any]
BAND_PCT = 10


def render_validation(document: Document) -> str:
    """The page's HTML; all text of the document is escaped."""
    groups: dict[str, list[Document]] = defaultdict(list)
    for row in document["rows"]:
        groups[row["unit"]].append(row)
    charts = [
        section(f"Predicted against measured, {unit}", f"The band is +-{BAND_PCT} %.")
        + chart(predicted_over_measured(rows, unit), f"validation-{i}")
        for i, (unit, rows) in enumerate(groups.items())
    ]
    heading = f"Calibration {document['name']} against what was measured"
    return page(
        title=f"rackplan: validation of {document['name']}",
        header=f"<h1>{escape(heading)}</h1>",
        sections=[
            section("By metric"),
            _metric_table(document["by_metric"]),
            *(
                section(order_title(order), order_verdict(order)) + table(ORDER_HEADER, order_rows(order), 1)
                for order in document.get("rank_order", [])
            ),
            *charts,
            _row_table(document),
        ],
    )


def predicted_over_measured(rows: Sequence[Document], unit: str) -> go.Figure:
    """One point a row on logarithmic axes, which all positive quantities share; the diagonal is no error."""
    figure = styled(460)
    values = [v for r in rows for v in (r["measured"], r["predicted"]) if v > 0]
    if not values:
        return figure
    ends = [min(values) / 1.2, max(values) * 1.2]
    share = BAND_PCT / 100
    for factor, dash in ((1.0, "solid"), (1 + share, "dot"), (1 - share, "dot")):
        line = {"color": BLACK, "width": 1, "dash": dash}
        figure.add_trace(
            go.Scatter(
                x=ends, y=[e * factor for e in ends], mode="lines", line=line, showlegend=False, hoverinfo="skip"
            )
        )
    for role, colour, symbol in (("fit", BLUE, "circle"), ("check", VERMILLION, "diamond")):
        mine = [r for r in rows if r["role"] == role]
        if mine:
            figure.add_trace(_points(mine, role, colour, symbol))
    figure.update_xaxes(type="log", title_text=f"Measured, {unit}")
    figure.update_yaxes(type="log", title_text=f"Predicted, {unit}")
    return figure


def _points(rows: Sequence[Document], name: str, colour: str, symbol: str) -> go.Scatter:
    return go.Scatter(
        x=[r["measured"] for r in rows], y=[r["predicted"] for r in rows], mode="markers", name=name,
        marker={"color": colour, "symbol": symbol, "size": 8},
        customdata=[[escape(str(r["id"])), escape(str(r["metric"])), r["error_pct"]] for r in rows],
        hovertemplate="%{customdata[0]}, %{customdata[1]}<br>measured %{x:.4g}, predicted %{y:.4g} "
        "(%{customdata[2]:+.1f} %)<extra></extra>",
    )  # fmt: skip


def _metric_table(metrics: Sequence[Document]) -> str:
    header = ("Metric", "Rows", "P50 error", "P50 magnitude", "Worst", "Worst at")
    return table(
        header,
        [
            (
                str(m["metric"]),
                str(m["rows"]),
                f"{m['p50_pct']:+.1f} %",
                f"{m['p50_abs_pct']:.1f} %",
                f"{m['worst_pct']:+.1f} %",
                str(m["worst_id"]),
            )
            for m in metrics
        ],
        1,
    )


def _row_table(document: Document) -> str:
    header = ("Row", "What", "Role", "Unit", "Measured", "Predicted", "Error")
    rows = [
        (
            str(r["id"]),
            str(r["what"]),
            str(r["role"]),
            str(r["unit"]),
            number(r["measured"], 4),
            number(r["predicted"], 4),
            f"{r['error_pct']:+.1f} %",
        )
        for r in document["rows"]
    ]
    return section("Every row") + table(header, rows, 4)
