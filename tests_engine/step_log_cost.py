"""CPU time that the step log adds to a step. Run: `.venv-engine/bin/python tests_engine/step_log_cost.py`.

One step of B decoding requests, planned by vLLM's own scheduler without a model, is described and written again and
again; the least of several rounds, so that other work on the machine counts little.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from remote_kv import Loop, make_scheduler

from rackplan.engine.tiny_models import TINY_MODELS, write_model_folder
from rackplan.engine.vllm_plugin.scheduler import LOG_DIR, RackplanScheduler

ROUNDS, RUNS = 20, 50


def log_us(model: Path, batch: int) -> float:
    """CPU time to log one step of `batch` decodes, us."""
    loop = Loop(make_scheduler(RackplanScheduler, model, max_num_seqs=batch, blocks=8 * batch))
    for i in range(batch):
        loop.add(f"local-{i}", 2, 200)
    for _ in range(20):
        loop.step(set())
    scheduler, log = loop.scheduler, loop.scheduler._step_log
    output = scheduler.schedule()
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(RUNS):
            log._pending.clear()
            step = scheduler._describe(output) | {"kv_loads": scheduler._settle_kv_loads()}
            log.scheduled(output, step, time.monotonic(), time.monotonic())
            log.processed(output, time.monotonic(), idle_after=False)
        best = min(best, (time.process_time() - begin) / RUNS * 1e6)
    return best


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LOG_DIR] = folder
        model = Path(folder) / "model"
        write_model_folder(model, TINY_MODELS["tiny-qwen3-moe"])
        for batch in (1, 32, 256, 512):
            print(f"{batch} decodes: {log_us(model, batch):.0f} us", flush=True)


if __name__ == "__main__":
    sys.exit(main())
