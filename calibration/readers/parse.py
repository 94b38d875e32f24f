"""Checked values out of files: what every reader shares. Errors are one line: file, row, value, mend."""

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rackplan.engine import InputError


def read_text(path: Path, wanted: str) -> str:
    """The text of a file, plain or gzip. `wanted`: what to give in its place, for the error."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path}: truncated or damaged gzip; copy the file again") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not text at byte {e.start}; give {wanted}") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give {wanted}") from None
    if not text.strip():
        raise InputError(f"{path}: empty; give {wanted}")
    return text


def read_json(path: Path, wanted: str) -> dict[str, Any]:
    """The object of a JSON file, plain or gzip."""
    try:
        data = json.loads(read_text(path, wanted))
    except json.JSONDecodeError as e:
        raise InputError(f"{path}:{e.lineno}: truncated or not JSON ({e.msg}); copy the file again") from None
    except (RecursionError, ValueError):
        raise InputError(f"{path}: not JSON that can be read; give {wanted}") from None
    return mapping(data, str(path), "file")


def mapping(value: Any, where: str, key: str) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} is a {type(value).__name__}, not an object; save the file again")
    return value


def sequence(value: Any, where: str, key: str) -> list[Any]:
    """`value`, which must be a list."""
    if not isinstance(value, list):
        raise InputError(f"{where}: {key} is a {type(value).__name__}, not a list; save the file again")
    return value


def number(record: Mapping[str, Any], key: str, where: str, least: float = 0.0, most: float = math.inf) -> float:
    """A finite number from `least` to `most`."""
    if key not in record or record[key] is None:
        raise InputError(f"{where}: {key} is missing; add it")
    value = record[key]
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{where}: {key}={str(value)[:40]!r} is not a number; correct or remove the row")
    if not least <= found <= most:
        bound = f"at least {least:g}" if found < least else f"at most {most:g}"
        raise InputError(f"{where}: {key}={str(value)[:40]} must be {bound}; correct the row or its unit")
    return found


def whole(record: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    """A whole number of at least `least`."""
    found = number(record, key, where, least)
    if found != int(found):
        raise InputError(f"{where}: {key}={str(record[key])[:40]} is not a whole number; correct the row")
    return int(found)


MOST_STEP_MS = 60_000.0
"""No step takes a minute: beyond it a time is in other units."""
LEAST_STEP_MS = 0.01
"""No step of a model takes less: below it a time is in other units."""
