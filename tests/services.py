"""A Hugging Face hub and an S3 server on 127.0.0.1, or another address, that fail on request.

`LoopbackHub` serves folders of dataset files to the real `datasets` and `huggingface_hub`:
repository info, tree, paths-info, resolve with byte ranges; no uploads, no authentication.
`LoopbackS3` is `moto` in its own process with a proxy before it, for the real `s3fs`;
signatures are not checked. Both log every request, and a `Fault` strikes exactly as often as asked.

    with LoopbackHub() as hub:
        commit = hub.publish("owner/name", folder)
        hub.faults.append(Fault(path="train", drop_after=1000, times=2))
        subprocess.run(command, env=hub.environment(home))

    with LoopbackS3() as s3:
        s3.make_bucket("data")
        s3.faults.append(Fault(path="shard_00000", method="PUT", status=503, times=2))
        push(folder, "s3://data/store", storage_options=s3.options())
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec

__all__ = ["Fault", "LoopbackHub", "LoopbackS3", "Request"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """Something that goes wrong with the next requests whose path contains `path`."""

    path: str = ""
    times: int = 1  # how many requests it strikes; it counts down
    skip: int = 0  # how many such requests are served well before
    status: int | None = None  # answer with this status, such as 503
    drop_after: int | None = None  # send this many bytes of the body, then cut the connection
    short_by: int = 0  # of a hub: leave out this many bytes at the end, and say that it is whole
    delay: float = 0.0  # wait this many seconds first
    hang: bool = False  # never serve it: wait until the client is gone
    method: str | None = None  # strike only GET, HEAD, POST or PUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of the log."""

    method: str
    path: str
    range: str | None
    status: int


class _Loopback:
    """A server with faults and a log."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self._port = 0
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        """Where clients find it: HF_ENDPOINT, or the S3 endpoint."""
        return f"http://{self.address}:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, on the port of before if it was started once."""
        handler = _HubHandler if isinstance(self, LoopbackHub) else _S3Handler
        self._server = _Server((self.address, self._port), handler, self)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """No new connections, and the open ones are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.cut_connections()
            self._server.server_close()
            self._server = None

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The first fault that strikes this request, counted down."""
        with self.lock:
            for fault in self.faults:
                fits = fault.path in path and fault.method in (None, method)
                if not fits or fault.times == 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        service: _Loopback,
    ) -> None:
        super().__init__(address, handler)
        self.service = service
        self._open: set[socket.socket] = set()

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        for connection in list(self._open):
            _cut(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is not worth a traceback on stderr."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small answer waits 40 ms for an acknowledgement
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the log is `requests`."""

    def fault(self, path: str) -> Fault | None:
        """The fault that strikes this request, after its delay."""
        found = self.server.service.fault_for(self.command, path)
        if found is not None:
            time.sleep(found.delay)
            if found.hang:
                wait = select.poll()
                wait.register(self.connection, select.POLLRDHUP)
                wait.poll()
                raise ConnectionResetError  # ends this connection
        return found

    def log(self, path: str, status: int) -> None:
        entry = Request(
            method=self.command, path=path, range=self.headers.get("Range"), status=status
        )
        with self.server.service.lock:
            self.server.service.requests.append(entry)

    def send(
        self, status: int, body: bytes, headers: list[tuple[str, str]], limit: int | None
    ) -> None:
        """At most `limit` bytes of the body, after which the connection is cut."""
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:limit])
        if limit is not None:
            self.close_connection = True
            self.wfile.flush()
            _cut(self.connection)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client was quicker


# --- the hub


_NOT_FOUND = {"repository": "RepoNotFound", "revision": "RevisionNotFound", "file": "EntryNotFound"}


@dataclass(frozen=True, slots=True)
class _Commit:
    sha: str
    files: dict[str, Path]
    etags: dict[Path, str]  # as published


@dataclass(slots=True)
class _Repository:
    commits: dict[str, _Commit] = field(default_factory=dict)
    head: str = ""


class LoopbackHub(_Loopback):
    """Start with `with`, or `start()` and `stop()`; a stopped hub can start again on its port."""

    def __init__(self) -> None:
        super().__init__()
        self._repositories: dict[str, _Repository] = {}

    def publish(self, name: str, folder: Path) -> str:
        """Make the files of `folder` the head of dataset `name`; returns the commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path for path in paths}
        etags = {path: hashlib.sha1(path.read_bytes()).hexdigest() for path in paths}
        digest = hashlib.sha1(name.encode())
        for relative, path in files.items():
            digest.update(f"{relative}:{etags[path]};".encode())
        repository = self._repositories.setdefault(name, _Repository())
        repository.head = digest.hexdigest()
        repository.commits[repository.head] = _Commit(repository.head, files, etags)
        return repository.head

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of a client process: this hub, caches under `home`, no telemetry."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",  # whatever earlier tests set
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def find(self, name: str, revision: str) -> _Commit | str:
        """The commit, or which kind of thing is not here."""
        repository = self._repositories.get(name)
        if repository is None:
            return "repository"
        sha = repository.head if revision == "main" else revision
        return repository.commits.get(sha) or "revision"


class _HubHandler(_Handler):
    _fault: Fault | None = None

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self._fault = self.fault(path)
        if self._fault is not None and self._fault.status is not None:
            self._answer(self._fault.status, b"fault", {})
            return
        match path.strip("/").split("/"):
            case ["datasets", owner, name, "resolve", revision, *parts]:
                self._resolve(f"{owner}/{name}", revision, "/".join(parts))
            case ["api", "datasets", owner, name]:
                self._info(f"{owner}/{name}", "main")
            case ["api", "datasets", owner, name, "revision", revision]:
                self._info(f"{owner}/{name}", revision)
            case ["api", "datasets", owner, name, "tree", revision, *parts]:
                self._tree(f"{owner}/{name}", revision, "/".join(parts))
            case ["api", "datasets", owner, name, "paths-info", revision]:
                self._paths_info(f"{owner}/{name}", revision, body)
            case _:
                self._answer(404, b"not served here", {})

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _commit(self, name: str, revision: str) -> _Commit | None:
        assert isinstance(self.server.service, LoopbackHub)
        found = self.server.service.find(name, revision)
        if isinstance(found, str):
            self._missing(found)
            return None
        return found

    def _missing(self, kind: str) -> None:
        headers = {"X-Error-Code": _NOT_FOUND[kind], "X-Error-Message": f"no {kind}"}
        self._answer(404, b"", headers)

    def _info(self, name: str, revision: str) -> None:
        if commit := self._commit(name, revision):
            siblings = [{"rfilename": file} for file in commit.files]
            info = {"id": name, "sha": commit.sha, "private": False, "gated": False, "tags": []}
            self._answer_json({**info, "downloads": 0, "likes": 0, "siblings": siblings})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        if commit := self._commit(name, revision):
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0]
            entries = _entries(commit, folder, is_deep=recursive.lower() in ("true", "1"))
            if folder and not entries:
                self._missing("file")
            else:
                self._answer_json(entries)

    def _paths_info(self, name: str, revision: str, body: bytes) -> None:
        if commit := self._commit(name, revision):
            if "json" in self.headers.get("Content-Type", ""):
                wanted = json.loads(body)["paths"]
            else:
                wanted = parse_qs(body.decode()).get("paths", [])
            paths = [wanted] if isinstance(wanted, str) else wanted
            known = {entry["path"]: entry for entry in _entries(commit, "", is_deep=True)}
            self._answer_json([known[path] for path in paths if path in known])

    def _resolve(self, name: str, revision: str, file: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        if file not in commit.files:
            self._missing("file")
            return
        path, asked = commit.files[file], self.headers.get("Range")
        size = path.stat().st_size
        start, stop = _asked_range(asked, size)
        headers = {
            "X-Repo-Commit": commit.sha,
            "ETag": f'"{commit.etags[path]}"',
            "Accept-Ranges": "bytes",
        }
        if start >= stop and size:
            self._answer(416, b"", {**headers, "Content-Range": f"bytes */{size}"})
            return
        if asked:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as stream:
            stream.seek(start)
            self._answer(206 if asked else 200, stream.read(stop - start), headers)

    def _answer_json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        fault = self._fault
        if fault is not None and fault.short_by:
            body = body[: -fault.short_by]
        self.log(unquote(self.path), status)
        sized = [*headers.items(), ("Content-Length", str(len(body)))]
        self.send(status, body, sized, None if fault is None else fault.drop_after)


def _asked_range(header: str | None, size: int) -> tuple[int, int]:
    """Half-open bytes: "bytes=5-9" -> (5, 10); "bytes=5-" -> (5, size); None -> (0, size)."""
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def _entries(commit: _Commit, folder: str, *, is_deep: bool) -> list[dict[str, object]]:
    """Files and folders below `folder`, as the hub's tree lists them."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for file, path in commit.files.items():
        if not file.startswith(prefix):
            continue
        parts = file[len(prefix) :].split("/")
        for end in range(1, (len(parts) if is_deep else 1) + 1):
            name = prefix + "/".join(parts[:end])
            entry = {"type": "directory", "oid": commit.sha, "size": 0, "path": name}
            if end == len(parts):
                entry |= {"type": "file", "oid": commit.etags[path], "size": path.stat().st_size}
            found[name] = entry
    return list(found.values())


# --- S3


_CODE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_MOTO = {"MOTO_S3_DEFAULT_MAX_KEYS": "50"}  # so that listings come in pages
_ERROR = b"<Error><Code>ServiceUnavailable</Code><Message>fault</Message></Error>"
_NOT_IMPLEMENTED = (
    b"<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality that "
    b"is not implemented</Message><Header>If-None-Match</Header></Error>"
)


class LoopbackS3(_Loopback):
    """Start with `with`. It ends with the block, and with this process if that is killed."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__(address)
        self.conditions = "kept"  # "ignored" or "refused": a service without conditional requests
        self._one_request = threading.Lock()
        self._moto_port = 0
        self._moto: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start moto, then the proxy."""
        self._moto = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_MOTO},
        )
        assert self._moto.stdout is not None
        self._moto_port = int(self._moto.stdout.readline())
        super().start()

    def stop(self) -> None:
        """Stop both."""
        super().stop()
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

    def options(self) -> dict[str, Any]:
        """Storage options for fsspec's `s3` file system."""
        return {"endpoint_url": self.url, "key": "test", "secret": "test"}

    def environment(self) -> dict[str, str]:
        """The environment of a client process; clients made in another one are forgotten here."""
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        return {
            **os.environ,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": self.address,
        }

    def make_bucket(self, name: str) -> None:
        host = {"Host": f"127.0.0.1:{self._moto_port}"}
        status, body, _ = self.forward("PUT", f"/{name}", b"", host)
        assert status == 200, body

    def sent(self, method: str, text: str) -> int:
        """How many requests of this kind went well whose path contains `text`."""
        with self.lock:
            log = list(self.requests)
        return sum(r.method == method and text in r.path and r.status < 300 for r in log)

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Ask moto itself.

        One request at a time: S3 checks a condition and writes in one step, and a reader sees the
        old object or the new one. moto does neither when two requests meet.
        """
        if self.conditions != "kept" and "If-None-Match" in headers and method in ("PUT", "POST"):
            if self.conditions == "refused":
                return 501, _NOT_IMPLEMENTED, []
            headers = {key: value for key, value in headers.items() if key != "If-None-Match"}
        with self._one_request:
            connection = http.client.HTTPConnection("127.0.0.1", self._moto_port, timeout=600)
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read(), answer.getheaders()
            finally:
                connection.close()


class _S3Handler(_Handler):
    def do_GET(self) -> None:
        assert isinstance(self.server.service, LoopbackS3)
        path = unquote(self.path)
        fault = self.fault(path)
        body = self._body()
        if len(body) < int(self.headers.get("Content-Length") or 0):
            # The client was killed while it sent. moto would wait for the rest, and every other
            # request for moto.
            self.close_connection = True
            return
        if fault is not None and fault.status is not None:
            self._answer(fault.status, _ERROR, [], None)
            return
        limit = None if fault is None else fault.drop_after
        if limit is not None and self.command != "GET":
            self.log(path, 0)  # the request is lost before the server hears of it
            self.close_connection = True
            return
        status, answer, headers = self.server.service.forward(
            self.command, self.path, body, dict(self.headers.items())
        )
        self._answer(status, answer, headers, limit)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

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

    def _answer(
        self, status: int, body: bytes, headers: list[tuple[str, str]], limit: int | None
    ) -> None:
        self.log(unquote(self.path), status)
        dropped = {"transfer-encoding", "connection"}
        length = []
        if self.command != "HEAD":
            dropped.add("content-length")
            length = [("Content-Length", str(len(body)))]
        kept = [(key, value) for key, value in headers if key.lower() not in dropped]
        self.send(status, body, [*kept, *length], limit)
