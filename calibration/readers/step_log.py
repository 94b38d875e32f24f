"""Step logs: JSON lines, the running configuration first, then one object a step of one rank."""

import json
from pathlib import Path
from typing import Any

from rackplan.calibration.readers import parse
from rackplan.calibration.records import Step, StepLog
from rackplan.engine import InputError

_WANTED = 'a step log: {"config": …} in its first line, then one JSON object a step'


def read_step_log(path: Path) -> StepLog:
    """The log of one rank. Raises InputError with file and line; a line that was cut short is one."""
    lines = [(n, x) for n, x in enumerate(parse.read_text(path, _WANTED).splitlines(), 1) if x.strip()]
    records = [_record(line, f"{path}:{n}") for n, line in lines]
    if "config" not in records[0]:
        raise InputError(f"{path}:{lines[0][0]}: config is missing; give {_WANTED}")
    config = parse.mapping(records[0]["config"], f"{path}:{lines[0][0]}", "config")
    steps = [_step(record, f"{path}:{n}") for (n, _), record in zip(lines[1:], records[1:], strict=True)]
    return StepLog(config=config, steps=tuple(steps))


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        return parse.mapping(json.loads(line), where, "line")
    except (RecursionError, ValueError):
        raise InputError(f"{where}: truncated or not JSON; correct or remove the row") from None


def _step(record: dict[str, Any], where: str) -> Step:
    def ms(key: str) -> float:
        return parse.number(record, key, where, 0, parse.MOST_STEP_MS)

    chunks = []
    for chunk in parse.sequence(record.get("prefill"), where, "prefill"):
        pair = parse.sequence(chunk, where, "prefill")
        if len(pair) != 2:
            raise InputError(f"{where}: prefill={str(pair)[:40]}: give [new tokens, context tokens] a chunk")
        named = dict(zip(("new_tokens", "context_tokens"), pair, strict=True))
        chunks.append((parse.whole(named, "new_tokens", where, 1), parse.whole(named, "context_tokens", where)))
    idle_gap = record.get("gap_ms") is None
    return Step(
        number=parse.whole(record, "step", where),
        t_s=parse.number(record, "t_s", where),
        prefill=tuple(chunks),
        decode_requests=parse.whole(record, "decode_requests", where),
        decode_tokens=parse.whole(record, "decode_tokens", where),
        decode_context_tokens=parse.whole(record, "decode_context_tokens", where),
        running=parse.whole(record, "running", where),
        schedule_ms=ms("schedule_ms"),
        execute_ms=ms("execute_ms"),
        update_ms=ms("update_ms"),
        # Between outputs lies idle time too, as long as it was.
        gap_ms=None if idle_gap else parse.number(record, "gap_ms", where),
    )
