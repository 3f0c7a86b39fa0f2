"""Which files are read, how they are named, and what is refused."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardmill.errors import OptionError, SourceError
from shardmill.sources import (
    ConcatSource,
    HubSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
    iter_jsonl_rows,
    open_chats,
    open_source,
)
from shardmill.storage.files import FULL_HASH_BYTES, list_files
from shardmill.testing.sources import account, assert_resumes_exactly


def texts_of(source: object) -> list[str]:
    return account(source.batches()).texts  # type: ignore[attr-defined]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_read_in_the_order_of_relative_posix_paths(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"3", "a/z.md": b"1", "a0.TXT": b"2", "c.csv": b"no"})

    assert texts_of(TextSource(tmp_path)) == ["1", "2", "3"]
    assert [file.name for file in TextSource(tmp_path).files] == ["a/z.md", "a0.TXT", "b.txt"]


def test_what_a_folder_leaves_out_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {"a.txt": b"1", ".hidden/b.txt": b"2", "._a.txt": b"3", "c.csv": b"4"})
    with caplog.at_level(logging.INFO):
        assert texts_of(TextSource(tmp_path)) == ["1"]

    assert (
        "left out 1 files of other endings (1 .csv) and 1 hidden files; read them with"
        in caplog.text
    )


def test_links_to_folders_are_followed_and_cycles_end(tmp_path: Path) -> None:
    write(tmp_path, {"data/a.txt": b"1", "elsewhere/b.txt": b"2"})
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")

    assert texts_of(TextSource(tmp_path / "data")) == ["1", "2"]


def test_a_glob_and_a_list_name_files_relative_to_what_they_share(tmp_path: Path) -> None:
    write(tmp_path, {"x/1.jsonl": b'{"text":"1"}', "y/2.jsonl": b'{"text":"2"}', "y/n.txt": b"n"})
    source = JsonlSource(str(tmp_path / "*" / "*.jsonl"))
    assert [file.name for file in source.files] == ["x/1.jsonl", "y/2.jsonl"]
    listed = JsonlSource([tmp_path / "y/2.jsonl", tmp_path / "x/1.jsonl"])
    assert [file.name for file in listed.files] == ["y/2.jsonl", "x/1.jsonl"]
    assert texts_of(listed) == ["2", "1"]
    parts = JsonlSource([tmp_path / "y", str(tmp_path / "x" / "*.jsonl")])
    assert [file.name for file in parts.files] == ["y/2.jsonl", "x/1.jsonl"]


def test_a_file_listed_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1"})
    with pytest.raises(SourceError, match=r"more than once: a\.txt"):
        TextSource([tmp_path / "a.txt", tmp_path / "a.txt"])


def test_nothing_found_is_an_error_not_an_empty_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no file here ends in \.txt, \.md"):
        TextSource(tmp_path)
    with pytest.raises(SourceError, match="no such file or folder"):
        TextSource(tmp_path / "nope")
    with pytest.raises(SourceError, match="no file here"):
        TextSource(str(tmp_path / "*.txt"))


def test_a_description_depends_on_the_content_and_has_no_absolute_path(tmp_path: Path) -> None:
    one = write(tmp_path / "1" / "in", {"a.txt": b"same", "b.txt": b"size"})
    two = write(tmp_path / "2" / "in", {"a.txt": b"same", "b.txt": b"size"})
    other = write(tmp_path / "3" / "in", {"a.txt": b"same", "b.txt": b"siZe"})

    assert TextSource(one).describe() == TextSource(two).describe()
    assert TextSource(one).describe() != TextSource(other).describe()
    assert TextSource(one).describe() == {
        "kind": "text",
        "name": "in",
        "split": None,
        "files": [
            {
                "file": "a.txt",
                "bytes": 4,
                "sha256": "0967115f2813a3541eaef77de9d9d5773f1c0c04314b0bbfe4ff3b3b1c55b5d5",
            },
            {
                "file": "b.txt",
                "bytes": 4,
                "sha256": "ccdcbe846f3da4eb044fbdf64bf6b57902388ab72fb0c852ba72280f8d478b40",
            },
        ],
    }


def test_large_input_is_recognised_by_the_ends_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"

    def described(tail: bytes) -> object:
        with path.open("wb") as stream:
            stream.truncate(FULL_HASH_BYTES)  # sparse
            stream.seek(-len(tail), 2)
            stream.write(tail)
        return TextSource(path).describe()["files"]

    first = described(b"end one")
    assert list(first[0]) == ["file", "bytes", "sha256_of_ends"]  # type: ignore[index]
    assert first != described(b"end two")
    assert first == described(b"end one")


@pytest.mark.parametrize("change", [b"longer than before", b""])
def test_a_file_that_changes_under_the_reader_is_refused(tmp_path: Path, change: bytes) -> None:
    write(tmp_path, {"a.txt": b"before", "b.txt": b"before"})
    source = TextSource(tmp_path)
    (tmp_path / "b.txt").write_bytes(change)

    with pytest.raises(SourceError, match="must not change while it is read"):
        texts_of(source)


def test_a_cursor_of_another_source_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"text":"1"}\n', "b.txt": b"x"})
    source = JsonlSource(tmp_path / "a.jsonl")
    position = {"bytes": 13, "lines": 1}
    assert texts_of(source) == ["1"]
    for cursor, words in [
        ({"file": "z.jsonl", "position": position}, "not among its 1 files"),
        ({"documents": 3}, "wanted exactly the keys"),
        ({"file": "a.jsonl", "position": {"bytes": -1, "lines": 0}}, "must be a count"),
        ({"file": "a.jsonl", "position": {"bytes": 99, "lines": 1}}, "only 13"),
        ({"file": "a.jsonl", "position": {"bytes": True, "lines": 1}}, "must be a count"),
    ]:
        with pytest.raises(SourceError, match=words):
            list(source.batches(cursor))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_truncated_compressed_data_is_an_error(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b'{"text": "document %d %d"}\n' % (n, n * 7919) for n in range(3000))
    pack = gzip.compress if suffix == ".jsonl.gz" else zstandard.compress
    whole = pack(lines)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(whole)
    assert len(texts_of(JsonlSource(path))) == 3000
    for data in (whole[: len(whole) // 2], whole[:-1], whole + whole[:20]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match="damaged or truncated"):
            texts_of(JsonlSource(path))


def test_gzip_members_may_be_followed_by_zeros(tmp_path: Path) -> None:
    """As tape tools leave them. Anything else after a member is damage."""
    members = [gzip.compress(b'{"text": "%d"}\n' % number) for number in range(3)]
    path = tmp_path / "x.jsonl.gz"
    for zeros in (b"", b"\0", b"\0" * 10_000):
        path.write_bytes(b"".join(members) + zeros)
        assert texts_of(JsonlSource(path)) == ["0", "1", "2"]
        path.write_bytes(b"".join(members) + zeros + b"x")
        with pytest.raises(SourceError, match="damaged or truncated"):
            texts_of(JsonlSource(path))


def test_a_zst_window_too_large_for_memory_is_not_called_damage(tmp_path: Path) -> None:
    long = zstandard.ZstdCompressionParameters(window_log=29, enable_ldm=True)
    pack = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(pack.compress(b'{"text": "a"}') + pack.flush())
    with pytest.raises(SourceError, match="compress it again without --long"):
        texts_of(JsonlSource(tmp_path / "x.jsonl.zst"))


def test_open_source_knows_the_kinds_by_their_endings(tmp_path: Path) -> None:
    write(tmp_path, {"t/a.md": b"1", "j/a.jsonl": b'{"text":"2"}', "x/a.raw": b"3\n4"})
    assert isinstance(open_source(str(tmp_path / "t")), TextSource)
    assert isinstance(open_source(str(tmp_path / "j/a.jsonl")), JsonlSource)
    assert isinstance(open_source("hub:owner/name:config"), HubSource)
    assert isinstance(open_source("hf://datasets/owner/name@abc"), HubSource)
    joined = open_source([tmp_path / "t", tmp_path / "j"])
    assert isinstance(joined, ConcatSource)
    assert texts_of(joined) == ["1", "2"]
    raw = open_source(str(tmp_path / "x/a.raw"), kind="text", split="line")
    assert texts_of(raw) == ["3", "4"]


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            "mixed",
            {},
            r"several kinds .*.jsonl: 1 .jsonl; text: 1 .txt.*ext='.jsonl', or a",
        ),
        (
            "mixed",
            {"ext": ".md,.c"},
            r"no file here ends in .md, .c; found 1 .jsonl, 1 .raw, 1 .txt",
        ),
        ("mixed/c.raw", {}, r"ends in none of \.jsonl, .*\.txt, \.md and \d+ more"),
        ("mixed/a.jsonl", {"kind": "xml"}, "wanted one of jsonl, json, csv, tsv, parquet"),
        ("mixed/a.jsonl", {"split": "line"}, "options here: field, on_bad"),
        ("mixed/a.jsonl", {"on_bad": "hope"}, "wanted 'error' or 'skip'"),
        ("mixed/b.txt", {"split": "(?=word)"}, "cannot split on .*RE2"),
        ("mixed/b.txt", {"split": "(word"}, "cannot split on .*unterminated"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_what_to_do(
    tmp_path: Path, spec: str, options: dict[str, str], words: str
) -> None:
    write(tmp_path / "mixed", {"a.jsonl": b'{"text":"1"}', "b.txt": b"2", "c.raw": b"3"})
    with pytest.raises((SourceError, OptionError), match=words):
        open_source(str(tmp_path / spec), **options)


@pytest.mark.parametrize("spec", ["hub:name", "hub:", "hub:a/b/c", "hf://x"])
def test_hub_names_need_an_owner_and_a_name(spec: str) -> None:
    with pytest.raises(SourceError, match="wanted hub:owner/name"):
        open_source(spec)


def test_joined_sources_resume_in_the_right_part(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1\n2\n3", "b.txt": b"4\n5"})
    make = lambda: ConcatSource(  # noqa: E731
        [
            TextSource(tmp_path / "a.txt", split="line"),
            MemorySource([]),
            TextSource(tmp_path / "b.txt", split="line"),
        ]
    )
    assert assert_resumes_exactly(make).texts == ["1", "2", "3", "4", "5"]
    assert make().size_hint() is None
    with pytest.raises(SourceError, match="there are 3 parts"):
        make().batches({"part": 3, "cursor": {}})


def test_rows_come_whole_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"a": [1, {"b": "\\ud800 x"}]}\n\n{"a": NaN, "c": null}\n')
    first, second = iter_jsonl_rows(path)
    assert first == {"a": [1, {"b": "\ufffd x"}]}
    assert list(second) == ["a", "c"]
    path.write_bytes(b'{"a": 1}\n\n[2]\n')
    with pytest.raises(SourceError, match=r"line 3: a list, but a row is an object; found '\[2\]'"):
        list(iter_jsonl_rows(path))


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(SourceError, match=r"a\.parquet: not a readable Parquet file"):
        texts_of(ParquetSource(tmp_path / "a.parquet"))


def test_names_are_sorted_by_their_bytes_not_by_folders(tmp_path: Path) -> None:
    write(tmp_path, {"a/b.txt": b"", "a.txt": b"", "a-b.txt": b"", "A.txt": b""})
    files = list_files(tmp_path, suffixes=(".txt",))
    assert [file.name for file in files] == ["A.txt", "a-b.txt", "a.txt", "a/b.txt"]


@pytest.mark.parametrize("neighbour", [b"", b'{"text": "x", "text": "y"}\n', b"broken\n"])
def test_a_row_nested_too_deep_for_python_is_read_the_same_beside_any_other_row(
    tmp_path: Path, neighbour: bytes
) -> None:
    deep = b'{"text": "kept", "other": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n"
    (tmp_path / "a.jsonl").write_bytes(neighbour + deep)
    (batch,) = JsonlSource(tmp_path / "a.jsonl", field="text", on_bad="skip").batches()
    assert batch.texts.to_pylist()[-1] == "kept"
    assert [drop.reason for drop in batch.drops] == (["bad_json"] if b"broken" in neighbour else [])


_PACKERS = {
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": zstandard.compress,
}


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("opened", [JsonlSource, open_chats, iter_jsonl_rows])
def test_a_compressed_file_without_bytes_is_damaged_not_empty(
    tmp_path: Path, suffix: str, opened: Callable[..., Any]
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"")

    def read() -> int:
        source = opened(path)
        return sum(1 for _ in (source if isinstance(source, Iterator) else source.batches()))

    with pytest.raises(SourceError, match=r"0 bytes.*fetch or write the file again") as refused:
        read()
    assert str(path) in str(refused.value)
    path.write_bytes(_PACKERS[suffix](b""))
    assert read() == 0


def test_a_plain_file_without_bytes_has_no_documents(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert list(JsonlSource(tmp_path).batches()) == []
    assert list(open_chats(tmp_path / "a.jsonl").batches()) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".parquet"])
def test_a_file_cut_at_any_byte_is_damaged_not_short(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": f"row {n} with {n * 7919} in it"} for n in range(40)]
    path = tmp_path / ("a.parquet" if suffix == ".parquet" else f"a.jsonl{suffix}")
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(_PACKERS[f".jsonl{suffix}"](lines))
    whole = path.read_bytes()
    # The footer of a Parquet file, its last bytes, is what a truncated one lacks.
    step = 1 if suffix != ".parquet" else 9
    for stop in (*range(0, len(whole), step), *range(len(whole) - 9, len(whole))):
        path.write_bytes(whole[:stop])
        with pytest.raises(SourceError, match=re.escape(str(path))):
            for _ in open_source(path).batches():
                pass
