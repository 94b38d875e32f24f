"""`rackplan deploy|status|rollback|stop` and `rackplan profile`: what touches a real engine."""

import os
import sys
from pathlib import Path
from typing import Any

import typer

from rackplan.cli import options, output, params
from rackplan.engine import GPUS, InputError

TARGETS = ("local", "shell", "lws", "dynamo", "llm-d")


def deploy(
    plan: params.PlanFile,
    target: params.Target = "local",
    model: params.ServedModel = None,
    python: params.Python = sys.executable,
    host: params.Host = "127.0.0.1",
    port: params.Port = 8000,
    state: params.StateDir = None,
    start_timeout: params.StartTimeout = "600s",  # type: ignore[assignment]
    workload: params.CanaryWorkload = None,
    concurrency: params.Concurrency = None,
    rate: params.Rate = None,
    requests: params.Requests = 100,
    tolerance: params.Tolerance = 25.0,
    no_canary: params.NoCanary = False,
    calibration: params.Calibration = None,
    json: params.Json = False,
) -> None:
    """Put a plan on this machine: start, verify, send a canary load, keep it or bring the old one back."""
    from rackplan.engine.deploy_state import Launch, StateFolder, default_folder
    from rackplan.engine.local import Machine
    from rackplan.engine.machine import versions
    from rackplan.tuner.rollout import verify_with

    base = options.load_base(plan)
    canary, fitted = _judge(base, workload, concurrency, rate, requests, tolerance, no_canary, calibration)
    launch = Launch(
        deployment=base.deployment,
        device="cpu" if base.deployment.gpu_spec.eager else "cuda",
        engine_version=_release(versions(python)["vllm"]),
        model=model or base.deployment.model_spec.checkpoint or base.deployment.model,
        python=python,
        host=host,
        port=port,
    )
    machine = Machine(StateFolder(state or default_folder()), _say, start_timeout)
    record = machine.deploy(launch, verify_with(canary, fitted, _say))
    _show(record, json)
