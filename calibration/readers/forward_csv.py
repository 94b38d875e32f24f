"""Exact batches as a table: one `forward_depN.csv` of a profile folder, a row a case."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rackplan.calibration.batch import Batch
from rackplan.calibration.readers import parse
from rackplan.calibration.rows import Row
from rackplan.engine import InputError
from rackplan.engine.forward_table import COLUMNS

PHASES = ("prefill", "decode", "mixed")
_WANTED = f"a table with the columns {', '.join(COLUMNS)}"


def forward_rows(path: Path) -> list[Row]:
    """Rows of one table, `median_us` in us. A last line that was cut short is an error, as any other bad row is."""
    table = csv.DictReader(io.StringIO(parse.read_text(path, _WANTED)))
    if missing := [c for c in COLUMNS if c not in (table.fieldnames or ())]:
        raise InputError(f"{path}: column {missing[0]} is missing; needed are {', '.join(COLUMNS)}")
    try:
        rows = [_row(record, f"{path}:{n}") for n, record in enumerate(table, 2)]
    except csv.Error as e:
        raise InputError(f"{path}:{table.line_num}: not a CSV row ({e}); correct or remove it") from None
    if not rows:
        raise InputError(f"{path}: holds no row; give {_WANTED}")
    return rows


def _row(record: Mapping[str, Any], where: str) -> Row:
    if record["phase"] not in PHASES:
        raise InputError(f"{where}: phase={str(record['phase'])[:40]!r}: one of {', '.join(PHASES)}")
    dep, new = parse.whole(record, "ranks", where, 1), parse.whole(record, "new_tokens", where)
    decodes = parse.whole(record, "decode_batch", where)
    chunks = parse.whole(record, "requests_per_rank", where) - decodes
    if chunks < 0 or (chunks > 0) != (new > 0):
        raise InputError(
            f"{where}: requests_per_rank={chunks + decodes}, of which decode_batch={decodes}, with new_tokens={new}: "
            "the rest are chunks of so many new tokens; correct the row"
        )
    batch = Batch(
        chunks=chunks,
        new_tokens=new,
        cached_tokens=parse.whole(record, "context_tokens", where),
        decodes=decodes,
        context_tokens=parse.whole(record, "decode_kv_len", where),
    )
    row = Row(
        id=f"{record['case']}_dep{dep}",
        metric=f"{record['phase']}_gpu_dep{dep}",
        dep=dep,
        batch=batch,
        measured_ms=parse.number(record, "median_us", where, parse.LEAST_STEP_MS * 1e3, parse.MOST_STEP_MS * 1e3) / 1e3,
        spread_pct=parse.number(record, "spread_pct", where),
    )
    if row.phase != record["phase"]:
        raise InputError(f"{where}: phase={record['phase']}, but its tokens make it {row.phase}; correct the row")
    return row
