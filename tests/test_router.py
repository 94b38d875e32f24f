"""The router in front of live instances: the simulator's policies, the P/D hand-over, refusal, instances that fail."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rackplan.engine.balancing import BLOCK_TOKENS, Backend, Balancer, PrefixHomes, prompt_of
from rackplan.engine.deployment import Router as Routing
from rackplan.engine.deployment import RouterPolicy
from rackplan.engine.router import RANK_HEADER, SESSION_HEADER, Router
from rackplan.engine.router_config import Instance, RouterConfig
from rackplan.simulator.request import NS_PER_S, Request
from rackplan.simulator.router import RankLoads, make_router
from rackplan.simulator.streams import Streams

FREE = prompt_of({"prompt": []})


class FakeInstance:
    """Answers as vLLM does; `seen` holds (body, headers) of each completion."""

    def __init__(self, kv_params: dict | None = None, chunks: tuple[bytes, ...] = (b"data: a\n\n", b"data: b\n\n")):
        self.seen: list[tuple[dict, Any]] = []
        self.kv_params, self.chunks, self.well = kv_params, chunks, True
        self.hold = asyncio.Event()
        self.hold.set()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((body, request.headers))
        await self.hold.wait()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": self.kv_params})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for chunk in self.chunks:
            await out.write(chunk)
        return out

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.well else 503)

    async def serve(self) -> TestServer:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.completions), web.get("/health", self.health)])
        server = TestServer(app)
        await server.start_server()
        return server


def url_of(server: TestServer) -> str:
    return str(server.make_url("")).rstrip("/")


def run(scenario: Callable[..., Awaitable[None]], entry: list[FakeInstance], decode: list[FakeInstance], **config: Any):
    """`scenario(post)` against a router of these instances; `post(body)` returns (status, body, headers)."""

    async def main() -> None:
        fakes = {f: await f.serve() for f in (*entry, *decode)}
        settings = {"port": 1, "policy": "round_robin", "max_in_flight": 100} | config
        at = {k: [Instance(url=url_of(fakes[f])) for f in v] for k, v in {"entry": entry, "decode": decode}.items()}
        router = Router(RouterConfig.model_validate({**settings, **at}))
        front = TestServer(router.app())
        await front.start_server()
        async with ClientSession() as session:

            async def post(body: Any, path: str = "/v1/completions") -> tuple[int, bytes, Any]:
                async with session.post(front.make_url(path), json=body) as answer:
                    return answer.status, await answer.read(), answer.headers

            try:
                await scenario(post, router)
            finally:
                await front.close()
                for server in fakes.values():
                    await server.close()

    asyncio.run(main())


def test_a_completion_streams_through_unchanged():
    one = FakeInstance()

    async def scenario(post, router):
        status, text, headers = await post({"prompt": "hello", "stream": True, "max_tokens": 5})
        assert (status, text) == (200, b"data: a\n\ndata: b\n\n")
        assert headers["Content-Type"] == "text/event-stream"
        assert one.seen[0][0] == {"prompt": "hello", "stream": True, "max_tokens": 5}
        assert [(b.requests, b.tokens) for b in router.entry.backends] == [(0, 0)]

    run(scenario, [one], [])


def test_a_hand_over_prefills_one_token_and_decodes_with_what_the_prefill_answered():
    prefill, decode = FakeInstance(kv_params={"remote_engine_id": "e1"}), FakeInstance()

    async def scenario(post, router):
        status, text, _ = await post({"prompt": "p", "stream": True, "max_tokens": 9, "min_tokens": 9})
        assert (status, text) == (200, b"data: a\n\ndata: b\n\n")
        (first, first_headers), (second, second_headers) = prefill.seen[0], decode.seen[0]
        assert (first["max_tokens"], first["stream"], "min_tokens" in first) == (1, False, False)
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert (second["max_tokens"], second["kv_transfer_params"]) == (9, {"remote_engine_id": "e1"})
        assert first_headers["X-Request-Id"] == second_headers["X-Request-Id"]

    run(scenario, [prefill], [decode])


def test_a_prefill_instance_that_hands_nothing_over_is_said():
    async def scenario(post, router):
        status, text, _ = await post({"prompt": "p"})
        assert status == 502
        assert b"handed no KV over" in text

    run(scenario, [FakeInstance(kv_params=None)], [FakeInstance()])


def test_a_full_deployment_refuses_at_once_and_says_when_to_come_back():
    one = FakeInstance()

    async def scenario(post, router):
        one.hold.clear()
        waiting = [asyncio.create_task(post({"prompt": "p"})) for _ in range(2)]
        while router.in_flight < 2:
            await asyncio.sleep(0.01)
        status, _, headers = await post({"prompt": "p"})
        assert (status, headers["Retry-After"]) == (503, "1")
        one.hold.set()
        assert [(await w)[0] for w in waiting] == [200, 200]
        assert (await post({"prompt": "p"}))[0] == 200
        assert router.refused == 1

    run(scenario, [one], [], max_in_flight=2)


def test_an_instance_that_is_not_well_gets_nothing_and_all_of_them_make_the_router_unwell():
    sick, well = FakeInstance(), FakeInstance()

    async def scenario(post, router):
        sick.well = False
        while router.entry.backends[0].healthy:
            await asyncio.sleep(0.02)
        for _ in range(3):
            assert (await post({"prompt": "p"}))[0] == 200
        assert (len(sick.seen), len(well.seen)) == (0, 3)
        well.well = False
        while router.entry.backends[1].healthy:
            await asyncio.sleep(0.02)
        assert (await router.health(None)).status == 503
        assert (await post({"prompt": "p"}))[0] == 503
        sick.well = True
        while not router.entry.backends[0].healthy:
            await asyncio.sleep(0.02)
        assert (await post({"prompt": "p"}))[0] == 200

    run(scenario, [sick, well], [])


def test_an_instance_that_is_gone_is_a_502_and_left_out():
    async def scenario(post, router):
        gone = router.entry.backends[0]
        gone.url = "http://127.0.0.1:9"
        statuses = [(await post({"prompt": "p"}))[0] for _ in range(3)]
        assert statuses == [502, 200, 200]

    run(scenario, [FakeInstance(), FakeInstance()], [])


@pytest.mark.parametrize("body", ["text", 3, None, []])
def test_a_body_that_is_no_object_is_a_400(body):
    async def scenario(post, router):
        assert (await post(body))[0] == 400

    run(scenario, [FakeInstance()], [])


def ranks_of(policy: RouterPolicy, ranks: int, asked: list[dict[str, str]]) -> list[str | None]:
    """To which ranks of one instance requests with these headers go."""
    one = FakeInstance()

    async def main() -> None:
        server = await one.serve()
        entry = (Instance(url=url_of(server), ranks=ranks),)
        front = TestServer(Router(RouterConfig(port=1, policy=policy, entry=entry, max_in_flight=9)).app())
        await front.start_server()
        async with ClientSession() as session:
            for headers in asked:
                async with session.post(
                    front.make_url("/v1/completions"), json={"prompt": "p"}, headers=headers
                ) as answer:
                    await answer.read()
        await front.close()
        await server.close()

    asyncio.run(main())
    return [headers.get(RANK_HEADER) for _, headers in one.seen]


def test_ranks_of_an_instance_are_addressed_by_header():
    assert ranks_of("round_robin", 2, [{}] * 3) == ["0", "1", "0"]


def test_sessions_are_told_by_their_header():
    ranks = ranks_of("session_affinity", 64, [{SESSION_HEADER: name} for name in "abaab"])
    assert ranks[0] == ranks[2] == ranks[3]
    assert ranks[1] == ranks[4]


@given(
    loads=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 500)), min_size=1, max_size=6),
    policy=st.sampled_from(get_args(RouterPolicy)),
    choices=st.integers(1, 4),
)
def test_the_router_chooses_as_the_simulator_does(loads, policy, choices):
    backends = [Backend("u", r, requests=n, tokens=t) for r, (n, t) in enumerate(loads)]
    requests, tokens = np.array(loads).T
    live, simulated = Balancer(backends, policy, draw=drawn()), make_router(Routing(policy=policy), Streams(0))
    for _ in range(choices):
        want = simulated.choose(Request(0, 0, 1, 1), RankLoads(requests, tokens, {}))
        assert live.choose(FREE).rank == want


def drawn() -> Callable[[int], int]:
    """The simulator's draws."""
    rng = Streams(0)["router"]
    return lambda n: int(rng.integers(n))


@given(
    timeout_s=st.sampled_from([None, 5.0, 60.0]),
    turns=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 40)), max_size=40),
)
def test_a_session_keeps_its_rank_until_its_time_is_out_live_as_simulated(timeout_s, turns):
    backends = [Backend("u", r) for r in range(8)]
    live = Balancer(backends, "session_affinity", timeout_s, draw=drawn())
    simulated = make_router(Routing(policy="session_affinity", affinity_timeout_s=timeout_s), Streams(0))
    home: dict[int, int] = {}
    last_s: dict[int, int] = {}
    loads, now_s = RankLoads(np.zeros(8, int), np.zeros(8, int), home), 0
    for session, gap_s in turns:
        now_s += gap_s
        want = simulated.choose(Request(0, now_s * NS_PER_S, 1, 1, session), loads)
        prompt = prompt_of({"prompt": []}, None if session < 0 else f"s{session}", float(now_s))
        assert live.choose(prompt).rank == want
        if session < 0:
            continue
        if session in home and (timeout_s is None or now_s - last_s[session] <= timeout_s):
            assert want == home[session]
        home[session], last_s[session] = want, now_s


def test_random_choices_reach_every_rank_evenly():
    router = make_router(Routing(policy="random"), Streams(3))
    loads = RankLoads(np.array([9, 0, 0, 0]), np.zeros(4, int), {})
    counts = np.bincount([router.choose(Request(i, 0, 1, 1), loads) for i in range(4000)], minlength=4)
    assert (abs(counts - 1000) < 5 * 1000**0.5).all()


@given(extra=st.integers(0, 400), blocks=st.integers(1, 5))
def test_a_session_leaves_its_home_when_the_queue_there_outweighs_twice_its_prefix(extra, blocks):
    prompt = prompt_of({"prompt": list(range(blocks * BLOCK_TOKENS))})
    home, other = Backend("home"), Backend("other", tokens=7)
    live = Balancer([home, other], "prefix_affinity")
    assert live.choose(prompt) is home
    home.tokens = 7 + extra
    request = Request(0, 0, 1, 1, session=1, reuse_tokens=blocks * BLOCK_TOKENS)
    want = make_router(Routing(policy="prefix_affinity"), Streams(0)).choose(
        request, RankLoads(np.array([0, 0]), np.array([home.tokens, other.tokens]), {1: 0})
    )
    assert live.choose(prompt) is (home, other)[want]


@given(text=st.text(min_size=600, max_size=900), more=st.text(max_size=300))
def test_blocks_of_a_prompt_are_those_of_its_beginning(text, more):
    longer, shorter = prompt_of({"prompt": text + more}), prompt_of({"prompt": text})
    assert longer.blocks[: len(shorter.blocks)] == shorter.blocks
    assert prompt_of({"prompt": "#" + text}).blocks[0] != shorter.blocks[0]


def test_homes_forget_the_oldest_first():
    homes, a, b = PrefixHomes(most_blocks=3), Backend("a"), Backend("b")
    first, second = (prompt_of({"prompt": [i] * (2 * BLOCK_TOKENS)}) for i in (1, 2))
    homes.remember(first, a)
    homes.remember(second, b)
    assert homes.find(second) == (b, 2 * BLOCK_TOKENS)
    assert homes.find(first) == (a, 2 * BLOCK_TOKENS)  # its second block is still there
    homes.remember(prompt_of({"prompt": [3] * (3 * BLOCK_TOKENS)}), b)
    assert homes.find(first) == (None, 0)
