"""Failures that are to happen in a run: data, and how the command line states them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rackplan.engine import Deployment, InputError

START_UP_S = 160.0
"""Until a server answers again: the middle of 130 to 190 s, vLLM 0.33 on H200 with weights that it fills at random
(bench/h200/README.md). Reading weights from disk comes on top."""

_TIME = r"(\d+(?:\.\d+)?)(ms|s|m|h)"
_FORM = re.compile(rf"(aggregated|prefill|decode):(\d+)@{_TIME}(?:\+{_TIME})?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Instance number `instance` of a role is lost at `at_s` and back `down_s` later."""

    role: str
    instance: int
    at_s: float
    down_s: float = START_UP_S

    def __str__(self) -> str:
        return f"{self.role}:{self.instance}@{self.at_s:g}s+{self.down_s:g}s"


def parse_failure(text: str) -> Failure:
    """A failure from `decode:0@60s+180s`; without `+180s` it takes START_UP_S. Raises InputError on any other form."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--fail {text}: write ROLE:INSTANCE@AT or ROLE:INSTANCE@AT+DOWN, as decode:0@60s+180s")
    role, instance, at, at_unit, down, down_unit = found.groups()
    down_s = float(down) * _SECONDS[down_unit] if down else START_UP_S
    return Failure(role=role, instance=int(instance), at_s=float(at) * _SECONDS[at_unit], down_s=down_s)


def check_failures(failures: Sequence[Failure], deployment: Deployment, duration_s: float) -> None:
    """Raises InputError on a role or an instance that there is not, on one that is down already, and on one that is
    lost when arrivals have ended."""
    back_s: dict[tuple[str, int], float] = {}
    for f in sorted(failures, key=lambda f: f.at_s):
        instances, place = sum(p.instances for p in deployment.pools if p.role == f.role), (f.role, f.instance)
        if not instances:
            roles = " and ".join(dict.fromkeys(p.role for p in deployment.pools))
            raise InputError(f"--fail {f}: the deployment has no {f.role} pool; name an instance of {roles}")
        if f.instance >= instances:
            raise InputError(f"--fail {f}: the pool has {instances} instances; number them from 0")
        if f.at_s < back_s.get(place, 0.0):
            raise InputError(f"--fail {f}: it is down until {back_s[place]:g} s; fail it later")
        if f.at_s >= duration_s:
            raise InputError(f"--fail {f}: arrivals end at {duration_s:g} s; fail it before, or raise --duration")
        back_s[place] = f.at_s + f.down_s
