"""Load on a running deployment by vLLM's own client, `vllm bench serve`, and its result as a file of ours."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rackplan.engine.errors import DeployError, InputError
from rackplan.engine.files import write_all
from rackplan.engine.servers import last_error

PERCENTILES = "50,90,99"
NOT_KEPT = ("generated_texts",)
SLACK_S = 120.0
"""Beyond the time that a load should take: the client's start and the last requests' ends."""


class BenchLoad(BaseModel):
    """Random prompts of `input_tokens`, answers of `output_tokens`, both within +- `spread` of that; Poisson arrivals
    at `rate_req_s`, or `concurrency` requests in flight. Unlike seeds have unlike prompts: none hits another's prefix.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    prompts: int = Field(ge=1)
    rate_req_s: float | None = Field(None, gt=0)
    concurrency: int | None = Field(None, ge=1)
    spread: float = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _one_load(self) -> "BenchLoad":
        if (self.rate_req_s is None) == (self.concurrency is None):
            raise ValueError(f"{self.name}: give rate_req_s or concurrency, one of the two")
        return self


def bench_argv(load: BenchLoad, *, python: str, url: str, model: str, out: Path) -> list[str]:
    """The client's command; its result goes to `out`."""
    limits = ["--request-rate", "inf" if load.rate_req_s is None else f"{load.rate_req_s:g}"]
    if load.concurrency is not None:
        limits += ["--max-concurrency", str(load.concurrency)]
    spread = ["--random-range-ratio", f"{load.spread:g}"] if load.spread else []
    return [
        *(python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "vllm", "--base-url", url, "--model", model, "--tokenizer", model),
        *("--dataset-name", "random", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), *spread, "--ignore-eos"),
        *(*limits, "--num-prompts", str(load.prompts), "--seed", str(load.seed)),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", PERCENTILES, "--save-result", "--save-detailed"),
        *("--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def run_bench(
    load: BenchLoad, *, python: str, url: str, model: str, path: Path, timeout_s: float | None = None
) -> dict[str, Any]:
    """Run `load` and write its result, without the generated text, to `path`, whole or not at all.

    Returns the result. Raises DeployError where the client fails, is late, or a request of it failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_name(f"{load.name}.client.log")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{load.name}.") as scratch:
        raw = Path(scratch) / "result.json"
        argv = bench_argv(load, python=python, url=url, model=model, out=raw)
        try:
            with log.open("wb") as out:
                code = subprocess.run(argv, stdout=out, stderr=out, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            raise DeployError(f"load {load.name}: not done after {timeout_s:g} s (see {log})") from None
        except OSError as e:
            raise InputError(f"--python {python}: cannot be run ({e.strerror})") from None
        if code or not raw.exists():
            raise DeployError(f"load {load.name}: the client failed: {last_error(log)}")
        result = {k: v for k, v in json.loads(raw.read_text()).items() if k not in NOT_KEPT}
    if result.get("failed") or result.get("completed") != load.prompts:
        came = result.get("completed")
        raise DeployError(f"load {load.name}: {came} of {load.prompts} requests came back (see {log})")
    write_all({path: json.dumps(result) + "\n"})
    return result


def time_limit_s(load: BenchLoad, request_s: float = 60.0) -> float:
    """How long the client may take: its arrivals, then twice what a request may take, then SLACK_S."""
    waves = load.prompts / load.rate_req_s if load.rate_req_s else load.prompts / (load.concurrency or 1) * request_s
    return waves + 2 * request_s + SLACK_S
