"""Does a pool fit its GPUs, and how many KV tokens are left? Answered before anything runs.

The plan is per GPU, in GiB, as vLLM counts: gpu_memory_utilization x HBM holds weights, the activation peak,
CUDA graphs and workspaces; what is left is the KV pool.
"""

from dataclasses import asdict, dataclass

from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.errors import InfeasibleError
from rackplan.engine.specs import GpuSpec, ModelSpec

GIB = 2**30
RUNTIME_GIB = 2.5
"""CUDA context, NCCL and all-to-all buffers, outside vLLM's own accounting. A factor: 2 to 3 GiB on H200."""
GRAPH_GIB_PER_CAPTURED_TOKEN = 1.5 / 512
"""CUDA-graph memory grows with the largest captured batch. A factor: about 1.5 GiB for 512 tokens on H200."""
ACTIVATION_COPIES = 14
"""Live activation tensors of hidden width per token at the peak (residual streams, projections, dispatch buffers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One GPU of a pool, GiB. `kv_tokens`: tokens of KV that one data-parallel rank can hold; `kv_offloading_tokens`:
    those that its tier in host memory can. `routed_experts_gib`: of layers in host memory, the buffers that
    `prefetch_step` of them are loaded to."""

    role: str
    gpus_per_instance: int
    hbm_gib: float
    usable_gib: float
    routed_experts_gib: float
    redundant_experts_gib: float
    replicated_weights_gib: float
    host_weights_gib: float
    activation_gib: float
    graphs_gib: float
    runtime_gib: float
    state_gib: float
    kv_pool_gib: float
    kv_tokens: int
    kv_offloading_tokens: int = 0

    def to_dict(self) -> dict:
        """The fields by name, GiB rounded to 4 digits."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def plan_memory(deployment: Deployment, pool: Pool) -> MemoryPlan:
    """The memory of one GPU of `pool`. A negative `kv_pool_gib` is the shortfall; `check_memory` raises on it."""
    return _plan(deployment.model_spec, deployment.gpu_spec, deployment, pool)


def _plan(model: ModelSpec, gpu: GpuSpec, deployment: Deployment, pool: Pool) -> MemoryPlan:
    width = pool.gpus_per_instance
    per_expert = model.moe_layers * model.bytes_per_routed_expert / GIB
    routed = model.routed_experts / width * per_expert
    host = routed * pool.offload.share
    held = routed - host + _offload_buffers_gib(model, pool)
    redundant = deployment.redundant_experts(pool) / width * per_expert
    replicated = model.replicated_bytes / pool.tp / GIB
    draft_free = model.draft.bytes / pool.tp / GIB if model.draft and not deployment.speculation.draft_tokens else 0.0
    activation = ACTIVATION_COPIES * pool.max_num_batched_tokens * model.hidden * 2 / GIB
    graphs = pool.max_cudagraph_capture_size * GRAPH_GIB_PER_CAPTURED_TOKEN
    state = pool.max_num_seqs * model.state_bytes_per_sequence / GIB
    hbm = gpu.hbm_gb * 1e9 / GIB
    usable = hbm * pool.gpu_memory_utilization
    kv = usable - held - redundant - (replicated - draft_free) - activation - graphs - RUNTIME_GIB - state
    return MemoryPlan(
        role=pool.role,
        gpus_per_instance=width,
        hbm_gib=hbm,
        usable_gib=usable,
        routed_experts_gib=held,
        redundant_experts_gib=redundant,
        replicated_weights_gib=replicated - draft_free,
        host_weights_gib=host,
        activation_gib=activation,
        graphs_gib=graphs,
        runtime_gib=RUNTIME_GIB,
        state_gib=state,
        kv_pool_gib=kv,
        kv_tokens=max(0, int(kv * GIB / model.kv_bytes_per_token)),
        kv_offloading_tokens=int(pool.kv_offloading_gib / pool.tp * GIB / model.kv_bytes_per_token),
    )


def _offload_buffers_gib(model: ModelSpec, pool: Pool) -> float:
    """Where offloaded layers' experts are loaded to: vLLM keeps room for `prefetch_step` layers, of those there are."""
    offload = pool.offload
    if not offload.group_size:
        return 0.0
    offloaded = model.moe_layers * offload.share
    layer = model.routed_experts / pool.gpus_per_instance * model.bytes_per_routed_expert / GIB
    return min(offload.prefetch_step, offloaded) * layer


def check_memory(deployment: Deployment, longest_tokens: int | None = None) -> list[MemoryPlan]:
    """The plan of every pool, or InfeasibleError with the shortfall in GiB and the nearest value that fits.

    `longest_tokens`: the longest request that must fit one rank's KV pool; `max_model_len` where that is set.
    """
    need = max(longest_tokens or 0, deployment.max_model_len or 0)
    return [_fits(deployment, pool, need) for pool in deployment.pools]


def _fits(deployment: Deployment, pool: Pool, need_tokens: int) -> MemoryPlan:
    plan = plan_memory(deployment, pool)
    if plan.kv_pool_gib <= 0:
        weights = plan.routed_experts_gib + plan.redundant_experts_gib + plan.replicated_weights_gib
        raise InfeasibleError(
            f"{pool.role} pool does not fit {deployment.gpu} ({plan.hbm_gib:.1f} GiB): {-plan.kv_pool_gib:.2f} GiB "
            f"short before any KV (weights {weights:.1f}, activations {plan.activation_gib:.1f}); "
            f"{_nearest(deployment, pool, 1)}"
        )
    if plan.kv_tokens < need_tokens:
        kv_gib = need_tokens * deployment.model_spec.kv_bytes_per_token / GIB
        raise InfeasibleError(
            f"{pool.role}: one request of {need_tokens} tokens needs {kv_gib:.2f} GiB of KV, the pool has "
            f"{plan.kv_pool_gib:.2f} GiB ({kv_gib - plan.kv_pool_gib:.2f} short); max_model_len={plan.kv_tokens} fits, "
            f"or {_nearest(deployment, pool, need_tokens)}"
        )
    return plan


def _nearest(deployment: Deployment, pool: Pool, need_tokens: int) -> str:
    """The smallest change of one knob that makes the pool fit: a shorter chunk, else a wider instance."""
    chunk = pool.max_num_batched_tokens // 2
    while chunk >= max(pool.max_num_seqs, 512):
        trial = pool.model_copy(update={"max_num_batched_tokens": chunk})
        if plan_memory(deployment, trial).kv_tokens >= need_tokens:
            return f"{pool.role}.max_num_batched_tokens={chunk} fits"
        chunk //= 2
    slots = deployment.model_spec.routed_experts + deployment.redundant_experts(pool)
    for dep in range(pool.dep + 1, deployment.gpu_spec.nvlink_domain_gpus // pool.tp + 1):
        trial = pool.model_copy(update={"dep": dep})
        if slots % (dep * pool.tp) == 0 and plan_memory(deployment, trial).kv_tokens >= need_tokens:
            return f"{pool.role}.dep={dep} fits"
    return "no dep of this GPU fits it"
