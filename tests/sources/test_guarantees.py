"""Every source, on hard input: the expected documents, from the start and from any cursor."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.protocols import Source
from shardmill.sources import BatchLimits, JsonlSource, MemorySource, ParquetSource, TextSource
from shardmill.testing.sources import (
    Account,
    RowCase,
    assert_ledger_balances,
    assert_resumes_exactly,
    cleaned,
    expected,
    json_lines,
    nasty_texts,
    parquet_bytes,
    raw_bytes,
)

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".jsonl.zst": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
}


def check(make_source: Callable[[], Source], wanted: Account) -> None:
    assert assert_ledger_balances(make_source()) == wanted
    assert assert_resumes_exactly(make_source) == wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarantees")


@settings(deadline=None, max_examples=100)
@given(data=st.data(), limits=LIMITS, suffix=st.sampled_from(sorted(PACKERS)))
def test_every_json_line_is_a_document_or_a_drop(
    folder: Path, data: st.DataObject, limits: BatchLimits, suffix: str
) -> None:
    skip_bad = data.draw(st.booleans())
    cases = data.draw(st.lists(json_lines(with_bad=skip_bad), max_size=12))
    blanks = data.draw(st.lists(st.sampled_from([b"", b"\n", b" \r\n"]), min_size=13, max_size=13))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    body = (
        b"".join(blank + case.raw + end for blank, case in zip(blanks, cases, strict=False))
        + blanks[12]
    )
    if data.draw(st.booleans()):
        body = body.removesuffix(end)
    if data.draw(st.booleans()):
        body = b"\xef\xbb\xbf" + body
    path = folder / f"rows{suffix}"
    path.write_bytes(PACKERS[suffix](body))
    lines, line = [], 0
    for blank, _ in zip(blanks, cases, strict=False):
        line += 1 + bool(blank)
        lines.append(line)
    wanted = expected(cases, lambda number: f"{path.name}:{lines[number]}")

    on_bad = "skip" if skip_bad else "error"
    check(lambda: JsonlSource(path, field="text", on_bad=on_bad, limits=limits), wanted)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    cases=st.lists(raw_bytes() | st.just(RowCase(raw=b"", document=None, reason="no_text"))),
    limits=LIMITS,
    kind=st.sampled_from(["binary", "large_binary", "dictionary", "string", "binary_view"]),
)
def test_every_parquet_row_is_a_document_or_a_drop(
    folder: Path, cases: list[RowCase], limits: BatchLimits, kind: str
) -> None:
    values = [None if case.reason else case.raw for case in cases]
    column = pa.array(values, pa.binary())
    if kind == "dictionary":
        column = column.dictionary_encode()
    elif kind == "string":  # strings that are no UTF-8: Parquet files in the wild hold them
        column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    elif kind != "binary":
        column = column.cast(getattr(pa, kind)())
    path = folder / "part.parquet"
    path.write_bytes(parquet_bytes(column))
    wanted = expected(cases, lambda number: f"part.parquet:row {number}")

    check(lambda: ParquetSource(path, limits=limits), wanted)


@settings(deadline=None, max_examples=40)
@given(cases=st.lists(raw_bytes(), min_size=1, max_size=8), limits=LIMITS)
def test_a_folder_of_text_files_gives_one_document_per_file(
    tmp_path_factory: pytest.TempPathFactory, cases: list[RowCase], limits: BatchLimits
) -> None:
    root = tmp_path_factory.mktemp("texts")
    for number, case in enumerate(cases):
        (root / f"{number}.txt").write_bytes(case.raw)

    check(lambda: TextSource(root, limits=limits), expected(cases, str))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    lines=st.lists(raw_bytes().filter(lambda case: b"\n" not in case.raw), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n"]),
    is_ended=st.booleans(),
    limits=LIMITS,
)
def test_a_line_that_is_not_empty_is_a_document(
    folder: Path, lines: list[RowCase], end: bytes, is_ended: bool, limits: BatchLimits
) -> None:
    # A line's own trailing CR would be part of its end, and the first line's BOM is the file's.
    lines = [line for line in lines if not line.raw.endswith(b"\r")]
    body = b"\xef\xbb\xbf" + end.join([line.raw for line in lines]) + (end if is_ended else b"")
    path = folder / "lines.txt"
    path.write_bytes(body)
    wanted = expected([line for line in lines if line.raw], str)

    check(lambda: TextSource(path, split="line", limits=limits), wanted)


@settings(deadline=None, max_examples=80)
@given(texts=st.lists(nasty_texts() | st.just("half \ud83d pair")), limits=LIMITS)
def test_texts_in_memory_are_cleaned_and_resumed(texts: list[str], limits: BatchLimits) -> None:
    cases = [
        RowCase(
            raw=b"",
            document=cleaned(text.replace("\ud83d", "\ufffd")),
            is_repaired="\ud83d" in text,
        )
        for text in texts
    ]

    check(lambda: MemorySource(texts, limits=limits), expected(cases, str))
    check(lambda: MemorySource(lambda: iter(texts), limits=limits), expected(cases, str))
