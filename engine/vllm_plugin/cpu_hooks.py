"""What is replaced inside vLLM on the CPU, where a subclass cannot do it, and why. None of it is touched on a GPU.

| replaced | why |
|---|---|
| `current_platform` in `vllm.config.parallel` | `--enable-eplb` is refused where `is_cuda_alike()` is false |
| `CPUUnquantizedExperts.apply` | its kernel ignores the expert map: a rank would compute experts it does not hold |
| `eplb_map_to_physical_and_record` | on the CPU it is the identity: no replica is chosen, no load counted |
| `torch` in EPLB's modules | events and streams of an accelerator, which a host neither has nor needs |

`attach_eplb` gives the CPU model runner the EPLB state that only the GPU runner's load_model sets up. Every function
can be called again in the same process. A name that is not there raises RuntimeError with vLLM's version.
"""

import importlib
import time
import types
from collections.abc import Callable
from typing import Any

import torch

EPLB_MODULES = ("async_worker", "eplb_communicator", "eplb_state", "eplb_utils", "rebalance_execute")
ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
HASH_MULTIPLIER = 2654435769
"""floor(2**32 / golden ratio): as in vLLM's kernel, so that a token picks the same replica on the CPU and on a GPU."""


def _owner(module: str, *names: str) -> Any:
    """The module, after checking that it has `names`."""
    import vllm

    owner = importlib.import_module(module)
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"vLLM {vllm.__version__}: {module} has no {name}, which rackplan replaces on CPU; it knows vLLM 0.32"
            )
    return owner


class _EplbPlatform:
    """The platform as `vllm.config.parallel` sees it."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def accept_eplb() -> None:
    """Lets the options `--enable-eplb` and `--eplb-config` through."""
    parallel = _owner("vllm.config.parallel", "current_platform")
    if not isinstance(parallel.current_platform, _EplbPlatform):
        parallel.current_platform = _EplbPlatform(parallel.current_platform)


def compute_local_experts() -> None:
    """Makes the CPU's experts follow the expert map."""
    name = "CPUUnquantizedExperts"
    experts = getattr(_owner("vllm.model_executor.layers.fused_moe.experts.cpu_moe", name), name)
    if not hasattr(experts.apply, "follows_expert_map"):
        experts.apply = _with_expert_map(experts.apply)


def _with_expert_map(apply: Callable[..., None]) -> Callable[..., None]:
    """Calls `apply` with one row for each pair of a token and a local expert, and adds the rows up by token."""

    def apply_local(
        self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
        expert_map: torch.Tensor | None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if expert_map is None:
            apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, None,
                  *args, **kwargs)  # fmt: skip
            return
        local = expert_map.to(topk_ids.device)[topk_ids.long()]
        token, choice = (local >= 0).nonzero(as_tuple=True)
        output.zero_()
        if not token.numel():
            return
        rows = output.new_empty((token.numel(), output.shape[1]))
        weights = topk_weights[token, choice].unsqueeze(1).contiguous()
        ids = local[token, choice].unsqueeze(1).to(topk_ids.dtype).contiguous()
        apply(self, rows, hidden_states[token].contiguous(), w1, w2, weights, ids, activation, global_num_experts, None,
              *args, **kwargs)  # fmt: skip
        output.index_add_(0, token, rows)

    apply_local.follows_expert_map = True  # type: ignore[attr-defined]
    return apply_local


def run_eplb_on_host() -> None:
    """Routes to physical experts, counts their tokens, and gives EPLB's modules events and streams of the host."""
    _owner(ROUTER, "eplb_map_to_physical_and_record").eplb_map_to_physical_and_record = map_to_physical_and_record
    for name in EPLB_MODULES:
        _owner(f"vllm.distributed.eplb.{name}", "torch").torch = _HostTorch()


def map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Physical expert of each choice, shape and type of `topk_ids` (tokens, top k); adds the choices of tokens that are
    not padding to `expert_load_view` (physical experts,) while `record_enabled`."""
    tokens = topk_ids.shape[0]
    logical = topk_ids.long()
    hashed = (torch.arange(tokens).unsqueeze(1) * HASH_MULTIPLIER) & 0xFFFFFFFF
    physical = logical_to_physical_map[logical, hashed % logical_replica_count[logical].clamp(min=1)]
    if bool(record_enabled):
        counted = tokens if num_unpadded_tokens is None else min(tokens, int(num_unpadded_tokens))
        chosen = physical[:counted].reshape(-1).long()
        chosen = chosen[(chosen >= 0) & (chosen < expert_load_view.shape[0])]
        expert_load_view.index_add_(0, chosen, torch.ones_like(chosen, dtype=expert_load_view.dtype))
    return physical.to(topk_ids.dtype)


def attach_eplb(runner: Any) -> None:
    """What the GPU runner's load_model does for EPLB. Raises RuntimeError for the V2 runner, which has its own EPLB."""
    gpu_runner = _owner("vllm.v1.worker.gpu_model_runner", "EplbState", "get_mixture_of_experts_model")
    if not isinstance(runner, gpu_runner.GPUModelRunner):
        raise RuntimeError("EPLB on CPU needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    runner._moe_model = gpu_runner.get_mixture_of_experts_model(runner.model)
    if runner._moe_model is None:
        raise RuntimeError(f"--enable-eplb: {runner.model_config.model} has no experts to balance; leave it out")
    runner.eplb_state = gpu_runner.EplbState(runner.parallel_config, runner.device)
    runner.eplb_state.device_index = 0  # asserted by the asynchronous worker, used for nothing on the host
    runner.eplb_state.add_model(runner._moe_model, runner.model_config)
    if runner.eplb_state.is_async:
        runner.eplb_state.start_async_loop()


class _HostEvent:
    """A point in the host's time: work on the host is done when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, *args: Any) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, *args: Any) -> None:
        return

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: "_HostEvent") -> float:
        return (end._recorded_s - self._recorded_s) * 1e3


class _HostStream:
    """The host's only stream: everything on it is done in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        return


class _HostTorch(types.ModuleType):
    """torch, with the host in the accelerator's place."""

    Event, Stream = _HostEvent, _HostStream
    accelerator = types.SimpleNamespace(
        current_accelerator=lambda: None,
        current_stream=_HostStream,
        set_stream=lambda stream: None,
        set_device_index=lambda index: None,
        is_available=lambda: False,
    )

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
