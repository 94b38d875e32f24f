"""Service-level objectives, on percentiles."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """90 % of requests must reach this interactivity (tok/s/user) and see their first token within this TTFT (ms)."""

    p90_interactivity_tok_s_user: float
    p90_ttft_ms: float

    @property
    def p90_tpot_ms(self) -> float:
        return 1e3 / self.p90_interactivity_tok_s_user

    def slack(self, metrics: dict) -> dict[str, float]:
        """How many times better than the objective each metric is; below 1 it is broken."""
        if not metrics["requests"]["measured"]:  # nothing ended: neither is met
            return {"p90_interactivity": 0.0, "p90_ttft": 0.0}
        reached = metrics["interactivity_tok_s_user"]["p90"]
        ttft = metrics["ttft_ms"]["p90"]
        return {
            # Without a second token there is no gap to be slow in.
            "p90_interactivity": reached / self.p90_interactivity_tok_s_user if metrics["tpot_ms"]["p90"] else 10.0,
            "p90_ttft": self.p90_ttft_ms / ttft if ttft else 10.0,
        }

    def meets(self, metrics: dict) -> bool:
        """Are both objectives met, by at least one measured request?"""
        return min(self.slack(metrics).values()) >= 1.0
