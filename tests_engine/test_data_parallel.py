"""Two ranks on the CPU: data and expert parallel in lockstep, and EPLB under Zipf routing, asynchronous or not."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import CORES, serving

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")
BALANCE = re.compile(r"avg_tokens=([\d.]+), max_tokens=(\d+), balancedness")


def eplb(mode):
    config = {"window_size": 60, "step_interval": 160, "log_balancedness": True, "log_balancedness_interval": 1,
              "use_async": mode == "async", "communicator": "torch_gloo"}  # fmt: skip
    return ("--enable-eplb", "--eplb-config", json.dumps(config))


@pytest.fixture(scope="module", params=["async", "sync"])
def server(request, tiny_moe, tmp_path_factory):
    parallel = ("--data-parallel-size=2", "--enable-expert-parallel", "--api-server-count=1", *eplb(request.param))
    zipf = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "zipf", "RACKPLAN_ZIPF": "1.0"}
    folder = tmp_path_factory.mktemp(request.param)
    with serving("dep2", tiny_moe, folder, *parallel, cores=f"{CORES[0]}|{CORES[1]}", **zipf) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server):
    """Rank 0 computes eight long prompts in chunks while rank 1 generates for one short one."""

    def ask(i):
        rank, body = (1, {"prompt": [9] * 10, "max_tokens": 150}) if i == 8 else (0, {"prompt": [i + 5] * 1500})
        return server.post({"max_tokens": 60, **body}, {"X-data-parallel-rank": str(rank)})

    with ThreadPoolExecutor(9) as pool:
        return list(pool.map(ask, range(9)))


def test_both_ranks_serve_and_say_so(server, answers):
    assert [a["usage"]["completion_tokens"] for a in answers] == [60] * 8 + [150]
    for rank in (0, 1):
        config = server.config(rank)
        assert (config["data_parallel_size"], config["data_parallel_rank"]) == (2, rank)
        assert config["enable_expert_parallel"]
        assert config["enable_eplb"]
        assert config["eplb"]["window_size"] == 60
    assert sum(tokens for step in server.steps(0) for tokens, _ in step["prefill"]) == 8 * 1500
    assert sum(tokens for step in server.steps(1) for tokens, _ in step["prefill"]) == 10


def test_ranks_step_together_however_unequal_their_batches(server, answers):
    first, second = server.steps(0), server.steps(1)
    begin = max(first[0]["t_s"], second[0]["t_s"])
    end = min(first[-1]["t_s"], second[-1]["t_s"])
    common = [[step for step in steps if begin <= step["t_s"] <= end] for steps in (first, second)]
    assert min(map(len, common)) > 40
    # Clocks are read at schedule(), so one step may lie outside at either end.
    assert abs(len(common[0]) - len(common[1])) <= 2
    work = [sum(sum(t for t, _ in s["prefill"]) + s["decode_tokens"] for s in steps) for steps in common]
    assert work[0] > 5 * work[1]  # 20 and more, unless the second request is late


def test_eplb_evens_out_the_ranks_load(server, answers):
    before, rearranged, after = server.log.partition("Rearranging experts")
    assert rearranged

    def balancedness(text):
        tokens = [(float(mean), float(top)) for mean, top in BALANCE.findall(text)]
        return sum(mean for mean, _ in tokens) / sum(top for _, top in tokens)

    # A rearrangement takes effect layer by layer over the next steps.
    settled = after.split("steps until the next rearrangement", 12)[-1]
    assert balancedness(settled) > balancedness(before) + 0.1
