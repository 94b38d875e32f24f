"""Numbers and phrases that the screen and the report share: sensible digits, units, the verdict in one line."""

import math
from collections.abc import Mapping
from typing import Any

CAUSES = {
    "compute": "Useful compute",
    "dp_imbalance": "Waiting: DP imbalance",
    "ep_imbalance": "Waiting: EP imbalance",
    "dp_sync": "DP sync",
    "host": "Host work",
    "transfer_wait": "Waiting for KV transfer",
    "kv_full": "KV cache full",
    "admission_cap": "Admission cap",
    "idle": "Idle (no requests)",
}
"""Where GPU time goes, in the order in which it is shown."""


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits, thousands grouped, no exponent; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gpus_phrase(count: float) -> str:
    """1 GPU, 36 GPUs."""
    return f"{number(count, 6)} GPU{'' if count == 1 else 's'}"


def rate(value: float | None) -> str:
    """Tokens per second as 954k or 1.2M, without the unit."""
    if value is None or not math.isfinite(value) or abs(value) < 10_000:
        return number(value)
    return f"{number(value / 1e6)}M" if abs(value) >= 999_500 else f"{number(value / 1e3)}k"


def time_ms(value: float | None) -> str:
    """Milliseconds as 12.3 ms, 3.42 s or 72.1 s."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{number(value / 1e3)} s" if abs(value) >= 1000 else f"{number(value)} ms"


def percent(share: float | None) -> str:
    """A share of 0 to 1 as 61 % or 4.2 %."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def usd(value: float | None) -> str:
    """An amount in US dollars with three significant digits; a dash for None."""
    return "–" if value is None else f"${number(value)}"


def pool_phrase(pool: Mapping[str, Any]) -> str:
    """One pool as people say it: 8 x prefill DEP2."""
    tp = f" TP{pool['tp']}" if pool.get("tp", 1) > 1 else ""
    return f"{pool['instances']} x {pool['role']} DEP{pool['dep']}{tp}"


def pool_gpus(pool: Mapping[str, Any]) -> int:
    """GPUs of a pool as documents state it: instances x dep x tp."""
    return int(pool["instances"]) * int(pool["dep"]) * int(pool.get("tp", 1))


def deployment_phrase(deployment: Mapping[str, Any]) -> str:
    """The pools in one phrase: 8 x prefill DEP2 + 1 x decode DEP32."""
    return " + ".join(pool_phrase(p) for p in deployment["pools"])


def options_phrase(deployment: Mapping[str, Any]) -> str:
    """What holds for all pools: EPLB, drafts, KV transfer, DP sync, router."""
    eplb, drafts = deployment["eplb"], deployment["speculation"]
    balancing = (
        f"{eplb['redundant_experts']} redundant experts, window {eplb['window_steps']}, "
        f"every {eplb['interval_steps']} steps"
    )
    parts = (
        f"EPLB {balancing if eplb['enabled'] else 'off'}",
        f"{drafts['draft_tokens']} draft tokens"
        + (", adaptive verification" if drafts.get("enable_adaptive_verification") else ""),
        f"KV {deployment['kv_transfer']['mode']}",
        f"DP sync {deployment['dp_sync']['algorithm']}",
        f"router {deployment['router']['policy']}",
    )
    return " · ".join(parts)


def load_phrase(load: Mapping[str, Any] | None) -> str:
    """The operating point: at concurrency 512, or at 12.5 req/s."""
    if load and load.get("concurrency") is not None:
        return f"at concurrency {load['concurrency']}"
    if load and load.get("rate_req_s") is not None:
        return f"at {number(load['rate_req_s'])} req/s"
    return "as recorded"


def achieved_tps(metrics: Mapping[str, Any], target: Mapping[str, Any]) -> float:
    """The predicted rate in what the target counts: total or output tokens, per GPU or the whole deployment."""
    per_gpu = float(metrics[f"throughput_{target['count']}_tok_s_per_gpu"])
    return per_gpu if target["per"] == "gpu" else per_gpu * float(metrics["gpus"])


def unit(target: Mapping[str, Any]) -> str:
    """The target's unit: tok/s/GPU, or tok/s of the whole deployment."""
    return "tok/s/GPU" if target["per"] == "gpu" else "tok/s"


def target_phrase(target: Mapping[str, Any]) -> str:
    """The target as people say it: 900k total tok/s per gpu."""
    return f"{rate(target['tps'])} {target['count']} tok/s per {target['per']}"


def slo_phrase(slo: Mapping[str, Any]) -> str:
    """Both objectives in one phrase, with units."""
    return (
        f"P90 interactivity ≥ {number(slo['p90_interactivity_tok_s_user'])} tok/s/user, "
        f"P90 TTFT ≤ {time_ms(slo['p90_ttft_ms'])}"
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """The answer in one line; what is infeasible never reads like a recommendation."""
    if not plan["feasible"]:
        return f"No plan meets {target_phrase(plan['target'])}: {plan.get('reason') or 'no constraint was named'}"
    metrics, target = plan["prediction"]["metrics"], plan["target"]
    margin = plan.get("margin_pct")
    sign = f", {margin:+.1f} %" if margin is not None else ""
    return (
        f"Feasible: {gpus_phrase(metrics['gpus'])}, {deployment_phrase(plan['deployment'])}, "
        f"{rate(achieved_tps(metrics, target))} {unit(target)} "
        f"(target {rate(target['tps'])} {target['count']} per {target['per']}{sign})"
    )


def flat(mapping: Mapping[str, Any] | None) -> str:
    """A mapping in one line: name value, name value; names ending in pct or ms carry their unit behind the value."""
    return ", ".join(_pair(k, v) for k, v in (mapping or {}).items() if v is not None)


def inputs_phrase(inputs: Mapping[str, Any]) -> str:
    """Every effective input as key=value, under the names that the JSON has."""
    return " ".join(f"{k}={_exact(v)}" for k, v in inputs.items() if v is not None)


def _exact(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else plain(value)


def _pair(key: str, value: Any) -> str:
    for suffix, sign in (("_pct", " %"), ("_ms", " ms")):
        if key.endswith(suffix) and isinstance(value, int | float):
            return f"{key.removesuffix(suffix).replace('_', ' ')} {number(value)}{sign}"
    if isinstance(value, Mapping):
        return f"{key.replace('_', ' ')} ({flat(value)})"
    return f"{key.replace('_', ' ')} {plain(value)}"


def plain(value: Any) -> str:
    """Any JSON value as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Mapping):
        return flat(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


ORDER_HEADER = ("Deployment", "Runs", "Measured", "Predicted", "Rank → predicted")


def order_title(order: Mapping[str, Any]) -> str:
    """What deployments were ranked by, under which load."""
    return f"Rank order by {order['metric']}, {order['unit']}, at {order['load']}"


def order_rows(order: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A rank order's rows under ORDER_HEADER, the best measured first."""
    return [
        (
            str(d["deployment"]),
            str(d["runs"]),
            number(d["measured"], 4),
            number(d["predicted"], 4),
            f"{i} → {d['predicted_rank']}",
        )
        for i, d in enumerate(order["deployments"], 1)
    ]


def order_verdict(order: Mapping[str, Any]) -> str:
    """How many pairs of deployments are predicted as measured, in one line."""
    tau, spread = order["kendall_tau"], order["spread_pct"]
    told = (
        "no deployment was served twice, so the spread of repeats is not known"
        if spread is None
        else f"{order['within_spread']} within the spread of repeats ({number(spread, 2)} % a run)"
    )
    agree = f"{order['agree']} of {order['pairs']} pairs agree, {order['disagree']} disagree"
    return f"{agree}; {told}; Kendall's tau {'–' if tau is None else f'{tau:+.2f}'}"
