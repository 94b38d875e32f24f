"""Closed-form screening: which layouts and knobs are worth simulating, and why none is where none is."""

import math
from dataclasses import dataclass, replace
from itertools import product

from rackplan.engine import Deployment, InfeasibleError, InputError, check_memory
from rackplan.tuner.capacity import Corrections, Estimate, estimate, least_ttft_ms
from rackplan.tuner.demand import Demand
from rackplan.tuner.probe import Probe
from rackplan.tuner.request import PlanRequest
from rackplan.tuner.space import (
    CHUNKS,
    REDUNDANT,
    Knobs,
    Layout,
    aggregated_layouts,
    decode_widths,
    default_knobs,
    disaggregated_layouts,
    fits_together,
    make_deployment,
    prefill_widths,
    simplified,
    sized_layout,
)

OVERPROVISION = (1.0, 1.15, 1.35)
"""Rates for which a deployment is sized, over the needed one: means promise more than queues keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with knobs, its closed-form estimate, and its score (higher is better; see Screening)."""

    layout: Layout
    knobs: Knobs
    deployment: Deployment
    estimate: Estimate
    score: float


class Screening:
    """Estimates of one request's candidates. `refusals`: why candidates fell, counted by reason."""

    def __init__(self, request: PlanRequest, demand: Demand) -> None:
        self.request, self.demand = request, demand
        self.corrections = Corrections()
        self.refusals: dict[str, int] = {}
        self.memory_refusal: str | None = None

    def candidate(self, layout: Layout, knobs: Knobs, *, judged: bool = True) -> Candidate | None:
        """The estimate of a layout with knobs; None, with the reason counted, where it cannot be or, if `judged`, where
        not even a request alone sees its first token in time."""
        model = self.request.model_spec
        knobs = simplified(layout, knobs, self.request.gpu_spec)
        if not fits_together(layout, knobs, model):
            self._refuse("experts do not divide over the GPUs")
            return None
        try:
            deployment = self._with_context(layout, knobs)
        except InfeasibleError as e:
            self.memory_refusal = self.memory_refusal or str(e)
            self._refuse("memory")
            return None
        except InputError as e:
            self._refuse(str(e))
            return None
        if judged and least_ttft_ms(deployment, self.request.fitted) > self.request.p90_ttft_ms:
            self._refuse("p90_ttft")
            return None
        found = estimate(deployment, self.demand, self.request.fitted, self.request.slo, self.corrections)
        score = self._score(layout, found.rate_req_s)
        return Candidate(layout=layout, knobs=knobs, deployment=deployment, estimate=found, score=score)

    def _with_context(self, layout: Layout, knobs: Knobs) -> Deployment:
        """The deployment with the model's whole context where a rank's KV holds it, else with the workload's longest
        request: vLLM refuses to start on less KV than max_model_len. Raises InfeasibleError where neither fits."""
        request = self.request
        whole = make_deployment(request.model, request.gpu, layout, knobs, request.model_spec.max_model_len)
        try:
            check_memory(whole)
            return whole
        except InfeasibleError:
            shorter = make_deployment(request.model, request.gpu, layout, knobs, self.demand.longest_tokens)
            check_memory(shorter)
            return shorter

    def _score(self, layout: Layout, rate_req_s: float) -> float:
        if rate_req_s <= 0:
            self._refuse("p90_interactivity")
            return -math.inf
        tps = rate_req_s * self.demand.counted_tokens(self.request.count)
        return self.request.score_of(tps / layout.gpus if self.request.per == "gpu" else tps, layout.gpus)[0]

    def learn(self, pilots: list[tuple[Candidate, Probe]]) -> None:
        """Take corrections from simulated candidates, each at a load near its capacity."""
        shares, tails, aggregated = dict(self.corrections.prefill_share), [], self.corrections.aggregated_share
        for candidate, found in pilots:
            rate, tpot = found.metrics["request_throughput_req_s"], found.metrics["tpot_ms"]
            if tpot["mean"]:
                tails.append(tpot["p90"] / tpot["mean"])
            if candidate.layout.disaggregated:
                width = candidate.layout.prefill_dep
                promised = candidate.estimate.by_role["prefill"] / self.corrections.share_of(width)
                shares[width] = _sane(rate / found.utilization["prefill"] / promised)
            elif candidate.estimate.rate_req_s > 0:
                aggregated = _sane(rate * self.corrections.aggregated_share / candidate.estimate.rate_req_s)
        tail = max(1.0, sum(tails) / len(tails)) if tails else self.corrections.tail
        self.corrections = Corrections(prefill_share=shares, tail=tail, aggregated_share=aggregated)

    def _refuse(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def candidates(self) -> list[Candidate]:
        """All layouts with the knobs that screen best for their widths, best first."""
        rates, knobs = self._unit_rates()
        found = []
        for layout in sorted(set(self._layouts(rates))):
            best = knobs.get(("decode" if layout.disaggregated else "aggregated", layout.decode_dep))
            if best is None:
                continue
            if layout.disaggregated:
                best = replace(best, chunk=knobs[("prefill", layout.prefill_dep)].chunk)
            candidate = self.candidate(layout, best)
            if candidate and math.isfinite(candidate.score):
                found.append(candidate)
        return sorted(found, key=lambda c: (-c.score, c.layout))

    def aggregated_anyway(self) -> Candidate | None:
        """An aggregated candidate that memory admits, whatever the closed form promises; None where there is none."""
        knobs = replace(default_knobs(self.request.model_spec), chunk=8192, redundant=0)
        layouts = aggregated_layouts(self.request.gpu_spec, self.request.gpus)
        return next((c for layout in layouts if (c := self.candidate(layout, knobs, judged=False))), None)

    def _layouts(self, rates: dict[tuple[str, int], float]) -> list[Layout]:
        request = self.request
        layouts = [*aggregated_layouts(request.gpu_spec, request.gpus)]
        layouts += disaggregated_layouts(request.gpu_spec, request.gpus, rates)
        if request.per == "deployment":
            layouts += self._sized_layouts(rates)
        return layouts

    def _sized_layouts(self, rates: dict[tuple[str, int], float]) -> list[Layout]:
        """Layouts with as many instances as the target needs, where they fit."""
        need = self.request.target_tps / self.demand.counted_tokens(self.request.count)
        by_role = {
            role: {w: r for (x, w), r in rates.items() if x == role and r > 0}
            for role in ("prefill", "decode", "aggregated")
        }
        sized = []
        for rate_req_s in (need * factor for factor in OVERPROVISION):
            for width, own in by_role["aggregated"].items():
                sized.append(sized_layout(rate_req_s, decode_dep=width, decode_req_s=own))
            for (p, p_own), (d, d_own) in product(by_role["prefill"].items(), by_role["decode"].items()):
                sized.append(
                    sized_layout(rate_req_s, prefill_dep=p, prefill_req_s=p_own, decode_dep=d, decode_req_s=d_own)
                )
        return [x for x in sized if x.gpus <= self.request.gpus]

    def _unit_rates(self) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], Knobs]]:
        """By role and width: the best rate of one instance, and the knobs that reach it."""
        rates: dict[tuple[str, int], float] = {}
        knobs: dict[tuple[str, int], Knobs] = {}
        gpu, base = self.request.gpu_spec, default_knobs(self.request.model_spec)
        drafts = range(self.request.model_spec.max_draft_tokens + 1)
        decode_variants = [replace(base, drafts=k, redundant=r) for k in drafts for r in REDUNDANT]
        for width in decode_widths(gpu):
            if width > self.request.gpus:
                continue
            alone = Layout(prefill_instances=0, prefill_dep=1, decode_instances=1, decode_dep=width)
            chunked = [replace(k, chunk=c) for k in decode_variants for c in CHUNKS]
            self._keep_best("aggregated", width, alone, chunked, rates, knobs)
            pair = Layout(prefill_instances=1, prefill_dep=width, decode_instances=1, decode_dep=width)
            self._keep_best("decode", width, pair, decode_variants, rates, knobs)
        for width in prefill_widths(gpu):
            if width > self.request.gpus:
                continue
            pair = Layout(prefill_instances=1, prefill_dep=width, decode_instances=1, decode_dep=width)
            variants = [replace(base, drafts=0, redundant=-1, chunk=c) for c in CHUNKS]
            self._keep_best("prefill", width, pair, variants, rates, knobs)
        return rates, knobs

    def _keep_best(
        self,
        role: str,
        width: int,
        layout: Layout,
        variants: list[Knobs],
        rates: dict[tuple[str, int], float],
        knobs: dict[tuple[str, int], Knobs],
    ) -> None:
        for variant in variants:
            found = self.candidate(layout, variant)
            rate = found.estimate.by_role[role] if found else 0.0
            if found and rate > rates.get((role, width), 0.0):
                rates[(role, width)], knobs[(role, width)] = rate, found.knobs


def _sane(share: float) -> float:
    return min(1.5, max(0.2, share))
