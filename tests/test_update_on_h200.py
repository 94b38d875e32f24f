"""`calibration update` on a real engine: what two scrapes of one server tell of the host it runs on.

tests/data/h200_update holds the series that are read of one of two vLLM 0.33 servers on H200, before and after a load
(2xdep1_b8192_r6_1 of calibration/data/h200_dsv2lite/profile_order) on a host that launches slower than the file's.
"""

from pathlib import Path

import pytest

from rackplan.calibration.file import FittedCalibration
from rackplan.calibration.h200_served import ORDER
from rackplan.calibration.library import load_calibration
from rackplan.calibration.readers.profile_folder import read_profile
from rackplan.calibration.readers.prometheus import read_metrics
from rackplan.calibration.serving import replay_served
from rackplan.calibration.update import update
from rackplan.engine import parse_deployment

SCRAPES = Path(__file__).parent / "data" / "h200_update"
SECONDS = 31.0
KNOBS = {"max_num_batched_tokens": 8192, "max_num_seqs": 512, "enable_prefix_caching": False}
SERVER = {
    "model": "deepseek-v2-lite",
    "gpu": "h200",
    "max_model_len": 8192,
    "pools": [{"role": "aggregated", "instances": 1, "dep": 1, **KNOBS}],
}


@pytest.fixture(scope="module")
def updated():
    before, after = (read_metrics(str(SCRAPES / f"{name}.prom")) for name in ("before", "after"))
    return update("h200-v2-lite", after.since(before), SECONDS, parse_deployment(SERVER))


def test_a_slower_host_is_found_by_its_prefill_and_its_front_end(updated):
    document, refitted = updated
    terms = {t["term"]: t for t in document["terms"]}
    assert {name for name, t in terms.items() if t["drifted"]} == {"prefill", "front end"}
    prefill = terms["prefill"]
    assert prefill["coefficient"] == "eager_floor_ms"
    # Launches beside decodes took 89 ms in that run where the file has 76, and of lone prompts 1.3 times the file's.
    assert 10 < prefill["after"] - prefill["before"] < 20
    assert refitted.coefficients.step_fixed_ms == load_calibration("h200-v2-lite").file.coefficients.step_fixed_ms


@pytest.mark.parametrize("name", ["1p1d_b8192_r6_1", "2xdep1_b8192_r12_1", "dep2_b8192_r6_1"])
def test_what_one_server_tells_halves_the_error_of_deployments_that_it_did_not_see(updated, name):
    (run,) = (r for r in read_profile(ORDER).runs if r.name == name)
    was, now = (
        {m.name: m.predicted / m.measured - 1 for m in replay_served(run.served, run.deployment, calibration)}
        for calibration in (load_calibration("h200-v2-lite"), FittedCalibration(updated[1]))
    )
    assert was["median TTFT"] < -0.15
    assert abs(now["median TTFT"]) < abs(was["median TTFT"]) / 2
