"""The only way from a node to a SuperLink: a reverse proxy that passes the Fleet API and no more.

A SuperLink answers nodes (Fleet), the operator (Control) and its own runs (Runtime) on one port,
and node authentication guards only the first: anyone who reaches the port could start runs, that
is, run code on every node. So the SuperLink listens where nodes cannot reach it, and nodes connect
to this gateway. It terminates TLS, passes ``/v1/fleet/*`` and ``/health`` on with headers and
signatures unchanged, and refuses everything else. A node can push only replies to messages that it
was given (see `hfedatm.deploy.deliveries`).

A node that asks for work and gets none sleeps for three seconds. So the gateway holds such a
request open and asks the SuperLink again, often at first, then twice a second: work then reaches a
node almost at once. With many nodes it asks less often, so that asking never takes more than a
quarter of the SuperLink's time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import uvicorn
from google.protobuf.message import DecodeError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hfedatm.base.versions import HEADER, own_version
from hfedatm.deploy import serving
from hfedatm.deploy.deliveries import Deliveries, Refused
from hfedatm.deploy.refusing import Withdrawn
from hfedatm.flower_internals import PULL, PullMessagesResponse

log = logging.getLogger("uvicorn.error")

_ALLOWED = re.compile(r"/health|/v1/fleet/[a-z-]+")
# Flower sends arrays in chunks of 5 MiB, so an honest request is far below this.
MAX_BODY = 64 * 2**20
# Seconds for which a request for work is held open, and most seconds between two attempts.
KEPT, LOOK_AGAIN = 10.0, 0.5
# Largest part of the SuperLink's time that asking for work may take.
SHARE = 0.25
# Explanations that Flower's refusals lack.
_MEANING = {
    "/v1/fleet/activate-node": ": it does not know this node's key, or has not missed it yet",
    "/v1/fleet/register-node": ": only nodes with a known key are admitted",
}
# Headers that describe one connection rather than the message (RFC 9110, 7.6.1), and the framing
# that the two HTTP libraries write themselves.
_CONNECTION_HEADERS = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding"),
}


def build(
    upstream: str,
    ca_file: str | None = None,
    max_body: int = MAX_BODY,
    deliveries: Deliveries | None = None,
    secrets: Path | None = None,
) -> Starlette:
    """Return the gateway to the SuperLink at the URL `upstream`, as an ASGI application."""
    known = deliveries or Deliveries()
    withdrawn = Withdrawn(secrets)
    pace = Pace()
    verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
    # Flower's nodes give up after 30 s; the proxies in the environment are not for this link.
    client = httpx.AsyncClient(base_url=upstream, verify=verify, timeout=60, trust_env=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def ask(request: Request, body: bytes) -> httpx.Response:
        headers = _end_to_end(request.headers.raw) + [(b"accept-encoding", b"identity")]
        began = time.monotonic()
        with pace.waiting(request.url.path == PULL):
            while True:
                asked = time.monotonic()
                answer = await client.request(
                    request.method, request.url.path, headers=headers, content=body
                )
                if not _no_work(request, answer):
                    return answer
                pace.took(time.monotonic() - asked)
                waited = time.monotonic() - began
                if waited > KEPT or await request.is_disconnected():
                    return answer
                await asyncio.sleep(pace.pause(waited))

    async def forward(request: Request) -> Response:
        if not _ALLOWED.fullmatch(request.url.path):
            log.warning("refused %s: a node may use the Fleet API only", request.url.path)
            return PlainTextResponse("this address serves the Fleet API only", 403)
        if name := withdrawn.refuses(request.headers):
            log.warning("refused %s: the key of %s is revoked", request.url.path, name)
            return PlainTextResponse("this node's key is revoked", 401)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > max_body:
                log.warning("refused %s: body over %s bytes", request.url.path, max_body)
                return PlainTextResponse("body too large", 413)
        try:
            known.check(request.url.path, bytes(body))
            answer = await ask(request, bytes(body))
            if answer.status_code == 200:
                known.passed(request.url.path, bytes(body), answer.content)
        except Refused as reason:
            log.warning("refused %s: %s", request.url.path, reason)
            return PlainTextResponse(str(reason), 403)
        except httpx.TransportError as error:
            log.warning("the SuperLink at %s does not answer: %r", upstream, error)
            return PlainTextResponse("the SuperLink does not answer", 502)
        if answer.status_code >= 400:
            log.warning(
                "the SuperLink refused %s from %s with %s%s",
                request.url.path,
                request.client.host if request.client else "?",
                answer.status_code,
                _MEANING.get(request.url.path, ""),
            )
        response = Response(answer.content, answer.status_code)
        response.raw_headers += _end_to_end(answer.headers.raw)
        if request.url.path == "/health":
            response.headers[HEADER] = own_version()  # for `hfedatm doctor` on the nodes below
        return response

    route = Route("/{path:path}", forward, methods=["GET", "POST"])
    return Starlette(routes=[route], lifespan=lifespan)


class Pace:
    """How often a SuperLink is asked for work on behalf of the nodes that wait."""

    def __init__(self) -> None:
        self._nodes = 0
        self._seconds = 0.0

    @contextmanager
    def waiting(self, counts: bool) -> Iterator[None]:
        """Count a node for as long as it waits."""
        self._nodes += counts
        try:
            yield
        finally:
            self._nodes -= counts

    def took(self, seconds: float) -> None:
        """Note how long the link took to say that there is no work."""
        self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds

    def pause(self, waited: float) -> float:
        """Return the seconds until a node's next attempt, which has waited for some time already.

        A node that has just finished a task is likely to get another one soon. ``n`` nodes that ask
        every ``p`` seconds take ``n t / p`` of the link's time, if an answer takes ``t``.
        """
        soon = min(LOOK_AGAIN, 0.1 * (1 + waited))
        return min(KEPT, max(soon, self._nodes * self._seconds / SHARE))


def _no_work(request: Request, answer: httpx.Response) -> bool:
    """Return whether a node asked for work and there is none."""
    if request.url.path != PULL or answer.status_code != 200:
        return False
    try:
        return not PullMessagesResponse.FromString(answer.content).messages_list
    except DecodeError:
        return False  # the node itself will report this


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(key, v) for key, v in headers if key.decode().lower() not in _CONNECTION_HEADERS]


def main() -> None:
    """Run a gateway: ``python -m hfedatm.deploy.gateway --help``."""
    parser = argparse.ArgumentParser(prog="hfedatm-gateway", description=__doc__)
    parser.add_argument("--upstream", required=True, help="the SuperLink, https://host:port")
    parser.add_argument("--ca", help="certificate of the authority behind the SuperLink's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert", help="this gateway's certificate; without one: plain HTTP")
    parser.add_argument("--key", help="the certificate's private key")
    parser.add_argument("--state", type=Path, help="file that remembers what nodes were given")
    arguments = parser.parse_args()
    serving.prepare()
    secrets = Path(arguments.cert).parent if arguments.cert else None
    uvicorn.run(
        build(
            arguments.upstream,
            arguments.ca,
            deliveries=Deliveries(arguments.state),
            secrets=secrets,
        ),
        host=arguments.host,
        port=arguments.port,
        ssl_certfile=arguments.cert,
        ssl_keyfile=arguments.key,
        server_header=False,  # the SuperLink writes these two
        date_header=False,
        access_log=False,  # nodes ask for work every three seconds
    )


if __name__ == "__main__":
    main()
