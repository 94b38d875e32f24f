"""Served runs out of whatever client's file: told by content, each read by its own reader."""

from pathlib import Path

from rackplan.calibration.readers import parse
from rackplan.calibration.readers.aiperf import read_aiperf
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.readers.guidellm import read_guidellm
from rackplan.calibration.records import ServedRun

_WANTED = "a result of `vllm bench serve --save-detailed`, guidellm's benchmarks.json or profile_export_aiperf.json"


def read_served_runs(path: Path) -> list[tuple[str, ServedRun]]:
    """(name, run) of each run in a client's file. Raises InputError as its reader does."""
    data = parse.read_json(path, _WANTED)
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if "benchmarks" in data:
        return [(f"{name}-{which}", run) for which, run in read_guidellm(path)]
    if "aiperf_version" in data or "time_to_first_token" in data:
        return [(name, read_aiperf(path))]
    return [(name, read_bench_serve(path))]
