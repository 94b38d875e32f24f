"""What happens in a run and is no setting of the engine, as KEY=VALUE of the command line."""

import math
from dataclasses import asdict, fields
from typing import Any

from rackplan.engine import Deployment, InputError
from rackplan.simulator.run_options import ExpertRun

PREFIX = "run."
"""Of a what-if's keys that are of the run."""
KEYS = tuple(f.name for f in fields(ExpertRun))
CONDITIONS = ("drift_per_step",)
"""Of the traffic, whatever the deployment: they hold for both sides of a what-if."""


def expert_run(values: dict[str, Any], deployment: Deployment, option: str) -> ExpertRun:
    """`values` by key without PREFIX. Raises InputError on an unknown key, a wrong value, and one without effect."""
    for key, value in values.items():
        if key not in KEYS:
            raise InputError(f"{option}{key}={value}: no such key; one of {', '.join(KEYS)}")
        wanted = bool if key == "cold_start" else (int, float)
        if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
            mend = "write true or false" if wanted is bool else "write a number, as in 600 or 1.0e-5"
            raise InputError(f"{option}{key}={value}: {mend}")
    run = ExpertRun(**values)
    balanced = deployment.eplb.enabled and any(p.gpus_per_instance > 1 for p in deployment.pools)
    if values and not balanced:
        raise InputError(f"{option}{next(iter(values))}: has no effect while EPLB is off; set eplb.enabled=true")
    return run


def run_document(run: ExpertRun) -> dict[str, Any]:
    """As JSON has it; None for never."""
    return {k: None if v == math.inf else v for k, v in asdict(run).items()}
