"""Queueing theory: with one sequence at a time the simulator is an M/D/1 or M/M/1 queue.

Mean waits near saturation converge too slowly for a simulation of thousands of requests, so the comparison goes through
Lindley's recursion: on a stream of millions its mean is Pollaczek and Khinchine's within 3 %, and on the head of that
same stream the simulator's waiting times are the recursion's, request by request.
"""

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, ServiceCost, aggregated, requests

from rackplan.simulator.load import Load
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.simulate import simulate

SERVICE_MS = 10.0
"""10,000 tokens at a microsecond each."""
STREAM, HEAD = 4_000_000, 5_000


def _lindley(arrivals_ms, services_ms):
    """Waiting times of a FIFO queue: W = S - min(S) over the walk S of service minus inter-arrival times."""
    walk = np.concatenate([[0.0], np.cumsum(services_ms[:-1] - np.diff(arrivals_ms))])
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("service", "squared_moment"), [("constant", 1.0), ("exponential", 2.0)])
def test_waiting_times_are_those_of_the_queue(utilisation, service, squared_moment):
    rng = np.random.default_rng(round(utilisation * 10))
    arrivals_ms = np.cumsum(rng.exponential(SERVICE_MS / utilisation, STREAM))
    tokens = np.full(STREAM, 10_000) if service == "constant" else rng.exponential(10_000, STREAM).round().clip(1)
    waits_ms = _lindley(arrivals_ms, tokens / 1e3)
    theory_ms = utilisation * SERVICE_MS * squared_moment / (2 * (1 - utilisation))
    assert waits_ms.mean() == pytest.approx(theory_ms, rel=0.03)

    deployment = aggregated(max_num_seqs=1, max_num_batched_tokens=163_840, async_scheduling=False)
    head = requests(arrivals_ms[:HEAD] / 1e3, tokens[:HEAD].astype(int), 1)
    result = simulate(deployment, GivenRequests(head), Load(), FakeCalibration(ServiceCost()), RunOptions())
    simulated_ms = ((result.scheduled_ns - result.arrival_ns) / 1e6)[np.argsort(result.request_id)]
    np.testing.assert_allclose(simulated_ms, waits_ms[:HEAD], atol=0.1)  # arrivals are rounded to ns, services are not
