"""What an instance knows of itself."""

from collections.abc import Callable
from dataclasses import dataclass

from rackplan.engine import Pool
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.adaptive import Verification
from rackplan.simulator.cost import PoolCost
from rackplan.simulator.eplb_run import EplbModel
from rackplan.simulator.host_tier import HostTier
from rackplan.simulator.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """`kv_tokens`: KV pool of one rank. `balancedness`: by tokens per rank. `eplb`: None where it is off. `coalesce`:
    pass steps together where they may be. `kv_offloading_tokens`: of a rank's KV tier in host memory, 0 for none;
    `kv_bytes_per_token`, `host_gb_s`: what a load from there takes. `frontend_token_ms`, `frontend_turn_ms`: see
    FrontEnd. `verification`: None where every step verifies all drafts.
    """

    pool: Pool
    cost: PoolCost
    kv_tokens: int
    acceptance: Acceptance
    replay_tokens: int
    balancedness: Callable[[float], float]
    make_cache: Callable[[], PrefixCache]
    eplb: EplbModel | None = None
    coalesce: bool = True
    frontend_token_ms: float = 0.0
    frontend_turn_ms: float = 0.0
    kv_offloading_tokens: int = 0
    kv_bytes_per_token: float = 0.0
    verification: Verification | None = None
    host_gb_s: float = 0.0

    def make_host_tier(self) -> HostTier | None:
        """A rank's; None where the pool has none."""
        if not self.kv_offloading_tokens:
            return None
        return HostTier(self.make_cache(), self.kv_offloading_tokens, self.kv_bytes_per_token, self.host_gb_s)
