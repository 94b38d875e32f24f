"""What drafts cost: verification by batch, and what a search makes of it."""

import pytest

from rackplan.calibration.batch import Batch, deployment_of, gpu_terms_ms
from rackplan.calibration.experts import experts_touched
from rackplan.calibration.library import load_calibration
from rackplan.cli import screen
from rackplan.engine import MODELS, ModelSpec
from rackplan.tuner.demand import play_demand
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.screening import Screening
from rackplan.tuner.search import Search
from rackplan.tuner.whatif import compare

V41 = MODELS["deepseek-v4.1-flash"]
OWN = {"gb300-v4.1-flash": ("deepseek-v4.1-flash", "gb300", 4), "h200-v3": ("deepseek-v3", "h200", 8)}


def terms(name: str, drafts: int, requests: int, context: int = 2000) -> dict[str, float]:
    model, gpu, dep = OWN[name]
    deployment, pool = deployment_of(model, gpu, dep=dep, drafts=drafts)
    cost = load_calibration(name).pool_cost(deployment, pool)
    return gpu_terms_ms(cost, Batch(decodes=requests, context_tokens=context), dep=dep, drafts=drafts)


def step_ms(name: str, drafts: int, requests: int) -> float:
    return sum(terms(name, drafts, requests).values())


@pytest.mark.parametrize("name", list(OWN))
@pytest.mark.parametrize("requests", [1, 9, 64, 256])
def test_each_further_draft_makes_a_step_longer(name, requests):
    most = MODELS[OWN[name][0]].max_draft_tokens
    times = [step_ms(name, k, requests) for k in range(most + 1)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_where_reads_bind_drafts_cost_the_experts_that_they_touch():
    # 4 ranks of 4 requests: far below what makes arithmetic bind, so MoE time is in proportion to experts touched.
    model, _, dep = OWN["gb300-v4.1-flash"]
    spec, sigma = MODELS[model], load_calibration("gb300-v4.1-flash").coefficients.routing_sigma
    touched = [experts_touched(dep * 4 * (1 + k), spec.routed_experts, spec.top_k, sigma) for k in (0, 5)]
    moe = [terms("gb300-v4.1-flash", k, 4)["moe"] for k in (0, 5)]
    assert touched[1] > 2 * touched[0]
    assert moe[1] / moe[0] == pytest.approx(touched[1] / touched[0], rel=0.02)


def test_attention_of_many_heads_costs_the_context_again_for_each_draft():
    # Of V3 alone: what grows with the context doubles with the one draft. V4.1's sparse attention reads it once.
    def per_context(name: str, drafts: int) -> float:
        return (terms(name, drafts, 16, 4000)["attention"] - terms(name, drafts, 16, 2000)["attention"]) / 2000

    assert per_context("h200-v3", 1) == pytest.approx(2 * per_context("h200-v3", 0))
    assert per_context("gb300-v4.1-flash", 5) == pytest.approx(per_context("gb300-v4.1-flash", 0))


@pytest.mark.parametrize("name", list(OWN))
def test_drafts_that_are_never_accepted_only_make_tokens_later(name):
    for requests in (9, 64):
        assert step_ms(name, 1, requests) > 1.05 * step_ms(name, 0, requests)


def test_the_best_number_of_drafts_falls_as_batches_grow():
    def best(requests: int) -> int:
        per_token = [step_ms("gb300-v4.1-flash", k, requests) / V41.acceptance_length(k) for k in range(6)]
        return min(range(6), key=per_token.__getitem__)

    found = [best(n) for n in (9, 128, 512, 2048)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 5
    assert found[-1] < 2


def screened_drafts(request: PlanRequest) -> set[int]:
    demand = play_demand(request.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0)
    return {c.knobs.drafts for c in Screening(request, demand).candidates()}


def asked(**changes) -> PlanRequest:
    request = {
        "model": "deepseek-v4.1-flash",
        "gpu": "gb300",
        "gpus": 4,
        "target_tps": 5e3,
        "count": "total",
        "per": "gpu",
        "workload": "fixed:2048/256",
        "p90_interactivity_tok_s_user": 60.0,
        "p90_ttft_ms": 5000.0,
        "seed": 0,
        "trials": 1,
    }
    return PlanRequest(**{**request, **changes})


def test_u21_where_no_draft_is_accepted_every_candidate_has_none(monkeypatch):
    assert 0 not in screened_drafts(asked())
    monkeypatch.setattr(ModelSpec, "acceptance_length", lambda self, draft_tokens, *, thinking=True: 1.0)
    assert screened_drafts(asked()) == {0}


def test_u21_the_search_may_propose_no_drafts():
    # The proposal's own range, asked of a trial that records it.
    class Recorder:
        def suggest_categorical(self, name, choices):
            return next(iter(choices))

        def suggest_int(self, name, low, high):
            assert name == "drafts"
            return low

    request = asked()
    demand = play_demand(request.parsed_workload, e2e_s=3.0, duration_s=20.0, seed=0)
    search = Search(request, Screening(request, demand), workers=None)
    search._offered = {c.layout.label: c for c in search.screening.candidates()}
    assert search._propose(Recorder())[1].drafts == 0


def test_u21_drafts_lower_tpot_and_raise_itl_and_both_are_printed(capsys):
    # A step with drafts is longer and yields several tokens: gaps between chunks grow while time per token falls.
    base, _ = deployment_of("deepseek-v4.1-flash", "gb300", dep=4, tokens=8192)
    found = compare(
        base,
        [("speculation.draft_tokens", "5")],
        workload="fixed:500/300",
        concurrency=64,
        rate=None,
        duration_s=20.0,
        calibration=None,
        replications=1,
        seed=0,
    )
    before, after = (found[k]["metrics"] for k in ("base", "changed"))
    assert after["tpot_ms"]["p50"] < before["tpot_ms"]["p50"]
    assert after["itl_ms"]["p50"] > before["itl_ms"]["p50"]
    screen.show_simulation(found["changed"], screen.stdout_console())
    printed = capsys.readouterr().out
    assert "TPOT" in printed
    assert "ITL" in printed
