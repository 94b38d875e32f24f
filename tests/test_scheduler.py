"""The scheduler's decisions where KV or budgets are short, as vLLM's own scheduler takes them; tests_engine compares
the two step by step.
"""

import numpy as np
import pytest
from models import FakeCalibration, GivenRequests, aggregated, disaggregated, requests, with_kv_tokens

from rackplan.engine import InputError
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.decode_batch import DecodeBatch
from rackplan.simulator.load import Load
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.rank import Rank
from rackplan.simulator.request import Request
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.simulate import simulate
from rackplan.simulator.streams import Streams


def run(deployment, reqs):
    return simulate(deployment, GivenRequests(reqs), Load(), FakeCalibration(), RunOptions())


def by_request(result, name):
    return getattr(result, name)[np.argsort(result.request_id)]


def test_the_threshold_for_long_prompts_spares_others_and_leaves_one_alone_as_it_is():
    limited, free = aggregated(long_prefill_token_threshold=300), aggregated()
    alone = requests([0.0], 1000, 5)
    assert run(limited, alone).finish_ns == run(free, alone).finish_ns
    two = requests([0.0, 0.0], 1000, 5)
    assert run(limited, two).first_token_ns.min() > run(free, two).first_token_ns.min()


@pytest.mark.parametrize(("spare", "preemptions"), [(0, 0), (-1, 1)])
def test_a_request_holds_kv_for_all_its_tokens_but_the_last(spare, preemptions):
    # Both run side by side; in their last step each holds 100 + 50 - 1 tokens.
    deployment = with_kv_tokens(aggregated(), "aggregated", 2 * 149 + spare)
    assert run(deployment, requests([0.0, 0.0], 100, 50)).pools[0].preemptions == preemptions


def test_the_request_admitted_last_is_preempted_even_in_its_prefill():
    # The second prompt takes chunks of what the budget leaves; the first one's growth takes the KV of its last chunks.
    deployment = with_kv_tokens(aggregated(max_num_batched_tokens=8, max_num_seqs=8), "aggregated", 100)
    result = run(deployment, requests([0.0, 0.0], [20, 74], [60, 2]))
    assert result.pools[0].preemptions == 1
    first, second = by_request(result, "finish_ns")
    assert first < by_request(result, "first_token_ns")[1] < second


def test_hand_overs_wait_in_the_prefill_pool_while_the_decode_rank_has_no_seat():
    # The first decodes for 400 steps; the others come meanwhile and begin their loads when it has ended.
    reqs = requests([0.0, 0.5, 0.5], 100, [400, 2, 2])
    found = {}
    for seats in (1, 2):
        result = run(disaggregated(prefill={"instances": 1}, decode={"dep": 1, "max_num_seqs": seats}), reqs)
        found[seats] = by_request(result, "first_token_ns") / 1e6, result.transfer_wait_ns / 1e6
    first_ends_ms = found[1][0][0] + 399 * 3.5
    assert (found[1][0][1:] > first_ends_ms).all()
    assert found[1][1] > 2 * (first_ends_ms - 600)
    assert (found[2][0][1:] < 600).all()
    assert found[2][1] < 3 * 3.6  # a step each, at most


def test_prompts_wait_for_their_step_where_a_rank_decodes():
    # Both ranks decode from time 0; what comes at 50 ms waits for a step whose number is a multiple of the interval.
    arrivals = requests([0.0, 0.0, 0.050], [100, 100, 50], [400, 400, 2])
    waits_ms = {}
    for every in (1, 50):
        result = run(aggregated(dep=2, prefill_schedule_interval=every, async_scheduling=False), arrivals)
        waits_ms[every] = by_request(result, "scheduled_ns")[2] / 1e6 - 50
    assert waits_ms[1] < 5
    first_ms = by_request(result, "first_token_ns")[0] / 1e6
    assert waits_ms[50] + 50 == pytest.approx(first_ms + 49 * 3.51, rel=0.01)  # steps 1 to 49 decode


def test_an_interval_for_prompts_without_data_parallel_ranks_is_refused():
    with pytest.raises(InputError, match=r"prefill_schedule_interval=4 has no effect at dep=1.*set 1"):
        aggregated(prefill_schedule_interval=4)


def test_the_last_token_of_an_answer_leaves_no_kv_to_hit():
    turns = [Request(0, 0, 1000, 24, session=7), Request(1, 2_000_000_000, 1200, 2, session=7, reuse_tokens=1024)]
    assert run(aggregated(), turns).cached_tokens.tolist() == [0, 1008]  # of 1023 tokens in 63 whole blocks


def test_a_preempted_request_ends_once_where_it_ends_at_the_step_that_it_was_to_end_at():
    batch = DecodeBatch([Rank(SessionCache())], 10_000, Acceptance(0, 1.0, Streams(0)))
    seq = Sequence(Request(0, 0, 100, 22), 0, 0, 100)
    batch.enter(0, 1)
    batch.start(seq, 21, 101)
    batch.step = 19
    batch.stop(seq)
    seq.preemptions = 1
    batch.step = 20  # its prompt and 20 tokens are computed anew, which makes one more
    batch.enter(0, 1)
    batch.start(seq, 1, 121)
    batch.step = 21
    assert batch.pop_ended() == [seq]
