"""One stream of requests through vLLM's own scheduler and through the simulator's, in virtual time: no model, no clock.

A step is what a scheduler decides once. Both sides are asked at the same steps, see the same arrivals, and are told the
same tokens; what each decided comes back as a list of `Step`.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from remote_kv import Elsewhere
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rackplan.engine import Pool
from rackplan.engine.vllm_plugin.scheduler import RackplanScheduler
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.instance_model import InstanceModel
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.ranks import Ranks
from rackplan.simulator.request import Request
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.streams import Streams

MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: token ids of its prompt and of its answer, and when it comes: at step `arrival`, or that many steps
    after the end of the request `after`, of which its prompt repeats the first `reuse_tokens`. `load_steps`: its
    prompt's KV is elsewhere and takes that long, and its name begins with remote-; None: it is computed here."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    arrival: int
    after: str | None = None
    session: int = -1
    reuse_tokens: int = 0
    prefix_session: int = -1
    load_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests and the scheduler that they meet. `kv_tokens`: of the KV pool, whole blocks of `block_tokens`."""

    asks: tuple[Ask, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int
    block_tokens: int = 16
    long_prefill_token_threshold: int = 0
    prefill_schedule_interval: int = 1
    enable_prefix_caching: bool = False
    max_new_kv_loads_per_step: int | None = None


@dataclass(slots=True)
class Step:
    """What was decided: (tokens, is it prefill) by request; who was preempted, and who ended with the step."""

    number: int
    scheduled: dict[str, tuple[int, bool]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class Arrivals:
    """Who comes when, as the ends of others become known."""

    def __init__(self, asks: tuple[Ask, ...]) -> None:
        self.left = len(asks)
        self._at: dict[int, list[Ask]] = {}
        self._after: dict[str, list[Ask]] = {}
        for ask in asks:
            if ask.after is None:
                self._at.setdefault(ask.arrival, []).append(ask)
            else:
                self._after.setdefault(ask.after, []).append(ask)

    def at(self, step: int) -> list[Ask]:
        return self._at.pop(step, [])

    def ended(self, names: list[str], step: int) -> None:
        self.left -= len(names)
        for name in names:
            for ask in self._after.pop(name, []):
                self._at.setdefault(step + 1 + ask.arrival, []).append(ask)


def both(stream: Stream, model: Path) -> Iterator[tuple[Step, Step]]:
    """vLLM's steps and the simulator's, side by side until every request has ended on both."""
    return side_by_side(EngineSide(stream, model), SimulatorSide(stream))


def side_by_side(engine: "EngineSide", simulator: "SimulatorSide") -> Iterator[tuple[Step, Step]]:
    """Both asked step by step."""
    for number in range(MOST_STEPS):
        if not engine.arrivals.left and not simulator.arrivals.left:
            return
        yield engine.step(number), simulator.step(number)
    raise AssertionError(f"still running after {MOST_STEPS} steps")


@functools.cache
def _engine_config(model: Path, caching: bool, connector: type | None) -> Any:
    transfer = connector and {
        "kv_connector": connector.__name__,
        "kv_role": "kv_consumer",
        "kv_connector_module_path": connector.__module__,
    }
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
    init_none_hash(sha256)
    return config, StructuredOutputManager(config)


class EngineSide:
    """vLLM's scheduler on a KV cache without tensors and with tokens that are given. It is the subclass with the cap on
    new KV loads, which without a cap decides what vLLM's own decides (test_kv_load_cap.py)."""

    def __init__(self, stream: Stream, model: Path, connector: type | None = None) -> None:
        if any(ask.load_steps is not None for ask in stream.asks):
            connector = Elsewhere
        config, structured = _engine_config(model, stream.enable_prefix_caching, connector)
        knobs = config.scheduler_config
        knobs.max_num_seqs = stream.max_num_seqs
        knobs.max_num_batched_tokens = knobs.max_num_scheduled_tokens = stream.max_num_batched_tokens
        knobs.long_prefill_token_threshold = stream.long_prefill_token_threshold
        blocks = stream.kv_tokens // stream.block_tokens + 1  # the first is vLLM's null block
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=stream.block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        self.scheduler = RackplanScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=structured,
            block_size=stream.block_tokens,
            log_stats=False,
        )
        self.scheduler._kv_load_cap = stream.max_new_kv_loads_per_step
        self.arrivals = Arrivals(stream.asks)
        self._hasher = (
            get_request_block_hasher(stream.block_tokens, sha256) if stream.enable_prefix_caching else None
        )
        self._asks = {ask.name: ask for ask in stream.asks}
        self._wave_step, self._prefill_every = 0, stream.prefill_schedule_interval
        self._loaded_at: dict[str, int] = {}
        self._prefill_end: dict[str, int] = {}
        """By request: what was known of it when it was admitted, tokens; beyond that it decodes."""

    def step(self, number: int) -> Step:
        for ask in self.arrivals.at(number):
            self._add(ask)
        output = self.scheduler.schedule(self._wave_step % self._prefill_every != 0)
        self._wave_step = self._wave_step + 1 if output.num_scheduled_tokens else 0
        requests = self.scheduler.requests
        step = Step(number, preempted=sorted(output.preempted_req_ids or ()))
        for name in step.preempted:
            del self._prefill_end[name]
        sampled: dict[str, list[int]] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            context = request.num_computed_tokens - tokens
            if name not in self._prefill_end:  # a prompt that was loaded computes its last token as a decode does
                loaded = name in self._loaded_at and request.num_preemptions == 0
                self._prefill_end[name] = request.num_tokens - loaded
            step.scheduled[name] = tokens, context < self._prefill_end[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled[name] = [self._asks[name].answer[request.num_output_tokens]] if done else []
        self.scheduler.update_from_output(output, _runner_output(sampled, self._received(number)))
        step.finished = sorted(name for name in sampled if name not in requests)
        self.arrivals.ended(step.finished, number)
        return step

    def _received(self, number: int) -> set[str]:
        """Whose KV arrives in a step."""
        for name, request in self.scheduler.requests.items():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._loaded_at:
                self._loaded_at[name] = number + (self._asks[name].load_steps or 0)
        return {name for name, due in self._loaded_at.items() if due == number}

    def _add(self, ask: Ask) -> None:
        params = SamplingParams(max_tokens=len(ask.answer), ignore_eos=True)
        self.scheduler.add_request(
            EngineRequest(
                request_id=ask.name,
                prompt_token_ids=list(ask.prompt),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )


def _runner_output(sampled: dict[str, list[int]], received: set[str]) -> ModelRunnerOutput:
    names = list(sampled)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=KVConnectorOutput(finished_recving=received or None),
    )


class SimulatorSide:
    """The simulator's ranks, one of them, driven as an instance drives them."""

    def __init__(self, stream: Stream) -> None:
        pool = Pool(
            role="aggregated",
            instances=1,
            dep=1,
            max_num_batched_tokens=stream.max_num_batched_tokens,
            max_num_seqs=stream.max_num_seqs,
            long_prefill_token_threshold=stream.long_prefill_token_threshold,
            prefill_schedule_interval=stream.prefill_schedule_interval,
            max_new_kv_loads_per_step=stream.max_new_kv_loads_per_step,
            enable_prefix_caching=stream.enable_prefix_caching,
        )
        model = InstanceModel(
            pool=pool,
            cost=None,  # type: ignore[arg-type]  # no step is timed
            kv_tokens=stream.kv_tokens,
            acceptance=Acceptance(0, 1.0, Streams(0)),
            replay_tokens=0,
            balancedness=lambda tokens: 1.0,
            make_cache=SessionCache,
        )
        self.ranks = Ranks(model, memoryview(bytearray(8)).cast("q"), memoryview(bytearray(8)).cast("q"))
        self.arrivals = Arrivals(stream.asks)
        self._ids = count()
        self._names: dict[Sequence, str] = {}
        self._load_steps: dict[Sequence, int] = {}
        self._loaded: dict[int, list[Sequence]] = {}

    def step(self, number: int) -> Step:
        ranks, batch = self.ranks, self.ranks.batch
        self._arrive(number)
        before = {seq: seq.preemptions for seq in self._names}
        if batch.step >= batch.roomy_until:
            ranks.preempt_for_growth()
        plans = ranks.plan(number, number + 1)
        for seq in ranks.begun_loads:
            self._loaded.setdefault(number + self._load_steps[seq] + 1, []).append(seq)
        ranks.begun_loads.clear()
        step = Step(number, preempted=sorted(self._names[s] for s, n in before.items() if s.preemptions > n))
        for seq in ranks.queues[0].decoding:
            step.scheduled[self._names[seq]] = 1, False
        for _, chunks, _ in plans.values():
            for seq, tokens in chunks:
                step.scheduled[self._names[seq]] = tokens, True
        if step.scheduled:
            ranks.commit(plans, 1)
        else:
            ranks.begin_wave()
        step.finished = sorted(map(self._names.pop, ranks.ended))
        ranks.started.clear()
        ranks.ended.clear()
        self.arrivals.ended(step.finished, number)
        return step

    def _arrive(self, number: int) -> None:
        for seq in self._loaded.pop(number, []):
            seq.ready_ns = number
            self.ranks.end_load(seq)
        for ask in self.arrivals.at(number):
            request = Request(
                next(self._ids),
                number,
                len(ask.prompt),
                len(ask.answer),
                session=ask.session,
                reuse_tokens=ask.reuse_tokens,
                prefix_session=ask.prefix_session,
            )
            seq = Sequence(request, 0, number, request.input_tokens)
            seq.kv_elsewhere = ask.load_steps is not None
            self._names[seq] = ask.name
            self._load_steps[seq] = self._steps_to_load(ask)
            self.ranks.add(seq)

    def _steps_to_load(self, ask: Ask) -> int:
        return ask.load_steps or 0
