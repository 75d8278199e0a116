#!/usr/bin/env python3
"""The server's door to the sites: lets through what nodes need, and nothing else.

A SuperLink has one port for everything.  Only calls of nodes (``/v1/fleet/``) are signed; whoever reaches the others
may register nodes, submit apps that then run at every site, and take over the server's own tasks.  So the SuperLink
listens on 127.0.0.1, and this listens for the sites, over TLS, and forwards calls of nodes alone.
"""

from __future__ import annotations

import argparse
import logging
import re
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN = re.compile(r"/v1/fleet/[a-z-]+")  # of the decoded path: no dots, no slashes, no query
HEALTH = "/health"
# Of one connection, not of the message; the length is set anew.
OWN = {b"connection", b"content-length", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}

_log = logging.getLogger("gate")


class Gate:
    """An ASGI application that forwards calls of nodes.

    Args:
        server: ``https://host:port`` of the SuperLink.
        ca: the authority's certificate, which the SuperLink's has to be signed by.
        max_bytes: of one request; Flower cuts what is larger than 5 MiB into pieces.
        seconds: that the SuperLink has to answer.
    """

    def __init__(self, server: str, ca: Path, *, max_bytes: int = 32 << 20, seconds: float = 60.0) -> None:
        import httpx

        self._errors = httpx.TransportError
        self._max_bytes = max_bytes
        self._client = httpx.AsyncClient(
            base_url=server,
            verify=ssl.create_default_context(cafile=str(ca)),
            timeout=seconds,
            trust_env=False,  # no proxy between the two
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=50),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (method, path) in (("GET", HEALTH), ("HEAD", HEALTH)):
            await _reply(send, 200, "")
            return
        if method != "POST" or scope["query_string"] or not OPEN.fullmatch(path):
            _log.warning("refused %s %r of %s: not a call of a node.", method, path, _caller(scope))
            await _reply(send, 404, "Only calls of nodes pass here.")
            return
        body = await self._body(receive)
        if body is None:
            _log.warning("refused %s of %s: more than %d bytes.", path, _caller(scope), self._max_bytes)
            await _reply(send, 413, "The request is too large.")
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in OWN]
        request = self._client.build_request(method, path, content=body, headers=headers)
        try:
            answer = await self._client.send(request)
        except self._errors as error:
            _log.warning("the SuperLink does not answer %s of %s: %r.", path, _caller(scope), error)
            await _reply(send, 503, "The server is not there now; try again.")  # which nodes do
            return
        await send(
            {
                "type": "http.response.start",
                "status": answer.status_code,
                # httpx has undone what encoding there was.
                "headers": [
                    *((n, v) for n, v in answer.headers.raw if n.lower() not in OWN | {b"content-encoding"}),
                    (b"content-length", str(len(answer.content)).encode()),
                ],
            }
        )
        await send({"type": "http.response.body", "body": answer.content})

    async def _body(self, receive: Receive) -> bytes | None:
        """What was sent; none if it is too much."""
        parts: list[bytes] = []
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""  # nobody waits for the answer
            length += len(message.get("body", b""))
            if length > self._max_bytes:
                return None
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})


def _caller(scope: Scope) -> str:
    return str((scope.get("client") or ("somebody",))[0])


async def _reply(send: Send, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="gate.py", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--certificates", type=Path, required=True, help="folder with server.key, server.crt and ca.crt"
    )
    parser.add_argument("--server", default="127.0.0.1:9091", help="where the SuperLink listens (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; 0.0.0.0: everywhere (%(default)s)")
    parser.add_argument("--port", type=int, default=9092, help="(%(default)s)")
    found = parser.parse_args(arguments)
    for name in ("server.key", "server.crt", "ca.crt"):
        if not (found.certificates / name).is_file():
            parser.error(f"no {name} in {found.certificates}; expected it there. Run make-server-certificate.")
    try:
        import uvicorn
    except ImportError:
        parser.error("no uvicorn here; expected the environment of selffl[flower]. Run this with its Python.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s gate: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _log.info("from %s:%d to %s, calls of nodes only.", found.host, found.port, found.server)
    uvicorn.run(
        Gate(f"https://{found.server}", found.certificates / "ca.crt"),
        host=found.host,
        port=found.port,
        ssl_certfile=str(found.certificates / "server.crt"),
        ssl_keyfile=str(found.certificates / "server.key"),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=500,
        proxy_headers=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
