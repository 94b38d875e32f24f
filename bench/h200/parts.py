"""Servers and loads: what plans.py and order.py are made of."""

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Server:
    """One `vllm serve`. `gpus`: which GPUs it sees."""

    gpus: tuple[int, ...]
    port: int
    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


SERVE_ARGS = (
    "--load-format=dummy --max-model-len=8192 --max-num-seqs=512 --no-enable-prefix-caching --async-scheduling "
    "--gpu-memory-utilization=0.15 --enable-logging-iteration-details --disable-uvicorn-access-log "
    "--scheduler-cls=rackplan.engine.vllm_plugin.scheduler.RackplanAsyncScheduler"
)
"""The KV pool is given in bytes (`kv_gib`): servers that share a GPU do not measure each other's memory."""


def kv_gib(gib: int) -> tuple[str, str]:
    return "--kv-cache-memory-bytes", str(gib << 30)


def budget(tokens: int) -> tuple[str, str]:
    return "--max-num-batched-tokens", str(tokens)


def dep(gpus: int, port: int, *more: str, tokens: int = 8192, **env: str) -> Server:
    parallel = (
        "--data-parallel-size",
        str(gpus),
        "--enable-expert-parallel",
        "--data-parallel-rpc-port",
        str(port + 50),
    )
    return Server(gpus=tuple(range(gpus)), port=port, args=(*parallel, *budget(tokens), *kv_gib(8), *more), env=env)


def nixl(gpu: int, port: int, role: str, tokens: int = 8192) -> Server:
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    args = (*budget(tokens), *kv_gib(8), "--kv-transfer-config", transfer)
    return Server(gpus=(gpu,), port=port, args=args, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 60)})


def aggregated(gpu: int, port: int, tokens: int, captured: int, kv: int = 6) -> Server:
    """Past 512 tokens the graphs are captured every 128, where vLLM's own list would go on by 16."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(640, captured + 1, 128)]
    capture = ("--cudagraph-capture-sizes", *(str(s) for s in sizes))
    return Server(gpus=(gpu,), port=port, args=(*budget(tokens), *kv_gib(kv), *capture))


INPUT_TOKENS, OUTPUT_TOKENS = 2048, 256


@dataclass(frozen=True, kw_only=True)
class Load:
    """One `vllm bench serve` run: random INPUT_TOKENS/OUTPUT_TOKENS, Poisson.

    `spread`: lengths within +- this fraction. `metrics`: servers whose counters are read after it. A load that is not
    `kept` only warms up.
    """

    name: str
    port: int
    rate: float
    prompts: int
    seed: int
    metrics: tuple[str, ...]
    spread: float = 0.0
    kept: bool = True
