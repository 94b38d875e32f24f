"""The router in front of a deployment's instances: `python -m rackplan.engine.router CONFIG.json`.

A completion goes to one instance; where prefill and decode are apart, to a prefill instance with one token to make,
then, with the transfer parameters of its answer, to a decode instance, whose stream is passed on. Instances that do not
answer are left out until they do. A full deployment answers 503 at once.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from rackplan.engine.balancing import Backend, Balancer, Prompt, prompt_of
from rackplan.engine.router_config import RouterConfig

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks a prefill instance to keep a prompt's KV for another to fetch."""
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
RANK_HEADER = "X-data-parallel-rank"
SESSION_HEADER = "X-Session-Id"
"""By which a client names its session, for `session_affinity`."""
CHECK_S = 2.0
MOST_BODY_BYTES = 64 << 20


class Router:
    """The web application. `entry`, `decode`: balancers; a decode rank is chosen by fewest requests, since KV comes
    whole and no prefix counts."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.entry = Balancer([b for i in config.entry for b in i.backends()], config.policy, config.affinity_timeout_s)
        self.decode = Balancer([b for i in config.decode for b in i.backends()], "least_requests")
        self.in_flight = 0
        self.refused = 0

    def app(self) -> web.Application:
        """The routes: completions, the models, and the router's own health and metrics."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=5)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=timeout) as self.session:
            watch = asyncio.create_task(self._watch())
            yield
            watch.cancel()

    # -- health --------------------------------------------------------------------------------------------------
    @property
    def _backends(self) -> list[Backend]:
        return self.entry.backends + self.decode.backends

    async def _watch(self) -> None:
        while True:
            urls = {b.url for b in self._backends}
            well = dict(zip(urls, await asyncio.gather(*map(self._answers, urls)), strict=True))
            for backend in self._backends:
                backend.healthy = well[backend.url]
            await asyncio.sleep(CHECK_S)

    async def _answers(self, url: str) -> bool:
        try:
            async with self.session.get(f"{url}/health", timeout=ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (ClientError, TimeoutError):
            return False

    def _lost(self, backend: Backend, error: Exception) -> web.Response:
        """An instance that failed takes no more requests until its health says so."""
        for same in self._backends:
            if same.url == backend.url:
                same.healthy = False
        return _problem(502, f"instance {backend.url} failed: {error or type(error).__name__}")

    async def health(self, request: web.Request) -> web.Response:
        """200 while each of a request's ways has a healthy instance."""
        ways = [self.entry.backends, *([self.decode.backends] if self.decode.backends else [])]
        well = all(any(b.healthy for b in way) for way in ways)
        down = sorted({b.url for b in self._backends if not b.healthy})
        return web.json_response({"healthy": well, "not_healthy": down}, status=200 if well else 503)

    # -- requests ------------------------------------------------------------------------------------------------
    async def completions(self, request: web.Request) -> web.StreamResponse:
        """One completion, streamed where the client asks for it."""
        try:
            body = await request.json()
            prompt = prompt_of(body, request.headers.get(SESSION_HEADER), time.monotonic())
        except (ValueError, AttributeError):
            return _problem(400, "the body is not a JSON object")
        if self.in_flight >= self.config.max_in_flight:
            self.refused += 1
            return _problem(503, f"{self.in_flight} requests are in flight, as many as fit; try again", retry_s=1)
        self.in_flight += 1
        try:
            return await self._serve(request, body, prompt)
        finally:
            self.in_flight -= 1

    async def _serve(self, request: web.Request, body: dict, prompt: Prompt) -> web.StreamResponse:
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or f"rackplan-{uuid.uuid4().hex}"}
        if not self.decode.backends:
            return await self._stream(self.entry, request, body, headers, prompt)
        first = {k: v for k, v in body.items() if k not in NOT_FOR_PREFILL}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        backend = self.entry.choose(prompt)
        if backend is None:
            return _problem(503, "no prefill instance is healthy", retry_s=1)
        try:
            with _counted(backend, prompt.tokens):
                async with self.session.post(
                    f"{backend.url}{request.path}", json=first, headers=_to_rank(headers, backend)
                ) as answer:
                    text = await answer.read()
                    if answer.status != 200:
                        return web.Response(status=answer.status, body=text, content_type=answer.content_type)
        except ClientError as e:
            return self._lost(backend, e)
        params = json.loads(text).get("kv_transfer_params")
        if not params:
            return _problem(502, f"prefill instance {backend.url} handed no KV over: is its KV transfer on?")
        return await self._stream(self.decode, request, {**body, "kv_transfer_params": params}, headers, prompt)

    async def _stream(
        self, balancer: Balancer, request: web.Request, body: dict, headers: dict[str, str], prompt: Prompt
    ) -> web.StreamResponse:
        backend = balancer.choose(prompt)
        if backend is None:
            return _problem(503, "no instance is healthy", retry_s=1)
        out: web.StreamResponse | None = None
        try:
            with _counted(backend, (0 if self.decode.backends else prompt.tokens) + prompt.asked_tokens):
                async with self.session.post(
                    f"{backend.url}{request.path}", json=body, headers=_to_rank(headers, backend)
                ) as answer:
                    out = _like(answer)
                    await out.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await out.write(chunk)
                    await out.write_eof()
                    return out
        except ClientError as e:
            failed = self._lost(backend, e)
            if out is not None:  # half an answer cannot be taken back: the client sees its stream break off
                raise
            return failed

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The models of the first healthy instance; all serve the same."""
        backend = next((b for b in self.entry.backends if b.healthy), None)
        if backend is None:
            return _problem(503, "no instance is healthy", retry_s=1)
        try:
            async with self.session.get(f"{backend.url}/v1/models") as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        except ClientError as e:
            return self._lost(backend, e)

    async def metrics(self, request: web.Request) -> web.Response:
        """In the text format of Prometheus."""
        lines = [
            f"rackplan_router_requests_in_flight {self.in_flight}",
            f"rackplan_router_requests_refused_total {self.refused}",
            *(
                f'rackplan_router_backend_requests{{url="{b.url}",rank="{b.rank or 0}",healthy="{int(b.healthy)}"}} '
                f"{b.requests}"
                for b in self._backends
            ),
        ]
        return web.Response(text="\n".join(lines) + "\n")


@contextmanager
def _counted(backend: Backend, tokens: int) -> Iterator[None]:
    """A request of so many tokens in flight on a backend, while the block lasts."""
    backend.requests += 1
    backend.tokens += tokens
    try:
        yield
    finally:
        backend.requests -= 1
        backend.tokens -= tokens


def _to_rank(headers: dict[str, str], backend: Backend) -> dict[str, str]:
    return headers if backend.rank is None else {**headers, RANK_HEADER: str(backend.rank)}


def _like(answer: ClientResponse) -> web.StreamResponse:
    kind = answer.headers.get("Content-Type", "application/json")
    return web.StreamResponse(status=answer.status, headers={"Content-Type": kind})


def _problem(status: int, message: str, retry_s: int | None = None) -> web.Response:
    headers = {"Retry-After": str(retry_s)} if retry_s else {}
    return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)


def main() -> None:
    """Serve until told to end."""
    config = RouterConfig.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    web.run_app(Router(config).app(), host=config.host, port=config.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
