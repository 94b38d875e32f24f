"""What identifies a measurement: versions, GPUs, environment, revision."""

import json
import os
import subprocess
from pathlib import Path
from typing import get_args

from rackplan.engine.errors import InputError
from rackplan.engine.parser_table import EngineVersion

WATCHED = ("VLLM_", "NCCL_", "UCX_", "CUDA_VISIBLE", "RACKPLAN_", "TORCH_SYMM", "NVSHMEM_", "DG_", "OMP_")
PACKAGES = ("vllm", "torch", "triton", "nixl", "transformers")


def watched_environment() -> dict[str, str]:
    """Variables that change how the engine runs, sorted by name."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(WATCHED)}


def versions(python: str) -> dict[str, str]:
    """Versions of what matters in the environment of `python`. Raises InputError where vLLM is not there."""
    code = (
        "import importlib.metadata as m, json; have = {};"
        "[have.setdefault(d.name.lower(), d.version) for d in m.distributions() if d.name];"
        f"print(json.dumps({{p: have[p] for p in {PACKAGES!r} if p in have}}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise InputError(f"--python {python}: cannot be run; give the interpreter that vLLM is installed for") from None
    found: dict[str, str] = json.loads(done.stdout)
    if "vllm" not in found:
        raise InputError(f"--python {python}: has no vLLM; give the interpreter that it is installed for")
    return found


def engine_release(python: str) -> EngineVersion:
    """The release of vLLM in the environment of `python`, as 0.33. Raises InputError on one that is not known."""
    found = versions(python)["vllm"]
    release = ".".join(found.split(".")[:2])
    known: tuple[EngineVersion, ...] = get_args(EngineVersion)
    for version in known:
        if version == release:
            return version
    raise InputError(f"--python {python}: has vLLM {found}; rackplan knows {' and '.join(known)}")


def gpu_names() -> list[str]:
    """Name, driver and memory of each GPU. Raises InputError where NVIDIA's driver does not answer."""
    return query_gpus("name,driver_version,memory.total")


def query_gpus(columns: str) -> list[str]:
    """One comma-separated line a GPU, of nvidia-smi's columns; MiB without their unit."""
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        raise InputError("nvidia-smi: cannot be run; measuring or deploying on GPUs needs NVIDIA's driver") from None


def git_revision() -> str | None:
    """The revision of rackplan's own sources, None where they are not in a repository."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
