"""How results leave: JSON on stdout alone, files whole or not at all, progress on stderr."""

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
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


def write_all(texts: Mapping[Path, str]) -> None:
    """Write every file beside its place, then rename: no reader meets half a file, an error changes none.

    Raises InputError where a folder cannot be written.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                written.append((Path(file.name), path))
                file.write(text)
            # Temporary files are private; results get the mode that an ordinary new file has.
            os.chmod(file.name, 0o666 & ~_umask())
        for temporary, path in written:
            os.replace(temporary, path)
    except OSError as e:
        raise InputError(f"{e.filename}: cannot be written ({e.strerror}); give another folder with --out") from None
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


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
