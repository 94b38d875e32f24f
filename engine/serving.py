"""A `Deployment` as the servers that run it: what is simulated is what is launched.

Start with `server_commands`. flags.py decides every flag, placement.py where each server runs, parser_table.py checks
each command against vLLM's own argument parser.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rackplan.engine import flags
from rackplan.engine.deployment import Deployment, Pool, Role
from rackplan.engine.errors import InputError
from rackplan.engine.memory import plan_memory
from rackplan.engine.parser_table import check_command, check_environment, parser_table
from rackplan.engine.placement import Placement, Slot, lay_out

MIN_KV_GIB = 1
"""VLLM_CPU_KVCACHE_SPACE counts whole GiB; 0 would let vLLM choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """One `vllm serve`.

    `name`: "decode-0", and of an instance's further machines "decode-0-node-1". `node`: 0 holds the API server, others
    are headless. `argv`: not quoted for any shell. `env`: beyond the machine's own. `port`: of the API, None where
    there is none. `devices`: of that machine: GPU indices, or cores on the CPU engine. `machine`: which of the
    placement's.
    """

    name: str
    role: Role
    instance: int
    node: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int | None
    devices: tuple[int, ...]
    machine: int = 0


def server_commands(deployment: Deployment, placement: Placement) -> tuple[ServerCommand, ...]:
    """The servers of `deployment`, pools and instances in order. Raises InputError on a field that no flag of that
    release carries, on an option that its parser does not know, and where machines or ports run out."""
    check_renderable(deployment, placement)
    return tuple(
        server_command(deployment, pool, slot, placement)
        for pool, slots in lay_out(deployment, placement)
        for slot in slots
    )


def server_command(deployment: Deployment, pool: Pool, slot: Slot, placement: Placement) -> ServerCommand:
    """The server of one machine of an instance, checked against the release's parser."""
    table = parser_table(placement.engine_version)
    api = [] if slot.node else ["--host", slot.host, "--port", str(slot.api_port)]
    argv = (
        *("vllm", "serve", placement.served_model(deployment), *api),
        *flags.parallel_flags(pool, slot),
        *flags.dp_sync_flags(pool, placement),
        *flags.expert_flags(deployment, pool, placement, table),
        *flags.scheduler_flags(deployment, pool, placement, table),
        *flags.memory_flags(deployment, pool, placement),
        *flags.model_flags(deployment),
        *flags.speculation_flags(deployment),
        *flags.kv_transfer_flags(deployment, pool, placement),
    )
    name = f"{pool.role}-{slot.instance}"
    env = _environment(deployment, pool, slot, placement, name)
    check_command(argv, table)
    check_environment(env, table)
    return ServerCommand(
        name=name + (f"-node-{slot.node}" if slot.node else ""),
        role=pool.role,
        instance=slot.instance,
        node=slot.node,
        argv=argv,
        env=env,
        port=None if slot.node else slot.api_port,
        devices=slot.devices,
        machine=slot.machine,
    )


def _environment(deployment: Deployment, pool: Pool, slot: Slot, placement: Placement, server: str) -> dict[str, str]:
    env = _cpu_environment(deployment, pool, slot, placement) if placement.device == "cpu" else _cuda_environment(slot)
    env |= flags.front_end_environment(pool) | flags.dp_sync_environment(pool, placement)
    if deployment.disaggregated:
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": slot.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(slot.kv_port)}
    if pool.max_new_kv_loads_per_step is not None:
        env["RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP"] = str(pool.max_new_kv_loads_per_step)
    if placement.log_dir is not None:
        env |= {"RACKPLAN_STEP_LOG_DIR": placement.log_dir, "RACKPLAN_SERVER_NAME": server}
    if placement.revision is not None:
        env["RACKPLAN_REVISION"] = placement.revision
    return env


def _cuda_environment(slot: Slot) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slot.devices))} if slot.devices else {}


def _cpu_environment(deployment: Deployment, pool: Pool, slot: Slot, placement: Placement) -> dict[str, str]:
    each = placement.cores_per_device
    cores = [",".join(str(d * each + c) for c in range(each)) for d in slot.devices]
    kv_gib = max(MIN_KV_GIB, int(plan_memory(deployment, pool).kv_pool_gib))
    env = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}
    return env | ({"UCX_TLS": "tcp,self"} if deployment.disaggregated else {})


def check_renderable(deployment: Deployment, placement: Placement) -> None:
    """Raises InputError on every value that this engine would not run as it was simulated, with what to set."""
    misfits = [m for pool in deployment.pools for m in _pool_misfits(deployment, pool, placement)]
    synced = flags.dp_sync_algorithm(placement.device, placement.engine_version)
    if any(p.dep > 1 for p in deployment.pools) and deployment.dp_sync.algorithm != synced:
        misfits.append(f"dp_sync.algorithm={deployment.dp_sync.algorithm} (set {synced})")
    if deployment.eplb.enabled and all(p.gpus_per_instance == 1 for p in deployment.pools):
        misfits.append("eplb.enabled=true on instances of one GPU (set false)")
    if placement.device == "cpu" and deployment.disaggregated and deployment.kv_transfer.mode == "push":
        misfits.append("kv_transfer.mode=push (set pull)")
    if misfits:
        engine = f"vLLM {placement.engine_version} on {placement.device}"
        raise InputError(f"{engine} does not run {'; '.join(misfits)}")


def _pool_misfits(deployment: Deployment, pool: Pool, placement: Placement) -> list[str]:
    if pool.long_prefill_token_threshold > deployment.context_limit:
        threshold = f"{pool.role}.long_prefill_token_threshold={pool.long_prefill_token_threshold}"
        return [f"{threshold} past max_model_len={deployment.context_limit} (set 0)"]
    misfits = _draft_misfits(deployment, pool)
    if placement.device == "cuda":
        return misfits
    if pool.async_scheduling:
        misfits.append(f"{pool.role}.async_scheduling=true (set false)")
    if pool.max_cudagraph_capture_size:
        misfits.append(f"{pool.role}.max_cudagraph_capture_size={pool.max_cudagraph_capture_size} (set 0)")
    if pool.kv_offloading_gib:
        misfits.append(f"{pool.role}.kv_offloading_gib={pool.kv_offloading_gib:g} (set 0)")
    if pool.offload.group_size:
        misfits.append(f"{pool.role}.offload.group_size={pool.offload.group_size} (set 0)")
    return misfits


def _draft_misfits(deployment: Deployment, pool: Pool) -> list[str]:
    """Prefill servers have the draft as well, so its experts must lie evenly there too."""
    draft, width = deployment.model_spec.draft, pool.gpus_per_instance
    if pool.role != "prefill" or draft is None or not deployment.speculation.draft_tokens or width == 1:
        return []
    experts = draft.experts + deployment.redundant_experts(pool)
    if experts % width == 0:
        return []
    return [f"prefill.dep={pool.dep} with {experts} experts of the draft (set a dep that divides them)"]
