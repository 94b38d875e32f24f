"""vLLM's scheduler without a model: a KV connector that has every prompt elsewhere, and the loop around the steps.

The connector is the scheduler's half only; what a worker would report (loads that finished, tokens that were sampled)
is made up by `Loop`, so that a test decides when each request's KV arrives.
"""

import functools
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 128


class Elsewhere(KVConnectorBase_V1):
    """Every prompt of a request named remote-… is to be loaded, asynchronously."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith("remote-") or request.num_preemptions:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


@functools.cache
def engine_config(model: Path, max_num_seqs: int, role: str, async_scheduling: bool) -> Any:
    config = EngineArgs(
        model=str(model),
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "Elsewhere",
            "kv_role": role,
            "kv_connector_module_path": __name__,
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = async_scheduling  # which vLLM turns off on the CPU
    return config


def make_scheduler(
    kind: type[Scheduler],
    model: Path,
    max_num_seqs: int = 8,
    blocks: int = 200,
    role: str = "kv_consumer",
    async_scheduling: bool | None = None,
) -> Scheduler:
    if async_scheduling is None:
        async_scheduling = issubclass(kind, AsyncScheduler)
    config = engine_config(model, max_num_seqs, role, async_scheduling)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


class Loop:
    """Runs a scheduler step by step; `depth` steps are in flight, two with async scheduling."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.in_flight: deque[Any] = deque()
        self.started: list[list[str]] = []
        """Names of the requests that each step computed for the first time."""
        self.seen: set[str] = set()

    def add(self, name: str, prompt: int, output: int) -> None:
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=[7] * prompt, sampling_params=params, pooling_params=None)
        )

    def step(self, received: set[str]) -> None:
        """One step; `received`: requests whose KV arrived while it ran."""
        output = self.scheduler.schedule()
        new = [name for name in output.num_scheduled_tokens if name not in self.seen]
        self.started.append(new)
        self.seen.update(new)
        sampled = {
            name: [9] if self._has_prompt(name) else []
            for name in output.num_scheduled_tokens
        }
        self.in_flight.append((output, sampled, received))
        if len(self.in_flight) >= self.depth:
            self._process(*self.in_flight.popleft())

    def _has_prompt(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_prompt_tokens

    def _process(self, output: Any, sampled: dict[str, list[int]], received: set[str]) -> None:
        names = list(sampled)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=KVConnectorOutput(finished_recving=received or None),
            ),
        )
