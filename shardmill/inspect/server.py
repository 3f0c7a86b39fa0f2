"""The facts over HTTP, on one address. The one importer of starlette and uvicorn.

Read-only. Only requests whose Host is ours are answered, so a page elsewhere cannot read the data
through its own name; no other origin may ask or start anything; nothing that is sent back runs
as code, and no file is served but the listed ones. Answers are made in a few threads, and a slow
one holds up no other. A connection that is not being answered is kept only while no other needs its
slot, and never for longer than twice `WAIT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError, missing_extra
from shardmill.inspect.api import GET, LONG, POST, Answer, Desk, Query
from shardmill.inspect.stores import NotThereError
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
try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise missing_extra("uvicorn", "view") from missing

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
MOST_CONNECTIONS = 96
"""Connections that wait for a request; of more, the one that has waited longest is closed."""

WAIT_SECONDS = 15.0
"""How often a connection is looked at; one that did nothing since the last time is closed."""

_BACKLOG = 24
"""Connections accepted in one turn of the event loop. Between accepting a connection and reading
its request are about three turns, so a flood of 3 * 24 cannot push out a client that asks."""
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
        a name could belong to anyone."""
        host, colon, port = header.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = header, "80"
        if port != str(self.port):
            return False
        own = f"[{self.host}]" if ":" in self.host else self.host
        if host.lower() in (*_LOOPBACK, own.lower()):
            return True
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return self.host in ("0.0.0.0", "::")


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
    return _guard(app, hosts)


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
            raise OptionError("a name was sent twice; wanted each name once")
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
    return _error(500, "an error in shardmill itself; the terminal that it runs in shows it")


def _guard(app: ASGIApp, hosts: Hosts) -> ASGIApp:
    """Comes before everything else: who may ask, and the headers of every answer."""
    extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: this server speaks plain HTTP alone")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refusal = _refusal(scope, hosts)
        await (app if refusal is None else refusal)(scope, receive, send_with_headers)

    return guarded


def _refusal(scope: Scope, hosts: Hosts) -> Response | None:
    """Why this request is not answered: it may be of a page of another site."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    found = headers.get("host", [])
    if len(found) != 1:
        return _error(400, f"{len(found)} Host headers; wanted one")
    if not hosts.known(found[0]):
        return _error(421, f"Host {found[0][:80]!r}: wanted the address it printed")
    asked_by = headers.get("sec-fetch-site", ["none"])[0]
    if scope["path"].startswith("/api/") and asked_by not in ("same-origin", "none"):
        return _error(403, "asked by a page of another site; only our own page may")
    if scope["method"] != "POST":
        return None
    if headers.get("x-shardmill") != ["1"]:
        return _error(403, "POST without the header X-Shardmill: 1, which our own page sends")
    own = f"http://{found[0]}"
    origin = headers.get("origin", [own])
    if [one.lower() for one in origin] != [own.lower()]:
        return _error(403, f"Origin {origin[0][:80]!r}: wanted {own}")
    return None


class _Connection(H11Protocol):
    """A connection that cannot be held without asking and reading.

    uvicorn itself has a time limit only for the pause between two requests, and any byte ends it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: tuple[object, int] | None = None
        self._begin_waiting()
        self._look = self.loop.call_later(WAIT_SECONDS, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin_waiting()

    @property
    def _is_answered(self) -> bool:
        """Whether an answer is being made; one that the client does not read does not count."""
        made = self.cycle is None or self.cycle.response_complete
        return not made and not self.flow.write_paused

    def _begin_waiting(self) -> None:
        """Close the connection that has waited longest, if there are too many."""
        self._since = self.loop.time()
        waiting = [
            one
            for one in self.connections
            if isinstance(one, _Connection) and not one._is_answered and not one._is_closing
        ]
        if len(waiting) > MOST_CONNECTIONS:
            min(waiting, key=lambda one: one._since).transport.abort()

    @property
    def _is_closing(self) -> bool:
        return self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def _look_again(self) -> None:
        """Close it if no request began and no byte of an answer left since the last look: bytes of
        an unfinished request are no progress, or one byte a second would hold it forever."""
        seen = self.cycle, self.transport.get_write_buffer_size()
        if seen == self._seen and not self._is_answered:
            self.transport.abort()  # close() would wait for a client that does not read
            return
        self._seen = seen
        self._look = self.loop.call_later(WAIT_SECONDS, self._look_again)


class Server:
    """An application on a bound address. `url` is what to open."""

    def __init__(self, listener: socket.socket, hosts: Hosts, desk: Desk, page: Path) -> None:
        self.hosts = hosts
        self._listener = listener
        config = uvicorn.Config(
            build_app(desk, hosts, page),
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_level="error",
            use_colors=False,  # the command line escapes what it did not colour itself
            limit_concurrency=2 * MOST_CONNECTIONS,  # with those being answered
            backlog=_BACKLOG,
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.hosts.host, self.hosts.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.hosts.port}/"

    def run(self) -> None:
        """Answer until `stop` is called from another thread, or until Ctrl-C: then all is closed
        and KeyboardInterrupt raised."""
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True


@contextmanager
def open_server(desk: Desk, host: str, port: int, page: Path = PAGE) -> Iterator[Server]:
    """Bind the address; port 0 is any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OptionError(
            f"--host {host} --port {port}: cannot be bound ({error.strerror or error}); is "
            "another program there? --port 0 takes a free one"
        ) from error
    with listener:
        yield Server(listener, Hosts(host=host, port=listener.getsockname()[1]), desk, page)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return all(str(one[4][0]).startswith("127.") or one[4][0] == "::1" for one in found)
