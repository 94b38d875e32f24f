"""The published figures (data/published_figures.csv) by id, and the CPU side that follows from them alone."""

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rackplan.calibration.file import FittedCalibration
from rackplan.engine import InputError

FIGURES = Path(__file__).parent / "data" / "published_figures.csv"
NCCL_SYNC_MS = 0.3
"""A prior: users report hundreds of microseconds for a two-node all-reduce of the step's flags; in no figure."""


class Figure(NamedTuple):
    """One published figure. `role`: fit (the fits may use it) or check (they may not). Value as printed."""

    id: str
    what: str
    unit: str
    text: str
    role: str

    @property
    def value(self) -> float:
        """The number; the middle of a range 'a to b'."""
        return sum(self.ends) / 2

    @property
    def ends(self) -> tuple[float, float]:
        """Least and greatest of a range, the number twice where there is one."""
        low, _, high = self.text.partition(" to ")
        return float(low), float(high or low)

    def error_pct(self, predicted: float) -> float:
        """Signed, %. Against a range it counts from its nearer end, and within it there is none."""
        low, high = self.ends
        return (predicted / min(max(predicted, low), high) - 1) * 100


class Predictor(NamedTuple):
    """`predict` gives a figure in its unit; `assumption` says what the figure left open."""

    predict: Callable[[FittedCalibration], float]
    assumption: str = ""


@cache
def figures() -> dict[str, Figure]:
    """All figures by id, in the file's order."""
    with FIGURES.open() as f:
        return {
            r["id"]: Figure(
                r["id"], f"{r['deployment']}; {r['conditions']}: {r['metric']}", r["unit"], r["value"], r["role"]
            )
            for r in csv.DictReader(f)
        }


def fit_value(id: str) -> float:
    """The value of a figure that fits may use. Raises InputError for a check row: those are never fitted to."""
    figure = figures()[id]
    if figure.role != "fit":
        raise InputError(f"{FIGURES.name}: {id} is a {figure.role} row; fits use rows marked fit")
    return figure.value


def cpu_side() -> dict[str, float]:
    """Coefficients of DP sync and admission, ms. Ring: F40 over 31 hops; recursive doubling: F41 over 5 rounds of 32
    ranks; admission: F51, all of it proportional to a prompt of 855K tokens."""
    return {
        "ring_hop_ms": fit_value("F40") / 31,
        "doubling_round_ms": fit_value("F41") / 5,
        "nccl_sync_ms": NCCL_SYNC_MS,
        "admission_token_ms": fit_value("F51") / 855_000,
    }
