"""Sources on object storage: the documents of the same files on a disk, read in place."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import HubError, MissingExtraError, OptionError, SourceError
from shardmill.protocols import Source
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    ParquetSource,
    TextSource,
    open_chats,
    open_source,
)
from shardmill.storage import retry
from shardmill.testing.sources import (
    Account,
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
    json_lines,
)
from shardmill.threads import StoppedError
from tests.services import Fault, LoopbackHub, LoopbackS3

LIMITS = BatchLimits(num_bytes=300, num_documents=9)
SECRETS = ("the-key-id", "the-secret")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackS3]:
    for package in ("s3fs", "moto", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: S3 is not tested")
    with LoopbackS3() as running:
        running.make_bucket("data")
        yield running


@pytest.fixture
def s3(server: LoopbackS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackS3]:
    """The server, named by the environment alone, with no faults and an empty log."""
    for name, value in server.environment().items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
    client = importlib.import_module("s3fs").S3FileSystem
    monkeypatch.setattr(client, "retries", 1)  # its pauses are long, and our retries are tested
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    clear_clients()
    server.faults.clear()
    server.requests.clear()
    yield server
    server.faults.clear()
    clear_clients()


def clear_clients() -> None:
    """Clients remember the environment they were made in."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)


Upload = Callable[[Path], str]


def uploaded(folder: Path, url: str) -> str:
    fs, root = fsspec.core.url_to_fs(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fs.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def upload(request: pytest.FixtureRequest) -> Upload:
    """Puts a folder where nothing was before; gives its URL."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return lambda folder: uploaded(folder, f"s3://data/far-{next(_numbers)}")
    return lambda folder: uploaded(folder, f"memory://far-{next(_numbers)}")


@pytest.fixture
def s3_upload(s3: LoopbackS3) -> Upload:
    return lambda folder: uploaded(folder, f"s3://data/far-{next(_numbers)}")


def write_all(root: Path) -> Path:
    """Files of every kind, with rows that are dropped, and some that no folder shows."""
    rows = [{"text": f"document {n} " + "\u00e9" * (n % 40)} for n in range(60)]
    rows[7], rows[33] = {"text": None}, {}  # type: ignore[dict-item]
    lines = "\n\n".join(json.dumps(row) for row in rows).encode()
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (root / "sub/b.jsonl.gz").write_bytes(gzip.compress(lines))
    (root / "sub/c.jsonl.zst").write_bytes(
        zstandard.compress(lines[:900]) + zstandard.compress(lines[900:])
    )
    (root / "sub/.d.jsonl").write_bytes(b"broken")
    (root / ".hidden/e.jsonl").write_bytes(b"broken")
    (root / "f.txt").write_bytes(b"one\r\ntwo\r\n\r\nthree" * 50)
    (root / "g.md").write_bytes(b"")
    texts = [None if n == 5 else f"text {n} " * 9 for n in range(40)]
    table = pa.table({"number": range(40), "text": texts})
    pq.write_table(table, root / "h.parquet", row_group_size=7)
    pq.write_table(table.slice(0, 3), root / "sub/i.parquet")
    return root


def text(where: str, **options: Any) -> Source:
    return TextSource(where, limits=LIMITS, **options)


def lines(where: str) -> Source:
    return TextSource(where, split="line", limits=LIMITS)


def jsonl(where: str) -> Source:
    return JsonlSource(where, on_bad="skip", limits=LIMITS)


def parquet(where: str) -> Source:
    return ParquetSource(where, limits=LIMITS)


KINDS = [jsonl, text, lines, parquet]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upload", "make"),
    [*(("memory", make) for make in KINDS), ("s3", jsonl), ("s3", parquet)],
    indirect=["upload"],
)
def test_remote_files_give_what_the_same_files_give_on_a_disk(
    tmp_path: Path, upload: Upload, make: Callable[[str], Any]
) -> None:
    folder = write_all(tmp_path / "all")
    url = upload(folder)
    wanted = account(make(str(folder)).batches())

    assert wanted.num_read > 1
    assert assert_ledger_balances(make(url)) == wanted
    assert assert_resumes_exactly(lambda: make(url)) == wanted
    assert_cut_is_the_source(make(url), 700)
    assert_divides_exactly(lambda: make(url), at_least=(1, 100))
    assert [file.name for file in make(url).files] == [f.name for f in make(str(folder)).files]
    assert make(url).size_hint() == make(str(folder)).size_hint()


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    rows=st.lists(json_lines(with_bad=True), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n"]),
    num_bytes=st.integers(1, 900),
)
def test_remote_lines_cut_anywhere_are_those_of_the_disk(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], end: bytes, num_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_bytes(end.join(row.raw for row in rows))
    url = uploaded(folder, f"memory://lines-{next(_numbers)}")
    far = JsonlSource(url, field="text", on_bad="skip", limits=LIMITS)
    near = JsonlSource(folder, field="text", on_bad="skip", limits=LIMITS)

    assert_cut_is_the_source(far, num_bytes)
    assert account(far.batches()) == account(near.batches())


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("**/*.jsonl*", "jsonl"),
        ("*.jsonl", "jsonl"),
        ("sub/?.jsonl.*", "jsonl"),
        ("*/*.parquet", "parquet"),
        ("[fg].*", "text"),
        ("sub/b.jsonl.gz", "jsonl"),
    ],
)
def test_a_glob_finds_the_files_that_it_finds_on_a_disk(
    tmp_path: Path, upload: Upload, pattern: str, kind: str
) -> None:
    folder = write_all(tmp_path / "all")
    url = upload(folder)
    far, near = open_source(f"{url}/{pattern}"), open_source(f"{folder}/{pattern}")

    assert [file.name for file in far.files] == [file.name for file in near.files]  # type: ignore[attr-defined]
    assert far.describe()["kind"] == near.describe()["kind"] == kind
    assert far.name == near.name
    assert account(far.batches()) == account(near.batches())


def test_a_list_of_files_keeps_its_order_and_names_them_apart(
    tmp_path: Path, upload: Upload
) -> None:
    folder = write_all(tmp_path / "all")
    url = upload(folder)
    source = JsonlSource([f"{url}/sub/b.jsonl.gz", f"{url}/a.jsonl"])

    assert [file.name for file in source.files] == ["sub/b.jsonl.gz", "a.jsonl"]
    assert isinstance(open_source([f"{url}/a.jsonl", f"{url}/f.txt"]), ConcatSource)
    with pytest.raises(SourceError, match="two of the inputs name it"):
        open_source([f"{url}/a.jsonl", f"{url}/*.jsonl"])
    with pytest.raises(SourceError, match="on this machine and on object storage in one list"):
        JsonlSource([f"{url}/a.jsonl", str(folder / "a.jsonl")])
    with pytest.raises(SourceError, match="listed more than once"):
        JsonlSource([f"{url}/a.jsonl", f"{url}/a.jsonl"])


def test_what_is_left_out_is_logged(
    tmp_path: Path, upload: Upload, caplog: pytest.LogCaptureFixture
) -> None:
    url = upload(write_all(tmp_path / "all"))
    with caplog.at_level(logging.INFO):
        jsonl(url)
    assert (
        "left out 4 files of other endings (2 .parquet, 1 .md, 1 .txt) and 2 hidden files"
        in caplog.text
    )


def test_a_file_without_an_identity_is_known_by_its_ends(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "all")
    url = uploaded(folder, "memory://identity")
    (near,) = JsonlSource(folder / "a.jsonl").describe()["files"]  # type: ignore[misc,union-attr]
    (far,) = JsonlSource(f"{url}/a.jsonl").describe()["files"]  # type: ignore[misc,union-attr]

    assert far == {
        "file": "a.jsonl",
        "bytes": near["bytes"],  # type: ignore[index,call-overload]
        "sha256_of_ends": far["sha256_of_ends"],  # type: ignore[index,call-overload]
    }
    fsspec.filesystem("memory").pipe_file("/identity/a.jsonl", (folder / "a.jsonl").read_bytes())
    assert JsonlSource(f"{url}/a.jsonl").describe()["files"] == [far]


@pytest.mark.slow
def test_the_description_holds_what_s3_calls_the_content_and_nothing_secret(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload
) -> None:
    url = s3_upload(write_all(tmp_path / "all"))
    source = JsonlSource(f"{url}/*.jsonl")
    s3.requests.clear()
    found = source.describe()

    assert found == {
        "kind": "jsonl",
        "name": "*.jsonl",
        "field": "text",
        "on_bad": "error",
        "files": [
            {
                "file": "a.jsonl",
                "bytes": (tmp_path / "all/a.jsonl").stat().st_size,
                "etag": source.files[0].place.identity[1],  # type: ignore[union-attr,index]
            }
        ],
    }
    assert s3.sent("GET", "a.jsonl") == 1  # of a first look for the field; the file is not hashed
    shown = repr([found, source, source.files, source.stamp(), list(source.batches())])
    shown += repr([piece.describe() for piece in source.cut(100)]) + pickle.dumps(source).decode(
        "latin-1"
    )
    for secret in (*SECRETS, s3.url, "127.0.0.1"):
        assert secret not in shown


@pytest.mark.parametrize("make", [jsonl, text, parquet])
def test_a_file_that_changed_since_it_was_listed_is_refused(
    tmp_path: Path, upload: Upload, make: Callable[[str], Source]
) -> None:
    url = upload(write_all(tmp_path / "all"))
    source = make(url)
    fs, root = fsspec.core.url_to_fs(url)
    for name in ("a.jsonl", "f.txt", "h.parquet"):
        data = fs.cat_file(f"{root}/{name}")
        fs.pipe_file(f"{root}/{name}", data[:9] + b"!" + data[10:])  # of the same size
    fs.invalidate_cache()

    for ask in (lambda: list(source.batches()), source.describe):
        with pytest.raises(SourceError, match="is not the file that was listed"):
            ask()


def test_a_file_that_changes_while_it_is_read_is_refused_at_its_end(
    tmp_path: Path, upload: Upload
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/rows.jsonl").write_text('{"text": "aaaaaaaaaa"}\n' * 100)
    url = upload(tmp_path / "a")
    batches = jsonl(url).batches()
    next(batches)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/rows.jsonl", b'{"text": "bbbbbbbbbb"}\n' * 100)

    with pytest.raises(SourceError, match="but rewritten"):
        list(batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (jsonl, {"status": 503}),
        (jsonl, {"status": 429}),
        (jsonl, {"drop_after": 150}),
        (text, {"status": 500}),
        (lines, {"drop_after": 0}),
        (parquet, {"status": 503}),
        (parquet, {"drop_after": 150}),
    ],
)
def test_transient_failures_lose_nothing(
    tmp_path: Path,
    s3: LoopbackS3,
    s3_upload: Upload,
    make: Callable[[str], Source],
    fault: dict[str, int],
) -> None:
    folder = write_all(tmp_path / "all")
    url = s3_upload(folder)
    place = url.rpartition("/")[2]
    s3.faults += [
        Fault(path="list-type", times=2, status=503),
        Fault(path=f"/{place}/", method="GET", times=3, **fault),  # type: ignore[arg-type]
        Fault(path=f"/{place}/", method="GET", skip=9, times=2, **fault),  # type: ignore[arg-type]
        Fault(path=f"/{place}/", method="HEAD", times=2, status=503),
    ]
    found = account(make(url).batches())

    assert [fault.times for fault in s3.faults if not fault.skip] == [0] * 3
    assert found == account(make(str(folder)).batches())


@pytest.mark.slow
def test_unreachable_storage_is_an_error_and_the_cursor_stays_valid(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload
) -> None:
    (tmp_path / "rows").mkdir()
    for name in "abc":
        (tmp_path / f"rows/{name}.jsonl").write_text(f'{{"text": "{name}"}}\n' * 50)
    url = s3_upload(tmp_path / "rows")
    s3.faults.append(Fault(path="/b.jsonl", method="GET", times=10_000, drop_after=30))
    found = []
    with pytest.raises(HubError, match=r"b.jsonl: unreachable after 6 tries .*resume") as raised:
        found.extend(jsonl(url).batches())  # those before the error stay in it
    assert isinstance(raised.value, ConnectionError)
    s3.faults.clear()
    found += jsonl(url).batches(found[-1].cursor)

    assert account(found) == account(jsonl(str(tmp_path / "rows")).batches())


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 403, 404])
def test_permanent_failures_are_errors_at_once(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload, status: int
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "a"}\n')
    source = JsonlSource(s3_upload(tmp_path / "rows"), field="text")
    s3.faults.append(Fault(path="/a.jsonl", method="GET", times=10_000, status=status))

    with pytest.raises(SourceError) as raised:
        list(source.batches())
    assert not isinstance(raised.value, HubError)
    assert 10_000 - s3.faults[0].times == 1
    assert not any(secret in str(raised.value) for secret in SECRETS)


def test_what_is_missing_is_named(s3: LoopbackS3, upload: Upload, tmp_path: Path) -> None:
    url = upload(write_all(tmp_path / "all"))
    for where in (f"{url}/none.jsonl", f"{url}/none"):
        with pytest.raises(SourceError, match=r"none.*FileNotFoundError.*check the bucket"):
            open_source(where)
    with pytest.raises(SourceError, match=r"none\*\.jsonl: no file here ends in"):
        open_source(f"{url}/none*.jsonl")
    with pytest.raises(SourceError, match="several kinds of files"):
        open_source(url)
    with pytest.raises(SourceError, match=r"s3://nowhere/a.jsonl: .*check the bucket"):
        open_source("s3://nowhere/a.jsonl")
    with pytest.raises(OptionError, match=r"nothing://a: .*wanted something like s3://bucket"):
        open_source("nothing://a")


def spans(s3: LoopbackS3, text: str) -> list[tuple[int, int]]:
    """The ranges of a file that were asked for, half-open."""
    found = [r for r in s3.requests if r.method == "GET" and text in r.path]
    ranges = [r.range.removeprefix("bytes=").split("-") for r in found if r.range]
    assert len(ranges) == len(found), "a file was asked for whole"
    return sorted((int(first), int(last) + 1) for first, last in ranges)


@pytest.mark.slow
def test_of_parquet_only_the_footer_and_the_column_are_fetched(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload
) -> None:
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows/a.parquet"
    noise = [os.urandom(400_000) for _ in range(6)]
    texts = [os.urandom(1000).hex() for _ in range(6)]
    pq.write_table(pa.table({"noise": noise, "text": texts}), path, row_group_size=2)
    source = ParquetSource(s3_upload(tmp_path / "rows"), field="text")
    s3.requests.clear()
    assert account(source.batches()).texts == texts

    asked = sum(stop - start for start, stop in spans(s3, "a.parquet"))
    assert asked < path.stat().st_size // 5
    metadata = pq.read_metadata(path)
    _, second, _ = source.divide(2)
    s3.requests.clear()
    assert account(second.batches()).texts == texts[2:4]
    chunk = metadata.row_group(1).column(1)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    assert spans(s3, "a.parquet") == [(start, start + chunk.total_compressed_size)]


def test_a_range_fetches_its_own_bytes_and_the_end_of_its_last_line(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload
) -> None:
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows/a.jsonl"
    path.write_text(('{"text": "' + "x" * 489 + '"}\n') * 10_000)
    source = JsonlSource(s3_upload(tmp_path / "rows"), field="text")
    pieces = source.cut(2**20)
    s3.requests.clear()
    found = account(pieces[2].batches())

    start, stop = pieces[2].describe()["bytes"]  # type: ignore[misc]
    asked = spans(s3, "a.jsonl")
    assert len(found.texts) == pytest.approx((stop - start) / 502, abs=2)  # type: ignore[operator]
    assert asked[0][0] == start - 1  # type: ignore[operator]
    assert asked[-1][1] <= stop + 2**16  # type: ignore[operator]
    assert sum(last - first for first, last in asked) < 1.4 * (stop - start)  # type: ignore[operator]


def test_looking_at_the_first_row_fetches_little(
    tmp_path: Path, s3: LoopbackS3, s3_upload: Upload
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text(
        '{"body": "' + "x" * 490 + '"}\n' + '{"body": "x"}\n' * 100_000
    )
    source = JsonlSource(s3_upload(tmp_path / "rows"))
    s3.requests.clear()

    assert source.describe()["field"] == "body"
    assert sum(stop - start for start, stop in spans(s3, "a.jsonl")) <= 2**18


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """Memory with a bad line: gives short answers, or raises, as ordered."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base class has it
    trouble: list[Any] = []  # noqa: RUF012
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("flaky://")))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        type(self).calls += 1
        data: bytes = super().cat_file(path, start, end)
        order = self.trouble.pop(0) if self.trouble else None
        if isinstance(order, Exception):
            raise order
        return data if order is None else data[:order]


@pytest.fixture
def flaky(tmp_path: Path) -> str:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.trouble.clear()
    Flaky.calls = 0
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "a"}\n' * 30)
    return uploaded(tmp_path / "rows", "flaky://rows")


@pytest.mark.parametrize(
    "trouble",
    [0, 1, 30, TimeoutError("slow"), ConnectionResetError("gone"), OSError(16, "busy")],
)
def test_a_short_answer_or_a_dead_stream_is_never_the_end(flaky: str, trouble: Any) -> None:
    Flaky.trouble += [trouble] * 5
    assert account(jsonl(flaky).batches()).texts == ["a"] * 30
    assert Flaky.trouble == []


@pytest.mark.parametrize(
    ("trouble", "error", "calls"),
    [
        (3, HubError, 6),
        (ConnectionError("gone"), HubError, 6),
        (PermissionError("no"), SourceError, 1),
        (OSError(22, "bad"), SourceError, 1),
        (StoppedError(), StoppedError, 1),
        (ZeroDivisionError(), ZeroDivisionError, 1),
    ],
)
def test_retries_are_bounded_and_only_made_where_they_help(
    flaky: str, trouble: Any, error: type[Exception], calls: int
) -> None:
    source = JsonlSource(flaky, field="text")
    Flaky.trouble += [trouble] * 50
    with pytest.raises(error) as raised:
        list(source.batches())
    assert type(raised.value) is error
    assert Flaky.calls == calls


def test_a_web_address_never_shows_its_user_or_its_query(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "a"}\nbroken\n')
    with LoopbackHub() as hub:
        hub.publish("own/rows", tmp_path / "rows")
        place = f"{hub.url}/datasets/own/rows/resolve/main"
        url = f"{place}/a.jsonl?signature=s3cr3t".replace("//", "//user:passw0rd@", 1)
        skipped = open_source(url, field="text", on_bad="skip")
        found = account(skipped.batches())
        shown = repr([skipped, skipped.name, skipped.describe(), list(skipped.batches())])
        with pytest.raises(SourceError, match=r"a.jsonl, line 2: broken JSON") as bad:
            list(open_source(url, field="text").batches())
        with pytest.raises(SourceError, match="check the bucket and the path") as gone:
            open_source(url.replace("a.jsonl", "none.jsonl"))

    assert found.texts == ["a"]
    assert [drop.id for drop in found.drops] == ["a.jsonl:2"]
    for words in (shown, str(bad.value), str(gone.value)):
        assert "s3cr3t" not in words
        assert "passw0rd" not in words
    with pytest.raises(HubError, match=r"a.jsonl: unreachable after 6 tries") as away:
        list(skipped.batches())
    assert "s3cr3t" not in str(away.value)


def test_chats_are_read_from_object_storage_too(tmp_path: Path, upload: Upload) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "chats/b.json").write_text(json.dumps([{"messages": turns}] * 2))
    pq.write_table(pa.table({"messages": [turns]}), tmp_path / "chats/c.parquet")
    url = upload(tmp_path / "chats")
    far, near = open_chats(url), open_chats(tmp_path / "chats")

    assert account(far.batches()) == account(near.batches())
    assert len(account(far.batches()).conversations) == 4
    assert far.stamp() != near.stamp()
    lists = [[f"{root}/a.jsonl", f"{root}/b.json"] for root in (url, str(tmp_path / "chats"))]
    found = [account(open_chats(where).batches()) for where in lists]
    assert found[0] == found[1]
    with pytest.raises(SourceError, match="on this machine and on object storage in one list"):
        open_chats([lists[0][0], lists[1][1]])


def _read(piece: Source) -> Account:
    return account(piece.batches())


@pytest.mark.slow
def test_a_fresh_process_reads_a_piece(tmp_path: Path, s3_upload: Upload) -> None:
    folder = write_all(tmp_path / "all")
    pieces = open_source(f"{s3_upload(folder)}/*.jsonl").cut(700)  # type: ignore[attr-defined]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(_read, pieces)

    assert found == [account(piece.batches()) for piece in pieces]


WITHOUT = """
import sys
from shardmill.errors import MissingExtraError
from shardmill.sources import open_source
for name in ("s3fs", "gcsfs"):
    sys.modules[name] = None
for url in ("s3://bucket/a.jsonl", "gs://bucket/a.jsonl"):
    try:
        open_source(url)
    except MissingExtraError as error:
        print(error)
"""


def test_a_missing_client_is_named_with_its_pip_command() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        "s3fs is not installed: pip install 'shardmill[s3]'",
        "gs://bucket/a.jsonl: cannot be opened: gcsfs is not installed: pip install gcsfs",
    ]
    assert issubclass(MissingExtraError, ImportError)


LOCAL = """
import sys
from shardmill.sources import open_source
list(open_source(sys.argv[1]).batches())
open_source(sys.argv[1]).describe()
print([name for name in sys.modules if name.startswith("fsspec")])
"""


@pytest.mark.slow
def test_local_files_are_read_without_importing_fsspec(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for where in (tmp_path / "a.jsonl", f"file://{tmp_path}/a.jsonl"):
        found = subprocess.run(
            [sys.executable, "-c", LOCAL, str(where)], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == "[]"
