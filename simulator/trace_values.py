"""Values of recorded workloads, checked: each error is one InputError with file, row, value and mend."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rackplan.engine import InputError

EXACT = 2**53
"""Up to here a float holds every whole number."""
FORMATS = "a Mooncake JSONL, an Azure or agentic CSV, or a `vllm bench serve --save-detailed` JSON, plain or .gz"


def number_of(path: Path, row: int, record: Mapping[str, Any], column: str, least: float = -math.inf) -> float:
    """A finite number >= `least` from a record, or InputError with file and row."""
    value = record.get(column)
    if type(value) is int and least <= value <= EXACT:  # nearly every one
        return float(value)
    if value is None:
        raise InputError(f"{path}:{row}: {column} is missing; add it")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{path}:{row}: {column}={str(value)[:40]!r} is not a number; correct or remove the row")
    if number < least:
        raise InputError(f"{path}:{row}: {column}={value} must be at least {least:g}; correct or remove the row")
    return number


def tokens_of(path: Path, row: int, record: Mapping[str, Any], column: str, least: int = 1) -> int:
    """A whole number >= `least` from a record, or InputError."""
    value = record.get(column)
    if type(value) is int and least <= value <= EXACT:  # nearly every one
        return value
    number = number_of(path, row, record, column, least)
    if number != int(number):
        raise InputError(f"{path}:{row}: {column}={record[column]} is not a whole number of tokens; correct the row")
    return int(number)
