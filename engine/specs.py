"""Facts about models and GPUs, read from data/models.yaml and data/gpus.yaml, or from a model's folder.

Bytes are bytes, GB are 1e9, TB/s are 1e12: the vendors' units. Every field's provenance is a comment in the data file.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from rackplan.engine.errors import InputError

Device = Literal["cuda", "cpu"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DraftSpec(_Spec):
    """The draft model of speculative decoding. `bytes`: its weights."""

    name: str
    layers: int
    experts: int
    top_k: int
    max_tokens: int
    bytes: float


class ModelSpec(_Spec):
    """One model as it is served. `checkpoint`: what the engine loads, a hub name or a folder; None where none is
    published. `kv_bytes_per_token`: all layers together, in `kv_cache_dtype` as vLLM names it."""

    name: str
    checkpoint: str | None = None
    layers: int
    hidden: int
    attention_heads: int
    dense_layers: int
    routed_experts: int
    top_k: int
    shared_experts: int
    expert_intermediate: int
    bytes_per_routed_expert: float
    bytes_per_routed_expert_fp8: float | None = None
    expert_flop_dtype: str
    checkpoint_bytes: float
    host_bytes: float
    non_expert_read_bytes_per_layer_step: float
    flops_per_token_dense: dict[str, float]
    kv_bytes_per_token: float
    kv_cache_dtype: str = "auto"
    state_bytes_per_sequence: float
    decode_kv_read_bytes_per_context_token: float
    decode_kv_read_bytes_per_sequence: float
    replay_tokens_per_hit: int
    replay_layers: int
    max_model_len: int
    draft: DraftSpec | None = None
    acceptance_length_by_k: dict[str, tuple[float, ...]] = {}

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def routed_expert_bytes(self) -> float:
        """All routed experts of all layers."""
        return self.moe_layers * self.routed_experts * self.bytes_per_routed_expert

    @property
    def replicated_bytes(self) -> float:
        """What every data-parallel rank holds whole: attention, shared experts, embeddings, draft."""
        return self.checkpoint_bytes - self.host_bytes - self.routed_expert_bytes

    @property
    def max_draft_tokens(self) -> int:
        return self.draft.max_tokens if self.draft else 0

    def acceptance_length(self, draft_tokens: int, *, thinking: bool = True) -> float:
        """Tokens that one decode step yields on average, the bonus token counted; 1 without drafts."""
        if draft_tokens == 0:
            return 1.0
        table = self.acceptance_length_by_k.get("thinking_on" if thinking else "thinking_off", ())
        if draft_tokens > len(table):
            raise InputError(
                f"speculation.draft_tokens={draft_tokens}: {self.name} has acceptance data for 0 to {len(table)}"
            )
        return table[draft_tokens - 1]


class GpuSpec(_Spec):
    """One GPU. `host_gb_s`: its link to host memory, one direction. `eager`: vLLM has no CUDA graphs and no async
    scheduling there."""

    name: str
    hbm_gb: float
    hbm_tb_s: float
    dense_tflops: dict[str, float]
    nvlink_gb_s: float
    nvlink_domain_gpus: int
    gpus_per_tray: int
    host_gb_s: float
    usd_per_gpu_hour: float
    eager: bool = False

    @property
    def device(self) -> Device:
        """What vLLM runs on."""
        return "cpu" if self.eager else "cuda"


@cache
def _load(file: str) -> dict[str, dict]:
    # libyaml's parser where PyYAML was built with it: the one in Python takes a tenth of all imports.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((files("rackplan.engine") / "data" / file).read_text(), loader)


MODELS: Mapping[str, ModelSpec] = {n: ModelSpec(name=n, **d) for n, d in _load("models.yaml").items()}
GPUS: Mapping[str, GpuSpec] = {n: GpuSpec(name=n, **d) for n, d in _load("gpus.yaml").items()}


def model_spec(name: str, gpu: str | None = None) -> ModelSpec:
    """The model of that name, or in that folder, as `gpu` serves it: a GPU without FP4 units takes the FP8 experts
    where there are both. Raises InputError that tells which there are."""
    if name not in MODELS:
        return _of_folder(name)
    model = MODELS[name]
    fp8 = model.bytes_per_routed_expert_fp8
    if gpu == "h200" and fp8:
        grown = model.moe_layers * model.routed_experts * (fp8 - model.bytes_per_routed_expert)
        return model.model_copy(
            update={
                "bytes_per_routed_expert": fp8,
                "expert_flop_dtype": "fp8",
                "checkpoint_bytes": model.checkpoint_bytes + grown,
            }
        )
    return model


@cache
def _of_folder(name: str) -> ModelSpec:
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(f"model={name}: unknown; one of {', '.join(MODELS)}, or a model's folder")
    from rackplan.engine.model_folder import read_model_folder  # not needed by the models that are known

    return ModelSpec(name=name, checkpoint=name, **read_model_folder(folder))


def gpu_spec(name: str) -> GpuSpec:
    """The GPU of that name. Raises InputError that tells which there are."""
    if name not in GPUS:
        raise InputError(f"gpu={name}: unknown; one of {', '.join(GPUS)}")
    return GPUS[name]
