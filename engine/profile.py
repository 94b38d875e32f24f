"""What a profile is: the request, and profile.json, which identifies the folder and says how far it has come."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rackplan.engine.deploy_state import Launch
from rackplan.engine.deployment import Deployment, parse_deployment
from rackplan.engine.errors import InputError
from rackplan.engine.flags import dp_sync_algorithm
from rackplan.engine.memory import GIB, plan_memory
from rackplan.engine.parser_table import EngineVersion
from rackplan.engine.profile_cases import Limits, forward_cases
from rackplan.engine.specs import Device, gpu_spec

FILE = "profile.json"
LOAD_SHARES = (0.35, 0.7)
"""Served loads, as shares of what a pilot reached with all seats taken: one calm, one near the knee."""
BURST_SHARE = 0.25
"""Of the seats, taken at once by a burst; the pilot begins as one of all seats."""
CAPTURED_SHARE = 0.75
"""Of the captured sizes: the length of short prompts, which run in CUDA graphs beside some decodes."""

Status = Literal["planned", "done", "failed"]


class ServedRun(BaseModel):
    """One served load of a profile. `rate_req_s` is None where `concurrency` requests were kept in flight;
    `decode_only`: the prompts' KV was filled in, not computed. What a fit finds in the results themselves may be
    missing where a folder was put together by hand."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    deployment: dict[str, Any]
    rate_req_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    concurrency: int | None = None
    prompts: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    decode_only: bool = False
    status: Status = "planned"
    reason: str | None = None


class Profile(BaseModel):
    """profile.json: what identifies a profile, and how far it has come. `time_kind`: forward rows are GPU time, or wall
    time of host and device together; `failed_cases`: batches that the engine could not run, by file. Keys of a user's
    own are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")
    format: Literal[1] = 1
    model: str
    gpu: str
    engine_version: str
    date: str
    command: str
    git_revision: str | None = None
    versions: dict[str, str] = {}
    gpus: list[str] = []
    environment: dict[str, str] = {}
    time_kind: Literal["gpu", "wall"]
    failed_cases: dict[str, list[str]] = {}
    runs: list[ServedRun] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to profile. `checkpoint`: what vLLM loads, None for the model's own; `gpus`: ranks 1, 2, 4 ... up to it;
    `budget_s`: of wall time; `input_tokens`, `output_tokens`: of the served requests; `repeats`: how often each rate is
    served, in turns; `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`: of every rank."""

    model: str
    gpu: str
    gpus: int
    python: str
    engine_version: EngineVersion
    budget_s: float
    checkpoint: str | None = None
    port: int = 8000
    input_tokens: int = 2048
    output_tokens: int = 256
    repeats: int = 1
    max_model_len: int = 16384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9

    def deployment(self, *pools: dict[str, Any], **parts: Any) -> Deployment:
        """Pools of this request's sizes. Prefix caching is off: no prompt may be found again by the next run's."""
        sizes = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": False,
        }
        filled = [{"instances": 1, **sizes, **pool} for pool in pools]
        data = {"model": self.model, "gpu": self.gpu, "max_model_len": self.max_model_len, "pools": filled, **parts}
        if any(p["dep"] > 1 for p in filled):
            data["dp_sync"] = {"algorithm": dp_sync_algorithm(self.device, self.engine_version)}
        return parse_deployment(data)

    @property
    def device(self) -> Device:
        """What vLLM runs on."""
        return gpu_spec(self.gpu).device

    def ranks(self) -> list[int]:
        """Instance widths to profile, those that divide the experts."""
        widths = [1 << i for i in range(self.gpus.bit_length()) if 1 << i <= self.gpus]
        experts = self.deployment({"role": "aggregated", "dep": 1}).model_spec.routed_experts
        return [w for w in widths if experts % w == 0]

    def served_deployments(self) -> dict[str, Deployment]:
        """By name: one rank, the widest instance, and one prefill with one decode rank where there are two GPUs."""
        found = {f"dep{w}": self.aggregated(w) for w in sorted({1, self.ranks()[-1]})}
        if self.gpus > 1:
            pools = [{"role": role, "dep": 1} for role in ("prefill", "decode")]
            found["pd"] = self.deployment(*pools, kv_transfer={"mode": "pull"})
        return found

    def decode_batches(self) -> list[int]:
        """Requests that decode at once where nothing else runs."""
        return sorted({1, max(1, self.max_num_seqs // 4), self.max_num_seqs})

    @property
    def burst(self) -> int:
        """Requests of a burst."""
        return max(2, int(self.max_num_seqs * BURST_SHARE))

    def aggregated(self, dep: int) -> Deployment:
        """One instance of `dep` ranks."""
        return self.deployment({"role": "aggregated", "dep": dep}, router={"policy": "least_requests"})

    def limits(self, dep: int) -> Limits:
        """What a rank of an instance of `dep` can run."""
        deployment = self.aggregated(dep)
        kv_tokens = plan_memory(deployment, deployment.pools[0]).kv_tokens
        if deployment.gpu_spec.eager:
            kv_tokens = int(self.cpu_kv_gib(dep) * GIB / deployment.model_spec.kv_bytes_per_token)
        return Limits(
            batched_tokens=self.max_num_batched_tokens,
            seqs=self.max_num_seqs,
            kv_tokens=kv_tokens * 9 // 10,  # the plan is an estimate, and a batch that does not fit ends its run
            model_len=self.max_model_len,
        )

    def cpu_kv_gib(self, dep: int) -> int:
        """KV pool of a rank on the CPU, as its servers have it: whole GiB."""
        deployment = self.aggregated(dep)
        return max(1, int(plan_memory(deployment, deployment.pools[0]).kv_pool_gib))

    def launch(self, deployment: Deployment) -> Launch:
        """`deployment` on this machine, steps logged."""
        return Launch(
            deployment=deployment,
            device=self.device,
            engine_version=self.engine_version,
            model=self.checkpoint or deployment.model_spec.checkpoint or self.model,
            python=self.python,
            port=self.port,
        )


def describe_plan(request: ProfileRequest) -> list[str]:
    """What `run_profile` would do, a line each; touches nothing."""
    lines = [f"exact batches on {w} rank(s): up to {len(forward_cases(request.limits(w)))}" for w in request.ranks()]
    often = f", {request.repeats} times in turns" if request.repeats > 1 else ""
    loads = f"a pilot at {request.max_num_seqs} in flight, then {len(LOAD_SHARES)} rates{often}"
    one = f", a burst of {request.burst} at once, prompts within the captured sizes"
    for name, deployment in request.served_deployments().items():
        lines.append(f"served loads on {name}: {loads}{one if deployment.gpus == 1 else ''}")
    return [*lines, f"decode steps alone, {', '.join(map(str, request.decode_batches()))} requests at a time"]


def read_profile(folder: Path) -> Profile:
    """The profile.json of a folder. Raises InputError where it is not one."""
    path = folder / FILE
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        mend = "give a folder that `rackplan profile` wrote"
        raise InputError(f"{path}: cannot be read ({e.strerror}); {mend}") from None
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        problem = f"{first['msg'].lower()} (got {first.get('input')!r:.60})"
        raise InputError(f"{path}: {where}: {problem}; correct it, or write the profile anew") from None
