"""`rackplan calibration`: what the predictions stand on, and how far off they are."""

import sys
from typing import Any

import typer

from rackplan.cli import options, output, params
from rackplan.engine import InputError, load_deployment
from rackplan.engine.files import write_all

calibration_app = typer.Typer(
    help="The measurements behind the predictions, and how far off they are.", **params.TYPER_SETTINGS
)


@calibration_app.command("list")
def list_all(json: params.Json = False) -> None:
    """The calibrations that ship with rackplan."""
    from rackplan.calibration.library import list_calibrations

    _print(list_calibrations(), json, "show_calibrations")


@calibration_app.command()
def show(name: params.CalibrationName, json: params.Json = False) -> None:
    """One calibration: its fitted terms, what they were fitted on, and the range."""
    from rackplan.calibration.library import show as show_one

    _print(show_one(name), json, "show_calibration")


@calibration_app.command()
def fit(
    folder: params.ProfileFolder,
    name: params.NewName,
    out: params.OutFile,
    json: params.Json = False,
) -> None:
    """Fit a calibration to a profile folder and write it, with its hold-out errors."""
    output.check_folder(out.parent)
    from rackplan.calibration.profile import fit_profile

    file = fit_profile(folder, name)
    write_all({out: file.to_json()})
    _print(file.model_dump(mode="json"), json, "show_calibration")


@calibration_app.command()
def validate(
    name: params.CalibrationName,
    against: params.Against = None,
    deployment: params.Served = None,
    out: params.OutPage = None,
    json: params.Json = False,
) -> None:
    """Measured against predicted, row by row; `check` rows took no part in the fit."""
    if deployment and not against:
        raise InputError("--deployment: has no effect without --against; give both or neither")
    if out:
        output.check_folder(out.parent)
    from rackplan.calibration.against import validate_against
    from rackplan.calibration.validate import validate as validate_one

    if against:
        document = validate_against(name, against, load_deployment(deployment) if deployment else None)
    else:
        document = validate_one(name)
    if out:
        from rackplan.cli.validation_report import render_validation

        write_all({out: render_validation(document)})
    _print(document, json, "show_validation")


@calibration_app.command()
def diff(before: params.Before, after: params.After, json: params.Json = False) -> None:
    """What changed between two calibrations, as of two engine versions: each term, and steps at a grid of shapes."""
    from rackplan.calibration.diff import diff as compare

    _print(compare(before, after), json, "show_diff")


@calibration_app.command()
def operators(gpu: params.TableGpu, json: params.Json = False) -> None:
    """What AIConfigurator's tables say of a GPU's matrix products, and what of them is not to be believed."""
    from rackplan.calibration.readers.aiconfigurator import operators as read

    _print(read(gpu), json, "show_operators")


@calibration_app.command()
def update(
    name: params.CalibrationName,
    metrics: params.Metrics,
    deployment: params.LiveDeployment,
    out: params.OutFile,
    over: params.Over = "60s",  # type: ignore[assignment]
    json: params.Json = False,
) -> None:
    """Compare a live engine with what is expected of it, and refit what its metrics can tell of a drift."""
    output.check_folder(out.parent)
    from rackplan.calibration.update import update as refit

    window = _window(metrics, over)
    document, refitted = refit(name, window, over, load_deployment(deployment))
    if refitted:
        write_all({out: refitted.to_json()})
    _print({**document, "file": str(out) if refitted else None}, json, "show_update")


def _window(sources: list[str], seconds: float) -> Any:
    """The load between two scrapes: of one endpoint `seconds` apart, or of two files."""
    import time

    from rackplan.calibration.readers.prometheus import read_metrics
    from rackplan.calibration.update import window_of

    live = [s for s in sources if s.startswith(("http://", "https://"))]
    if (len(sources), len(live)) not in ((1, 1), (2, 0)):
        raise InputError(f"--metrics {sources[0]}: give one URL, or two files of one engine with --over between them")
    first = read_metrics(sources[0])
    if live:
        print(f"Scraped {sources[0]}; again in {seconds:g} s", file=sys.stderr)
        time.sleep(seconds)
    return window_of([first, read_metrics(sources[-1])], sources[-1])


@calibration_app.command()
def predict(
    name: params.CalibrationName,
    pool: params.StepPool,
    dep: params.Dep,
    batch: params.Batch = 1,
    context: params.Context = 0,
    drafts: params.Drafts = 0,
    new: params.New = None,
    json: params.Json = False,
) -> None:
    """One step's time by term, and whether it is inside the measured range."""
    options.one_of("--pool", pool, ("prefill", "decode"))
    from rackplan.calibration.predict import predict as predict_step

    step = predict_step(name, pool=pool, dep=dep, batch=batch, context=context, drafts=drafts, new=new)
    _print(step, json, "show_step")


def _print(result: Any, as_json: bool, show: str) -> None:
    if as_json:
        output.print_json(result)
    else:
        from rackplan.cli import screen

        getattr(screen, show)(result, screen.stdout_console())
