"""What deploying says on the screen: what serves, what was measured of it, and against which prediction."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rackplan.cli.wording import number

Document = Mapping[str, Any]
GOOD = {"serving"}


def show_record(record: Document, console: Console) -> None:
    """A deployment that serves."""
    launch = record["launch"]
    console.print(f"Serving at http://{launch['host']}:{launch['port']} as {record['id']}", style="bold green")
    _result(record["result"], console)


def show_status(status: Document, console: Console) -> None:
    """What this machine serves, and what became of the last deployment."""
    current = status["current"]
    if current is None:
        console.print("Nothing serves on this machine.", style="bold")
    else:
        style = "bold green" if current["phase"] in GOOD else "bold red"
        console.print(f"{current['phase']}: {current['what']} at {current['url']} ({current['id']})", style=style)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("Server", "Alive", "Healthy", "Address", "Log"):
            table.add_column(column, overflow="fold")
        for s in current["servers"]:
            table.add_row(s["name"], _yes(s["alive"]), _yes(s["healthy"]), s["url"] or "-", s["log"])
        console.print(table)
        _result(current["result"], console)
    if status["previous"]:
        console.print(f"`rackplan rollback` brings back {status['previous']['what']} ({status['previous']['id']})")
    if status["last"]:
        reason = f": {status['last']['reason']}" if status["last"]["reason"] else ""
        console.print(f"Last that did not stay: {status['last']['id']}, {status['last']['phase']}{reason}")


def _result(result: Document, console: Console) -> None:
    if measured := result.get("measured"):
        console.print("Measured: " + ", ".join(f"{k} {number(v)}" for k, v in measured.items()))
    if not (metrics := result.get("metrics")):
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"Canary against {result['calibration']}", title_justify="left"
    )
    table.add_column("Metric")
    for column in ("Measured", "Predicted", "Error, %"):
        table.add_column(column, justify="right")
    for m in metrics:
        error = "-" if m["error_pct"] is None else f"{m['error_pct']:+.1f}"
        table.add_row(f"{m['name']}, {m['unit']}", number(m["measured"]), number(m["predicted"]), error)
    console.print(table)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
