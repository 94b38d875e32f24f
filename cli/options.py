"""What is typed on the command line, turned into values with units; pure, and InputError says how to mend it.

A parser takes text; it also takes its own result's type, because Typer hands an option's default through it.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackplan.engine import Deployment, InputError, load_deployment, parse_deployment

_TPS_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_MOST = 1e15
"""Beyond it a number is a slip of the hand, and arithmetic in ns would overflow."""
MOST_DURATION_S = 30 * 86400.0
"""Of simulated time and of latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a what-if or a deploy starts from. A plan file states all of it, a deployment's YAML only the deployment.
    `unmet`: why the plan misses its request; None where it meets it."""

    deployment: Deployment
    workload: str | None = None
    concurrency: int | None = None
    rate_req_s: float | None = None
    calibration: str | None = None
    unmet: str | None = None
    thinking: bool | None = None
    acceptance_spread: float | None = None


def parse_tps(text: str | float, option: str = "--target-tps") -> float:
    """Tokens per second from 954000, 900k or 1.2M. Raises InputError unless it is a number above 0."""
    match = re.fullmatch(_NUMBER + r"([kKmM]?)", str(text).strip())
    value = float(match[1]) * _TPS_FACTOR[match[2].lower()] if match else 0.0
    if not 0 < value <= _MOST:
        raise InputError(f"{option} {text}: not a rate in tok/s; write 900k, 1.2M or 954000")
    return value


def parse_duration(text: str, option: str = "--duration") -> float:
    """Seconds from 500ms, 10s, 2m or 1h. A bare number is refused: traces disagree on whether it means s or ms.
    Raises InputError there, and on 0 and on more than 30 days."""
    match = re.fullmatch(_NUMBER + r"(ms|s|m|h)", text.strip())
    value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if value <= 0:
        raise InputError(f"{option} {text}: not a time above 0 with its unit; write 10s, 500ms or 2m")
    if value > MOST_DURATION_S:
        raise InputError(f"{option} {text}: more than 30 days; write {MOST_DURATION_S / 3600:g}h or less")
    return value


def parse_set(text: str, option: str = "--set") -> tuple[str, str]:
    """A (dotted key, value) pair from decode.dep=16; the value stays text until the deployment types it."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value or not re.fullmatch(r"\w+(\.\w+)*", key):
        example = "decode.dep=16 or eplb.enabled=false" if option == "--set" else "cold_start=true"
        raise InputError(f"{option} {text}: not KEY=VALUE; write {example}")
    return key, value


def parse_claim(text: str) -> tuple[str, str]:
    """A (volume claim, absolute mount path) pair from models:/models."""
    claim, colon, path = text.partition(":")
    if not colon or not path.startswith("/") or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
        raise InputError(f"--model-claim {text}: not CLAIM:/PATH; write models:/models")
    return claim, path


def parse_int(option: str, least: int = 0, most: int = 10**12 - 1) -> Callable[[str | int], int]:
    """A parser of whole numbers from `least` to `most` that names `option` when it refuses."""

    def parse(text: str | int) -> int:
        digits = str(text).strip()
        if not re.fullmatch(r"[0-9]+", digits) or (len(digits) <= 12 and int(digits) < least):
            raise InputError(f"{option} {text}: not a whole number; write {least} or more")
        if len(digits) > 12 or int(digits) > most:
            raise InputError(f"{option} {text}: too large; write {most} or less")
        return int(digits)

    return parse


def parse_above_zero(option: str, example: str, most: float = _MOST) -> Callable[[str | float], float]:
    """A parser of decimal numbers above 0, to `most`, that names `option` and gives `example` when it refuses."""

    def parse(text: str | float) -> float:
        value = float(text) if re.fullmatch(_NUMBER, str(text).strip()) else 0.0
        if value <= 0:
            raise InputError(f"{option} {text}: not a number above 0; write {example}")
        if value > most:
            raise InputError(f"{option} {text}: too large; write {most:g} or less")
        return value

    return parse


def parse_name(option: str, example: str) -> Callable[[str], str]:
    """A parser of names that names `option` and gives `example` when there is none."""

    def parse(text: str) -> str:
        if not text.strip():
            raise InputError(f"{option}: empty; write {example}")
        return text

    return parse


def one_of(option: str, text: str, allowed: Iterable[str], other: str | None = None) -> str:
    """`text` where it is allowed; else InputError with what is. `other`: what could stand there besides the names."""
    names = list(allowed)
    if text not in names:
        besides = f", or {other}" if other else ""
        raise InputError(f"{option} {text}: unknown; one of {', '.join(names)}{besides}")
    return text


def load_base(path: Path) -> Base:
    """The base of a what-if from plan.json or from a deployment's YAML. Raises InputError that names the file."""
    if path.suffix != ".json":
        return Base(deployment=load_deployment(path))
    plan = _read_json(path)
    if "pools" in plan:
        return Base(deployment=parse_deployment(plan, str(path)))
    if not plan.get("deployment"):
        raise InputError(f"{path}: holds no deployment; give the plan.json that `rackplan plan` wrote, or a YAML")
    concurrency = _stated(path, plan, "load.concurrency")
    rate = _stated(path, plan, "load.rate_req_s")
    return Base(
        deployment=parse_deployment(plan["deployment"], f"{path}: deployment"),
        workload=_stated(path, plan, "inputs.workload", str),
        concurrency=None if concurrency is None else parse_int(f"{path}: load.concurrency", 1)(concurrency),
        rate_req_s=None if rate is None else parse_above_zero(f"{path}: load.rate_req_s", "12.5")(rate),
        calibration=_stated(path, plan, "provenance.calibration", str),
        unmet=None if plan.get("feasible") else _stated(path, plan, "reason", str),
        thinking=_stated(path, plan, "inputs.thinking", bool),
        acceptance_spread=_stated(path, plan, "inputs.acceptance_spread"),
    )


def _stated(path: Path, plan: dict[str, Any], key: str, of: type | tuple[type, ...] = (int, float)) -> Any:
    """The value at a dotted key of a plan, None where it is not there. Raises InputError where its type is not `of`."""
    value: Any = plan
    for part in key.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            break
        value = value.get(part)
    else:
        if value is None or (isinstance(value, of) and (of is bool or not isinstance(value, bool))):
            return value
    raise InputError(f"{path}: {key}={str(value)[:40]!r}: not what `rackplan plan` writes there; write the plan anew")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); give a plan.json or a deployment's YAML") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not valid JSON ({e}); give a plan.json or a deployment's YAML") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}, not a plan; give a plan.json or a deployment's YAML")
    return data
