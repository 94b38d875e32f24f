"""`rackplan profile`, `deploy`, `status`, `rollback`, `stop`: the commands that touch a real engine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rackplan.cli import options, output, params
from rackplan.engine import GPUS, MODELS, Deployment, InputError, load_deployment, model_spec

if TYPE_CHECKING:
    from rackplan.calibration.file import CalibrationFile, FittedCalibration
    from rackplan.engine.local import Machine
    from rackplan.tuner.rollout import Canary

MODEL_LEN = 16_384
"""Longest request of a profile unless given, where the model takes so long ones."""
TARGETS = ("local", "shell", "lws", "dynamo", "llm-d")
CLUSTER_ONLY = ("--image", "--router-image", "--model-claim", "--name", "--namespace")
FILES_ONLY = ("--out", "--engine", "--log-dir", "--force")
LOCAL_ONLY = (
    *("--python", "--host", "--state", "--start-timeout", "--workload", "--concurrency", "--rate", "--requests"),
    *("--tolerance", "--no-canary", "--calibration", "--json"),
)
IDLE = {
    "local": (*FILES_ONLY, *CLUSTER_ONLY, "--hosts"),
    "shell": (*LOCAL_ONLY, *CLUSTER_ONLY),
    "lws": (*LOCAL_ONLY, "--hosts", "--port"),
    "dynamo": (*LOCAL_ONLY, "--hosts", "--port", "--router-image"),
    "llm-d": (*LOCAL_ONLY, "--hosts", "--port", "--router-image"),
}
"""By target, the options that do nothing there: giving one is an error."""


def add_commands(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (profile, deploy, status, rollback, stop):
        app.command()(command)


def profile(
    model: params.ProfiledModel,
    out: params.ProfileDir,
    gpu: params.EngineGpu = "h200",
    gpus: params.ProfiledGpus = 1,
    checkpoint: params.Checkpoint = None,
    budget: params.Budget = "20m",  # type: ignore[assignment]
    python: params.Python = sys.executable,
    port: params.Port = 8000,
    input_tokens: params.InputTokens = 2048,
    output_tokens: params.OutputTokens = 256,
    repeats: params.Repeats = 1,
    max_model_len: params.MaxModelLen = None,
    max_num_seqs: params.MaxSeqs = 256,
    max_num_batched_tokens: params.MaxBatched = 8192,
    gpu_memory_utilization: params.Utilization = 0.9,
    dry_run: params.DryRun = False,
) -> None:
    """Measure a model on this machine's vLLM and fit a calibration to it."""
    options.one_of("--gpu", gpu, GPUS)
    if not Path(model).is_dir():
        options.one_of("MODEL", model, MODELS, "a model's folder")
    from rackplan.engine.machine import engine_release
    from rackplan.engine.profile import ProfileRequest, describe_plan

    output.check_folder(out)
    request = ProfileRequest(
        model=model,
        gpu=gpu,
        gpus=gpus,
        python=python,
        engine_version=engine_release(python),
        budget_s=budget,
        checkpoint=checkpoint,
        port=port,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        max_model_len=max_model_len or min(MODEL_LEN, model_spec(model).max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    from rackplan.calibration.library import load_calibration

    if dry_run:
        print(*describe_plan(request), sep="\n")
        if (out / "calibration.json").exists():
            _print_missing(load_calibration(str(out / "calibration.json")).file)
        return
    from rackplan.calibration.profile import fit_profile
    from rackplan.engine.profile_run import Profiler

    Profiler(request, out, _say).run()
    fitted = fit_profile(out, out.name)
    fitted.save(out / "calibration.json")
    print(f"Written: {out / 'profile.json'}, {out / 'calibration.json'}")
    _print_missing(fitted)


def _print_missing(file: "CalibrationFile") -> None:
    """What the fit could not tell, and the runs that would."""
    from rackplan.calibration.missing import missing_runs

    for run in missing_runs(file):
        terms = f" ({', '.join(run.terms)})" if run.terms else ""
        print(f"Not measured: {run.why}{terms}; would tell: {run.run}")


def deploy(
    plan: params.PlanFile,
    target: params.Target = "local",
    model: params.ServedModel = None,
    port: params.EntryPort = None,
    python: params.LocalPython = None,
    host: params.Host = None,
    state: params.StateDir = None,
    start_timeout: params.DeployTimeout = None,
    workload: params.CanaryWorkload = None,
    concurrency: params.Concurrency = None,
    rate: params.Rate = None,
    requests: params.Requests = None,
    tolerance: params.Tolerance = None,
    no_canary: params.NoCanary = False,
    calibration: params.Calibration = None,
    json: params.Json = False,
    out: params.FilesDir = None,
    engine: params.EngineRelease = None,
    log_dir: params.StepLogs = None,
    hosts: params.Hosts = None,
    name: params.ClusterName = None,
    namespace: params.Namespace = None,
    image: params.Image = None,
    router_image: params.RouterImage = None,
    model_claim: params.ModelClaim = None,
    force: params.Force = False,
) -> None:
    """Put a plan on this machine's engine, verified; or write the files that put it on others."""
    given = {f"--{k.replace('_', '-')}": v for k, v in locals().items()}
    options.one_of("--target", target, TARGETS)
    for option in IDLE[target]:
        if given[option] not in (None, False):
            value = "" if given[option] is True else f" {given[option]}"
            raise InputError(f"{option}{value}: has no effect with --target {target}; leave it out")
    base = options.load_base(plan)
    if base.unmet:
        _say(f"Warning: {plan} does not meet what it was asked for: {base.unmet}")
    if target != "local":
        cluster = {k: given[k] for k in CLUSTER_ONLY}
        _write(target, base.deployment, out, force, model, engine, log_dir, hosts, port, cluster)
        return
    from rackplan.engine.deploy_state import Launch
    from rackplan.engine.machine import engine_release
    from rackplan.tuner.rollout import verify_with

    canary, fitted = (
        (None, None)
        if no_canary
        else _judge(base, workload, concurrency, rate, requests or 100, tolerance or 25.0, calibration)
    )
    launch = Launch(
        deployment=base.deployment,
        device=base.deployment.gpu_spec.device,
        engine_version=engine_release(python or sys.executable),
        model=model or base.deployment.model_spec.checkpoint or base.deployment.model,
        python=python or sys.executable,
        host=host or "127.0.0.1",
        port=port or 8000,
    )
    record = _machine(state, start_timeout or 600.0).deploy(launch, verify_with(canary, fitted, _say))
    _print(record.model_dump(mode="json"), json, "show_record")


def _write(
    target: str,
    deployment: Deployment,
    out: Path | None,
    force: bool,
    model: str | None,
    engine: str | None,
    log_dir: str | None,
    hosts: str | None,
    port: int | None,
    cluster: dict[str, str | None],
) -> None:
    """Write a target's files, and say what is new against those that are there."""
    from rackplan.cli.render import files_of
    from rackplan.engine.changes import restart_needed
    from rackplan.engine.manifests import DEPLOYMENT

    if out is None:
        raise InputError(f"--out: missing; give the folder that the files of {target} go into")
    output.check_folder(out)
    rendering = files_of(
        target,
        deployment,
        model=model,
        engine=engine,
        log_dir=log_dir,
        hosts=hosts,
        port=port,
        cluster=cluster,
    )
    before = out / DEPLOYMENT
    changes = restart_needed(load_deployment(before), deployment) if before.exists() else []
    for change in changes:
        _say(f"Changes {change}")
    for path in rendering.write(out, force=force):
        print(f"Written: {path}")
    print("To apply:", *rendering.commands(out), sep="\n  ")


def status(state: params.StateDir = None, json: params.Json = False) -> None:
    """What this machine serves, and what became of the last deployment."""
    from rackplan.engine.local_status import status_document

    _print(status_document(_folder(state)), json, "show_status")


def rollback(
    state: params.StateDir = None,
    start_timeout: params.StartTimeout = "600s",  # type: ignore[assignment]
    json: params.Json = False,
) -> None:
    """End what serves and bring the previous deployment back."""
    record = _machine(state, start_timeout).rollback()
    _print(record.model_dump(mode="json"), json, "show_record")


def stop(state: params.StateDir = None) -> None:
    """End all that this machine's deployment runs; a rollback brings it back."""
    count = _machine(state, 1.0).stop()
    print(f"{count} processes ended" if count else "nothing was running")


def _judge(
    base: options.Base,
    workload: str | None,
    concurrency: int | None,
    rate: float | None,
    requests: int,
    tolerance: float,
    calibration: str | None,
) -> "tuple[Canary, FittedCalibration | None]":
    """The canary, and the calibration that says what it should measure; None where there is none for this model."""
    from rackplan.tuner.evaluate import fitted_for
    from rackplan.tuner.rollout import make_canary

    own_load = concurrency is not None or rate is not None
    canary = make_canary(
        base.deployment,
        workload=workload or base.workload,
        concurrency=concurrency if own_load else base.concurrency,
        rate_req_s=rate if own_load else base.rate_req_s,
        prompts=requests,
        tolerance_pct=tolerance,
    )
    named = calibration or base.calibration
    try:
        return canary, fitted_for(base.deployment, named)
    except InputError as e:
        if named:
            raise
        _say(f"no prediction to compare with: {e}")
        return canary, None


def _folder(state: Path | None) -> Any:
    from rackplan.engine.deploy_state import StateFolder, default_folder

    return StateFolder(state or default_folder())


def _machine(state: Path | None, start_timeout_s: float) -> "Machine":
    from rackplan.engine.local import Machine

    return Machine(_folder(state), _say, start_timeout_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(document: dict[str, Any], as_json: bool, show: str) -> None:
    if as_json:
        output.print_json(document)
        return
    from rackplan.cli import deploy_screen, screen

    getattr(deploy_screen, show)(document, screen.stdout_console())
