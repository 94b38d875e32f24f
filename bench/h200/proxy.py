"""Router of one prefill and one decode server over NIXL, for measuring. Run: `proxy.py PORT PREFILL DECODE TIMES.csv`.

Each completion goes to the prefill server with one token to make, then, with the transfer parameters of its answer, to
the decode server, whose stream is passed on. TIMES.csv has one row a request, wall seconds: arrival, prefill_done (the
prefill server answered), first_token (the decode server's first chunk), end.
"""

import csv
import sys
import time
import uuid
from typing import TextIO

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from rackplan.engine.router import REMOTE_DECODE


class Proxy:
    """Attributes: `prefill`, `decode` (completion URLs), `times` (csv writer), `session` (one pool of connections)."""

    def __init__(self, prefill: int, decode: int, times: TextIO) -> None:
        self.prefill, self.decode = (f"http://127.0.0.1:{p}/v1/completions" for p in (prefill, decode))
        self.times = csv.writer(times)
        self.times.writerow(["request", "arrival", "prefill_done", "first_token", "end"])
        self.session: ClientSession | None = None

    async def connect(self, app: web.Application) -> None:
        self.session = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=600))

    async def close(self, app: web.Application) -> None:
        if self.session is not None:
            await self.session.close()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        assert self.session is not None
        arrival, body = time.time(), await request.json()
        headers = {"X-Request-Id": f"pd-{uuid.uuid4().hex[:12]}"}
        first = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens", "max_completion_tokens")}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        async with self.session.post(self.prefill, json=first, headers=headers) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read())
            params = (await answer.json())["kv_transfer_params"]
        done, token = time.time(), 0.0
        async with self.session.post(
            self.decode, json={**body, "kv_transfer_params": params}, headers=headers
        ) as answer:
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                token = token or time.time()
                await out.write(chunk)
            await out.write_eof()
        self.times.writerow([headers["X-Request-Id"], *(f"{t:.6f}" for t in (arrival, done, token, time.time()))])
        return out


async def health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    port, prefill, decode = (int(a) for a in sys.argv[1:4])
    with open(sys.argv[4], "a", newline="", buffering=1) as times:
        proxy = Proxy(prefill, decode, times)
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post("/v1/completions", proxy.completions), web.get("/health", health)])
        app.on_startup.append(proxy.connect)
        app.on_cleanup.append(proxy.close)
        web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
