"""A small Hugging Face hub on 127.0.0.1, with faults on order.

In: folders of dataset files.  Out: a server that the real `datasets` and `huggingface_hub` can use
when HF_ENDPOINT points at it: repository info, tree, paths-info, resolve with byte ranges.
Promise: loopback only; a commit's files never change; every request is logged; a fault strikes
exactly as often as ordered.
Not here: uploads, authentication, models.

    with LoopbackHub() as hub:
        commit = hub.publish("owner/name", folder)
        hub.faults.append(Fault(path="train", drop_after=1000, times=2))
        subprocess.run(command, env=hub.environment(home))
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = [
    "Fault",
    "LoopbackHub",
    "Request",
]

_NOT_FOUND = {"repository": "RepoNotFound", "revision": "RevisionNotFound", "file": "EntryNotFound"}


@dataclass(slots=True, kw_only=True)
class Fault:
    """Something that goes wrong with the next requests whose path holds `path`."""

    path: str = ""
    times: int = 1  # how many requests it strikes; it counts down
    skip: int = 0  # how many such requests are served well before
    status: int | None = None  # answer with this status, such as 503
    drop_after: int | None = None  # send so many bytes of the body, then cut the connection
    short_by: int = 0  # leave out so many bytes at the end of the body, and say that it is whole
    delay: float = 0.0  # wait so many seconds first
    method: str | None = None  # strike only GET, HEAD or POST


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of the log."""

    method: str
    path: str
    range: str | None
    status: int


@dataclass(frozen=True, slots=True)
class _Commit:
    sha: str
    files: dict[str, Path]
    etags: dict[Path, str]  # as published


@dataclass(slots=True)
class _Repository:
    commits: dict[str, _Commit] = field(default_factory=dict)
    head: str = ""

    def at(self, revision: str) -> _Commit | None:
        return self.commits.get(self.head if revision == "main" else revision)


class LoopbackHub:
    """Start with `with`, or `start()` and `stop()`; a stopped hub can start again on its port."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self._repositories: dict[str, _Repository] = {}
        self._port = 0
        self._server: _Server | None = None

    def __enter__(self) -> LoopbackHub:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients find it: HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    def publish(self, name: str, folder: Path) -> str:
        """Make the files of `folder` the head of dataset `name`; gives the commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path for path in paths}
        etags = {path: _etag(path) for path in paths}
        digest = hashlib.sha1(name.encode())
        for relative, path in files.items():
            digest.update(f"{relative}:{etags[path]};".encode())
        repository = self._repositories.setdefault(name, _Repository())
        repository.head = digest.hexdigest()
        repository.commits[repository.head] = _Commit(repository.head, files, etags)
        return repository.head

    def start(self) -> None:
        """Serve, on the port of before if it was started once."""
        self._server = _Server(("127.0.0.1", self._port), _Handler, self)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Go away: no new connections, and the open ones are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.cut_connections()
            self._server.server_close()
            self._server = None

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of a client process: this hub, caches under `home`, no telemetry."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",  # whatever the tests before set
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
        return repository.at(revision) or "revision"

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
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: LoopbackHub
    ) -> None:
        super().__init__(address, handler)
        self.hub = hub
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
    _fault: Fault | None = None
    _log_range: str | None = None

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the log is `LoopbackHub.requests`."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self._fault = self.server.hub.fault_for(self.command, path)
        self._log_range = self.headers.get("Range")
        if self._fault is not None:
            time.sleep(self._fault.delay)
            if self._fault.status is not None:
                self._send(self._fault.status, b"fault", {})
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
                self._send(404, b"not served here", {})

    def _commit(self, name: str, revision: str) -> _Commit | None:
        found = self.server.hub.find(name, revision)
        if isinstance(found, str):
            self._missing(found)
            return None
        return found

    def _missing(self, kind: str) -> None:
        self._send(404, b"", {"X-Error-Code": _NOT_FOUND[kind], "X-Error-Message": f"no {kind}"})

    def _info(self, name: str, revision: str) -> None:
        if commit := self._commit(name, revision):
            siblings = [{"rfilename": file} for file in commit.files]
            info = {"id": name, "sha": commit.sha, "private": False, "gated": False, "tags": []}
            self._send_json({**info, "downloads": 0, "likes": 0, "siblings": siblings})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0]
        entries = _entries(commit, folder, is_deep=recursive.lower() in ("true", "1"))
        if folder and not entries:
            self._missing("file")
            return
        self._send_json(entries)

    def _paths_info(self, name: str, revision: str, body: bytes) -> None:
        if commit := self._commit(name, revision):
            if "json" in self.headers.get("Content-Type", ""):
                wanted = json.loads(body)["paths"]
            else:
                wanted = parse_qs(body.decode()).get("paths", [])
            paths = [wanted] if isinstance(wanted, str) else wanted
            known = {entry["path"]: entry for entry in _entries(commit, "", is_deep=True)}
            self._send_json([known[path] for path in paths if path in known])

    def _resolve(self, name: str, revision: str, file: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        if file not in commit.files:
            self._missing("file")
            return
        path = commit.files[file]
        size = path.stat().st_size
        start, stop = _asked_range(self._log_range, size)
        headers = {
            "X-Repo-Commit": commit.sha,
            "ETag": f'"{commit.etags[path]}"',
            "Accept-Ranges": "bytes",
        }
        if start >= stop and size:
            self._send(416, b"", {**headers, "Content-Range": f"bytes */{size}"})
            return
        if self._log_range:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as stream:
            stream.seek(start)
            self._send(206 if self._log_range else 200, stream.read(stop - start), headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self._fault is not None and self._fault.short_by:
            body = body[: -self._fault.short_by]
        entry = Request(
            method=self.command, path=unquote(self.path), range=self._log_range, status=status
        )
        with self.server.hub.lock:
            self.server.hub.requests.append(entry)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = None if self._fault is None else self._fault.drop_after
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


def _asked_range(header: str | None, size: int) -> tuple[int, int]:
    """Half-open bytes: "bytes=5-9" -> (5, 10); "bytes=5-" -> (5, size); None -> (0, size)."""
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entries(commit: _Commit, folder: str, *, is_deep: bool) -> list[dict[str, object]]:
    """Files and folders below `folder`, as the hub's tree lists them."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for file, path in commit.files.items():
        if not file.startswith(prefix):
            continue
        parts = file[len(prefix) :].split("/")
        depth = len(parts) if is_deep else 1
        for end in range(1, depth + 1):
            name = prefix + "/".join(parts[:end])
            if end < len(parts):
                found[name] = {"type": "directory", "oid": commit.sha, "size": 0, "path": name}
            else:
                size = path.stat().st_size
                found[name] = {
                    "type": "file",
                    "oid": commit.etags[path],
                    "size": size,
                    "path": name,
                }
    return list(found.values())
