"""What rackplan's router is told, whether it is started here or rendered for a cluster."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from rackplan.engine.balancing import Backend
from rackplan.engine.deployment import Deployment, Role, RouterPolicy

QUEUED_PER_SEAT = 4
"""Requests that the router lets in for each sequence that may run: a factor; vLLM's own queue has no limit."""


class Instance(BaseModel):
    """One instance: where it answers, and how many data-parallel ranks a request can be sent to."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str
    ranks: int = Field(1, ge=1)

    def backends(self) -> list[Backend]:
        """One a rank."""
        return [Backend(self.url, r if self.ranks > 1 else None) for r in range(self.ranks)]


class RouterConfig(BaseModel):
    """What the router is told. `entry`: the instances that requests enter; `decode`: those that take them over, empty
    where prefill and decode are one. `affinity_timeout_s`: see Router in deployment.py. `max_in_flight`: requests at
    which the next is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    policy: RouterPolicy
    affinity_timeout_s: float | None = None
    entry: tuple[Instance, ...] = Field(min_length=1)
    decode: tuple[Instance, ...] = ()
    max_in_flight: int = Field(ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An instance: its role, where it answers, how many ranks a request can be sent to."""

    role: Role
    url: str
    ranks: int


def router_json(deployment: Deployment, instances: Iterable[Address], *, host: str, port: int) -> str:
    """What `python -m rackplan.engine.router` reads: policy and limits are the deployment's."""
    known = list(instances)

    def of(*roles: str) -> tuple[Instance, ...]:
        return tuple(Instance(url=a.url, ranks=a.ranks) for a in known if a.role in roles)

    last = deployment.pools_of("decode") or deployment.pools
    config = RouterConfig(
        host=host,
        port=port,
        policy=deployment.router.policy,
        affinity_timeout_s=deployment.router.affinity_timeout_s,
        entry=of("prefill", "aggregated"),
        decode=of("decode"),
        max_in_flight=QUEUED_PER_SEAT * sum(p.instances * p.dep * p.max_num_seqs for p in last),
    )
    return config.model_dump_json(indent=1) + "\n"


def needs_router(deployment: Deployment) -> bool:
    """Does more than one address take requests, or a policy that vLLM's own balancing is not?"""
    pool = deployment.pools[0]
    own = pool.instances == 1 and (pool.dep == 1 or deployment.router.policy == "least_requests")
    return deployment.disaggregated or not own
