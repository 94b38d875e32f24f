"""The spec of a model that lies in a folder, from its config.json: what a served model of one's own is planned with.

Knows mixture-of-experts models whose attention is grouped-query (Qwen3-MoE's shape) or multi-head latent (DeepSeek
V2's and V3's). What a configuration does not say is 0: drafts, state per sequence, bounded replay.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rackplan.engine.errors import InputError

CONFIG = "config.json"
EMBEDDING_BYTES = 2
"""Embeddings, head and KV stay 16 bits wide where the layers are quantised."""

Size = Annotated[int, Field(ge=1)]


class _Config(BaseModel):
    """The keys of a config.json that size a model; the names are the file's."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    max_position_embeddings: Size
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    experts: Size
    intermediate_size: int = Field(0, ge=0)
    n_shared_experts: int | None = None
    first_k_dense_replace: int = Field(0, ge=0)
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    tie_word_embeddings: bool = False
    torch_dtype: str = "bfloat16"
    quantization_config: dict[str, Any] | None = None

    @property
    def layer_bytes(self) -> float:
        """Bytes of one weight inside a layer."""
        if self.quantization_config:
            return 1.0 if self.quantization_config.get("quant_method") == "fp8" else 0.5
        return 4.0 if self.torch_dtype == "float32" else 2.0

    @property
    def flop_dtype(self) -> str:
        return {1.0: "fp8", 0.5: "fp4"}.get(self.layer_bytes, "bf16")

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.kv_lora_rank is None:
            head = self.head_dim or hidden // heads
            return hidden * head * (2 * heads + 2 * (self.num_key_value_heads or heads))
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = hidden * query if self.q_lora_rank is None else self.q_lora_rank * (hidden + query)
        latent = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        return queries + latent + heads * (
            self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim) + self.v_head_dim * hidden
        )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one layer caches for a token."""
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + self.qk_rope_head_dim
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * head * (self.num_key_value_heads or self.num_attention_heads)


def read_model_folder(folder: Path) -> dict[str, Any]:
    """The fields of a `ModelSpec`, without its name. Raises InputError that names the file and the key."""
    config = _read(folder / CONFIG)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    dense_layers = config.first_k_dense_replace
    moe_layers = config.num_hidden_layers - dense_layers
    if moe_layers < 1:
        raise InputError(f"{folder / CONFIG}: first_k_dense_replace={dense_layers} leaves no layer of experts")
    shared = config.n_shared_experts or 0
    every_layer = config.num_hidden_layers * config.attention_weights
    every_layer += moe_layers * (shared * expert + config.hidden_size * config.experts)
    every_layer += dense_layers * 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size
    routed_bytes = moe_layers * config.experts * expert * config.layer_bytes
    tables = 1 if config.tie_word_embeddings else 2
    # A token passes through the head, not through the embedding table, of which it reads one row.
    active = every_layer + moe_layers * config.num_experts_per_tok * expert + embeddings
    kv_bytes = config.num_hidden_layers * config.kv_values_per_token * EMBEDDING_BYTES
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "dense_layers": dense_layers,
        "routed_experts": config.experts,
        "top_k": config.num_experts_per_tok,
        "shared_experts": shared,
        "expert_intermediate": config.moe_intermediate_size,
        "bytes_per_routed_expert": expert * config.layer_bytes,
        "expert_flop_dtype": config.flop_dtype,
        "checkpoint_bytes": routed_bytes + every_layer * config.layer_bytes + tables * embeddings * EMBEDDING_BYTES,
        "host_bytes": 0.0,
        "non_expert_read_bytes_per_layer_step": (every_layer * config.layer_bytes + embeddings * EMBEDDING_BYTES)
        / config.num_hidden_layers,  # with the head
        "flops_per_token_dense": {"prefill": 2.0 * active, "decode": 2.0 * active},
        "kv_bytes_per_token": kv_bytes,
        "state_bytes_per_sequence": 0.0,
        "decode_kv_read_bytes_per_context_token": kv_bytes,
        "decode_kv_read_bytes_per_sequence": 0.0,
        "replay_tokens_per_hit": 0,
        "replay_layers": 0,
        "max_model_len": config.max_position_embeddings,
    }


def _read(path: Path) -> _Config:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give a model's folder") from None
    except ValueError as e:
        raise InputError(f"{path}: not valid JSON ({e}); correct it") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a model's configuration")
    experts = next((data[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if data.get(k)), None)
    if experts is None:
        raise InputError(f"{path}: has no n_routed_experts or num_experts; rackplan plans mixture-of-experts models")
    try:
        return _Config.model_validate({**data, "experts": experts, "torch_dtype": _dtype(data)})
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {key}: {first['msg'].lower()}; correct it") from None


def _dtype(data: dict[str, Any]) -> str:
    """Its newer name is `dtype`."""
    return str(data.get("dtype") or data.get("torch_dtype") or "bfloat16").removeprefix("torch.")
