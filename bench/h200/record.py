"""Identifies a run: versions, GPU, driver, command, environment, date. Run: `record.py OUT.json NAME -- COMMAND...`."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

WATCHED = ("VLLM_", "NCCL_", "UCX_", "CUDA_VISIBLE", "RACKPLAN_", "TORCH_SYMM", "NVSHMEM_", "DG_")


def gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def record(path: Path, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
    """Adds the run `name` to the JSON object in `path`."""
    known = json.loads(path.read_text()) if path.exists() else {}
    environment = {**os.environ, **(env or {})}
    known[name] = {
        "command": shlex.join(command),
        "environment": {k: v for k, v in sorted(environment.items()) if k.startswith(WATCHED)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {p: version(p) for p in ("vllm", "torch", "triton", "nixl", "transformers")},
        "gpus": gpus(),
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2], sys.argv[4:])
