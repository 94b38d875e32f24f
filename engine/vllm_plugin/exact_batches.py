"""Times exact batches inside the real engine, without its scheduler, for engines that have no `vllm bench forward`.

python -m rackplan.engine.vllm_plugin.exact_batches --model FOLDER --case NAME=[N*]Q[@K][,...] ... --out CSV [--ranks R]

Each case is a batch on every rank: N chunks of Q new tokens whose KV length, with them, is K (one without N*, Q without
@K), and N decodes of one token at KV length K: `mix=256,16*1@512` is a prompt of 256 tokens beside 16 decodes. The
command starts an engine (random weights where the folder holds none, eager mode; several ranks are data and expert
parallel, in lockstep), runs the cases and appends a row as each is done; cases that the CSV has are left out. The time
is the wall time of execute_model and sampling, the maximum over ranks, of `samples` x `iters` runs after two that are
not counted; spread_pct is the range of the samples' medians in percent of the median, as `vllm bench forward` has it.
"""

import argparse
import asyncio
import gc
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackplan.engine.errors import InputError
from rackplan.engine.forward_table import append_row, done_cases, row_of
from rackplan.engine.profile_cases import ForwardCase

WARM_UP = 2


def parse_case(text: str) -> ForwardCase:
    """NAME=[N*]Q[@K][,...]. Raises InputError on anything but equal chunks, equal decodes, or both."""
    name, _, batch = text.partition("=")
    chunks, decodes = (1, 0, 0), (0, 0)
    for part in batch.split(","):
        count, _, lengths = part.rpartition("*")
        new, _, kv = lengths.partition("@")
        numbers = [count or "1", new, kv or new]
        if not name or not all(n.isdecimal() and int(n) for n in numbers) or int(numbers[2]) < int(new):
            raise InputError(f"--case {text}: must be NAME=[N*]Q[@K][,...] with K at least Q, e.g. mix=256,16*1@512")
        n, q, k = map(int, numbers)
        if q == 1 and k > 1 and not decodes[0]:
            decodes = n, k
        elif not chunks[1] and (n == 1 or q > 1):
            chunks = n, q, k - q
        else:
            raise InputError(f"--case {text}: {part} is a second kind of chunk or of decode; one of each a case")
    return ForwardCase(
        own_name=name,
        chunks=chunks[0],
        new_tokens=chunks[1],
        context_tokens=chunks[2],
        decode_batch=decodes[0],
        decode_kv_len=decodes[1],
    )


class ExactBatches:
    """vLLM worker extension: `collective_rpc` calls its methods on every worker."""

    def kv_capacity(self) -> tuple[list[int], int]:
        """Block size in tokens of each KV group, and the number of blocks that they share."""
        config = self.model_runner.kv_cache_config  # type: ignore[attr-defined]
        return [group.kv_cache_spec.block_size for group in config.kv_cache_groups], config.num_blocks

    def time_exact_batch(self, requests: list[tuple[int, int]], count: int) -> list[float]:
        """Wall times in us of `count` runs, the maximum over data-parallel ranks, of a batch of `requests`."""
        import torch
        from vllm.distributed.parallel_state import get_dp_group

        times = []
        for run in range(WARM_UP + count):
            batch, finish = self._plan(requests, run)
            begin = time.perf_counter()
            output = self.model_runner.execute_model(batch)  # type: ignore[attr-defined]
            if output is None:
                output = self.model_runner.sample_tokens(None)  # type: ignore[attr-defined]
            if hasattr(output, "get_output"):  # asynchronous output: wait for it
                output.get_output()
            times.append((time.perf_counter() - begin) * 1e6)
            self.model_runner.execute_model(finish)  # type: ignore[attr-defined]
        slowest = torch.tensor(times[WARM_UP:], dtype=torch.float64)
        if get_dp_group().world_size > 1:
            torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX, group=get_dp_group().cpu_group)
        return slowest.tolist()

    def _plan(self, requests: list[tuple[int, int]], run: int) -> tuple[Any, Any]:
        """What the scheduler would have handed on: a batch of random tokens, and the step that frees its requests."""
        import numpy as np
        from vllm.distributed.parallel_state import get_dp_group
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        block_sizes, _ = self.kv_capacity()
        vocabulary = self.model_runner.model_config.get_vocab_size()  # type: ignore[attr-defined]
        random = np.random.default_rng((run, get_dp_group().rank_in_group))
        free = itertools.count(1)  # block 0 is vLLM's own
        batch, finish = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
        for i, (new, kv) in enumerate(requests):
            name = f"exact-{run}-{i}"
            tokens = random.integers(vocabulary, size=kv).tolist()
            batch.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=tokens,
                    prefill_token_ids=tokens,
                    mm_features=[],
                    sampling_params=SamplingParams(max_tokens=16, temperature=0.0),
                    pooling_params=None,
                    block_ids=tuple([next(free) for _ in range(-(-kv // size))] for size in block_sizes),
                    num_computed_tokens=kv - new,
                    lora_request=None,
                )
            )
            batch.num_scheduled_tokens[name] = new
        batch.total_num_scheduled_tokens = sum(batch.num_scheduled_tokens.values())
        batch.num_common_prefix_blocks = [0] * len(block_sizes)
        finish.finished_req_ids = set(batch.num_scheduled_tokens)
        return batch, finish


def start_engine(model: Path, cases: Sequence[ForwardCase], ranks: int) -> Any:
    """An engine whose limits just hold the cases. On the CPU the KV pool is VLLM_CPU_KVCACHE_SPACE GiB, 1 if unset."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    has_weights = any(model.glob("*.safetensors")) or any(model.glob("*.bin"))
    longest = max(kv for case in cases for _, kv in case.requests)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            load_format="auto" if has_weights else "dummy",
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=longest + 16,
            max_num_seqs=max(len(case.requests) for case in cases),
            max_num_batched_tokens=max(longest + 16, *(case.tokens for case in cases)),
            data_parallel_size=ranks,
            enable_expert_parallel=ranks > 1,
            worker_extension_cls=f"{__spec__.name}.{ExactBatches.__name__}",
        )
    )


async def measure(model: Path, cases: Sequence[ForwardCase], ranks: int, samples: int, iters: int, out: Path) -> None:
    """Runs the cases and appends a row for each to `out`. Raises InputError if one does not fit in the KV pool."""
    import numpy as np

    engine = start_engine(model, cases, ranks)
    try:
        block_sizes, num_blocks = (await engine.collective_rpc("kv_capacity"))[0]
        for case in cases:
            need = 1 + sum(-(-kv // size) for _, kv in case.requests for size in block_sizes)
            if need > num_blocks:
                short = f"needs {need} KV blocks, the engine has {num_blocks}"
                raise InputError(f"--case {case.name}: {short}; raise VLLM_CPU_KVCACHE_SPACE or leave it out")
        for case in cases:
            times = await engine.collective_rpc("time_exact_batch", args=(case.requests, samples * iters))
            us = np.array(times[0])
            spread = 100 * np.ptp(np.median(us.reshape(samples, iters), axis=1)) / np.median(us)
            row = row_of(case, ranks, float(np.median(us)), float(spread))
            append_row(out, row)
            print(*row, sep=",", flush=True)
    finally:
        engine.shutdown(timeout=10)
        del engine
        gc.collect()  # its __del__ fails if left to the end of the interpreter


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="exact_batches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--case", action="append", required=True, help="NAME=[N*]Q[@K][,...], may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="CSV to append to")
    parser.add_argument("--ranks", type=int, default=1, help="data- and expert-parallel ranks, each with every batch")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--iters", type=int, default=4, help="runs a sample")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 2 for bad input."""
    args = arguments(argv)
    try:
        cases = {case.name: case for case in map(parse_case, args.case)}
        if len(cases) < len(args.case):
            raise InputError("--case: a name is given twice; each case needs its own")
        if min(args.ranks, args.samples, args.iters) < 1:
            raise InputError("--ranks, --samples and --iters must be at least 1")
        if not (args.model / "config.json").exists():
            raise InputError(f"--model {args.model}: no config.json there; name a model folder")
        todo = [case for name, case in cases.items() if name not in done_cases(args.out)]
        if todo:
            asyncio.run(measure(args.model, todo, args.ranks, args.samples, args.iters, args.out))
    except (InputError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
