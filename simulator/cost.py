"""What the simulator must know of an engine's speed: the `PoolCost` protocol, which calibrations implement.

A step of an instance is lockstep over its data-parallel ranks. Its GPU time is the slowest rank's attention plus what
all ranks go through together (dense layers at the padded batch, MoE, communication, draft). The host adds a launch
floor, its own work and the DP sync; `step_wall_ms` in step.py says how they overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rackplan.engine import Deployment, Pool

if TYPE_CHECKING:  # numpy's random numbers, which it needs, take long to import
    from rackplan.simulator.rearrange import Rearrangement

FloatArray = np.ndarray


class SharedTime(NamedTuple):
    """GPU time that all ranks of an instance share in one step, ms. `ep_imbalance`: the hottest rank's excess;
    `weight_wait`: layers that wait for their weights from host memory."""

    dense: float
    moe: float
    ep_imbalance: float
    communication: float
    draft: float
    weight_wait: float = 0.0


class PlacedAt(NamedTuple):
    """Which placement of the experts serves. `linear`: blocks in order, as before EPLB's first; `age_steps`: since the
    middle of the window it was made from, None for its mean age while EPLB runs; `drift_per_step`: see ExpertLoad."""

    linear: bool = False
    age_steps: float | None = None
    drift_per_step: float = 0.0


STEADY = PlacedAt()
"""What EPLB as deployed holds up, or blocks where it is off, under popularity that does not drift."""


class ShortChunks(NamedTuple):
    """Prefill chunks of up to `tokens` new ones, which attention takes as it takes decodes: each pair of a query and a
    token before it counts as `pairs` of a longer chunk's, and what is cached is not worked on besides."""

    tokens: int = 0
    pairs: float = 1.0


class PoolCost(Protocol):
    """Step costs of one pool, bound to its width, drafts and options. All times are ms, all coefficients >= 0.

    `launch_quantiles`: how far the launches of steps with prompts spread, as quantiles of launch / mean launch at equal
    shares from 0 to 1; empty where a launch always takes its mean. `launch_correlation`: of one draw with the next.
    `short_chunks`: how `chunk_work` counts them.
    """

    launch_quantiles: tuple[float, ...]
    launch_correlation: float
    short_chunks: ShortChunks

    def attention_ms(
        self,
        prefill_tokens: FloatArray,
        prefill_pairs: FloatArray,
        prefill_context: FloatArray,
        decode_requests: FloatArray,
        decode_context: FloatArray,
    ) -> FloatArray:
        """Rank-local GPU time, elementwise over arrays of any one shape, or numbers; linear in what decodes, and a rank
        with nothing takes none.

        prefill_tokens: new tokens in this step. prefill_pairs, prefill_context: sums of `chunk_work` over chunks.
        decode_requests: decoding requests. decode_context: sum of their context tokens.
        """
        ...

    def shared_ms(
        self, widest_tokens: int, total_tokens: int, prefill_tokens: int, prefill_chunks: int, balancedness: float
    ) -> SharedTime:
        """Time shared by all ranks. `widest_tokens`: tokens of the fullest rank (drafts counted), to which CUDA graphs
        pad the others; `total_tokens`: over all ranks, of which `prefill_tokens` are prompt tokens in `prefill_chunks`
        chunks; `balancedness`: mean / max of routed tokens per GPU, 0 to 1.
        """
        ...

    def launch_floor_ms(self, widest_tokens: int, prefill_ranks: int) -> float:
        """Least wall time of a step by CUDA-graph mode: the host cannot launch its kernels faster. `prefill_ranks`:
        ranks that prefill in it; the mean of one rank's launch, whatever their number."""
        ...

    def host_ms(self, widest_requests: int) -> float:
        """CPU work of one step on the rank with most requests: schedule, prepare inputs, process outputs."""
        ...

    def admission_ms(self, prompt_tokens: int) -> float:
        """CPU work of admitting one request whose KV is at hand; grows with the prompt's length."""
        ...

    def dp_sync_ms(self) -> float:
        """The step's all-reduce over DP ranks on the CPU; 0 for one rank."""
        ...


class PassedOn:
    """A `PoolCost` that says what `cost` does, for those that replace a part of it."""

    def __init__(self, cost: PoolCost) -> None:
        self.launch_quantiles, self.launch_correlation = cost.launch_quantiles, cost.launch_correlation
        self.short_chunks = cost.short_chunks
        self.attention_ms, self.host_ms, self.launch_floor_ms = cost.attention_ms, cost.host_ms, cost.launch_floor_ms
        self.shared_ms: Callable[..., SharedTime] = cost.shared_ms
        self.admission_ms, self.dp_sync_ms = cost.admission_ms, cost.dp_sync_ms


def chunk_work(short: ShortChunks, new: int, cached: int) -> tuple[float, int]:
    """(pairs, context) of a chunk of `new` tokens after `cached` ones: new x (cached + new / 2), and what is cached."""
    pairs = new * (cached + 0.5 * new)
    return (short.pairs * pairs, 0) if new <= short.tokens else (pairs, cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """KV hand-over from prefill to decode. `setup_ms`: handshake and orchestration of one request;
    `per_block_ms`: descriptor work per KV block; `gb_per_s`: one GPU's link, shared by the transfers in flight;
    `block_tokens`: tokens per transferred block. In pull mode `per_block_ms` runs on the decode worker's thread.
    `counts_steps`: the decode engine's steps that a hand-over waits for come on top (kv_transfer.steps_waited); where
    not, `setup_ms` holds them at whatever length they had.
    """

    setup_ms: float
    per_block_ms: float
    gb_per_s: float
    block_tokens: int
    counts_steps: bool = False


class Calibration(Protocol):
    """An engine's speed, as measured. `frontend_ms`: API server, tokeniser and first-chunk delivery per request.
    `frontend_token_ms`, `frontend_turn_ms`: API server's work on a token that it hands on, and on each turn of a
    request that waits for it (simulator/frontend.py); the turns are part of `frontend_ms`."""

    name: str
    frontend_ms: float
    frontend_token_ms: float
    frontend_turn_ms: float

    def pool_cost(self, deployment: Deployment, pool: Pool, placed: PlacedAt = STEADY) -> PoolCost:
        """Step costs of `pool`. Raises InputError where the deployment is not of the calibrated model and GPU."""
        ...

    def rearrangement(
        self, deployment: Deployment, pool: Pool, *, first: bool, drift_per_step: float
    ) -> "Rearrangement":
        """One rearrangement of EPLB on an instance of `pool`. `first`: from the blocks that the engine starts with."""
        ...

    def transfer_cost(self, deployment: Deployment) -> TransferCost:
        """What handing a prompt's KV over costs."""
        ...

    def balancedness(
        self, deployment: Deployment, pool: Pool, tokens_per_rank: float, placed: PlacedAt = STEADY
    ) -> float:
        """Expected mean / max of routed tokens per GPU in a step of `pool`."""
        ...
