"""The table of exact batches, forward_depN.csv, written row by row: a cut run keeps all that it has timed."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackplan.engine.errors import InputError
from rackplan.engine.profile_cases import ForwardCase

COLUMNS = (
    "case",
    "phase",
    "ranks",
    "new_tokens",
    "context_tokens",
    "decode_batch",
    "decode_kv_len",
    "requests_per_rank",
    "tokens_per_rank",
    "median_us",
    "spread_pct",
)


def row_of(case: ForwardCase, ranks: int, median_us: float, spread_pct: float) -> list[Any]:
    """Values in the order of COLUMNS."""
    shape = [case.new_tokens, case.context_tokens, case.decode_batch, case.decode_kv_len]
    counts = [len(case.requests), case.tokens]
    return [case.name, case.phase, ranks, *shape, *counts, round(median_us, 1), round(spread_pct, 2)]


def append_row(table: Path, row: Sequence[Any]) -> None:
    """Append `row`, after the heading where the table is new."""
    new = not table.exists()
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)


def done_cases(table: Path) -> set[str]:
    """Names of the cases in a table; none where there is no table. Raises InputError on another kind of file."""
    if not table.exists():
        return set()
    with table.open(newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise InputError(f"{table}: line 1 is not the heading of exact batches; name another file")
        return {r["case"] for r in reader if r["median_us"]}
