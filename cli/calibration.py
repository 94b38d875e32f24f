"""`rackplan calibration`: what the predictions stand on, and how far off they are."""

from typing import Any

import typer

from rackplan.cli import options, output, params
from rackplan.engine import InputError, load_deployment

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
    output.write_all({out: file.to_json()})
    _print(file.model_dump(mode="json"), json, "show_calibration")


@calibration_app.command()
def validate(
    name: params.CalibrationName,
    against: params.Against = None,
    deployment: params.Served = None,
    json: params.Json = False,
) -> None:
    """Measured against predicted, row by row; `check` rows took no part in the fit."""
    if bool(against) != bool(deployment):
        given, missing = ("--against", "--deployment") if against else ("--deployment", "--against")
        raise InputError(f"{given}: has no effect without {missing}; give both or neither")
    from rackplan.calibration.validate import validate as validate_one
    from rackplan.calibration.validate import validate_against

    if against and deployment:
        document = validate_against(name, against, load_deployment(deployment))
    else:
        document = validate_one(name)
    _print(document, json, "show_validation")


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
