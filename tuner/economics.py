"""What tokens cost and earn: GPU-hours against prices per million tokens."""

from rackplan.engine import GpuSpec

PRICES_USD_PER_M_TOKENS = {"input_cache_hit": 0.003, "input_cache_miss": 0.15, "output": 0.60}
"""Off-peak list prices of DeepSeek's API; of the published AgentX run they give 38.96 USD per GPU-hour."""


def economics_of(metrics: dict, gpu: GpuSpec) -> dict:
    """Cost and revenue at a run's rates. `metrics`: the contract's. USD per GPU-hour and per million tokens."""
    total, output, new = (
        metrics[f"throughput_{kind}_tok_s_per_gpu"] * 3600 / 1e6 for kind in ("total", "output", "new_input")
    )  # million tokens per GPU-hour
    hit = max(0.0, total - output - new)
    prices = PRICES_USD_PER_M_TOKENS
    earned = hit * prices["input_cache_hit"] + new * prices["input_cache_miss"] + output * prices["output"]
    return {
        "usd_per_gpu_hour": gpu.usd_per_gpu_hour,
        "usd_per_m_tokens_total": gpu.usd_per_gpu_hour / total if total else None,
        "usd_per_m_output_tokens": gpu.usd_per_gpu_hour / output if output else None,
        "revenue_usd_per_gpu_hour": earned,
        "prices": {**prices, "unit": "USD per million tokens"},
    }
