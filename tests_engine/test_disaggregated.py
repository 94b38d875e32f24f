"""1P1D over NIXL on the CPU: the cap on new KV loads holds, no request is lost, the text is one server's."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from servers import CORES, Server, free_port, launch, stop, wait_healthy

pytest.importorskip("nixl", reason="needs NIXL: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1")
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two servers need two cores")
CAP, REQUESTS, INPUT, OUTPUT = 2, 12, 600, 24
TRANSFER = (
    '{"kv_connector": "NixlConnector", "kv_role": "%s", "kv_buffer_device": "cpu",'
    ' "kv_connector_extra_config": {"backends": ["UCX"]}}'
)
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                 "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip


def prompt(i):
    return {"prompt": [(i * 7 + j) % 4000 + 5 for j in range(INPUT)], "max_tokens": OUTPUT}


@pytest.fixture(scope="module")
def pair(tiny_moe, tmp_path_factory):
    """(prefill server, decode server), started together."""
    folder = tmp_path_factory.mktemp("disaggregated")
    servers = [Server(name, tiny_moe, free_port(), folder) for name in ("prefill-0", "decode-0")]
    started = []
    try:
        for server, core, role in zip(servers, CORES, ("kv_producer", "kv_consumer"), strict=False):
            env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,self"}
            if role == "kv_consumer":
                env["RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP"] = str(CAP)
            started.append(launch(server, "--kv-transfer-config", TRANSFER % role, cores=str(core), **env))
        for server, process in zip(servers, started, strict=True):
            wait_healthy(server, process)
        yield servers
    finally:
        for process in started:
            stop(process)


@pytest.fixture(scope="module")
def answers(pair):
    """Every prompt is computed first, then all are handed to the decode server at once."""
    prefill, decode = pair
    with ThreadPoolExecutor(REQUESTS) as pool:
        first = {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        handed = list(pool.map(lambda i: prefill.post(prompt(i) | first)["kv_transfer_params"], range(REQUESTS)))
        return list(pool.map(lambda i: decode.post(prompt(i) | {"kv_transfer_params": handed[i]}), range(REQUESTS)))


def text(answer):
    return answer["choices"][0]["text"]


def test_every_request_finishes_with_the_text_of_one_server(pair, answers):
    prefill, _ = pair
    assert [a["usage"]["completion_tokens"] for a in answers] == [OUTPUT] * REQUESTS
    assert [text(a) for a in answers] == [text(prefill.post(prompt(i))) for i in range(REQUESTS)]


def test_no_step_takes_more_loaded_requests_than_the_cap_and_each_once(pair, answers):
    _, decode = pair
    loads = [step["kv_loads"] for step in decode.steps()]
    assert max(loads) <= CAP
    assert sum(loads) == REQUESTS


def test_the_decode_server_computes_the_last_prompt_token_alone(pair, answers):
    _, decode = pair
    chunks = [tuple(c) for c in chain.from_iterable(step["prefill"] for step in decode.steps())]
    assert chunks == [(1, INPUT - 1)] * REQUESTS


def test_both_say_their_role_and_the_cap(pair, answers):
    prefill, decode = pair
    assert [s.config()["kv_role"] for s in pair] == ["kv_producer", "kv_consumer"]
    assert [s.config()["kv_connector"] for s in pair] == ["NixlConnector"] * 2
    assert prefill.config()["max_new_kv_loads_per_step"] is None
    assert decode.config()["max_new_kv_loads_per_step"] == CAP
