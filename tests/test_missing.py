"""What was carried names the run that would tell it; a calibration that carries nothing asks for nothing."""

import profiles
import pytest

from rackplan.calibration.library import calibration_file
from rackplan.calibration.missing import missing_runs
from rackplan.calibration.profile import fit_profile


def test_every_term_that_a_profile_carries_has_a_run_that_tells_it(tmp_path):
    profiles.write_profile(tmp_path / "p", runs=False)
    file = fit_profile(tmp_path / "p", "tiny")
    found = missing_runs(file)
    assert {t for run in found for t in run.terms} == set(file.carried)
    assert all(run.run and run.why for run in found)


def test_runs_that_were_made_are_not_asked_for_again(tmp_path):
    model = profiles.write_profile(tmp_path / "p")
    before = {run.run for run in missing_runs(fit_profile(tmp_path / "p", "tiny"))}
    profiles.write_forward(tmp_path / "p" / "forward_dep2.csv", model, noise=0.01, dep=2)
    after = {run.run for run in missing_runs(fit_profile(tmp_path / "p", "tiny"))}
    assert any("2 ranks" in run for run in before - after)
    assert after < before


def test_a_narrow_range_asks_for_a_wider_one():
    file = calibration_file("h200-v2-lite")
    assert not any("up to" in run.run for run in missing_runs(file))
    narrow = file.measured["decode"].model_copy(update={"batch": (1, 32)})
    asked = missing_runs(file.model_copy(update={"measured": {**file.measured, "decode": narrow}}))
    assert [run.run for run in asked if "up to" in run.run] == ["exact batches with decode batches up to 128 requests"]


@pytest.mark.parametrize("term", ["piecewise_floor_ms", "transfer", "admission_token_ms", "frontend_turn_ms"])
def test_the_embedded_file_says_what_its_runs_left_open(term):
    assert term in {t for run in missing_runs(calibration_file("h200-v2-lite")) for t in run.terms}
