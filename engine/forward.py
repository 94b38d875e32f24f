"""Timing exact batches with the engine's own means, one row as each is done.

With CUDA graphs `vllm bench forward` times the GPU, under torchrun where an instance has several; without, the plug-in
times `execute_model`, host and device in one.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rackplan.engine.errors import DeployError
from rackplan.engine.forward_table import append_row, done_cases, row_of
from rackplan.engine.local_servers import VLLM
from rackplan.engine.profile_cases import ForwardCase
from rackplan.engine.servers import KEEP_ENVIRONMENT, MARK, last_error, stop

DONE = re.compile(r"\[forward\] (\S+): (\d+) reqs, (\d+) tokens, median ([\d.]+) us, sample spread ([\d.]+)%")
MOST_FAILURES = 3
"""A case that fails ends the run that it is in; the rest is tried again without it, so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRun:
    """Which engine times the cases. `gpu`: by bench forward, else by the plug-in; `ranks`: data-parallel, each with the
    same batch; `max_model_len`, `max_num_seqs`: as the deployment has them; `kv_gib`: KV pool of a rank on the CPU."""

    python: str
    model: str
    gpu: bool
    ranks: int
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_gib: int

    def env(self) -> dict[str, str]:
        """What the engine is told beside its command: on the CPU its KV pool and a core for each rank."""
        if self.gpu:
            return {}
        cores = "|".join(map(str, range(self.ranks)))
        return {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib), "VLLM_CPU_OMP_THREADS_BIND": cores}

    def argv(self, cases: Sequence[ForwardCase], table: Path) -> list[str]:
        """The command that times `cases`; the plug-in's appends to `table` itself."""
        named = [a for c in cases for a in ("--case", c.argument)]
        if not self.gpu:
            program = [self.python, "-m", "rackplan.engine.vllm_plugin.exact_batches", "--out", str(table)]
            return [*program, "--model", self.model, "--ranks", str(self.ranks), *named]
        sizes = ["--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)]
        start, parallel = [self.python], []
        if self.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
            parallel = ["--data-parallel-size", str(self.ranks), "--enable-expert-parallel"]
        how = ["--kv-len-jitter", "0", "--iters", "10", "--samples", "5", "--skip-tokenizer-init"]
        weights = ["--gpu-memory-utilization", f"{self.gpu_memory_utilization:g}"]
        return [*start, *VLLM, "bench", "forward", "--model", self.model, *parallel, *how, *weights, *sizes, *named]


def time_cases(
    run: ForwardRun,
    cases: Sequence[ForwardCase],
    table: Path,
    *,
    mark: str,
    deadline_s: float,
    on_row: Callable[[str], None],
) -> list[str]:
    """Time the cases that `table` lacks, appending to it, until all are done or `deadline_s` (monotonic) has come.

    Returns the names of cases that failed. Raises DeployError where not one case could be timed.
    """
    failed: list[str] = []
    log = table.with_suffix(".log")
    while len(failed) <= MOST_FAILURES and time.monotonic() < deadline_s:
        left = [c for c in cases if c.name not in done_cases(table) and c.name not in failed]
        if not left:
            break
        rc = _run_once(run, left, table, log, mark, deadline_s, on_row)
        if rc == 0 or time.monotonic() >= deadline_s:
            break
        failed += [c.name for c in left if c.name not in done_cases(table)][:1]
    if not done_cases(table) and failed:
        raise DeployError(f"no batch could be timed on {run.ranks} rank(s): {last_error(log)}")
    return failed


def _run_once(
    run: ForwardRun,
    cases: Sequence[ForwardCase],
    table: Path,
    log: Path,
    mark: str,
    deadline_s: float,
    on_row: Callable[[str], None],
) -> int:
    """Exit status of one run of the engine; ended at the deadline."""
    by_name = {c.name: c for c in cases}
    environment = {**os.environ, **run.env(), **KEEP_ENVIRONMENT, MARK: mark}
    process = subprocess.Popen(
        run.argv(cases, table),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    with log.open("a", encoding="utf-8") as out:
        for line in _until(process, deadline_s, mark):
            out.write(line)
            if match := DONE.search(line):
                append_row(table, row_of(by_name[match[1]], run.ranks, float(match[4]), float(match[5])))
                on_row(f"{match[1]}: {float(match[4]) / 1e3:.2f} ms")
            elif (name := line.split(",")[0]) in by_name:  # the plug-in's row, which it has appended itself
                on_row(f"{name}: {float(line.split(',')[-2]) / 1e3:.2f} ms")
    return process.wait()


def _until(process: subprocess.Popen[str], deadline_s: float, mark: str) -> Iterator[str]:
    """Lines of a process, which is ended when the deadline comes, also where it says nothing."""
    import threading

    timer = threading.Timer(max(0.1, deadline_s - time.monotonic()), stop, [mark, 5.0])
    timer.start()
    try:
        assert process.stdout is not None
        yield from process.stdout
    finally:
        timer.cancel()
