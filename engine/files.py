"""Files that appear whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from rackplan.engine.errors import InputError


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
        raise InputError(f"{e.filename}: cannot be written ({e.strerror}); give another folder") from None
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
