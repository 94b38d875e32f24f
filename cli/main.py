"""The commands: each parses, calls one function, renders. Results on stdout, progress and errors on stderr.

Exit codes: 0 done, 2 bad input, 3 no plan or no memory meets this, 4 the engine did not do it, 130 interrupted. What is
slow to import is imported inside the commands, so that `--help` answers at once.
"""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rackplan.cli import options, output, params
from rackplan.cli.calibration import calibration_app
from rackplan.cli.deploy import add_commands
from rackplan.engine import GPUS, MODELS, DeployError, InfeasibleError, InputError, load_deployment

if TYPE_CHECKING:
    from rackplan.simulator.failures import Failure
    from rackplan.simulator.run_options import Drafting

BAD_INPUT, INFEASIBLE, NOT_DEPLOYED, INTERRUPTED = 2, 3, 4, 130

# What click calls UsageError: every mistake in the use of a command. Typer exports only its subclass.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(help="Plan vLLM deployments with a calibrated simulator; no GPU needed.", **params.TYPER_SETTINGS)
plan_app = typer.Typer(**params.TYPER_SETTINGS)
app.add_typer(calibration_app, name="calibration")

# Defaults of times are in the notation of the command line, because --help shows them as they stand here.


@app.command()
@plan_app.command()
def plan(
    target_tps: params.TargetTps,
    count: params.Count = "total",
    per: params.Per = "gpu",
    model: params.Model = "deepseek-v4.1-flash",
    gpu: params.Gpu = "gb300",
    gpus: params.Gpus = 72,
    workload: params.Workload = "agentx",
    p90_interactivity: params.P90Interactivity = 150.0,
    p90_ttft: params.P90Ttft = "10s",  # type: ignore[assignment]
    seed: params.Seed = 0,
    trials: params.Trials = 60,
    calibration: params.Calibration = None,
    thinking: params.Thinking = None,
    acceptance_spread: params.AcceptanceSpread = None,
    out: params.Out = Path("out"),
    json: params.Json = False,
) -> None:
    """Find the deployment that meets a throughput target and the SLOs, and how sure that is."""
    options.one_of("--count", count, ("total", "output"))
    options.one_of("--per", per, ("gpu", "deployment"))
    if not Path(model).is_dir():
        options.one_of("--model", model, MODELS, "a model's folder")
    options.one_of("--gpu", gpu, GPUS)
    from rackplan.cli import report, screen
    from rackplan.tuner.plan import PlanRequest, make_plan

    request = PlanRequest(
        model=model,
        gpu=gpu,
        gpus=gpus,
        target_tps=target_tps,
        count=count,
        per=per,
        workload=workload,
        p90_interactivity_tok_s_user=p90_interactivity,
        p90_ttft_ms=p90_ttft * 1000,
        seed=seed,
        trials=trials,
        calibration=calibration,
        drafting=_drafting(thinking, acceptance_spread),
    )
    output.check_folder(out)
    with output.progress_on_stderr() as progress:
        found = make_plan(request, progress)
    files = report.write_outputs(found, out)
    if json:
        output.print_json(found)
    else:
        screen.show_plan(found, screen.stdout_console(), files)
    if not found["feasible"]:
        raise typer.Exit(INFEASIBLE)


@app.command()
def simulate(
    deployment: params.DeploymentFile,
    workload: params.Workload = "agentx",
    concurrency: params.Concurrency = None,
    rate: params.Rate = None,
    cv: params.Cv = None,
    duration: params.Duration = "600s",  # type: ignore[assignment]
    calibration: params.Calibration = None,
    replications: params.Replications = 1,
    seed: params.Seed = 0,
    run: params.RunSettings = (),  # type: ignore[assignment]
    fail: params.Fail = (),  # type: ignore[assignment]
    no_resubmit: params.NoResubmit = False,
    thinking: params.Thinking = None,
    acceptance_spread: params.AcceptanceSpread = None,
    json: params.Json = False,
) -> None:
    """Predict what a given deployment does under a given load."""
    _one_load(concurrency, rate)
    if cv is not None and rate is None:
        raise InputError(f"--cv {cv:g}: has no effect without --rate; add --rate or leave it out")
    given = load_deployment(deployment)
    pairs = [options.parse_set(text, "--run") for text in run]
    drafting = _drafting(thinking, acceptance_spread)
    drafting.check_effect(given.speculation.draft_tokens)
    from rackplan.cli import screen
    from rackplan.tuner.evaluate import simulate_document
    from rackplan.tuner.run_settings import expert_run
    from rackplan.tuner.whatif import values_of

    document = simulate_document(
        given,
        workload=workload,
        concurrency=concurrency,
        rate=rate,
        cv=1.0 if cv is None else cv,
        duration_s=duration,
        calibration=calibration,
        replications=replications,
        seed=seed,
        run=expert_run(values_of(pairs, "--run"), given, "--run "),
        drafting=drafting,
        failures=_failures(fail, no_resubmit),
        resubmit=not no_resubmit,
    )
    if json:
        output.print_json(document)
    else:
        screen.show_simulation(document, screen.stdout_console())


@app.command()
def whatif(
    plan: params.PlanFile,
    changes: params.Changes = (),  # type: ignore[assignment]
    fail: params.Fail = (),  # type: ignore[assignment]
    no_resubmit: params.NoResubmit = False,
    workload: params.WhatifWorkload = None,
    concurrency: params.Concurrency = None,
    rate: params.Rate = None,
    duration: params.Duration = "120s",  # type: ignore[assignment]
    calibration: params.Calibration = None,
    replications: params.Replications = 1,
    seed: params.Seed = 0,
    thinking: params.Thinking = None,
    acceptance_spread: params.AcceptanceSpread = None,
    json: params.Json = False,
) -> None:
    """Compare a plan with changes to it on the same arrivals: what moves, and why."""
    _one_load(concurrency, rate)
    pairs = [options.parse_set(text) for text in changes]
    if not pairs and not fail:
        raise InputError("whatif: nothing is changed; give --set KEY=VALUE or --fail ROLE:N@AT")
    base = options.load_base(plan)
    from rackplan.cli import screen
    from rackplan.tuner.whatif import compare

    own_load = concurrency is not None or rate is not None
    document = compare(
        base.deployment,
        pairs,
        workload=base.workload or "agentx" if workload is None else workload,
        concurrency=concurrency if own_load else base.concurrency,
        rate=rate if own_load else base.rate_req_s,
        duration_s=duration,
        calibration=base.calibration if calibration is None else calibration,
        replications=replications,
        seed=seed,
        drafting=_drafting(thinking, acceptance_spread, base),
        failures=_failures(fail, no_resubmit),
        resubmit=not no_resubmit,
    )
    if json:
        output.print_json(document)
    else:
        screen.show_whatif(document, screen.stdout_console())


add_commands(app)


def _drafting(thinking: str | None, spread: float | None, base: options.Base | None = None) -> "Drafting":
    """What was given, else what `base` states, else the usual."""
    if thinking is not None:
        options.one_of("--thinking", thinking, ("on", "off"))
    from rackplan.simulator.run_options import Drafting

    stated = (base.thinking, base.acceptance_spread) if base else (None, None)
    return Drafting(
        thinking=stated[0] is not False if thinking is None else thinking == "on",
        acceptance_spread=(stated[1] or 0.0) if spread is None else spread,
    )


def _failures(texts: Sequence[str], no_resubmit: bool) -> "tuple[Failure, ...]":
    if not texts:
        if no_resubmit:
            raise InputError("--no-resubmit: has no effect without --fail; add --fail or leave it out")
        return ()
    from rackplan.simulator.failures import parse_failure

    return tuple(map(parse_failure, texts))


def _one_load(concurrency: int | None, rate: float | None) -> None:
    if concurrency is not None and rate is not None:
        raise InputError(f"--rate {rate:g}: cannot go with --concurrency {concurrency}; give one of the two")


def execute(commands: typer.Typer, prog: str, args: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error is one line on stderr."""
    output.degrade_to_encoding()
    try:
        code = commands(args=list(args), prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as e:
        return _fail(f"{e.format_message()}; see {_help_of(e, prog)}", BAD_INPUT)  # type: ignore[attr-defined]
    except InputError as e:
        return _fail(str(e), BAD_INPUT)
    except InfeasibleError as e:
        return _fail(str(e), INFEASIBLE)
    except DeployError as e:
        return _fail(str(e), NOT_DEPLOYED)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has gone (`| head`): nothing is left to say, and Python must not say so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        if os.environ.get("RACKPLAN_DEBUG"):
            raise
        return _fail(f"internal error: {type(e).__name__}: {e}; RACKPLAN_DEBUG=1 shows where, please report it", 1)
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _help_of(error: Exception, prog: str) -> str:
    context = getattr(error, "ctx", None)
    return f"`{context.command_path if context else prog} --help`"


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()).replace(".;", ";"), file=sys.stderr)
    return code


def run() -> None:
    """The `rackplan` command."""
    _exit(execute(app, "rackplan", sys.argv[1:]))


def run_plan() -> None:
    """The `plan` command: the same as `rackplan plan`."""
    _exit(execute(plan_app, "plan", sys.argv[1:]))


def _exit(code: int) -> None:
    gc.freeze()  # all memory goes back with the process: Python need not look for circles in it first
    sys.exit(code)
