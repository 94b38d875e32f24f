"""What the campaign measures: exact batches for `vllm bench forward`, servers, and the loads put on them.

Three tables, read by forward.py, servers.py and loads.py; those of order.py are in them. `gpus` is the number of GPUs
at hand; nothing here is fixed to two, except that a prefill/decode pair takes the first and the last.
"""

import json
from dataclasses import dataclass

from order import order_loads, order_servers
from parts import Load, Server, aggregated, dep, nixl

from rackplan.engine.profile_cases import ForwardCase


def prefill(new: int, cached: int = 0) -> ForwardCase:
    return ForwardCase(new_tokens=new, context_tokens=cached)


def decode(batch: int, kv: int) -> ForwardCase:
    return ForwardCase(decode_batch=batch, decode_kv_len=kv)


def mixed(new: int, batch: int, kv: int) -> ForwardCase:
    return ForwardCase(own_name=f"mix_{new}_{batch}", new_tokens=new, decode_batch=batch, decode_kv_len=kv)


def powers(last: int) -> list[int]:
    return [1 << i for i in range(last.bit_length())]


# The last rows of each plan are the ones that may not fit in memory: a case that fails ends the run.
DEP_GAPS = [
    *(decode(b, 4096) for b in powers(256)),
    *(mixed(new, b, 4096) for new in (512, 2048) for b in (16, 64, 128)),
    *(decode(b, 16384) for b in powers(64)),
    *(decode(b, 60000) for b in powers(16)),
    *(decode(b, 1024) for b in (256, 512)),
    decode(512, 4096),
    decode(128, 16384),
    decode(32, 60000),
    decode(48, 60000),
]
V3_SLICE = [
    *(decode(b, 1024) for b in powers(256)),
    *(decode(b, 4096) for b in powers(256)),
    *(prefill(n) for n in (512, 1024, 2048, 4096, 8192)),
    *(mixed(2048, b, 4096) for b in (64,)),
]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One run of `vllm bench forward`; `ranks` > 1 is DP x EP under torchrun."""

    model: str
    cases: list[ForwardCase]
    args: tuple[str, ...] = ()


FORWARD_ARGS = "--kv-len-jitter=0 --iters=10 --samples=5 --skip-tokenizer-init --gpu-memory-utilization=0.92"
FORWARD = {
    "dep_gaps": Forward(model="dsv2lite", cases=DEP_GAPS, args=("--max-model-len", "65536", "--max-num-seqs", "512")),
    **{
        f"v3_L{n}": Forward(
            model=f"dsv3_L{n}",
            cases=V3_SLICE,
            args=("--max-model-len", "16384", "--max-num-seqs", "512", "--moe-backend", "deep_gemm"),
        )
        for n in (2, 4)
    },
}


SKEW = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "zipf", "RACKPLAN_ZIPF": "0.5"}
EPLB = json.dumps({"window_size": 200, "step_interval": 400, "log_balancedness": True, "log_balancedness_interval": 20})


def servers(gpus: int) -> dict[str, Server]:
    last = gpus - 1
    return {
        "dep": dep(gpus, 8100),
        "prefill": nixl(0, 8200, "kv_producer"),
        "decode": nixl(last, 8300, "kv_consumer"),
        "agg8192_graphs512": aggregated(0, 8400, 8192, 512),
        "agg8192_graphs4096": aggregated(last, 8500, 8192, 4096),
        "agg2048_graphs512": aggregated(0, 8600, 2048, 512),
        "agg2048_graphs4096": aggregated(last, 8700, 2048, 4096),
        "skew": dep(gpus, 8800, **SKEW),
        "skew_eplb": dep(gpus, 8900, "--enable-eplb", "--eplb-config", EPLB, **SKEW),
        **order_servers(gpus),
    }


PROXY_PORT = 8000


def loads(gpus: int) -> dict[str, list[Load]]:
    def of(
        server: str, port: int, metrics: tuple[str, ...], *runs: tuple[str, float, int, float], seed: int
    ) -> list[Load]:
        warm = Load(name=f"{server}_warm", port=port, rate=30, prompts=24, seed=seed, metrics=(), kept=False)
        return [warm] + [
            Load(
                name=f"{server}_{tag}",
                port=port,
                rate=rate,
                prompts=n,
                spread=spread,
                seed=seed + i + 1,
                metrics=metrics,
            )
            for i, (tag, rate, n, spread) in enumerate(runs)
        ]

    port = {name: s.port for name, s in servers(gpus).items()}
    plans = {
        "dep": of("dep", port["dep"], ("dep",), ("r8", 8, 160, 0), ("r20", 20, 240, 0), ("r12", 12, 180, 0), seed=1000),
        "pd": of(
            "pd", PROXY_PORT, ("prefill", "decode"), ("r3", 3, 90, 0), ("r6", 6, 150, 0), ("r10", 10, 200, 0), seed=2000
        ),
    }
    for name in (n for n in port if n.startswith("agg") and "graphs" in n):
        plans[name] = of(name, port[name], (name,), ("r6", 6, 120, 0), ("r6var", 6, 120, 0.5), seed=3000)
    for name in ("skew", "skew_eplb"):
        # Long enough before the measured run for EPLB to have moved the experts.
        runs = (("settle", 12, 120, 0.0), ("r12", 12, 180, 0.0))
        plans[name] = of(name, port[name], (name,), *runs, seed=4000)
    return plans | order_loads(gpus)
