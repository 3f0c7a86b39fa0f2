"""Serve the inspector on one address. The one importer of uvicorn.

In: a `Desk`, a host, a port.  Out: a server that answers until it is stopped.
Promise: the address is bound before it is told, so whoever reads it can connect; Ctrl-C closes
every connection; nothing is logged but errors.
Not here: what is answered (web), messages (cli).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill.errors import OptionError, missing_extra
from shardmill.inspector.api import Desk
from shardmill.inspector.web import PAGE, Hosts, build_app

try:
    import uvicorn
except ImportError as missing:
    raise missing_extra("uvicorn", "view") from missing


class Server:
    """A bound address with an application behind it. `url` is what to open."""

    def __init__(self, listener: socket.socket, hosts: Hosts, desk: Desk, page: Path) -> None:
        self.hosts = hosts
        self._listener = listener
        config = uvicorn.Config(
            build_app(desk, hosts, page),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_level="error",
            limit_concurrency=128,
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
        listener = socket.create_server(address[:2], family=family, backlog=128)
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
