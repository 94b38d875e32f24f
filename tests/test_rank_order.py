"""Rank order of deployments under one load: agreement, swaps, what repeats cannot tell, and where it is shown."""

import json

import numpy as np
import profiles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration.against import validate_against
from rackplan.calibration.rank_order import RankedRun, deployment_label, rank_orders
from rackplan.cli import screen
from rackplan.cli.main import app, execute
from rackplan.engine import parse_deployment

LOAD = "12 req/s"


def runs(metric, values, load=LOAD):
    """`values`: by deployment, a list of (measured, predicted), one a run."""
    return [RankedRun(load=load, deployment=d, metrics={metric: v}) for d, mine in values.items() for v in mine]


def order(metric="mean TPOT", **values):
    (found,) = rank_orders(runs(metric, values))
    return found


def counts(found):
    return {k: found[k] for k in ("pairs", "agree", "disagree", "within_spread")}


def test_predictions_that_are_all_off_by_a_factor_rank_alike():
    found = order(a=[(10, 13)], b=[(20, 26)], c=[(15, 19.5)])
    assert counts(found) == {"pairs": 3, "agree": 3, "disagree": 0, "within_spread": 0}
    assert found["kendall_tau"] == pytest.approx(1)
    assert [(d["deployment"], d["predicted_rank"]) for d in found["deployments"]] == [("a", 1), ("c", 2), ("b", 3)]


def test_one_swap_of_neighbours_is_one_pair():
    found = order(a=[(10, 10)], b=[(20, 31)], c=[(30, 30)], d=[(40, 40)])
    assert counts(found) == {"pairs": 6, "agree": 5, "disagree": 1, "within_spread": 0}
    assert found["kendall_tau"] == pytest.approx(4 / 6)
    assert [d["predicted_rank"] for d in found["deployments"]] == [1, 3, 2, 4]


def test_of_throughput_more_is_better():
    found = order("output throughput", a=[(100, 90)], b=[(200, 190)])
    assert [d["deployment"] for d in found["deployments"]] == ["b", "a"]
    assert counts(found)["agree"] == 1


def test_what_repeats_cannot_tell_apart_is_no_disagreement():
    found = order(a=[(10, 12), (11, 12)], b=[(10.3, 11), (11.2, 11)], c=[(30, 30), (32, 30)])
    assert counts(found) == {"pairs": 3, "agree": 2, "disagree": 0, "within_spread": 1}
    logs = np.log([[10, 11], [10.3, 11.2], [30, 32]])
    assert found["spread_pct"] == pytest.approx(100 * np.sqrt(logs.var(axis=1, ddof=1).mean()))


def test_calm_repeats_tell_a_small_difference_apart():
    found = order(a=[(10, 12), (10.01, 12)], b=[(10.3, 11), (10.31, 11)])
    assert counts(found)["disagree"] == 1


def test_without_repeats_no_spread_is_known_and_only_equals_are_not_told_apart():
    found = order(a=[(10, 10)], b=[(10.01, 9.9)], c=[(10, 11)])
    assert found["spread_pct"] is None
    assert counts(found) == {"pairs": 3, "agree": 0, "disagree": 2, "within_spread": 1}


def test_a_prediction_that_tells_no_difference_where_there_is_one_disagrees():
    found = order(a=[(10, 5)], b=[(20, 5)])
    assert counts(found)["disagree"] == 1
    assert found["kendall_tau"] is None


def test_only_deployments_under_the_same_load_are_ranked():
    alone = runs("mean TPOT", {"a": [(1, 1), (1, 1)]}) + runs("mean TPOT", {"b": [(2, 2)]}, load="6 req/s")
    assert rank_orders(alone) == []
    both = rank_orders(alone + runs("mean TPOT", {"c": [(3, 3)]}, load="6 req/s"))
    assert [(r["load"], r["pairs"]) for r in both] == [("6 req/s", 1)]


def test_a_metric_of_one_deployment_alone_or_without_a_size_is_left_out():
    assert rank_orders(runs("mean TPOT", {"a": [(1, 1)]}) + runs("median TTFT", {"b": [(1, 1)]})) == []
    assert rank_orders(runs("mean TPOT", {"a": [(0, 1)], "b": [(1, 1)]})) == []


POSITIVE = st.floats(1e-3, 1e6)
VALUES = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=3), min_size=2
)


@given(VALUES, st.sampled_from(["mean TPOT", "output throughput"]))
def test_every_pair_is_counted_once(values, metric):
    found = order(metric, **values)
    assert found["pairs"] == len(values) * (len(values) - 1) // 2
    assert found["agree"] + found["disagree"] + found["within_spread"] == found["pairs"]
    assert sorted(d["predicted_rank"] for d in found["deployments"]) == list(range(1, len(values) + 1))


@given(VALUES)
def test_the_measurement_itself_as_prediction_disagrees_nowhere(values):
    found = order(**{d: [(m, m) for m, _ in mine] for d, mine in values.items()})
    assert found["disagree"] == 0


# -- where it is shown -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A profile of one load on two deployments, by an engine of known speed."""
    found = tmp_path_factory.mktemp("order") / "p"
    model = profiles.write_profile(found, logs=False)
    narrow = profiles.tiny_deployment(model, max_num_batched_tokens=64)
    profiles.write_serve(found / "serve_narrow_r2.json", profiles.true_calibration(model), narrow, 2.0, 60)
    document = json.loads((found / "profile.json").read_text())
    document["runs"].append(document["runs"][0] | {"name": "narrow_r2", "deployment": narrow.to_dict()})
    (found / "profile.json").write_text(json.dumps(document))
    for table in found.glob("forward_dep*"):
        table.unlink()
    profiles.true_calibration(model).file.save(found / "truth.json")
    return found


def test_a_folder_of_two_deployments_under_one_load_is_ranked(folder, tmp_path, capsys):
    truth, page = folder / "truth.json", tmp_path / "page.html"
    document = validate_against(str(truth), [folder], None)
    by_metric = {r["metric"]: r for r in document["rank_order"]}
    assert by_metric["median TTFT"]["load"] == "2 req/s"
    ranked = [d["deployment"] for d in by_metric["median TTFT"]["deployments"]]
    assert ranked == ["1 x aggregated DEP1, 2,048 tokens", "1 x aggregated DEP1, 64 tokens"]
    assert by_metric["median TTFT"]["agree"] == 1
    arguments = ["calibration", "validate", str(truth), "--against", str(folder), "--out", str(page)]
    assert execute(app, "rackplan", arguments) == 0
    assert "1 of 1 pairs agree" in capsys.readouterr().out
    assert "1 of 1 pairs agree" in page.read_text()


def test_one_deployment_has_no_order(tmp_path):
    model = profiles.write_profile(tmp_path / "p", logs=False)
    profiles.true_calibration(model).file.save(tmp_path / "truth.json")
    assert validate_against(str(tmp_path / "truth.json"), [tmp_path / "p"], None)["rank_order"] == []


def test_a_label_states_pools_width_and_budget():
    pools = [{"role": "prefill", "instances": 2, "dep": 1}, {"role": "decode", "instances": 1, "dep": 2}]
    pools[1]["max_num_batched_tokens"] = 2048
    deployment = parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": pools})
    assert deployment_label(deployment) == "2 x prefill DEP1 + 1 x decode DEP2, 8,192 / 2,048 tokens"


def test_the_screen_says_where_repeats_are_missing(capsys):
    document = {"name": "x", "rows": [], "by_metric": [], "summary": {}}
    document["rank_order"] = [order(a=[(10, 10)], b=[(20, 9)])]
    screen.show_validation(document, screen.stdout_console())
    out = capsys.readouterr().out
    assert "0 of 1 pairs agree" in out
    assert "no deployment was served twice" in out
