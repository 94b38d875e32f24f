"""A profile folder: exact batches, served runs and their step logs, and the profile.json that names them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rackplan.calibration.readers.bench_forward import read_bench_forward
from rackplan.calibration.readers.bench_serve import read_bench_serve
from rackplan.calibration.readers.forward_csv import forward_rows
from rackplan.calibration.readers.iteration_log import as_step_log, read_iteration_log
from rackplan.calibration.readers.step_log import read_step_log
from rackplan.calibration.records import ServedRun, StepLog
from rackplan.calibration.rows import Row
from rackplan.engine import Deployment, InputError, parse_deployment
from rackplan.engine.profile import FILE
from rackplan.engine.profile import Profile as Identity
from rackplan.engine.profile import ServedRun as PlannedRun
from rackplan.engine.profile import read_profile as read_identity

WANTED = f"the folder of a profile, with {FILE} and forward_dep1.csv in it"


_FORWARD: dict[str, Callable[[Path], list[Row]]] = {".csv": forward_rows, ".json": read_bench_forward}
"""Readers of exact batches by the file's kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """One served run that is done. `logs`: by server ("" where there is one), the step logs of its ranks in order.
    `load`: its arrivals and lengths in words, None where its plan states no arrivals."""

    name: str
    path: Path
    deployment: Deployment
    rate_req_s: float
    load: str | None
    served: ServedRun
    logs: dict[str, tuple[StepLog, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that a profile folder holds. `decode_runs`: those in which nothing but decode steps ran; `files`: names of
    those that were read."""

    folder: Path
    identity: Identity
    rows: tuple[Row, ...]
    runs: tuple[ProfileRun, ...]
    decode_runs: tuple[ProfileRun, ...]
    files: tuple[str, ...]


def read_profile(folder: Path) -> Profile:
    """`rows` is empty where served runs alone were measured: enough to compare with, not to fit to.

    Raises InputError with file and row: nothing is taken from a folder of which a part is damaged."""
    identity = read_identity(folder)
    tables = sorted(f for f in folder.glob("forward_dep*") if f.suffix in _FORWARD)
    if not tables and not any(run.status == "done" for run in identity.runs):
        raise InputError(f"{folder}: has no forward_dep*.csv; give {WANTED}")
    rows = [row for table in tables for row in _FORWARD[table.suffix](table)]
    runs: dict[bool, list[ProfileRun]] = {False: [], True: []}  # by decode_only
    files = [t.name for t in tables]
    for i, run in enumerate(identity.runs):
        if run.status == "done":
            found, names = _served(folder, run, f"{folder / FILE}: runs.{i}.deployment")
            runs[run.decode_only].append(found)
            files += names
    for run_of in (*runs[False], *runs[True]):
        for key in ("model", "gpu"):
            if getattr(run_of.deployment, key) != getattr(identity, key):
                raise InputError(
                    f"{folder / FILE}: run {run_of.name} has {key}={getattr(run_of.deployment, key)}, the profile "
                    f"{getattr(identity, key)}; profile one at a time"
                )
    return Profile(
        folder=folder,
        identity=identity,
        rows=tuple(rows),
        runs=tuple(runs[False]),
        decode_runs=tuple(runs[True]),
        files=tuple(files),
    )


def _served(folder: Path, run: PlannedRun, where: str) -> tuple[ProfileRun, list[str]]:
    names = (f"serve_{run.name}.json", f"serve_{run.name}.json.gz")
    path = next((folder / n for n in names if (folder / n).exists()), None)
    if path is None:
        raise InputError(f"{folder / names[0]}: is missing, and {FILE} says that run {run.name} is done; run it")
    served = read_bench_serve(path)
    logs, log_names = _logs(folder, run.name)
    iterations = folder / f"iterations_{run.name}.log"
    if not logs and iterations.exists():
        engines = [i for i in read_iteration_log(iterations) if i.engine == 0]
        logs, log_names = {"": (as_step_log(engines, served.mean_context),)}, [iterations.name]
    span_s = float(served.start_s[-1] - served.start_s[0])
    found = ProfileRun(
        name=run.name,
        path=path,
        deployment=parse_deployment(run.deployment, where),
        rate_req_s=run.rate_req_s or (len(served.start_s) - 1) / max(span_s, 1e-3),
        load=_load(run),
        served=served,
        logs=logs,
    )
    return found, [path.name, *log_names]


def _load(run: PlannedRun) -> str | None:
    if run.rate_req_s is None and run.concurrency is None:
        return None
    arrivals = f"{run.rate_req_s:g} req/s" if run.rate_req_s else f"{run.concurrency} in flight"
    lengths = ((run.input_tokens, "tokens in"), (run.output_tokens, "out"))
    return ", ".join([arrivals, *(f"{n:,} {what}" for n, what in lengths if n)])


def _logs(folder: Path, name: str) -> tuple[dict[str, tuple[StepLog, ...]], list[str]]:
    """Step logs by server, ranks in order, and the files' names."""
    pattern = re.compile(rf"steps_{re.escape(name)}(?:\.([a-z]+-\d+))?\.dp(\d+)\.jsonl(?:\.gz)?")
    matches = ((pattern.fullmatch(f.name), f) for f in folder.glob("steps_*"))
    found = sorted((m[1] or "", int(m[2]), f) for m, f in matches if m)
    servers: dict[str, tuple[StepLog, ...]] = {}
    for server, _, file in found:
        servers[server] = (*servers.get(server, ()), read_step_log(file))
    return servers, [f.name for _, _, f in found]
