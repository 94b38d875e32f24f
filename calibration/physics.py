"""Step time as a sum of physical terms with fitted, non-negative coefficients: the `PoolCost` of every calibration.

The physics (bytes of weights and KV read, multiply-adds, bytes sent) comes from the model's and the GPU's specs; the
data only say how far below the hardware's peak each part runs, and what the fixed and the host's costs are. So a query
outside the measured range still scales as the hardware does. Equations and limits: docs/model/step_time.md.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from rackplan.calibration.coefficients import Coefficients, EngineFix
from rackplan.calibration.experts import experts_touched, replicas_touched
from rackplan.calibration.weight_offload import weight_wait_ms
from rackplan.engine import Deployment, GpuSpec, ModelSpec, Pool
from rackplan.simulator.cost import FloatArray, SharedTime, ShortChunks

CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Token counts that vLLM captures CUDA graphs for by default; beyond 512 the step 16 goes on to the knob's limit."""


def padded_tokens(tokens: int, capture_limit: int) -> int:
    """The captured CUDA-graph size that `tokens` run at; `tokens` itself past the largest."""
    if tokens > capture_limit or tokens <= 0:
        return tokens
    if tokens <= 512:
        return next(s for s in CAPTURE_SIZES if s >= tokens)
    return min(-(-tokens // 16) * 16, capture_limit)


class PhysicalCost:
    """`PoolCost` of one pool from specs and coefficients. `fixes_off`: engine fixes to undo (see EngineFix); `model`,
    `gpu`: what a profile ran in place of the deployment's, e.g. some of the model's layers."""

    def __init__(
        self,
        coefficients: Coefficients,
        deployment: Deployment,
        pool: Pool,
        fixes_off: tuple[EngineFix, ...] = (),
        model: ModelSpec | None = None,
        gpu: GpuSpec | None = None,
    ) -> None:
        # Dual-batch overlap runs on all-to-all kernels alone.
        self.c = coefficients.model_copy(update={"all_to_all": True}) if pool.enable_dbo else coefficients
        self.launch_quantiles = coefficients.launch_quantiles
        self.launch_correlation = coefficients.launch_correlation
        self.short_chunks = ShortChunks(coefficients.short_chunk_tokens, coefficients.short_chunk_pairs)
        self.model: ModelSpec = model or deployment.model_spec
        self.gpu: GpuSpec = gpu or deployment.gpu_spec
        self.pool = pool
        self.drafts = deployment.speculation.draft_tokens
        self.sync_algorithm = deployment.dp_sync.algorithm
        self.width = pool.gpus_per_instance
        m, g, c = self.model, self.gpu, coefficients
        hbm_bytes_ms = g.hbm_tb_s * 1e9
        self._dense_read_ms = (
            m.layers * m.non_expert_read_bytes_per_layer_step / pool.tp / (hbm_bytes_ms * c.dense_read_efficiency)
        )
        self._context_ms = m.decode_kv_read_bytes_per_context_token / pool.tp / (hbm_bytes_ms * c.kv_read_efficiency)
        self._context_ms *= 1 + self.drafts * c.context_query_share
        queries_ms = (1 + self.drafts) * c.decode_query_ms / pool.tp
        self._request_ms = (
            c.decode_request_ms
            + queries_ms
            + m.decode_kv_read_bytes_per_sequence / pool.tp / (hbm_bytes_ms * c.kv_read_efficiency)
        )
        # numpy takes half as long to multiply with an array of no dimension as with a number
        self._decode_cells: Any = np.array(self._request_ms), np.array(self._context_ms)
        self._pair_ms = (c.prefill_pair_ms + sum(f.per_pair_ms for f in fixes_off)) / pool.tp
        self._prefill_context_ms, self._host_request_ms = c.prefill_context_ms, c.host_request_ms
        self._admission_ms, self._admission_token_ms = c.admission_fixed_ms, c.admission_token_ms
        decodes_ms = c.eager_decode_launch_ms if pool.role != "prefill" else 0.0
        self._eager_floor_ms = c.eager_floor_ms + decodes_ms + (c.eager_ep_launch_ms if self.width > 1 else 0.0)
        self._eager_token_ms, self._piecewise_floor_ms = c.eager_token_launch_ms, c.piecewise_floor_ms
        self._capture_limit = pool.max_cudagraph_capture_size
        self._replay_layers = max(0, m.replay_layers - sum(f.full_layers for f in fixes_off))
        self._token_fix_ms = sum(f.per_token_ms for f in fixes_off)
        self._expert_flops = 6.0 * m.hidden * m.expert_intermediate
        self._prefill_flops, self._decode_flops = self._dense_flops("prefill"), self._dense_flops("decode")
        self._dense_flop_rate = self._flop_rate("fp8") * c.dense_flop_efficiency
        self._moe_flop_rate = self._flop_rate("fp4") * c.moe_flop_efficiency
        self._moe_read_rate = g.hbm_tb_s * 1e9 * c.moe_read_efficiency
        self._redundant_experts = deployment.redundant_experts(pool)
        self._keep_shared_numbers()
        self._record_ms = c.eplb_record_ms if deployment.eplb.enabled and self.width > 1 else 0.0
        self.draft_balancedness: Callable[[float], float] | None = None
        shared_ms: Callable[[int, int, int, int, float], SharedTime] = self._shared_time
        if pool.enable_dbo:
            from rackplan.calibration.dual_batch import overlapped  # imports all of vLLM's flags

            shared_ms = overlapped(shared_ms)
        self.shared_ms = lru_cache(maxsize=65536)(shared_ms)
        late = sum(1.0 / i for i in range(1, pool.dep + 1)) - 1.0  # expected extra of the latest of dep ranks
        self._host_fixed_ms = c.host_step_ms + c.host_jitter_ms * late

    def _keep_shared_numbers(self) -> None:
        """What `_shared_time` needs of the models, whose attributes take long to read, as plain numbers."""
        m, c, pool = self.model, self.c, self.pool
        self._dep, self._tp, self._offloads = pool.dep, pool.tp, bool(pool.offload.group_size)
        self._hidden, self._moe_layers, self._all_to_all = m.hidden, m.moe_layers, c.all_to_all
        self._replay_tokens, self._narrow_share = m.replay_tokens_per_hit, self._replay_layers / m.layers
        self._routing = m.routed_experts, m.top_k, c.routing_sigma, self._redundant_experts
        self._top_k, self._expert_bytes = m.top_k, m.bytes_per_routed_expert
        self._step_fixed_ms, self._chunk_ms, self._causal_ms = c.step_fixed_ms, c.prefill_chunk_ms, c.prefill_causal_ms
        self._copies = m.top_k * (self.width - 1) / self.width if c.all_to_all else self.width - 1.0
        self._message_bytes = c.dispatch_bytes + c.combine_bytes
        self._link_rate = self.gpu.nvlink_gb_s / 2 * 1e6 * c.link_efficiency  # one direction
        self._latency_ms = c.comm_fixed_ms + c.comm_rank_ms * math.log2(self.width)
        self._sharpness, self._root = c.roofline_sharpness, 1 / c.roofline_sharpness
        self._draft, self._draft_fixed_ms, self._draft_token_ms = m.draft, c.draft_fixed_ms, c.draft_token_ms
        if draft := self._draft:
            self._draft_experts, self._draft_top_k, self._draft_bytes = draft.experts, draft.top_k, draft.bytes
            self._draft_layer_share = c.draft_layer_share * draft.layers / m.layers

    # -- each rank's own ------------------------------------------------------------------------------------------
    def attention_ms(
        self,
        prefill_tokens: FloatArray,
        prefill_pairs: FloatArray,
        prefill_context: FloatArray,
        decode_requests: FloatArray,
        decode_context: FloatArray,
    ) -> FloatArray:
        prefill = (
            self._pair_ms * prefill_pairs
            + self._prefill_context_ms * prefill_context
            + self._token_fix_ms * prefill_tokens
        )
        is_number = isinstance(decode_context, float)
        request_ms, context_ms = (self._request_ms, self._context_ms) if is_number else self._decode_cells
        own = request_ms * decode_requests
        if not (isinstance(prefill, float) and prefill == 0.0):  # where none prefills, one vector less to add
            own = prefill + own
        total = context_ms * decode_context
        total += own
        return total

    # -- all ranks together ---------------------------------------------------------------------------------------
    def _shared_time(
        self, widest: int, total: int, prefill_tokens: int, prefill_chunks: int, balancedness: float
    ) -> SharedTime:
        # Layers that a prefill runs on its replay window alone see fewer tokens than the others.
        narrow = total - prefill_tokens + min(prefill_tokens, self._replay_tokens * prefill_chunks)
        narrow_share, moe_layers = self._narrow_share, self._moe_layers
        padded = padded_tokens(widest, self._capture_limit)
        # MoE: once over all layers at the full batch, the replayed layers at the narrow one.
        full_ms, full_excess = self._moe_ms(total, moe_layers * (1 - narrow_share), balancedness)
        thin_ms, thin_excess = self._moe_ms(narrow, moe_layers * narrow_share, balancedness)
        prefill_share = prefill_tokens / total if total else 0.0
        dense_ms = self._step_fixed_ms + self._dense_ms(padded, prefill_share) + self._record_ms
        dense_ms += self._chunk_ms * prefill_chunks / self._dep
        if self._causal_ms and prefill_chunks:
            # Exact where the chunks are alike: of unlike ones only the sum is at hand.
            pairs = prefill_tokens * (prefill_tokens / prefill_chunks) / 2
            dense_ms += self._causal_ms * pairs / self._dep / self._tp
        latency_ms, volume_ms = self._communication_ms(padded, prefill_share, narrow_share)
        # All-to-all brings the hottest GPU its tokens' activations too; all-gather brings every GPU the same.
        crowding_ms = volume_ms * (1 / balancedness - 1) if self._all_to_all else 0.0
        target = (dense_ms, full_ms + thin_ms, full_excess + thin_excess + crowding_ms, latency_ms + volume_ms)
        draft_ms = self._draft_ms(widest, total, dense_ms + latency_ms) if self.drafts else 0.0
        wait_ms = self._weight_wait_ms(sum(target)) if self._offloads else 0.0
        return SharedTime(*target, draft_ms, wait_ms)

    def _weight_wait_ms(self, layers_ms: float) -> float:
        """Waiting for experts that lie in host memory, over the step. A layer computes for its share of `layers_ms`, to
        which attention is not counted: the wait is an upper bound where attention is long."""
        m = self.model
        load_ms = m.routed_experts * m.bytes_per_routed_expert / self.width / (self.gpu.host_gb_s * 1e6)
        return weight_wait_ms(
            self.pool.offload,
            layers=m.layers,
            dense_layers=m.dense_layers,
            layer_ms=layers_ms / m.layers,
            load_ms=load_ms,
        )

    def _dense_ms(self, tokens: int, prefill_share: float) -> float:
        flops = prefill_share * self._prefill_flops + (1 - prefill_share) * self._decode_flops
        flop_ms = tokens * flops / self._tp / self._dense_flop_rate
        return self._roofline(self._dense_read_ms, flop_ms)

    def _dense_flops(self, phase: str) -> float:
        """Multiply-adds x 2 of one token outside the routed experts. A prefill token goes through the layers that are
        not replayed; the specs count those alone."""
        m = self.model
        spec_layers = m.layers - (m.replay_layers if phase == "prefill" else 0)
        layers = m.layers - (self._replay_layers if phase == "prefill" else 0)
        routed = (spec_layers - m.dense_layers) * m.top_k * self._expert_flops
        return max(0.1 * m.flops_per_token_dense[phase], m.flops_per_token_dense[phase] - routed) * layers / spec_layers

    def _flop_rate(self, coarsest: str) -> float:
        """Peak flop per ms of the experts' data type, or of `coarsest` where that has more bits: FP4 checkpoints keep
        all but their experts in FP8."""
        dtype = self.model.expert_flop_dtype
        return self.gpu.dense_tflops[coarsest if dtype == "fp4" else dtype] * 1e9

    def _moe_ms(self, tokens: float, layers: float, balancedness: float) -> tuple[float, float]:
        """(time with even load, excess of the hottest GPU) of `layers` MoE layers over `tokens` of all ranks."""
        if tokens <= 0 or layers <= 0:
            return 0.0, 0.0
        touched = replicas_touched(tokens, *self._routing) / self.width
        read_ms = layers * touched * self._expert_bytes / self._moe_read_rate
        flops = tokens * self._top_k / self.width * self._expert_flops
        flop_ms = layers * flops / self._moe_flop_rate
        even = self._roofline(read_ms, flop_ms)
        return even, self._roofline(read_ms, flop_ms / balancedness) - even

    def _communication_ms(self, tokens: int, prefill_share: float, narrow_share: float) -> tuple[float, float]:
        """(latency, time of the bytes) of dispatch and combine of every MoE layer, under even routing. All-gather +
        reduce-scatter moves every rank's tokens to every GPU; all-to-all moves a token to each of its experts that lies
        on another GPU."""
        if self.width == 1:
            return 0.0, 0.0
        layers = self._moe_layers * (1 - prefill_share * narrow_share)
        volume = tokens * self._copies * self._hidden * self._message_bytes * layers
        return self._latency_ms, volume / self._link_rate

    def _draft_ms(self, widest: int, total: int, layers_ms: float) -> float:
        """The draft's experts, with the hottest GPU's tokens where popularity is known; its other work is a constant, a
        part per token, and a share of what as many of the target's layers take beside experts (`layers_ms`: all)."""
        draft = self._draft
        if draft is None:
            return 0.0
        other_ms = self._draft_fixed_ms + self._draft_token_ms * widest
        if self._draft_layer_share:
            other_ms += self._draft_layer_share * layers_ms
        read_bytes_ms = self._moe_read_rate
        if self.draft_balancedness is None:
            touched = experts_touched(total, self._draft_experts, self._draft_top_k) / self.width
            return touched / self._draft_experts * self._draft_bytes / read_bytes_ms + other_ms
        routed = total * self.drafts / (1 + self.drafts)
        touched = replicas_touched(routed, draft.experts, draft.top_k, 0.0, self._redundant_experts) / self.width
        read_ms = touched / draft.experts * draft.bytes / read_bytes_ms
        # An expert of either part does the arithmetic of its bytes.
        expert_flops = draft.bytes / (draft.layers * draft.experts) / self.model.bytes_per_routed_expert
        flops = draft.layers * routed * draft.top_k / self.width * expert_flops * self._expert_flops
        flop_ms = flops / self._moe_flop_rate
        return self._roofline(read_ms, flop_ms / self.draft_balancedness(routed / self.pool.dep)) + other_ms

    def _roofline(self, read_ms: float, flop_ms: float) -> float:
        """Smooth maximum: the two overlap, but not perfectly where they are close."""
        top, other = (read_ms, flop_ms) if read_ms > flop_ms else (flop_ms, read_ms)
        if top == 0.0:
            return 0.0
        return top * (1.0 + (other / top) ** self._sharpness) ** self._root

    # -- host -----------------------------------------------------------------------------------------------------
    def launch_floor_ms(self, widest_tokens: int, prefill_ranks: int) -> float:
        if widest_tokens > self._capture_limit:
            return self._eager_floor_ms + self._eager_token_ms * widest_tokens
        return self._piecewise_floor_ms if prefill_ranks else 0.0

    def host_ms(self, widest_requests: int) -> float:
        return self._host_fixed_ms + self._host_request_ms * widest_requests

    def admission_ms(self, prompt_tokens: int) -> float:
        return self._admission_ms + self._admission_token_ms * prompt_tokens

    def dp_sync_ms(self) -> float:
        ranks = self.pool.dep
        if ranks == 1:
            return 0.0
        if self.sync_algorithm == "ring":
            return self.c.ring_hop_ms * (ranks - 1)
        if self.sync_algorithm == "nccl":
            return self.c.nccl_sync_ms
        return self.c.doubling_round_ms * math.ceil(math.log2(ranks))
