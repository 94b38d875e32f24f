"""vLLM's schedulers with two additions: a log of every step, and a cap on new KV loads per step.

`vllm serve --scheduler-cls rackplan.engine.vllm_plugin.scheduler.RackplanScheduler`, or `.RackplanAsyncScheduler` with
async scheduling. The file needs vLLM and the standard library alone, so it can also be mounted as one module
`rackplan_scheduler`. What it reads from the environment:

RACKPLAN_STEP_LOG_DIR               folder of the logs; absent: nothing is logged
RACKPLAN_SERVER_NAME                prefix of the files, `engine` if absent: steps_{server}.dp{rank}.jsonl
RACKPLAN_REVISION                   copied into the configuration that is logged
RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP  requests whose remote KV has arrived that may start running in one step; absent: all

The first line of a log is the running configuration, {"config": {...}}, which config_{server}.dp{rank}.json repeats;
each line after it is a step that had tokens to compute. A file of an earlier start is replaced. Steps without tokens
(waiting for KV) and the dummy batches of idle DP ranks are not logged: vLLM does not tell the scheduler of them.
"""

import contextlib
import json
import os
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

CAP = "RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP"
LOG_DIR = "RACKPLAN_STEP_LOG_DIR"
HOOKS = ("schedule", "update_from_output", "_handle_blocked_waiting_request")
"""Methods of vLLM's scheduler that are overridden here; the last one is private and the one that admits loaded KV."""

CONFIG = {
    "model": "model_config.model",
    "max_model_len": "model_config.max_model_len",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "async_scheduling": "scheduler_config.async_scheduling",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "prefill_schedule_interval": "scheduler_config.prefill_schedule_interval",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_rank": "parallel_config.data_parallel_index",
    "enable_expert_parallel": "parallel_config.enable_expert_parallel",
    "enable_eplb": "parallel_config.enable_eplb",
    "enable_dbo": "parallel_config.enable_dbo",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "kv_cache_memory_bytes": "cache_config.kv_cache_memory_bytes",
    "num_gpu_blocks": "cache_config.num_gpu_blocks",
    "block_size": "cache_config.block_size",
    "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
}
"""Name in the log, and where vLLM's own configuration has it."""
SPECULATIVE = (
    "method",
    "num_speculative_tokens",
    "model",
    "rejection_sample_method",
    "synthetic_acceptance_length",
    "enable_adaptive_verification",
)


def running_config(vllm_config: Any, scheduler_cls: str, max_new_kv_loads: int | None) -> dict[str, Any]:
    """The engine's configuration as it runs, after vLLM has filled in its defaults.

    Raises RuntimeError, naming vLLM's version, where a setting is not where 0.32 and 0.33 keep it.
    """
    try:
        config = {name: _at(vllm_config, path) for name, path in CONFIG.items()}
        drafter, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
        return config | {
            "eplb": asdict(vllm_config.parallel_config.eplb_config),
            "offload": asdict(vllm_config.offload_config),
            "speculative": None if drafter is None else {name: _at(drafter, name) for name in SPECULATIVE},
            "kv_role": None if transfer is None else transfer.kv_role,
            "kv_connector": None if transfer is None else transfer.kv_connector,
            "max_new_kv_loads_per_step": max_new_kv_loads,
            "scheduler_cls": scheduler_cls,
            "vllm_version": vllm.__version__,
            "revision": os.environ.get("RACKPLAN_REVISION"),
        }
    except AttributeError as error:
        raise RuntimeError(f"vLLM {vllm.__version__}: {error}; rackplan's scheduler knows 0.32 and 0.33") from error


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def kv_load_cap(loads_kv: bool) -> int | None:
    """RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP; None where there is no cap.

    Raises ValueError if it is no positive integer, or on an engine that loads no KV, where it would do nothing.
    """
    text = os.environ.get(CAP, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{CAP}={text}: must be an integer of at least 1; unset it for no cap")
    if not loads_kv:
        raise ValueError(f"{CAP}={text}: this engine loads no KV (--kv-transfer-config names no consumer); unset it")
    return int(text)


class StepLog:
    """One rank's log file; a step is written when its output has been processed.

    Raises ValueError at construction if the folder cannot be written. A write that fails later (a full disk) ends the
    log with one error message and leaves serving alone.
    """

    def __init__(self, folder: Path, rank: int, config: dict[str, Any]) -> None:
        server = os.environ.get("RACKPLAN_SERVER_NAME", "engine")
        text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        self.path = folder / f"steps_{server}.dp{rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"config_{server}.dp{rank}.json").write_text(text + "\n", encoding="utf-8")
            self._file = self.path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ValueError(f"{LOG_DIR}={folder}: cannot be written ({error.strerror}); name another folder") from None
        self._steps = 0
        self._pending: deque[tuple[Any, dict[str, Any], float]] = deque()
        self._last_output_s: float | None = None
        self._write(f'{{"config": {text}}}\n')

    def scheduled(self, output: Any, step: dict[str, Any], begin_s: float, end_s: float) -> None:
        """A step was planned from `begin_s` to `end_s`, monotonic seconds."""
        self._steps += 1
        step = {"step": self._steps, "t_s": begin_s} | step | {"schedule_ms": 1e3 * (end_s - begin_s)}
        self._pending.append((output, step, end_s))

    def processed(self, output: Any, begin_s: float, idle_after: bool) -> None:
        """The step's output was processed, from `begin_s` to now; `idle_after`: nothing is left to run."""
        if not self._pending or self._pending[0][0] is not output:
            return
        _, step, scheduled_s = self._pending.popleft()
        step["execute_ms"] = 1e3 * (begin_s - scheduled_s)
        step["update_ms"] = 1e3 * (time.monotonic() - begin_s)
        step["gap_ms"] = None if self._last_output_s is None else 1e3 * (begin_s - self._last_output_s)
        self._last_output_s = None if idle_after else begin_s
        self._write(json.dumps(step) + "\n")

    def paused(self) -> None:
        """Nothing could be scheduled: the time to the next output is not a step's."""
        if not self._pending:
            self._last_output_s = None

    def _write(self, line: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(line)
        except OSError as error:
            init_logger(f"vllm.{__name__}").error("%s: the step log ends here: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):  # what is still in the buffer is lost with the disk
                self._file.close()


class RackplanScheduler(Scheduler):
    """vLLM's scheduler with the step log and the cap, for engines without async scheduling.

    Raises ValueError at construction if its environment is wrong or it is the wrong one of the two classes,
    RuntimeError if vLLM lacks a hook; each ends the engine's start.
    """

    for_async_scheduling = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        missing = [name for name in HOOKS if not hasattr(Scheduler, name)]
        if missing:
            raise RuntimeError(
                f"vLLM {vllm.__version__} has no Scheduler.{missing[0]}; rackplan's scheduler knows 0.32 and 0.33"
            )
        super().__init__(*args, **kwargs)
        if bool(self.scheduler_config.async_scheduling) != self.for_async_scheduling:
            state, other = ("off", RackplanScheduler) if self.for_async_scheduling else ("on", RackplanAsyncScheduler)
            raise ValueError(
                f"--scheduler-cls {type(self).__name__}: async scheduling is {state} here; use {other.__name__}"
            )
        transfer = self.vllm_config.kv_transfer_config
        self._kv_load_cap = kv_load_cap(loads_kv=transfer is not None and transfer.is_kv_consumer)
        # Requests whose remote KV arrived and that do not run yet, and those that were let through in this step.
        self._kv_arrived: set[str] = set()
        self._let_through: list[Any] = []
        self._step_log: StepLog | None = None
        if folder := os.environ.get(LOG_DIR):
            kind = type(self)
            config = running_config(self.vllm_config, f"{kind.__module__}.{kind.__qualname__}", self._kv_load_cap)
            self._step_log = StepLog(Path(folder), config["data_parallel_rank"], config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's step plan, logged."""
        begin_s = time.monotonic()
        output = super().schedule(*args, **kwargs)
        end_s = time.monotonic()
        kv_loads = self._settle_kv_loads()
        if self._step_log is None:
            return output
        if output.total_num_scheduled_tokens:
            self._step_log.scheduled(output, self._describe(output) | {"kv_loads": kv_loads}, begin_s, end_s)
        else:
            self._step_log.paused()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, timed."""
        if self._step_log is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        begin_s = time.monotonic()
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._step_log.processed(scheduler_output, begin_s, idle_after=not self.has_unfinished_requests())
        return result

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Whether `request` may be scheduled now. vLLM asks for each waiting request in turn, and one that is refused
        keeps its place: in the next step it is asked for again before any that arrived after it, so none starves."""
        if not self._kv_has_arrived(request):
            return super()._handle_blocked_waiting_request(request)
        if self._kv_load_cap is not None and self._kv_loads() >= self._kv_load_cap:
            return False
        self._kv_arrived.add(request.request_id)
        ready = super()._handle_blocked_waiting_request(request)
        if ready:
            self._let_through.append(request)
        return ready

    def _kv_has_arrived(self, request: Any) -> bool:
        """A load that failed does not count: its prompt is computed here like any other."""
        name = request.request_id
        return name in self._kv_arrived or (
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and name in self.finished_recving_kv_req_ids
            and name not in self.failed_recving_kv_req_ids
        )

    def _kv_loads(self) -> int:
        """Requests with loaded KV that this step admitted; one that was let through may still have found no room."""
        return sum(request.status == RequestStatus.RUNNING for request in self._let_through)

    def _settle_kv_loads(self) -> int:
        """The step's count of new KV loads; forgets those that run now and those that were aborted."""
        if not self._kv_arrived:
            return 0
        count = self._kv_loads()
        self._kv_arrived -= {r.request_id for r in self._let_through if r.status == RequestStatus.RUNNING}
        self._kv_arrived &= self.requests.keys()
        self._let_through.clear()
        return count

    def _describe(self, output: Any) -> dict[str, Any]:
        """What the step computes. A request is in its prefill while tokens are missing that were known before the step:
        the prompt's, and after a preemption those it had generated. schedule() has already advanced the counters."""
        prefill, decodes, decode_tokens, decode_context = [], 0, 0, 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            context = request.num_computed_tokens - tokens
            if context < max(request.num_prompt_tokens, request.num_tokens - 1):
                prefill.append((tokens, context))
            else:
                decodes += 1
                decode_tokens += tokens
                decode_context += context
        running, waiting = self.get_request_counts()
        return {
            "prefill": prefill,
            "decode_requests": decodes,
            "decode_tokens": decode_tokens,
            "decode_context_tokens": decode_context,
            "running": running,
            "waiting": waiting,
            "kv_usage": self.kv_cache_manager.usage,
            "preempted": len(output.preempted_req_ids or ()),
        }


class RackplanAsyncScheduler(RackplanScheduler, AsyncScheduler):
    """The same for engines with async scheduling; a step's time is then the gap between outputs, `gap_ms`."""

    for_async_scheduling = True
