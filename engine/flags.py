"""Every flag of `vllm serve` that a pool means, decided in one place.

All that the simulation assumes is stated, also where it equals vLLM's default: defaults differ by release and by
GPU. Each function returns the flags of one concern; serving.py puts them into commands.
"""

import json
from typing import Any

from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.errors import InputError
from rackplan.engine.parser_table import EngineVersion, ParserTable
from rackplan.engine.placement import Placement, Slot
from rackplan.engine.specs import Device

Flags = list[str]

ASSUMED = (
    *("--enable-chunked-prefill", "--scheduling-policy", "fcfs"),
    *("--watermark", "0.0", "--scheduler-reserve-full-isl", "--stream-interval", "1"),
)
"""The scheduler as it is simulated, where no knob changes it."""

DP_SYNC_INTERVAL = "16"
"""Steps between the ranks' agreement on whether any has work left."""

ALL2ALL = "allgather_reducescatter"
"""Expert-parallel exchange as it is simulated where the experts' kernel leaves it to vLLM."""

DBO_ALL2ALL = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}
"""Those that dual-batch overlap runs on, by role."""
DBO_DECODE_TOKENS, DBO_PREFILL_TOKENS = 32, 512
"""Tokens of a rank from which a step runs in two halves: of decodes alone, and with prompts. vLLM's defaults."""

MEGA_MOE = {("deepseek-v4.1-flash", "gb200"), ("deepseek-v4.1-flash", "gb300")}
"""(model, GPU) whose calibration is of DeepGEMM's MegaMoE, which exchanges tokens within the experts' kernel."""

DRAFT_METHODS = {"DSpark": "dspark", "MTP": "mtp"}
"""vLLM's method by the draft's name in models.yaml; both are weights of the target's own checkpoint."""


def parallel_flags(pool: Pool, slot: Slot) -> Flags:
    """Ranks of the instance, and which of them are on this machine."""
    flags = ["--tensor-parallel-size", str(pool.tp), "--data-parallel-size", str(pool.dep)]
    if pool.dep == 1:
        return flags
    flags += ["--data-parallel-size-local", str(slot.ranks), "--data-parallel-address", slot.address]
    flags += ["--data-parallel-rpc-port", str(slot.rpc_port), "--dp-sync-interval", DP_SYNC_INTERVAL]
    if slot.node:
        flags += ["--headless", "--data-parallel-start-rank", str(slot.first_rank)]
    return flags


def expert_flags(deployment: Deployment, pool: Pool, placement: Placement, table: ParserTable) -> Flags:
    """Expert parallelism and its balancing; both need more than one GPU."""
    if pool.gpus_per_instance == 1:
        return [table.negative("--enable-expert-parallel"), table.negative("--enable-eplb")]
    kernel = "deep_gemm_mega_moe" if (deployment.model, deployment.gpu) in MEGA_MOE else "auto"
    all2all = DBO_ALL2ALL[pool.role] if pool.enable_dbo else ALL2ALL
    flags = ["--enable-expert-parallel", "--all2all-backend", all2all, "--moe-backend", kernel]
    flags += [switch("--enable-dbo", pool.enable_dbo, table)]
    if pool.enable_dbo:
        flags += ["--dbo-decode-token-threshold", str(DBO_DECODE_TOKENS)]
        flags += ["--dbo-prefill-token-threshold", str(DBO_PREFILL_TOKENS)]
    eplb = deployment.eplb
    if not eplb.enabled:
        return [*flags, table.negative("--enable-eplb")]
    config: dict[str, Any] = {
        "window_size": eplb.window_steps,
        "step_interval": eplb.interval_steps,
        "num_redundant_experts": deployment.redundant_experts(pool),
        "use_async": eplb.use_async,
    }
    if placement.device == "cpu":
        config["communicator"] = "torch_gloo"
    return [*flags, "--enable-eplb", "--eplb-config", as_json(config)]


def scheduler_flags(deployment: Deployment, pool: Pool, placement: Placement, table: ParserTable) -> Flags:
    """Budgets, lengths, caching; and rackplan's scheduler class where a cap or a step log asks for it."""
    flags = ["--max-model-len", str(deployment.context_limit)]
    flags += ["--max-num-batched-tokens", str(pool.max_num_batched_tokens)]
    flags += ["--max-num-seqs", str(pool.max_num_seqs)]
    flags += ["--long-prefill-token-threshold", str(pool.long_prefill_token_threshold)]
    flags += ["--prefill-schedule-interval", str(pool.prefill_schedule_interval)]
    flags += [switch("--enable-prefix-caching", pool.enable_prefix_caching, table)]
    flags += [switch("--async-scheduling", pool.async_scheduling, table), *ASSUMED]
    if needs_scheduler_class(pool, placement):
        name = "RackplanAsyncScheduler" if pool.async_scheduling else "RackplanScheduler"
        flags += ["--scheduler-cls", f"{placement.scheduler_module}.{name}"]
    return flags


def needs_scheduler_class(pool: Pool, placement: Placement) -> bool:
    """Does this pool ask for what vLLM's own scheduler has not: the cap on new KV loads, the step log?"""
    return pool.max_new_kv_loads_per_step is not None or placement.log_dir is not None


def memory_flags(deployment: Deployment, pool: Pool, placement: Placement) -> Flags:
    """Memory, CUDA graphs and offloaded weights; the CPU engine is told its KV space by its environment."""
    flags = ["--kv-cache-dtype", deployment.model_spec.kv_cache_dtype]
    if not placement.has_weights(deployment):
        flags += ["--load-format", "dummy"]
    if placement.device == "cpu":
        return [*flags, "--dtype", "bfloat16", "--enforce-eager"]
    flags += ["--gpu-memory-utilization", f"{pool.gpu_memory_utilization:g}"]
    flags += _graph_flags(pool)
    offload = pool.offload
    flags += ["--offload-group-size", str(offload.group_size)]
    if offload.group_size:
        # Without --offload-params vLLM would move all weights of those layers, not the routed experts alone.
        flags += ["--offload-backend", "prefetch", "--offload-params", "experts"]
        flags += ["--offload-num-in-group", str(offload.num_in_group)]
        flags += ["--offload-prefetch-step", str(offload.prefetch_step)]
    return flags


def model_flags(deployment: Deployment) -> Flags:
    """What the model's spec takes for granted: bounded replay after a prefix hit, tables that stay in host memory."""
    model = deployment.model_spec
    flags = ["--swa-bounded-replay"] if model.replay_tokens_per_hit else []
    return flags + (["--engram-config", as_json({"cpu_offload": True})] if model.host_bytes else [])


def _graph_flags(pool: Pool) -> Flags:
    if pool.max_cudagraph_capture_size == 0:
        return ["--compilation-config", as_json({"cudagraph_mode": "NONE"})]
    return ["--max-cudagraph-capture-size", str(captured_tokens(pool))]


def captured_tokens(pool: Pool) -> int:
    """The largest captured batch: no step is larger than the token budget. Raises InputError for a size that vLLM
    does not capture, which it would round down."""
    size = min(pool.max_cudagraph_capture_size, pool.max_num_batched_tokens)
    step = 16 if size > 256 else 8 if size > 4 else 1
    if size % step and size != pool.max_num_batched_tokens or size == 3:
        low = 2 if size == 3 else size // step * step or 4
        raise InputError(
            f"{pool.role}.max_cudagraph_capture_size={size}: vLLM captures 1, 2, 4, then every 8, past 256 every 16, "
            f"and would take {low}; set {low} or {low + step if size > 3 else 4}"
        )
    return size


def speculation_flags(deployment: Deployment) -> Flags:
    """Drafts, on every pool: a prefill server that lacked them would hold no KV of the draft to hand over, and NIXL
    refuses a pair of servers whose drafts differ."""
    drafts, draft = deployment.speculation.draft_tokens, deployment.model_spec.draft
    if not drafts or draft is None:
        return []
    if draft.name not in DRAFT_METHODS:
        raise InputError(
            f"speculation.draft_tokens={drafts}: vLLM's method for {draft.name} is not known, only for "
            f"{', '.join(DRAFT_METHODS)}; set 0"
        )
    config: dict[str, Any] = {"method": DRAFT_METHODS[draft.name], "num_speculative_tokens": drafts}
    if config["method"] == "dspark":
        config["enable_adaptive_verification"] = deployment.speculation.enable_adaptive_verification
    return ["--speculative-config", as_json(config)]


def kv_transfer_flags(deployment: Deployment, pool: Pool, placement: Placement) -> Flags:
    """Who hands KV over to whom, and the tier in host memory. --kv-offloading-size puts its own connector in the place
    of NIXL's, so a prefill pool states both."""
    size_gib = pool.kv_offloading_gib
    if not deployment.disaggregated:
        return ["--kv-offloading-size", f"{size_gib:g}", "--kv-offloading-backend", "native"] if size_gib else []
    config: dict[str, Any] = {
        "kv_connector": "NixlPushConnector" if deployment.kv_transfer.mode == "push" else "NixlConnector",
        "kv_role": "kv_producer" if pool.role == "prefill" else "kv_consumer",
    }
    if placement.device == "cpu":
        config |= {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"]}}
    if size_gib:
        tier = {"cpu_bytes_to_use": int(size_gib * 2**30)}
        host = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
        both = {"connectors": [config, host]}
        config = {"kv_connector": "MultiConnector", "kv_role": config["kv_role"], "kv_connector_extra_config": both}
    return ["--kv-transfer-config", as_json(config)]


def dp_sync_flags(pool: Pool, placement: Placement) -> Flags:
    """Gloo for the agreement of ranks on each step, where there is a choice: the first model runner, which the CPU
    engine takes, obeys this flag; the second, which `dp_sync_environment` states, knows one way and ignores it."""
    return ["--disable-nccl-for-dp-synchronization"] if pool.dep > 1 and placement.device == "cpu" else []


def front_end_environment(pool: Pool) -> dict[str, str]:
    """Outputs that the API server handles in one go: the last of the chunk sizes; the experts' were gone by 0.32."""
    return {"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(pool.output_proc_chunk_size)}


def dp_sync_environment(pool: Pool, placement: Placement) -> dict[str, str]:
    """The model runner decides how ranks agree, so GPUs are told which to take: the second."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if pool.dep > 1 and placement.device == "cuda" else {}


def engine_release(device: Device) -> EngineVersion:
    """The newest known release that runs on `device`."""
    return "0.32" if device == "cpu" else "0.33"


def kv_transfer_modes(device: Device) -> tuple[str, ...]:
    """Who may move KV: NIXL's push does not come to an end on the CPU."""
    return ("pull",) if device == "cpu" else ("push", "pull")


def dp_sync_algorithm(device: Device, engine_version: EngineVersion) -> str:
    """The one that this release runs: 0.33's second model runner has recursive doubling and no other; 0.32's, and the
    first one, hand the all-reduce to Gloo, a ring."""
    return "recursive_doubling" if (device, engine_version) == ("cuda", "0.33") else "ring"


def switch(name: str, on: bool, table: ParserTable) -> str:
    """The option that switches `name` on or off, as this release spells it."""
    return name if on else table.negative(name)


def as_json(value: dict[str, Any]) -> str:
    """One line of JSON, as vLLM's options take it."""
    return json.dumps(value, separators=(",", ":"))
