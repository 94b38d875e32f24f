"""Calibrations by name: the embedded files, or a file of one's own."""

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rackplan.calibration.file import CalibrationFile, FittedCalibration, parse_calibration
from rackplan.engine import InputError

DATA = "rackplan.calibration"


@cache
def _embedded() -> dict[str, CalibrationFile]:
    """The embedded files by name, sorted."""
    folder = files(DATA) / "data"
    texts = {f.name.removesuffix(".json"): f.read_text() for f in folder.iterdir() if f.name.endswith(".json")}
    return {name: parse_calibration(text, name) for name, text in sorted(texts.items())}


def calibration_file(name_or_path: str) -> CalibrationFile:
    """The embedded calibration of that name, or the JSON file at that path. Raises InputError if there is neither."""
    embedded = _embedded()
    if name_or_path in embedded:
        return embedded[name_or_path]
    path = Path(name_or_path)
    if os.path.isfile(path):  # False too where a name is too long for the file system
        try:
            return parse_calibration(path.read_text(), name_or_path)
        except (OSError, UnicodeDecodeError):
            raise InputError(f"calibration={name_or_path}: cannot be read as text; give a calibration's JSON") from None
    raise InputError(f"calibration={name_or_path}: no such name or file; one of {', '.join(embedded)}, or a JSON file")


def load_calibration(name_or_path: str) -> FittedCalibration:
    """What the simulator needs, from an embedded name or a path. Raises InputError."""
    return FittedCalibration(calibration_file(name_or_path))


def default_calibration(model: str, gpu: str) -> str:
    """The name of the embedded calibration of `model` on `gpu`. Raises InputError that tells what there is."""
    known = _embedded().values()
    for file in known:
        if (file.model, file.gpu) == (model, gpu):
            return file.name
    pairs = ", ".join(f"{f.model} on {f.gpu}" for f in known)
    raise InputError(f"model={model}, gpu={gpu}: no embedded calibration; there is {pairs}, or give calibration=FILE")


def list_calibrations() -> list[dict[str, Any]]:
    """One row per embedded calibration: name, model, gpu, engine_version, date, rows, errors by metric."""
    return [
        {
            "name": f.name,
            "model": f.model,
            "gpu": f.gpu,
            "engine_version": f.engine_version,
            "date": f.date,
            "rows": len(f.rows),
            "errors": {metric: error.model_dump() for metric, error in f.errors.items()},
        }
        for f in _embedded().values()
    ]


def show(name: str) -> dict[str, Any]:
    """The whole file as a dictionary. Raises InputError."""
    return calibration_file(name).model_dump(mode="json")
