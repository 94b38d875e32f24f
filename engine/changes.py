"""What changes from one deployment to the next, and what must restart for it: vLLM takes no setting while it runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.placement import pool_names

ROUTER = "router"
ROUTED = ("instances", "dep", "max_num_seqs")
"""Knobs of a pool that the router is told: addresses, ranks, how many requests it lets in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One knob. `knob`: dotted, pools by their role ("decode.max_num_seqs"). `restarts`: names of the pools, and
    "router", that must restart; none where instances only come or go."""

    knob: str
    old: Any
    new: Any
    restarts: tuple[str, ...]

    def __str__(self) -> str:
        after = "; ".join(f"restarts {r}" for r in self.restarts) or "no restart"
        return f"{self.knob}: {_shown(self.old)} -> {_shown(self.new)} ({after})"


def restart_needed(old: Deployment, new: Deployment) -> list[Change]:
    """Every knob whose value differs, in the deployment's own order; none for equal deployments. Where pools come or
    go there is one change, `pools`, which restarts all."""
    before, after = _named_pools(old), _named_pools(new)
    if list(before) != list(after):
        told = (_layout(old), _layout(new))
        changes = [Change(knob="pools", old=told[0], new=told[1], restarts=(*after, ROUTER))]
    else:
        changes = [c for name in after for c in _pool_changes(name, before[name], after[name])]
    return changes + list(_shared_changes(old, new, after))


def _named_pools(deployment: Deployment) -> dict[str, Pool]:
    return dict(zip(pool_names(deployment), deployment.pools, strict=True))


def _layout(deployment: Deployment) -> str:
    return " + ".join(f"{p.instances} x {p.role} DEP{p.dep}" for p in deployment.pools)


def _pool_changes(name: str, old: Pool, new: Pool) -> Iterator[Change]:
    for knob, before, after in _differences(old.model_dump(), new.model_dump()):
        own = () if knob == "instances" else (name,)
        yield Change(knob=f"{name}.{knob}", old=before, new=after, restarts=own + ((ROUTER,) if knob in ROUTED else ()))


def _shared_changes(old: Deployment, new: Deployment, pools: dict[str, Pool]) -> Iterator[Change]:
    before_all, after_all = ({k: v for k, v in d.to_dict().items() if k != "pools"} for d in (old, new))
    for knob, before, after in _differences(before_all, after_all):
        if knob.startswith("router."):
            restarts: tuple[str, ...] = (ROUTER,)
        else:
            restarts = tuple(n for n, p in pools.items() if _concerns(knob, p, new, old))
        yield Change(knob=knob, old=before, new=after, restarts=restarts)


def _concerns(knob: str, pool: Pool, new: Deployment, old: Deployment) -> bool:
    """Does a knob of the deployment reach this pool's servers?"""
    if knob.startswith("dp_sync."):
        return pool.dep > 1
    if knob.startswith("eplb."):
        balanced = pool.gpus_per_instance > 1 and (new.eplb.enabled or old.eplb.enabled)
        return balanced and not (knob == "eplb.redundant_experts" and pool.redundant_experts is not None)
    return True


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, before in old.items():
        after = new[key]
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield prefix + key, before, after


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
