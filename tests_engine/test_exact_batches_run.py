"""Exact batches on the real engine: a row for each case, none twice, in lockstep over ranks."""

import csv
import os
import subprocess
import sys

import pytest
from servers import CORES, START_S

CASES = {
    "decode_4_512": ("4*1@512", "decode", 0, 0, 4, 512, 4, 4),
    "prefill_256": ("256", "prefill", 256, 0, 0, 0, 1, 256),
    "hit_64_960": ("64@1024", "prefill", 64, 960, 0, 0, 1, 64),
    "mix_64_4": ("64,4*1@512", "mixed", 64, 0, 4, 512, 5, 68),
}


def run(model, out, ranks, *cases):
    line = [sys.executable, "-m", "rackplan.engine.vllm_plugin.exact_batches", "--model", model, "--out", out]
    line += ["--ranks", ranks, "--iters", 2, "--samples", 3, *(a for c in cases for a in ("--case", c))]
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:ranks]))}
    return subprocess.run(
        list(map(str, line)), capture_output=True, text=True, timeout=2 * START_S, env={**os.environ, **bind}
    )


@pytest.mark.parametrize(("ranks", "model"), [(1, "tiny-deepseek-v3"), (2, "tiny-qwen3-moe")])
def test_every_case_becomes_a_row_and_is_not_run_again(ranks, model, models, tmp_path):
    if len(CORES) < ranks:
        pytest.skip("two ranks need two cores")
    out = tmp_path / "forward.csv"
    cases = [f"{name}={case[0]}" for name, case in CASES.items()]
    done = run(models / model, out, ranks, *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["case"]: row for row in csv.DictReader(out.open())}
    for name, (_, phase, *shape) in CASES.items():
        row = rows[name]
        assert (row["phase"], int(row["ranks"])) == (phase, ranks)
        assert [int(value) for value in list(row.values())[3:9]] == shape
        assert float(row["median_us"]) > 0
        assert float(row["spread_pct"]) >= 0
    # Sixty-four times the tokens take longer, also on a busy machine.
    assert float(rows["prefill_256"]["median_us"]) > float(rows["decode_4_512"]["median_us"])
    before = out.read_bytes()
    assert run(models / model, out, ranks, *cases).returncode == 0
    assert out.read_bytes() == before
