"""The configuration of rackplan's router in front of rendered servers."""

from collections.abc import Iterable
from dataclasses import dataclass

from rackplan.engine.deployment import Deployment, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An instance: its role, where it answers, how many ranks a request can be sent to."""

    role: Role
    url: str
    ranks: int


def router_json(deployment: Deployment, instances: Iterable[Address], *, host: str, port: int) -> str:
    """What `python -m rackplan.engine.router` reads: policy and limits are the deployment's."""
    from rackplan.engine.local_servers import QUEUED_PER_SEAT
    from rackplan.engine.router import Instance, RouterConfig

    known = list(instances)

    def of(*roles: str) -> tuple[Instance, ...]:
        return tuple(Instance(url=a.url, ranks=a.ranks) for a in known if a.role in roles)

    last = deployment.pools_of("decode") or deployment.pools
    config = RouterConfig(
        host=host,
        port=port,
        policy=deployment.router.policy,
        entry=of("prefill", "aggregated"),
        decode=of("decode"),
        max_in_flight=QUEUED_PER_SEAT * sum(p.instances * p.dep * p.max_num_seqs for p in last),
    )
    return config.model_dump_json(indent=1) + "\n"


def wants_router(deployment: Deployment) -> bool:
    """Does more than one address take requests, or a policy that vLLM's own balancing is not?"""
    from rackplan.engine.local_servers import needs_router

    return needs_router(deployment)
