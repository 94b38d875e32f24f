"""Measured GPU times of batches: the rows that fits on H200 compare with. Sources: data/h200_dsv2lite."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rackplan.calibration.batch import Batch
from rackplan.calibration.readers.forward_csv import forward_rows
from rackplan.calibration.rows import Row

DATA = Path(__file__).parent / "data"
PROFILES = DATA / "h200_dsv2lite"
FORWARD_FILES = (
    "bench_forward_1gpu.csv",
    "bench_forward_dep2.csv",
    "campaign/bench_forward_dep_gaps_dep2.csv",
    "profile_turns/forward_dep1.csv",
)
LEFT_OUT = ("decode_48_60000_dep2",)
"""16 more requests than decode_32_60000 should read for 6.7 ms more; it took 18.2. Attention there has one wave of 132
multiprocessors to fill with requests times splits of their context, and 48 do not divide it as 32 do; but waves alone
give 14 ms, a fuller pool (2.9 million tokens, 90 GB) may do its part, and one row cannot tell. A fit would spread it
over all long contexts."""
SERVED_PROMPT = 2048
SERVED_CONTEXT = SERVED_PROMPT + 256 // 2


def profile_rows() -> list[Row]:
    """Exact batches of DeepSeek-V2-Lite on 1 and 2 GPUs. What a later file measured again is a row of its own."""
    rows: dict[str, Row] = {}
    for row in (row for name in FORWARD_FILES for row in forward_rows(PROFILES / name)):
        id = f"{row.id}_again" if row.id in rows else row.id
        rows[id] = replace(row, id=id)
    return [row for row in rows.values() if row.id not in LEFT_OUT]


def served_rows(intervals_ms: Iterable[tuple[int, float]]) -> list[Row]:
    """Decode steps as clients saw them: (requests, ms) each. Source: bench_serve_agg8192_r4 and r12."""
    return [
        Row(
            id=f"served_decode_{b}",
            metric="decode_served_dep1",
            dep=1,
            batch=Batch(decodes=b, context_tokens=SERVED_CONTEXT),
            measured_ms=ms,
            served=True,
        )
        for b, ms in intervals_ms
    ]
