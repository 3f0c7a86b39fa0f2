"""Clients that hold connections and ask for nothing do not block others."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from shardmill.inspect import server as serve
from tests.inspect.browser.session import running_view
from tests.inspect.conftest import open_desk, serving

SILENT, HALF, IDLE, DRIP, BODY, UNREAD = "silent", "half", "idle", "drip", "body", "unread"
KINDS = [SILENT, HALF, IDLE, DRIP, BODY, UNREAD]
LARGE = "/api/stores/1/documents?split=train&limit=500"


def request(port: int, path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def hold(port: int, kind: str) -> socket.socket:
    """A connection that keeps its place without a question, or without reading the answer."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect(("127.0.0.1", port))
    if kind in (HALF, DRIP):
        made.sendall(b"GET /api/stores HTTP/1.1\r\nHost: 127.0.0.1")
    elif kind == IDLE:
        made.sendall(request(port, "/api/stores"))
        made.recv(100)
    elif kind == BODY:
        made.sendall(request(port, "/api/stores", "Content-Length: 1000000") + b"x")
    elif kind == UNREAD:
        made.sendall(request(port, LARGE) * 40)
    return made


def is_closed(held: socket.socket) -> bool:
    """Whether the server ended it; what it sent before is read."""
    held.setblocking(False)
    try:
        while held.recv(2**20):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def dripping(held: list[socket.socket]) -> Iterator[None]:
    """Send one more byte on each of them, again and again."""
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            for one in held:
                with suppress(OSError):
                    one.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.slow
def test_300_half_open_connections_block_no_client(place):
    with ExitStack() as stack:
        url = stack.enter_context(running_view([str(place)]))
        port = int(url.rstrip("/").rpartition(":")[2])
        held = [stack.enter_context(hold(port, KINDS[n % len(KINDS)])) for n in range(300)]
        stack.enter_context(dripping([one for n, one in enumerate(held) if KINDS[n % 6] == DRIP]))
        for _ in range(20):
            with urllib.request.urlopen(f"{url}api/stores", timeout=60) as answer:
                found = json.load(answer)
            assert [one["name"] for one in found["stores"]] == ["chats", "pages"]
        ended = [is_closed(one) for n, one in enumerate(held) if KINDS[n % 6] != UNREAD]
    assert ended[0]
    assert sum(ended) >= 250 - serve.MOST_CONNECTIONS  # those that waited longest made room


def test_one_client_that_is_slow_to_ask_is_not_ended_while_there_is_room(client):
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as slow:
        whole = request(client.port, "/api/stores")
        slow.sendall(whole[:20])
        assert client.json("/api/stores")[0] == 200
        slow.sendall(whole[20:])
        assert slow.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_only_waits_is_ended(place, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(serve, "WAIT_SECONDS", 0.2)
    with serving(open_desk(place), tmp_path) as other, hold(other.port, kind) as held:
        own = held.getsockname()[1]
        with dripping([held] if kind == DRIP else []):
            for _ in range(600):
                if not _established(other.port, own):
                    break
                time.sleep(0.1)
            assert not _established(other.port, own)
        assert other.json("/api/stores")[0] == 200


def _established(port: int, own: int) -> bool:
    """Whether the server's end of a connection is open, as the kernel lists it: an answer that
    nobody reads must stay unread."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {(int(row[1][-4:], 16), int(row[2][-4:], 16)): row[3] for row in rows}
    return ends.get((port, own)) == "01"
