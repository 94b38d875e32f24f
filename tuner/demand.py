"""What a workload asks for as it is played: request rate per unit of load, and mean lengths.

A workload's file or corpus says what it holds; a run of a minute plays some of it, at a pace that depends on how long
requests take. Closed-form estimates use what is played.
"""

import heapq
from dataclasses import dataclass

from rackplan.engine import InputError
from rackplan.simulator.arrivals import TraceWorkload
from rackplan.simulator.load import Load, Workload
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.streams import Streams

_SAMPLE_LOAD = 256
_MOST_REQUESTS = 20_000
_KEPT_OUTPUTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Means per request. `rate_req_s`: requests per second and unit of load (a client, a session tree, or 1 req/s) when
    a request takes `played_e2e_s`; `new_tokens`: prompt tokens that an infinite prefix cache misses;
    `outputs`: output lengths as they came, some hundreds; `thinking`: see Drafting."""

    rate_req_s: float
    played_e2e_s: float
    input_tokens: float
    output_tokens: float
    new_tokens: float
    longest_tokens: int
    outputs: tuple[int, ...] = ()
    thinking: bool = True

    @property
    def pauses(self) -> bool:
        """Do units wait between requests? Those that never do all come at once at the start of a closed loop."""
        return self.rate_req_s * self.played_e2e_s < 0.9

    @property
    def total_tokens(self) -> float:
        return self.input_tokens + self.output_tokens

    def counted_tokens(self, count: str) -> float:
        """Tokens of a mean request that a target counts: `total` (cached input + new input + output) or `output`."""
        return self.output_tokens if count == "output" else self.total_tokens


def is_open_loop(workload: Workload) -> bool:
    """Is the load a rate (recorded arrivals, stretched) and not a concurrency?"""
    return isinstance(workload, TraceWorkload)


def load_of(workload: Workload, amount: float) -> Load:
    """`amount` req/s of an open loop, or that many clients or session trees of a closed one."""
    return Load(rate_req_s=amount) if is_open_loop(workload) else Load(concurrency=max(1, round(amount)))


def play_demand(workload: Workload, *, e2e_s: float, duration_s: float, seed: int) -> Demand:
    """Play the workload against a server on which every request takes `e2e_s`. Raises InputError if nothing comes."""
    units = 1 if is_open_loop(workload) else _SAMPLE_LOAD
    source = workload.source(load_of(workload, units), duration_s, Streams(seed))
    cached = dict(source.primed())
    hashes: set[int] = set()
    queue = [(r.arrival_ns, r.id, r) for r in source.arrivals()]
    heapq.heapify(queue)
    count = inputs = new = longest = last_ns = 0
    outputs: list[int] = []
    while queue and count < _MOST_REQUESTS:
        at_ns, _, request = heapq.heappop(queue)
        count += 1
        last_ns = at_ns
        inputs += request.input_tokens
        outputs.append(request.output_tokens)
        longest = max(longest, request.input_tokens + request.output_tokens)
        new += request.input_tokens - _hit(request, cached, hashes)
        for following in source.finished(request, at_ns + round(e2e_s * NS_PER_S)):
            heapq.heappush(queue, (following.arrival_ns, following.id, following))
    if not count:
        raise InputError(f"--workload {workload.name}: no request comes in {duration_s:g} s; give a longer trace")
    return Demand(
        rate_req_s=1.0 if is_open_loop(workload) else count / max(last_ns / NS_PER_S, e2e_s) / units,
        played_e2e_s=e2e_s,
        input_tokens=inputs / count,
        output_tokens=sum(outputs) / count,
        new_tokens=max(1.0, new / count),
        longest_tokens=longest,
        outputs=tuple(outputs[:: max(1, count // _KEPT_OUTPUTS)]),
    )


def _hit(request: Request, cached: dict[int, int], hashes: set[int]) -> int:
    """Tokens that an infinite prefix cache holds; the request's own are added."""
    if request.cached_tokens is not None:
        return request.cached_tokens
    if request.hash_ids is not None:
        hit = 0
        for block in request.hash_ids:
            if block not in hashes:
                break
            hit += request.block_tokens
        hashes.update(request.hash_ids)
        return min(hit, request.input_tokens)
    if request.session < 0:
        return 0
    held = max(cached.get(request.session, 0), cached.get(request.prefix_session, 0))
    cached[request.session] = request.input_tokens + request.output_tokens
    return min(request.reuse_tokens, held)
