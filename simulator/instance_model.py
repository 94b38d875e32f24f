"""What an instance knows of itself."""

from collections.abc import Callable
from dataclasses import dataclass

from rackplan.engine import Pool
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.cost import PoolCost
from rackplan.simulator.eplb_run import EplbModel
from rackplan.simulator.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """`kv_tokens`: KV pool of one rank. `balancedness`: by tokens per rank. `eplb`: None where it is off. `coalesce`:
    pass steps together where they may be. `frontend_token_ms`, `frontend_turn_ms`: see FrontEnd.
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
