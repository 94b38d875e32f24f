"""Engine logs of `--enable-logging-iteration-details`: what each step held, without contexts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rackplan.calibration.readers import parse
from rackplan.calibration.records import Step, StepLog
from rackplan.engine import InputError

_STEP = re.compile(
    r"Engine (\d+): Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: (\S+) ms( \(dummy\))?, .*KV cache usage: ([^%\s]+)%"
)
_BEGUN = re.compile(r"Iteration\(\d+\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One logged step. `elapsed_ms` is the step's time without async scheduling, and little of it with."""

    engine: int
    number: int
    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int
    elapsed_ms: float
    dummy: bool
    kv_usage: float


def read_iteration_log(path: Path) -> list[Iteration]:
    """All steps in a server's log. A last line that was cut short is left out; another one is an error."""
    lines = parse.read_text(path, "the log of a server with --enable-logging-iteration-details").splitlines()
    found = []
    for n, line in enumerate(lines, 1):
        match, where = _STEP.search(line), f"{path}:{n}"
        if match:
            found.append(_iteration(match, where))
        elif _BEGUN.search(line) and n < len(lines):
            raise InputError(f"{where}: not an iteration as vLLM 0.33 logs it; remove the line, or profile again")
    if not found:
        raise InputError(f"{path}: logs no iteration; serve with --enable-logging-iteration-details")
    return found


def _iteration(match: re.Match[str], where: str) -> Iteration:
    engine, number, *counts, elapsed, dummy, usage = match.groups()
    record = {"elapsed time": elapsed, "KV cache usage": usage}
    context_requests, context_tokens, generation_requests, generation_tokens = map(int, counts)
    return Iteration(
        engine=int(engine),
        number=int(number),
        context_requests=context_requests,
        context_tokens=context_tokens,
        generation_requests=generation_requests,
        generation_tokens=generation_tokens,
        elapsed_ms=parse.number(record, "elapsed time", where, 0, parse.MOST_STEP_MS),
        dummy=dummy is not None,
        kv_usage=parse.number(record, "KV cache usage", where, 0, 100) / 100,
    )


def as_step_log(iterations: Sequence[Iteration], context_tokens: int) -> StepLog:
    """The steps of one engine as a step log: `context_tokens` a decoding request, prompts in equal chunks without
    cached tokens. The clock is the sum of the steps, so idle time is not on it."""
    steps, at_s = [], 0.0
    for i in (x for x in iterations if not x.dummy):
        new = i.context_tokens // i.context_requests if i.context_requests else 0
        at_s += i.elapsed_ms / 1e3
        steps.append(
            Step(
                number=i.number,
                t_s=at_s,
                prefill=((new, 0),) * i.context_requests if new else (),
                decode_requests=i.generation_requests,
                decode_tokens=i.generation_tokens,
                decode_context_tokens=i.generation_requests * context_tokens,
                running=i.generation_requests + i.context_requests,
                schedule_ms=0.0,
                execute_ms=i.elapsed_ms,
                update_ms=0.0,
                gap_ms=i.elapsed_ms,
            )
        )
    return StepLog(config={}, steps=tuple(steps))
