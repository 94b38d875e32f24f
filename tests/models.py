"""Small costs and workloads with known answers, for the laws."""

from collections.abc import Iterator, Sequence

import numpy as np

from rackplan.engine import Deployment, Pool, parse_deployment, plan_memory
from rackplan.simulator.cost import STEADY, PlacedAt, SharedTime, ShortChunks, TransferCost
from rackplan.simulator.load import Load, Source
from rackplan.simulator.rearrange import Rearrangement
from rackplan.simulator.request import Request
from rackplan.simulator.streams import Streams


class LinearCost:
    """Step = fixed + per token of the fullest rank + attention by pairs and context; host and floors as given."""

    launch_quantiles: tuple[float, ...] = ()
    launch_correlation = 0.0
    short_chunks = ShortChunks()

    def __init__(self, fixed_ms=3.0, token_ms=0.01, context_ms=1e-6, host=0.0, sync=0.0, admission=0.0, floor=0.0):
        self.fixed_ms, self.token_ms, self.context_ms = fixed_ms, token_ms, context_ms
        self.host, self.sync, self.admission, self.floor = host, sync, admission, floor

    def attention_ms(self, prefill_tokens, prefill_pairs, prefill_context, decode_requests, decode_context):
        return 1e-7 * prefill_pairs + 1e-3 * decode_requests + self.context_ms * decode_context

    def shared_ms(self, widest_tokens, total_tokens, prefill_tokens, prefill_chunks, balancedness):
        moe = 0.5
        return SharedTime(self.fixed_ms + self.token_ms * widest_tokens, moe, moe / balancedness - moe, 0.0, 0.0)

    def launch_floor_ms(self, widest_tokens, prefill_ranks):
        return self.floor if prefill_ranks else 0.0

    def host_ms(self, widest_requests):
        return self.host

    def admission_ms(self, prompt_tokens):
        return self.admission

    def dp_sync_ms(self):
        return self.sync


class ServiceCost(LinearCost):
    """One server: a prefill step of n tokens takes n microseconds, whatever else."""

    def attention_ms(self, prefill_tokens, prefill_pairs, prefill_context, decode_requests, decode_context):
        return 1e-3 * prefill_tokens + 0.0 * decode_context

    def shared_ms(self, widest_tokens, total_tokens, prefill_tokens, prefill_chunks, balancedness):
        return SharedTime(0.0, 0.0, 0.0, 0.0, 0.0)


class FakeCalibration:
    name = "fake"
    frontend_ms = 0.0
    rearrange_ms, rearrange_link_ms = 1000.0, 100.0
    frontend_token_ms = frontend_turn_ms = 0.0

    def __init__(self, cost=None, transfer: TransferCost | None = None, balance: float = 1.0) -> None:
        self.cost = cost or LinearCost()
        self.transfer = transfer or TransferCost(setup_ms=5.0, per_block_ms=0.001, gb_per_s=50.0, block_tokens=64)
        self.balance = balance

    def pool_cost(self, deployment: Deployment, pool: Pool, placed: PlacedAt = STEADY):
        return self.cost

    def rearrangement(self, deployment: Deployment, pool: Pool, *, first: bool, drift_per_step: float):
        return Rearrangement(self.rearrange_ms, self.rearrange_link_ms)

    def transfer_cost(self, deployment: Deployment) -> TransferCost:
        return self.transfer

    def balancedness(
        self, deployment: Deployment, pool: Pool, tokens_per_rank: float, placed: PlacedAt = STEADY
    ) -> float:
        """Blocks have half the balance, and drift takes the more the older the placement is."""
        if placed.linear:
            return self.balance / 2
        return self.balance / (1 + placed.drift_per_step * (placed.age_steps or 0.0))


class GivenRequests:
    """A workload of given requests that come by themselves."""

    name = "given"

    def __init__(self, requests: Sequence[Request], primed: Sequence[tuple[int, int]] = ()) -> None:
        self.requests, self._primed = requests, list(primed)

    def source(self, load: Load, duration_s: float, streams: Streams) -> Source:
        return self

    def arrivals(self) -> Iterator[Request]:
        return iter(self.requests)

    def finished(self, request: Request, now_ns: int) -> list[Request]:
        return []

    def primed(self) -> list[tuple[int, int]]:
        return self._primed


def requests(arrivals_s, inputs, outputs) -> list[Request]:
    n = len(arrivals_s)
    inputs, outputs = np.broadcast_to(inputs, n), np.broadcast_to(outputs, n)
    return [
        Request(i, round(t * 1e9), int(a), int(b))
        for i, (t, a, b) in enumerate(zip(arrivals_s, inputs, outputs, strict=True))
    ]


def aggregated(*, model="deepseek-v2-lite", gpu="h200", dep=1, instances=1, **pool) -> Deployment:
    return parse_deployment(
        {"model": model, "gpu": gpu, "pools": [{"role": "aggregated", "instances": instances, "dep": dep, **pool}]}
    )


def disaggregated(*, prefill: dict | None = None, decode: dict | None = None, **top) -> Deployment:
    return parse_deployment(
        {
            "model": "deepseek-v2-lite",
            "gpu": "h200",
            "pools": [
                {"role": "prefill", "instances": 2, "dep": 1, **(prefill or {})},
                {"role": "decode", "instances": 1, "dep": 2, **(decode or {})},
            ],
            **top,
        }
    )


def with_kv_tokens(deployment: Deployment, role: str, tokens: int) -> Deployment:
    """The deployment with `gpu_memory_utilization` set so that a rank of `role` holds about `tokens` of KV."""
    pools = []
    for pool in deployment.pools:
        if pool.role == role:
            spare = (
                plan_memory(deployment, pool).kv_pool_gib * 2**30 - tokens * deployment.model_spec.kv_bytes_per_token
            )
            hbm = deployment.gpu_spec.hbm_gb * 1e9
            pool = pool.model_copy(update={"gpu_memory_utilization": pool.gpu_memory_utilization - spare / hbm})
        pools.append(pool)
    return deployment.model_copy(update={"pools": tuple(pools)})
