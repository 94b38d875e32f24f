"""Does what runs have the configuration that was planned? Each engine writes down its own once it has started.

vLLM changes or ignores settings without failing, and an old server may answer where a new one was meant; so the values
and the revision are read back from the engines themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rackplan.engine.deploy_state import Record
from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.errors import DeployError
from rackplan.engine.flags import captured_tokens


def expected_config(deployment: Deployment, pool: Pool, revision: str) -> dict[str, Any]:
    """What an engine of `pool` must say of itself, by the key it says it under."""
    wide = pool.gpus_per_instance > 1
    balanced = deployment.eplb.enabled and wide
    graphs = {"max_cudagraph_capture_size": captured_tokens(pool)} if pool.max_cudagraph_capture_size else {}
    eplb = {
        "num_redundant_experts": deployment.redundant_experts(pool),
        "window_size": deployment.eplb.window_steps,
        "step_interval": deployment.eplb.interval_steps,
        "use_async": deployment.eplb.use_async,
    }
    return {
        "revision": revision,
        "max_model_len": deployment.context_limit,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "max_num_seqs": pool.max_num_seqs,
        "long_prefill_token_threshold": pool.long_prefill_token_threshold,
        "prefill_schedule_interval": pool.prefill_schedule_interval,
        "enable_prefix_caching": pool.enable_prefix_caching,
        "async_scheduling": pool.async_scheduling,
        "data_parallel_size": pool.dep,
        "tensor_parallel_size": pool.tp,
        "enable_expert_parallel": wide,
        "enable_eplb": balanced,
        "enable_dbo": pool.enable_dbo,
        **({f"eplb.{k}": v for k, v in eplb.items()} if balanced else {}),
        "draft_tokens": deployment.speculation.draft_tokens,
        "enable_adaptive_verification": deployment.speculation.enable_adaptive_verification,
        "kv_role": _kv_role(pool),
        "max_new_kv_loads_per_step": pool.max_new_kv_loads_per_step,
        "offload.prefetch.offload_group_size": pool.offload.group_size,
        **graphs,
    }


def _kv_role(pool: Pool) -> str | None:
    if pool.role == "aggregated":
        return "kv_both" if pool.kv_offloading_gib else None
    return "kv_producer" if pool.role == "prefill" else "kv_consumer"


def differences(record: Record) -> list[str]:
    """One line for each setting of a running deployment that is not the planned one. Raises DeployError where an
    engine has not written its configuration."""
    found = []
    for pool in record.launch.deployment.pools:
        expected = expected_config(record.launch.deployment, pool, record.id)
        for name, config in _running(Path(record.folder), pool):
            for key, value in expected.items():
                if (runs := _at(config, key)) != value:
                    found.append(f"{name}: {key} was planned as {json.dumps(value)}, the engine has {json.dumps(runs)}")
    return found


def _running(folder: Path, pool: Pool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(server and rank, configuration) of every engine of `pool`."""
    for instance in range(pool.instances):
        for rank in range(pool.dep):
            name = f"{pool.role}-{instance}"
            files = sorted(folder.glob(f"config_{name}*.dp{rank}.json"))
            if not files:
                raise DeployError(f"{name}: rank {rank} wrote no configuration into {folder}: is the plug-in there?")
            yield f"{name} rank {rank}", json.loads(files[0].read_text(encoding="utf-8"))


def _at(config: dict[str, Any], key: str) -> Any:
    """The value at a dotted key; a speculative configuration that there is not drafts nothing."""
    speculative = config.get("speculative") or {}
    if key == "draft_tokens":
        return speculative.get("num_speculative_tokens", 0)
    if key == "enable_adaptive_verification":
        return speculative.get(key, False)
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
