"""The facts over HTTP. The one importer of starlette.

In: a `Desk`, a folder of page files, the hosts that may be named.  Out: an ASGI application.
Promise: read-only; only requests whose Host is one of ours are answered, so a page elsewhere cannot
read the data through a name of its own; no other origin may ask or start anything; nothing that
is sent back runs as code, and no file is read but the listed ones. Work is done in a few threads;
one that is slow holds up no other.
Not here: sockets (serve), what is answered (api).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError, missing_extra
from shardmill.inspector.api import GET, LONG, POST, Answer, Desk
from shardmill.inspector.query import NotThereError, Query
from shardmill.records import JSON

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as missing:
    raise missing_extra("starlette", "view") from missing

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NO_PAGE = "no-page.html"
_AT_ONCE = 4  # requests that are worked on; others wait
_LONG_AT_ONCE = 2  # of those that may take a second, beside the others
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """What a Host header may say."""

    host: str  # that the server is bound to
    port: int

    def known(self, header: str) -> bool:
        """Our own address, a loopback one, or, when bound to all addresses, any that is a number:
        a name could be anybody's."""
        host, colon, port = header.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = header, "80"
        if port != str(self.port):
            return False
        own = f"[{self.host}]" if ":" in self.host else self.host
        if host.lower() in (*_LOOPBACK, own.lower()):
            return True
        return self.host in ("0.0.0.0", "::") and _is_number(host)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def build_app(desk: Desk, hosts: Hosts, page: Path = PAGE) -> ASGIApp:
    """The application; the files of `page` are listed now."""
    files = dict(_files(page))
    gate, narrow = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_LONG_AT_ONCE)
    routes = [
        *(
            Route(path, _endpoint(desk, answer, narrow if answer in LONG else gate, 200))
            for path, answer in GET.items()
        ),
        *(
            Route(path, _endpoint(desk, answer, gate, 202), methods=["POST"])
            for path, answer in POST.items()
        ),
        Route("/{file:path}", _file_endpoint(files)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ShardmillError: _refused,
            OSError: _refused,
            HTTPException: _not_served,
            Exception: _broken,
        },
    )
    app.router.redirect_slashes = False
    return _Guard(app, hosts)


def _files(page: Path) -> Iterator[tuple[str, Path]]:
    """Address and path of every file that is served."""
    for path in sorted(page.rglob("*")):
        if path.suffix in TYPES and path.is_file() and not path.is_symlink():
            yield path.relative_to(page).as_posix(), path
            if path == page / "index.html":
                yield "", path


def _endpoint(
    desk: Desk, answer: Answer, gate: asyncio.Semaphore, status: int
) -> Callable[[Request], object]:
    def work(values: dict[str, str]) -> bytes:
        query = Query(values)
        found = answer(desk, query)
        query.done()
        return _encoded(found)

    async def endpoint(request: Request) -> Response:
        given = request.query_params.multi_items()
        values = dict(given) | request.path_params
        if len(values) != len(given) + len(request.path_params):
            raise OptionError("a name is there twice; wanted each name once")
        async with gate:
            body = await run_in_threadpool(work, values)
        return _json(body, status)

    return endpoint


def _file_endpoint(files: dict[str, Path]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        name, status = request.path_params["file"], 200
        if name not in files:
            # a person who typed the address gets a page, a program gets JSON
            typed = "text/html" in request.headers.get("accept", "")
            if not typed or name.startswith("api/") or _NO_PAGE not in files:
                raise HTTPException(404)
            name, status = _NO_PAGE, 404
        path = files[name]
        body = await run_in_threadpool(path.read_bytes)
        headers = {"Cache-Control": "no-cache"}
        return Response(body, status, media_type=TYPES[path.suffix], headers=headers)

    return endpoint


def _encoded(value: JSON) -> bytes:
    # ASCII: a lone surrogate of the data is written out, and no byte of it can end a script
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _json(body: bytes, status: int) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(body, status, media_type="application/json", headers=headers)


def _error(status: int, message: str) -> Response:
    return _json(_encoded({"error": message}), status)


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001
    if isinstance(error, StoreNotFoundError | NotThereError):
        return _error(404, str(error))
    return _error(400 if isinstance(error, OptionError) else 409, str(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        return _error(405, f"{request.method} {path}: this server is read-only; wanted GET")
    return _error(error.status_code, f"there is no address {path}; /api/stores lists the stores")


async def _broken(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error(500, "an error of shardmill itself; the terminal that it runs in shows it")


class _Guard:
    """In front of everything: who may ask, and what every answer says."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: this server speaks plain HTTP alone")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        found = headers.get("host", [])
        if len(found) != 1:
            return _error(400, f"{len(found)} Host headers; wanted one")
        if not self._hosts.known(found[0]):
            return _error(421, f"Host {found[0][:80]!r}: not this server; use the address it told")
        asked_by = headers.get("sec-fetch-site", ["none"])[0]
        if scope["path"].startswith("/api/") and asked_by not in ("same-origin", "none"):
            return _error(403, "asked by a page of another site; only our own page may")
        if scope["method"] == "POST":
            return _foreign_post(headers, f"http://{found[0]}")
        return None


def _foreign_post(headers: dict[str, list[str]], own: str) -> Response | None:
    """Why this POST is not of our own page; None when it may be."""
    if headers.get("x-shardmill") != ["1"]:
        return _error(403, "POST without the header X-Shardmill: 1, which our own page sends")
    origin = headers.get("origin", [own])
    if [one.lower() for one in origin] != [own.lower()]:
        return _error(403, f"Origin {origin[0][:80]!r}: wanted {own}")
    return None
