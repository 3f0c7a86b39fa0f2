"""Serve the inspector on one address. The one importer of uvicorn.

In: a `Desk`, a host, a port.  Out: a server that answers until it is stopped.
Promise: the address is bound before it is printed, so it can be opened at once; Ctrl-C closes every
connection; nothing is logged but errors. A connection that is not being answered keeps its place
only while nobody else needs it, and never for longer than `WAIT_SECONDS` twice.
Not here: what is answered (web), messages (cli).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill.errors import OptionError, missing_extra
from shardmill.inspector.api import Desk
from shardmill.inspector.web import PAGE, Hosts, build_app

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise missing_extra("uvicorn", "view") from missing

MOST_CONNECTIONS = 96
"""Connections that wait for a request; of more, the one that has waited longest is closed."""

WAIT_SECONDS = 15.0
"""How often a connection is looked at; one that did nothing since the last time is closed."""

_BACKLOG = 24
"""Connections accepted in one turn of the event loop. Between accepting a connection and reading
its request lie about three turns, so a flood of 3 * 24 cannot push out a client that asks."""


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
        """Make room: close the connection that has waited longest, if there are too many."""
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
        an unfinished request are no progress, or one byte a second would hold it for ever."""
        seen = self.cycle, self.transport.get_write_buffer_size()
        if seen == self._seen and not self._is_answered:
            self.transport.abort()  # close() would wait for a client that does not read
            return
        self._seen = seen
        self._look = self.loop.call_later(WAIT_SECONDS, self._look_again)


class Server:
    """A bound address with an application behind it. `url` is what to open."""

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
            f"something else there? --port 0 takes a free one"
        ) from error
    with listener:
        yield Server(listener, Hosts(host=host, port=listener.getsockname()[1]), desk, page)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return all(str(one[4][0]).startswith("127.") or one[4][0] == "::1" for one in found)
