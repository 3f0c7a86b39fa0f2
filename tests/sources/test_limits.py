"""Documents that memory does not hold are refused, unread, with their file and size."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
    limited,
    open_chats,
)
from shardmill.sources.formats import parquet
from tests.services import LoopbackS3

MIB = 2**20
TINY = BatchLimits(num_bytes=64, num_documents=5)
PACKED = {
    "a.txt": bytes,
    "a.txt.gz": gzip.compress,
    "a.txt.zst": zstandard.ZstdCompressor().compress,
}


def texts_of(source: Source) -> list[str]:
    return [text for batch in source.batches() for text in batch.texts.to_pylist()]


def outcome(source: Source) -> list[str] | str:
    """The texts, or the words of the refusal."""
    try:
        return texts_of(source)
    except SourceError as error:
        return str(error)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=12),
    most=st.integers(1, 300),
    name=st.sampled_from(sorted(PACKED)),
    ends=st.booleans(),
)
def test_a_line_is_given_or_refused_by_its_length(tmp_path_factory, lengths, most, name, ends):
    path = tmp_path_factory.mktemp("lines") / name
    lines = ["x" * length for length in lengths]
    path.write_bytes(PACKED[name]("\n".join([*lines, ""] if ends else lines).encode()))
    source = TextSource(path, split="line", limits=TINY)
    found = outcome(source.limited(most))
    allowed = most + TINY.num_bytes
    stored = [len(line) + 1 for line in lines]
    if lines and not ends:
        stored[-1] -= 1
    large = [number for number, length in enumerate(stored) if length > allowed]
    if not large:
        assert found == [line for line in lines if line] == texts_of(source)
        return
    places = [f"{name}, line {number + 1} (byte {sum(stored[:number]):,}): " for number in large]
    assert any(place in found for place in places)
    assert f"{allowed} can be read: cut it into several, allow more with memory" in found


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=10),
    most=st.integers(1, 40),
    piece=st.integers(20, 400),
)
def test_pieces_of_a_file_have_the_bound_of_their_source(tmp_path_factory, lengths, most, piece):
    path = tmp_path_factory.mktemp("pieces") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    source = JsonlSource(path, field="text", limits=TINY).limited(most)
    large = [
        n
        for n, line in enumerate(path.read_bytes().splitlines(keepends=True))
        if len(line) > most + TINY.num_bytes
    ]
    words = [str(found) for found in map(outcome, source.cut(piece)) if isinstance(found, str)]
    assert bool(words) == bool(large)
    if large:
        assert f"a.jsonl, line {large[0] + 1} (byte " in words[0]
    assert source.describe() == JsonlSource(path, limits=TINY).describe()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    pieces=st.lists(
        st.sampled_from(["a", "\x00", "\n", "\\", "\\u", '"', "\u00e9", "\U0001f600", "xyz"]),
        min_size=1,
        max_size=80,
    ),
    most=st.integers(1, 120),
    chunk=st.integers(1, 64),
    ascii_only=st.booleans(),
)
def test_a_line_of_json_is_bounded_by_the_text_it_can_hold(
    tmp_path_factory, pieces, most, chunk, ascii_only
):
    """However it is escaped and wherever it is cut: what fits is given, and the same lines are
    refused from a file as a whole and from its pieces."""
    path = tmp_path_factory.mktemp("escaped") / "a.jsonl"
    text = "".join(pieces)
    line = json.dumps({"text": text}, ensure_ascii=ascii_only) + "\n"
    path.write_text(f'{{"text": "first"}}\n{line}', encoding="utf-8")
    source = JsonlSource(
        path, field="text", limits=BatchLimits(num_bytes=8 * chunk, num_documents=5)
    ).limited(most)
    found = outcome(source)
    least = [
        len(re.sub(rb"\\(u[0-9a-f]{4}|.)", b"_", one))
        for one in path.read_bytes().splitlines(keepends=True)
    ]
    large = [number for number, size in enumerate(least, 1) if size > most + 8 * chunk]
    if large:
        assert any(f"a.jsonl, line {number} (byte " in found for number in large)
    else:
        assert found == ["first", text]
    pieces_found = [outcome(piece) for piece in source.cut(30)]
    refused = [one for one in pieces_found if isinstance(one, str)]
    assert bool(refused) == bool(large)


GROWTH = """
import resource, sys
from shardmill.errors import SourceError
from shardmill.sources import JsonlSource, open_chats
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
url = sys.argv[1]
sources = {
    "jsonl": JsonlSource(url, field="text"),
    "chats": open_chats(url, shape="messages", on_bad="skip"),
}
for name, source in sources.items():
    before = peak()
    try:
        for batch in source.limited(16 * 2**20).batches():
            pass
        print(name, peak() - before, "read")
    except SourceError as error:
        print(name, peak() - before, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "s3"])
def test_a_line_beyond_the_bound_is_refused_when_the_bound_is_reached(tmp_path, kind):
    """A line of 90 MiB where 16 MiB are allowed: memory grows by the bound, not by the line."""
    data = b'{"text": "small"}\n{"text": "' + b"x" * (90 * MIB) + b'"}\n'
    name = {"gz": "a.jsonl.gz", "zst": "a.jsonl.zst"}.get(kind, "a.jsonl")
    packed = {"gz": partial(gzip.compress, compresslevel=1), "zst": zstandard.compress}.get(
        kind, bytes
    )
    environment = dict(os.environ)
    with ExitStack() as stack:
        if kind == "s3":
            for package in ("s3fs", "moto", "flask_cors"):
                pytest.importorskip(package)
            server = stack.enter_context(LoopbackS3())
            server.make_bucket("data")
            fsspec.filesystem("s3", **server.options()).pipe_file("data/a.jsonl", data)
            where, environment = "s3://data/a.jsonl", server.environment()
        else:
            path = tmp_path / name
            path.write_bytes(packed(data))
            where = str(path)
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, where],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    assert done.returncode == 0, done.stderr
    for line, kind_read in zip(done.stdout.splitlines(), ("jsonl", "chats"), strict=True):
        source, grown, words = line.split(" ", 2)
        assert source == kind_read
        assert f"{where}, line 2 (byte 18): " in words
        assert int(grown) < 80


BOUNDED = """
import resource, sys
from shardmill.errors import SourceError
from shardmill.sources import JsonlSource, TextSource, open_chats
resource.setrlimit(resource.RLIMIT_DATA, (600 * 2**20, 600 * 2**20))
path = sys.argv[1]
sources = {
    "jsonl": lambda: JsonlSource(path, field="text"),
    "unnamed field": lambda: JsonlSource(path),
    "lines": lambda: TextSource(path, split="line"),
    "chats": lambda: open_chats(path),
}
for name, make in sources.items():
    try:
        source = make().limited(16 * 2**20)
        source.describe()
        for batch in source.batches():
            pass
        print(name, "read")
    except SourceError as error:
        print(name, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "gz", "zst"])
def test_a_line_of_three_gigabytes_is_refused_in_little_memory(tmp_path, kind):
    """The limit of the process would end a reader that took the line whole."""
    path = tmp_path / f"a.jsonl{'' if kind == 'sparse' else '.' + kind}"
    block = b"x" * (64 * MIB)
    if kind == "sparse":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif kind == "gz":
        path.write_bytes(gzip.compress(block, 1) * 48)
    else:
        path.write_bytes(zstandard.ZstdCompressor().compress(block) * 48)
        assert path.stat().st_size < 2**20
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert [line.split(f" {path}")[0] for line in words] == [
        *("jsonl", "unnamed field", "lines", "chats")
    ]
    for line in words:
        assert f"{path}, line 1 (byte 0): " in line
        assert "bytes and no end of the line; with the available memory" in line


def test_a_text_file_beyond_the_bound_is_refused_by_its_size(tmp_path):
    (tmp_path / "small.txt").write_text("small")
    with (tmp_path / "vast.txt").open("wb") as file:
        file.truncate(3 * 2**40)
    source = TextSource(tmp_path).limited(1000)
    with pytest.raises(SourceError, match=r"vast\.txt: a document of 3,298,534,883,328 bytes"):
        texts_of(source)


def test_a_row_group_beyond_the_bound_is_refused_by_its_footer(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 5000, "y" * 6000]}), path, use_dictionary=False)
    assert texts_of(ParquetSource(path).limited(6000)) == ["x" * 5000, "y" * 6000]
    with pytest.raises(SourceError, match=r"a\.parquet, row group 0: 11,\d+ bytes in 2 documents"):
        texts_of(ParquetSource(path).limited(5000))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_page_beyond_the_bound_is_refused_before_it_is_read(tmp_path, version, compression):
    """One large cell among many small ones: on average they are small."""
    path = tmp_path / "a.parquet"
    texts = [*(["small " * 10] * 1000), "large" * 100_000, *(["small " * 10] * 1000)]
    pq.write_table(
        pa.table({"text": texts}),
        path,
        use_dictionary=False,
        compression=compression,
        data_page_version=version,
        data_page_size=10_000,
    )
    with pytest.raises(SourceError, match=r"row group 0: a page of 5\d\d,\d+ bytes, which is read"):
        texts_of(ParquetSource(path, limits=TINY).limited(100_000))
    assert len(texts_of(ParquetSource(path).limited(150_000))) == len(texts)
    small = [text for text in texts if text.startswith("small")]
    pq.write_table(pa.table({"text": small}), path, use_dictionary=False, data_page_size=10_000)
    assert texts_of(ParquetSource(path, limits=TINY).limited(20_000)) == small


def test_a_bound_reaches_every_part_and_changes_no_identity(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 50)
    pq.write_table(pa.table({"text": ["b" * 50]}), tmp_path / "b.parquet")
    parts = [TextSource(tmp_path / "a.txt"), ParquetSource(tmp_path / "b.parquet")]
    for order in (parts, parts[::-1]):
        source = ConcatSource(order)
        bounded = limited(source, 20)
        assert (bounded.name, bounded.describe()) == (source.name, source.describe())
        with pytest.raises(SourceError, match="20 can be read"):
            texts_of(bounded)
    memory = MemorySource(["c" * 50])
    assert limited(memory, 20) is memory
    with pytest.raises(OptionError, match="every limit must be at least 1"):
        limited(parts[0], 0)


def test_a_conversation_beyond_the_bound_is_refused(tmp_path):
    path = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "x" * 5 * MIB}]}
    path.write_text("\n".join(json.dumps({"messages": []}) for _ in range(3)) + "\n")
    with Path(path).open("a") as file:
        file.write(json.dumps(chat) + "\n")
    source = open_chats(path, shape="messages")
    assert sum(batch.num_read for batch in source.batches()) == 4
    with pytest.raises(SourceError, match=r"chats\.jsonl, line 4 \(byte 51\): "):
        list(limited(source, 1000).batches())


def test_an_empty_row_group_is_within_any_bound(tmp_path):
    path = tmp_path / "empty.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": pa.array([], pa.string())}))
        writer.write_table(pa.table({"text": ["a"]}))
    assert texts_of(limited(ParquetSource(path), 1000)) == ["a"]


def test_no_field_of_a_page_header_hides_the_size_of_its_page() -> None:
    # Thrift's compact protocol: type 5 is a whole number (zigzag), 1 true, 3 a byte, 7 a double
    fields = [
        b"\x15\x00",
        b"\x15\x90\x4e",
        b"\x15\x06",
        b"\x11",
        b"\x13\x09",
        b"\x17" + b"\x01" * 8,
    ]
    page = b"".join(fields) + b"\x00" + b"abc"
    assert list(parquet._page_sizes(io.BytesIO(page * 2), 0, 2 * len(page))) == [5000, 5000]
