"""`Deployment`: every knob that is searched, simulated, launched and read back, in one frozen object.

The YAML form is the JSON form: unknown keys are errors, every default is echoed by `to_dict`.
"""

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rackplan.engine.errors import InputError
from rackplan.engine.specs import GPUS, GpuSpec, ModelSpec, gpu_spec, model_spec

Role = Literal["prefill", "decode", "aggregated"]
SyncAlgorithm = Literal["recursive_doubling", "ring", "nccl"]
RouterPolicy = Literal[
    "round_robin", "random", "least_requests", "least_tokens", "prefix_affinity", "session_affinity"
]

MOST_GPUS = 16_384
"""More than the largest deployments have: beyond it a number is a slip, and no simulation would end."""


EAGER: dict[str, Any] = {"async_scheduling": False, "max_cudagraph_capture_size": 0}
"""A pool's defaults where vLLM has neither (GpuSpec.eager)."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WeightOffload(_Part):
    """vLLM's --offload-*: of every `group_size` layers, the last `num_in_group` keep their routed experts in host
    memory. Each is loaded from the end of the one `prefetch_step` offloaded layers before it on."""

    group_size: int = Field(0, ge=0)
    num_in_group: int = Field(1, ge=1)
    prefetch_step: int = Field(1, ge=1)

    @property
    def share(self) -> float:
        """Share of the routed-expert bytes that is in host memory."""
        return min(1.0, self.num_in_group / self.group_size) if self.group_size else 0.0


class Pool(_Part):
    """Instances of one role. Caps are per data-parallel rank, as in vLLM.

    GPUs of an instance = dep x tp: attention is data-parallel over `dep` ranks, experts lie over all its GPUs.
    `enable_dbo`: dual-batch overlap, on DeepEP's all-to-all kernels.
    `kv_offloading_gib`: host memory of each data-parallel rank that keeps the KV of computed prompts, 0 for none.
    `output_proc_chunk_size`: requests whose outputs an API server handles before it turns to others.
    `redundant_experts`: this pool's own number of replicas, where EPLB is on; None takes eplb.redundant_experts.
    """

    role: Role
    instances: int = Field(ge=1)
    dep: int = Field(ge=1)
    tp: int = Field(1, ge=1)
    max_num_batched_tokens: int = Field(8192, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    max_new_kv_loads_per_step: int | None = Field(None, ge=1)
    long_prefill_token_threshold: int = Field(0, ge=0)
    prefill_schedule_interval: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1)
    enable_prefix_caching: bool = True
    kv_offloading_gib: float = Field(0.0, ge=0)
    max_cudagraph_capture_size: int = Field(512, ge=0)
    async_scheduling: bool = True
    redundant_experts: int | None = Field(None, ge=0)
    enable_dbo: bool = False
    output_proc_chunk_size: int = Field(128, ge=1)
    offload: WeightOffload = WeightOffload()

    @property
    def gpus_per_instance(self) -> int:
        return self.dep * self.tp

    @property
    def gpus(self) -> int:
        return self.instances * self.gpus_per_instance


class Eplb(_Part):
    """Expert-parallel load balancing: replicas by measured load, every `interval_steps` on the last `window_steps`."""

    enabled: bool = False
    redundant_experts: int = Field(0, ge=0)
    window_steps: int = Field(1000, ge=1)
    interval_steps: int = Field(3000, ge=1)
    use_async: bool = True


class Speculation(_Part):
    """Speculative decoding: `draft_tokens` a step, verified by decode and aggregated pools; 0 is off.
    `enable_adaptive_verification`: as many of them as are worth their time."""

    draft_tokens: int = Field(0, ge=0)
    enable_adaptive_verification: bool = False


class KvTransfer(_Part):
    """Who moves a prompt's KV: `push` by the prefill worker, `pull` on the decode worker's own thread."""

    mode: Literal["push", "pull"] = "push"


class DpSync(_Part):
    """The all-reduce on the CPU with which data-parallel ranks agree on each step."""

    algorithm: SyncAlgorithm = "recursive_doubling"


class Router(_Part):
    """How requests find a rank of the pool that they enter first; decode pools take the rank with fewest requests.

    `affinity_timeout_s`: of `session_affinity`, how long a session that sends nothing keeps its rank; None: for ever.
    """

    policy: RouterPolicy = "prefix_affinity"
    affinity_timeout_s: float | None = Field(None, gt=0)


class Deployment(_Part):
    """What is put on the rack: one aggregated pool, or prefill and decode pools."""

    model: str
    gpu: str
    pools: tuple[Pool, ...]
    max_model_len: int | None = Field(None, ge=1)
    eplb: Eplb = Eplb()
    speculation: Speculation = Speculation()
    kv_transfer: KvTransfer = KvTransfer()
    dp_sync: DpSync = DpSync()
    router: Router = Router()

    @property
    def model_spec(self) -> ModelSpec:
        return model_spec(self.model, self.gpu)

    @property
    def gpu_spec(self) -> GpuSpec:
        return gpu_spec(self.gpu)

    @property
    def gpus(self) -> int:
        """The one count of GPUs: instances x dep x tp over all pools."""
        return sum(p.gpus for p in self.pools)

    @property
    def disaggregated(self) -> bool:
        return self.pools[0].role != "aggregated"

    def redundant_experts(self, pool: Pool) -> int:
        """Replicas beyond one per routed expert on an instance of `pool`."""
        own = pool.redundant_experts
        return (self.eplb.redundant_experts if own is None else own) if self.eplb.enabled else 0

    @property
    def context_limit(self) -> int:
        return self.max_model_len or self.model_spec.max_model_len

    def pools_of(self, role: Role) -> tuple[Pool, ...]:
        """The pools of `role`, in order; none where the deployment has none."""
        return tuple(p for p in self.pools if p.role == role)

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults too, as JSON has it; `parse_deployment` makes an equal deployment of it."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """`to_dict` as YAML: what is launched is what was simulated."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @model_validator(mode="before")
    @classmethod
    def _eager_defaults(cls, data: Any) -> Any:
        gpu = data.get("gpu") if isinstance(data, dict) else None
        if not isinstance(gpu, str) or gpu not in GPUS or not isinstance(data.get("pools"), list | tuple):
            return data
        if not GPUS[gpu].eager:
            return data
        return {**data, "pools": [EAGER | p if isinstance(p, dict) else p for p in data["pools"]]}

    @model_validator(mode="after")
    def _consistent(self) -> "Deployment":
        roles = [p.role for p in self.pools]
        if roles != ["aggregated"] and not ({"prefill", "decode"} == set(roles)):
            raise ValueError(f"pools={roles}: give one aggregated pool, or prefill and decode pools")
        model, gpu = self.model_spec, self.gpu_spec
        if self.gpus > MOST_GPUS:
            raise ValueError(f"pools: {self.gpus} GPUs in all (instances x dep x tp); at most {MOST_GPUS}")
        _check_effect(self)
        if self.speculation.draft_tokens > model.max_draft_tokens:
            raise ValueError(
                f"speculation.draft_tokens={self.speculation.draft_tokens}: {self.model} takes at most "
                f"{model.max_draft_tokens}"
            )
        if self.max_model_len and self.max_model_len > model.max_model_len:
            raise ValueError(f"max_model_len={self.max_model_len}: {self.model} takes at most {model.max_model_len}")
        for p in self.pools:
            _check_width(p, self, model, gpu)
            _check_pool(p, self)
        return self


def _check_effect(deployment: Deployment) -> None:
    """What is set away from its default must do something; vLLM would ignore it in silence."""
    eplb, usual = deployment.eplb, Eplb()
    for key in ("redundant_experts", "window_steps", "interval_steps", "use_async"):
        if not eplb.enabled and getattr(eplb, key) != getattr(usual, key):
            mend = f"set {getattr(usual, key)}".lower()
            raise ValueError(f"eplb.{key} has no effect while eplb.enabled=false; enable it or {mend}")
    if deployment.speculation.enable_adaptive_verification and (why := _adaptive_misfit(deployment)):
        raise ValueError(f"speculation.enable_adaptive_verification=true: {why}")
    router = deployment.router
    if router.affinity_timeout_s is not None and router.policy != "session_affinity":
        raise ValueError(
            f"router.affinity_timeout_s has no effect with router.policy={router.policy}; remove it or set "
            "router.policy=session_affinity"
        )
    if deployment.kv_transfer.mode == "pull" and not deployment.disaggregated:
        raise ValueError("kv_transfer.mode=pull has no effect: an aggregated pool hands no KV over; remove it")


def _adaptive_misfit(deployment: Deployment) -> str | None:
    """Why vLLM does not verify adaptively, and what to set. None where it does."""
    draft = deployment.model_spec.draft
    if not deployment.speculation.draft_tokens:
        return "has no effect without drafts; set speculation.draft_tokens or remove it"
    if draft is None or draft.name != "DSpark":
        return f"vLLM does so with DSpark's drafts alone, {deployment.model} has others; remove it"
    eager = [p.role for p in deployment.pools if p.role != "prefill" and not p.max_cudagraph_capture_size]
    return f"wants CUDA graphs; set {eager[0]}.max_cudagraph_capture_size or remove it" if eager else None


def _check_width(pool: Pool, deployment: Deployment, model: ModelSpec, gpu: GpuSpec) -> None:
    """Do the experts divide over an instance's GPUs, and do these fit one NVLink domain?"""
    redundant = deployment.redundant_experts(pool)
    slots = model.routed_experts + redundant
    width = pool.gpus_per_instance
    if slots % width:
        fits = [d for d in range(1, gpu.nvlink_domain_gpus // pool.tp + 1) if slots % (d * pool.tp) == 0]
        near = sorted(sorted(fits, key=lambda d: abs(d - pool.dep))[:2])
        size = f"{pool.role}.dep={pool.dep}" + (f", tp={pool.tp}" if pool.tp > 1 else "")
        mend = f"nearest {', '.join(map(str, near))}" if near else "no dep goes with this tp: lower it"
        raise ValueError(
            f"{size}: dep x tp must divide {model.routed_experts} routed experts + {redundant} redundant; {mend}"
        )
    draft = model.draft if deployment.speculation.draft_tokens and pool.role != "prefill" else None
    if draft and width > 1 and (draft.experts + redundant) % width:
        raise ValueError(
            f"{pool.role}.dep={pool.dep}: dep x tp must divide the draft's {draft.experts} experts + "
            f"{redundant} redundant too; change dep, eplb.redundant_experts or set "
            f"speculation.draft_tokens=0"
        )
    if width > gpu.nvlink_domain_gpus:
        raise ValueError(
            f"{pool.role}.dep={pool.dep}: an instance of {width} GPUs does not fit one NVLink domain of "
            f"{gpu.nvlink_domain_gpus} {gpu.name}; at most {gpu.nvlink_domain_gpus // pool.tp}"
        )


def _check_pool(pool: Pool, deployment: Deployment) -> None:
    if pool.redundant_experts and not deployment.eplb.enabled:
        raise ValueError(f"{pool.role}.redundant_experts has no effect while eplb.enabled=false; enable or remove it")
    if pool.max_new_kv_loads_per_step is not None and pool.role != "decode":
        raise ValueError(f"{pool.role}.max_new_kv_loads_per_step has no effect; only decode pools load KV: remove it")
    if pool.kv_offloading_gib and (pool.role == "decode" or not pool.enable_prefix_caching):
        why = "prompts come with their KV" if pool.role == "decode" else "enable_prefix_caching=false"
        raise ValueError(f"{pool.role}.kv_offloading_gib={pool.kv_offloading_gib:g} has no effect: {why}; set 0")
    if pool.prefill_schedule_interval > 1 and pool.dep == 1:
        raise ValueError(
            f"{pool.role}.prefill_schedule_interval={pool.prefill_schedule_interval} has no effect at dep=1; only "
            "data-parallel ranks keep to it: set 1"
        )
    if pool.enable_dbo and (why := _dbo_misfit(pool, deployment)):
        raise ValueError(f"{pool.role}.enable_dbo=true: {why}; set false")
    for key, off in EAGER.items() if deployment.gpu_spec.eager else ():
        if getattr(pool, key) != off:
            mend = f"set {off} or remove it".lower()
            raise ValueError(f"{pool.role}.{key} has no effect on {deployment.gpu}; {mend}")
    if pool.max_num_batched_tokens < pool.max_num_seqs:
        raise ValueError(
            f"{pool.role}.max_num_batched_tokens={pool.max_num_batched_tokens}: vLLM wants at least "
            f"max_num_seqs={pool.max_num_seqs}"
        )
    threshold = pool.long_prefill_token_threshold
    if threshold and threshold >= pool.max_num_batched_tokens:
        raise ValueError(
            f"{pool.role}.long_prefill_token_threshold={threshold} has no effect at max_num_batched_tokens="
            f"{pool.max_num_batched_tokens}; lower it or set 0"
        )


def _dbo_misfit(pool: Pool, deployment: Deployment) -> str:
    """Why vLLM would not run the pool with dual-batch overlap, or rackplan does not know how it would."""
    if pool.dep == 1:
        return "only data-parallel ranks exchange tokens to overlap, and dep=1"
    if pool.role == "aggregated":
        return "DeepEP has one kind of kernel for prompts and one for decodes, and an aggregated pool runs both"
    if deployment.speculation.draft_tokens:
        return f"vLLM does not split batches with speculation.draft_tokens={deployment.speculation.draft_tokens}"
    if deployment.model_spec.host_bytes:
        return f"vLLM does not split batches of {deployment.model}, which has tables in host memory"
    return "its engine has no such kernels" if deployment.gpu_spec.eager else ""


def parse_deployment(data: Any, where: str = "deployment") -> Deployment:
    """A `Deployment` from parsed YAML or JSON. Raises InputError with one line: where, key, value, mend."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a mapping with model, gpu and pools, got {type(data).__name__}")
    try:
        return Deployment.model_validate(data)
    except ValidationError as e:
        raise InputError(f"{where}: {_first_problem(e, data)}") from None
    except InputError as e:  # of a model or GPU that there is not; pydantic lets it through
        raise InputError(f"{where}: {e}") from None


_WANTED = {
    "tuple_type": "give a list, one pool an item",
    "model_type": "give a mapping of its keys",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "int_type": "write a whole number",
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
    "finite_number": "write a whole number",
    "float_type": "write a number",
    "float_parsing": "write a number",
    "string_type": "write a name",
}
"""The mend by pydantic's type of error; its own words where it is not among them."""


def _first_problem(error: ValidationError, data: dict) -> str:
    first = error.errors()[0]
    path = _dotted(first["loc"], data)
    if first["type"] == "extra_forbidden":
        return f"{path}: unknown key; remove it or correct its name"
    if first["type"] == "missing":
        return f"{path}: missing; add it"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = _WANTED.get(first["type"], f"{first['msg'][0].lower()}{first['msg'][1:]}")
    return f"{path}={str(first['input'])[:40]!r}: {wanted}"


def _dotted(loc: tuple, data: dict) -> str:
    """pools.0.dep as decode.dep: pools are named by their role where they state one."""
    parts = [str(x) for x in loc]
    if len(loc) > 1 and loc[0] == "pools" and isinstance(loc[1], int):
        pool = data["pools"][loc[1]]
        role = pool.get("role") if isinstance(pool, dict) else None
        parts = [str(role) if role in get_args(Role) else f"pools.{loc[1]}", *parts[2:]]
    return ".".join(parts)


def load_deployment(path: Path) -> Deployment:
    """Read a deployment's YAML. Raises InputError that names the file and the key."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8-sig"), _UniqueKeys)
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give a deployment's YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        row = f":{mark.line + 1}" if mark else ""
        problem = str(getattr(e, "problem", e)).partition(";")[0]
        raise InputError(f"{path}{row}: not valid YAML ({problem}); correct it") from None
    return parse_deployment(data, str(path))


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error: of two values one would be ignored in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key_node.value} is given twice", problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
