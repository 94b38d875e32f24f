"""Prompts of which host memory has the first tokens, on vLLM's scheduler and on the simulator's, in virtual time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_kv import Elsewhere
from virtual_scheduler import Ask, EngineSide, SimulatorSide, Stream
from vllm.v1.request import RequestStatus

from rackplan.simulator.host_tier import HostTier
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAsk(Ask):
    """Host memory has `reuse_tokens` of its prompt, and its name ends with as many; a load takes `host_steps`."""

    host_steps: int


class InHost(Elsewhere):
    """What follows a hit in HBM is loaded, asynchronously, as vLLM's offloading connector does."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        more = int(request.request_id.rpartition("-")[2]) - num_computed_tokens
        return max(0, more), more > 0


class HostEngineSide(EngineSide):
    def __init__(self, stream: Stream, model: Path) -> None:
        super().__init__(stream, model, InHost)
        self.loads = 0
        self._due: dict[str, int] = {}

    def _received(self, number: int) -> set[str]:
        arrived = self.scheduler.finished_recving_kv_req_ids
        for name, request in self.scheduler.requests.items():
            loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads and name not in self._due and name not in arrived:
                self._due[name] = number + self._asks[name].host_steps
                self.loads += 1
        received = {name for name, due in self._due.items() if due == number}
        for name in received:
            del self._due[name]
        return received


class HostSimulatorSide(SimulatorSide):
    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        host = self.ranks.queues[0].host = HostTier(SessionCache(), 10**9, token_bytes=1.0, bytes_per_ns=1.0)
        for ask in stream.asks:
            if ask.reuse_tokens:
                host.store(Request(-1, 0, ask.reuse_tokens + 1, 1, session=ask.session), ask.reuse_tokens)

    def _steps_to_load(self, ask: Ask) -> int:
        assert isinstance(ask, HostAsk)
        return ask.host_steps


def sides(stream: Stream, model: Path) -> tuple[HostEngineSide, HostSimulatorSide]:
    """vLLM's scheduler and the simulator's, for `stream`, whose asks are HostAsk."""
    return HostEngineSide(stream, model), HostSimulatorSide(stream)
