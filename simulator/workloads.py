"""The one door to workloads: `parse_workload` turns what the user writes into a `Workload`."""

import os
from pathlib import Path

from rackplan.engine import InputError
from rackplan.simulator.lengths import LengthsWorkload
from rackplan.simulator.load import Workload
from rackplan.simulator.traces import read_trace

DEFAULT_SIGMA = 1.0
"""Of lognormal lengths: the public Azure code and Mooncake conversation traces' logarithms deviate by 0.8 to 1.4."""

_FORMS = "agentx, fixed:ISL/OSL, lognormal:ISL_P50/OSL_P50[/SIGMA], or a file"


def parse_workload(text: str) -> Workload:
    """`agentx`, `fixed:ISL/OSL`, `lognormal:ISL_P50/OSL_P50[/SIGMA]`, or the path of a trace.

    Raises InputError that quotes `text` and the forms there are, or the file and row at fault.
    """
    kind, colon, rest = text.partition(":")
    if text == "agentx":
        from rackplan.simulator.agentx import AGENTX  # its quantile functions, which no other workload needs

        return AGENTX
    if colon and kind in ("fixed", "lognormal"):
        return _lengths(text, kind, rest.split("/"))
    path = Path(text)
    if not os.path.isfile(path):  # False too where a name is too long for the file system
        raise InputError(f"workload={text}: no such form or file; give {_FORMS}")
    return read_trace(path)


def _lengths(text: str, kind: str, parts: list[str]) -> LengthsWorkload:
    form = "fixed:ISL/OSL" if kind == "fixed" else "lognormal:ISL_P50/OSL_P50[/SIGMA]"
    if len(parts) not in ((2,) if kind == "fixed" else (2, 3)):
        raise InputError(f"workload={text}: give {form}, as in {kind}:8192/1024")
    try:
        sigma = 0.0 if kind == "fixed" else float(parts[2]) if len(parts) == 3 else DEFAULT_SIGMA
        return LengthsWorkload(name=text, input_p50=int(parts[0]), output_p50=int(parts[1]), sigma=sigma)
    except ValueError:
        raise InputError(f"workload={text}: not numbers of tokens; give {form}, as in {kind}:8192/1024") from None
