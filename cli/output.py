"""How results leave: JSON on stdout alone, progress on stderr."""

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rackplan.engine import InputError

Progress = Callable[[str, float], None]

_PLAIN = {"≥": ">=", "≤": "<=", "→": "->", "–": "-", "·": "|", "•": "*"}


def degrade_to_encoding() -> None:
    """Write what a terminal's encoding lacks in plain characters, where it would otherwise be an error."""

    def plain(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end

    codecs.register_error("rackplan.plain", plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="rackplan.plain")


def to_json(document: Any) -> str:
    """Indented JSON in ASCII. Raises ValueError on NaN or infinity, which JSON does not have."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def print_json(document: Any) -> None:
    """Write `document` to stdout, with nothing beside it."""
    sys.stdout.write(to_json(document))


def check_folder(folder: Path) -> None:
    """Raise InputError where files could not be written into `folder`, before minutes are spent on what they hold."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise InputError(f"--out {folder}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder}: {there} cannot be written; give another folder")


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A callback (stage, share done 0 to 1): a live bar on a terminal, else one line per stage or tenth."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


def _lines() -> Progress:
    last = -1

    def report(stage: str, share: float) -> None:
        nonlocal last
        if int(share * 10) > last:
            last = int(share * 10)
            print(f"{share:4.0%} {stage}", file=sys.stderr, flush=True)

    return report
