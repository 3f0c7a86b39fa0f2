"""Stores on plain web servers: with and without ranges, chunked, redirecting, failing."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.errors import SourceError, StoreError, StoreNotFoundError
from shardmill.records import Ragged
from shardmill.remote import open_remote, pull, push
from shardmill.sources import open_source
from shardmill.store import verify
from shardmill.testing.stores import build_small_store
from tests.remote.conftest import files_of


class Plain(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server`: an index page for each folder, no ranges."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


class Dropping(Plain):
    """Loses the connection in the middle of the first answer for each large file."""

    lost: set[str]

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        if len(data) > 500 and self.path not in self.lost:
            self.lost.add(self.path)
            outputfile.write(data[:300])
            self.close_connection = True
            return
        outputfile.write(data)


class Ranged(Plain):
    """Serves ranges, and says so."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", self.headers.get("Range", ""))
        if not path.is_file() or wanted is None:
            super().do_GET()
            return
        data = path.read_bytes()
        start, stop = int(wanted[1]), int(wanted[2] or len(data) - 1) + 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data[start:stop])))
        self.end_headers()
        self.wfile.write(data[start:stop])


class RangedDropping(Dropping, Ranged):
    """Ranges, and lost connections."""


class Chunked(Plain):
    """Never says how long an answer is."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = path.read_bytes()
        for at in range(0, len(data), 700):
            piece = data[at : at + 700]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def do_HEAD(self) -> None:
        self.send_error(405)


class Circle(Plain):
    """Redirects to itself."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.path}?again")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815


class Forbidden(Plain):
    def do_GET(self) -> None:
        self.send_error(403)

    do_HEAD = do_GET  # noqa: N815


@contextmanager
def serving(kind: type[Plain], folder: Path) -> Iterator[str]:
    if issubclass(kind, Dropping):
        kind.lost = set()
    handler = functools.partial(kind, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("kind", [Plain, Ranged, Chunked, Dropping, RangedDropping])
def test_a_store_is_pulled_from_a_web_server(
    make_store: Callable[..., Path], tmp_path: Path, kind: type[Plain]
) -> None:
    store = make_store("served/store")
    with serving(kind, store.parent) as url:
        receipt = pull(f"{url}/store", tmp_path / "copy")
    assert receipt.moved_files == 14
    assert files_of(tmp_path / "copy") == files_of(store)
    assert verify(tmp_path / "copy").ok


@pytest.mark.parametrize("kind", [Plain, Ranged, Chunked])
def test_a_file_of_many_blocks_needs_no_ranges(tmp_path: Path, kind: type[Plain]) -> None:
    ids = np.random.default_rng(0).integers(0, 60_000, 9_000_000)
    build_small_store(tmp_path / "served/store", {"train": Ragged.from_lengths(ids, [len(ids)])})
    with serving(kind, tmp_path / "served") as url:
        pull(f"{url}/store", tmp_path / "copy")
        assert files_of(tmp_path / "copy") == files_of(tmp_path / "served/store")
        options = {"cache": tmp_path / "cache", "max_bytes": 10**8}
        with open_remote(f"{url}/store", **options) as store, store.open_tokens("train") as tokens:
            assert tokens.read(8_999_990, 9_000_000).tolist() == ids[-10:].tolist()


@pytest.mark.parametrize("kind", [Plain, Ranged])
def test_an_interrupted_pull_continues(make_store, tmp_path: Path, kind: type[Plain]) -> None:
    store = make_store("served/store")
    shard = store / "train/shard_00004.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:400])
    with serving(kind, store.parent) as url:
        with pytest.raises(StoreError, match=r"shard_00004\.bin"):
            pull(f"{url}/store", tmp_path / "copy", workers=1)
        assert not (tmp_path / "copy").exists()
        shard.write_bytes(good)
        again = pull(f"{url}/store", tmp_path / "copy", workers=1)
    assert again.kept_files >= 4
    assert files_of(tmp_path / "copy") == files_of(store)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Circle, "redirects in a circle"), (Forbidden, "403.*credentials")],
)
def test_a_server_with_a_permanent_error_is_asked_once(
    make_store, tmp_path: Path, kind: type[Plain], words: str
) -> None:
    store = make_store("served/store")
    with serving(kind, store.parent) as url, pytest.raises(StoreError, match=words):
        pull(f"{url}/store", tmp_path / "copy")


def test_nothing_there_is_not_found(make_store, tmp_path: Path) -> None:
    store = make_store("served/store")
    with (
        serving(Plain, store.parent) as url,
        pytest.raises(StoreNotFoundError, match="check the URL"),
    ):
        pull(f"{url}/elsewhere", tmp_path / "copy")


def test_a_push_to_a_web_server_is_refused(make_store, tmp_path: Path) -> None:
    store = make_store("served/store")
    with serving(Plain, store.parent) as url, pytest.raises(StoreError, match="cannot be written"):
        push(store, f"{url}/new")


def test_input_on_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    lines = "".join(f'{{"text": "line {number} of a long file"}}\n' for number in range(40_000))
    (tmp_path / "served/pages.jsonl").write_text(lines)
    with (
        serving(Plain, tmp_path / "served") as url,
        pytest.raises(SourceError, match=r"127\.0\.0\.1:[0-9]+ does not serve ranges"),
    ):
        list(open_source(f"{url}/pages.jsonl").batches())
