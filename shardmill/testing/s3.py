"""A real S3 server on 127.0.0.1, and a proxy before it that fails on order.

In: nothing.  Out: an endpoint that the real `s3fs` can use: `moto` in a process of its own, and
between it and the client a proxy with `Fault`s, as `testing.hub` has them.
Promise: loopback only; the server ends with the block, and with this process if that is killed;
every request is logged; a fault strikes exactly as often as ordered.
Not here: signatures (moto does not check them), TLS.

    with LoopbackS3() as s3:
        s3.make_bucket("data")
        s3.faults.append(Fault(path="shard_00000", method="PUT", status=503, times=2))
        push(folder, "s3://data/store", storage_options=s3.options())
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from shardmill.testing.hub import Fault, Request

__all__ = ["Fault", "LoopbackS3", "Request"]

_CODE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_SERVER_QUIET = {"MOTO_S3_DEFAULT_MAX_KEYS": "50"}  # so that listings come in pages
_ERROR = b"<Error><Code>ServiceUnavailable</Code><Message>fault</Message></Error>"
_NOT_IMPLEMENTED = (
    b"<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality that "
    b"is not implemented</Message><Header>If-None-Match</Header></Error>"
)


class LoopbackS3:
    """Start with `with`."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.conditions = "kept"  # "ignored" or "refused": a service without conditional requests
        self._one_request = threading.Lock()
        self.port = 0  # of the server behind the proxy
        self._moto: subprocess.Popen[str] | None = None
        self._proxy: _Proxy | None = None

    def __enter__(self) -> LoopbackS3:
        self._moto = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_SERVER_QUIET},
        )
        assert self._moto.stdout is not None
        self.port = int(self._moto.stdout.readline())
        self._proxy = _Proxy(("127.0.0.1", 0), _Handler, self)
        threading.Thread(target=self._proxy.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._proxy is not None:
            self._proxy.shutdown()
            self._proxy.server_close()
        if self._moto is not None:
            assert self._moto.stdin is not None
            assert self._moto.stdout is not None
            self._moto.stdin.close()  # it reads to the end, then ends
            self._moto.stdout.close()
            try:
                self._moto.wait(5)
            except subprocess.TimeoutExpired:
                self._moto.kill()
                self._moto.wait()

    @property
    def url(self) -> str:
        """The endpoint, through the proxy."""
        assert self._proxy is not None
        return f"http://127.0.0.1:{self._proxy.server_address[1]}"

    def options(self) -> dict[str, Any]:
        """Storage options for fsspec's `s3` file system."""
        return {"endpoint_url": self.url, "key": "test", "secret": "test"}

    def environment(self) -> dict[str, str]:
        """The environment of a client process."""
        return {
            **os.environ,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self, name: str) -> None:
        status, body, _ = self.forward("PUT", f"/{name}", b"", {"Host": f"127.0.0.1:{self.port}"})
        assert status == 200, body

    def sent(self, method: str, text: str) -> int:
        """How many requests of this kind went well whose path holds `text`."""
        with self.lock:
            log = list(self.requests)
        return sum(r.method == method and text in r.path and r.status < 300 for r in log)

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Ask the server itself.

        One request at a time: S3 checks a condition and writes in one step, and a reader sees the
        old object or the new one. moto does neither when two requests meet.
        """
        if self.conditions != "kept" and "If-None-Match" in headers and method in ("PUT", "POST"):
            if self.conditions == "refused":
                return 501, _NOT_IMPLEMENTED, []
            headers = {key: value for key, value in headers.items() if key != "If-None-Match"}
        with self._one_request:
            return self._forward(method, path, body, headers)

    def _forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheaders()
        finally:
            connection.close()

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The first fault that strikes this request, counted down."""
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or fault.path not in path:
                    continue
                if fault.method not in (None, method):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], s3: LoopbackS3
    ) -> None:
        super().__init__(address, handler)
        self.s3 = s3

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is not worth a traceback on stderr."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Proxy

    def do_GET(self) -> None:
        path = unquote(self.path)
        fault = self.server.s3.fault_for(self.command, path)
        body = self._body()
        if fault is not None:
            time.sleep(fault.delay)
        if fault is not None and fault.status is not None:
            self._log(path, fault.status)
            self._send(fault.status, _ERROR, [], None)
            return
        if fault is not None and fault.drop_after is not None and self.command != "GET":
            self._log(path, 0)  # the request is lost before the server hears of it
            self.close_connection = True
            return
        status, answer, headers = self.server.s3.forward(
            self.command, self.path, body, dict(self.headers.items())
        )
        self._log(path, status)
        self._send(status, answer, headers, None if fault is None else fault.drop_after)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the log is `LoopbackS3.requests`."""

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        del self.headers["Transfer-Encoding"]
        return b"".join(pieces)

    def _log(self, path: str, status: int) -> None:
        entry = Request(
            method=self.command, path=path, range=self.headers.get("Range"), status=status
        )
        with self.server.s3.lock:
            self.server.s3.requests.append(entry)

    def _send(
        self, status: int, body: bytes, headers: list[tuple[str, str]], limit: int | None
    ) -> None:
        self.send_response_only(status)
        dropped = {"transfer-encoding", "connection"}
        if self.command != "HEAD":
            dropped.add("content-length")
            headers = [*headers, ("Content-Length!", str(len(body)))]
        for key, value in headers:
            if key.lower() not in dropped:
                self.send_header(key.rstrip("!"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:limit])
        self.wfile.flush()
        if limit is not None:
            self.close_connection = True
