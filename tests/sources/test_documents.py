"""What becomes of single documents and rows, in literal examples; and how batches are bounded."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.records import Drop
from shardmill.sources import BatchLimits, JsonlSource, MemorySource, ParquetSource, TextSource
from shardmill.sources.batches import byte_lengths, cut, make_batch, string_batch, to_binary
from shardmill.testing.sources import account, parquet_bytes


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"a\rb\n\r", "a\rb\n\r"),
        (b"\xef\xbb\xbfa\xef\xbb\xbf", "a\ufeff"),
        (b"\xef\xbb\xbf\xef\xbb\xbfa", "\ufeffa"),
        (b" \n", " \n"),
        (b"\x00", "\x00"),
        (b"caf\xc3\xa9 \xe4\xb8\xad", "caf\u00e9 \u4e2d"),
    ],
)
def test_cleaning_changes_line_ends_and_the_bom_and_nothing_else(raw: bytes, text: str) -> None:
    cleaned = make_batch(pa.array([raw], pa.binary()), {})
    assert cleaned.texts.to_pylist() == [text]
    assert cleaned.counts == {"empty": 0, "invalid_utf8": 0}


def test_invalid_bytes_are_replaced_and_their_documents_counted() -> None:
    raw = pa.array([b"good", b"bad \xff\xff", b"", b"\xef\xbb\xbf", b"cut \xe4\xb8"], pa.binary())
    cleaned = make_batch(raw, {})
    assert cleaned.texts.to_pylist() == ["good", "bad \ufffd\ufffd", "cut \ufffd"]
    assert cleaned.counts == {"empty": 2, "invalid_utf8": 2}


def test_a_carriage_return_and_a_newline_of_two_documents_are_not_joined() -> None:
    cleaned = make_batch(pa.array(["a\r", "\nb", "\r\n"]), {})
    assert cleaned.texts.to_pylist() == ["a\r", "\nb", "\n"]


def test_cleaning_a_slice_does_not_look_outside_it() -> None:
    whole = pa.array([b"\xff", b"a\r\nb", b"\xff"], pa.binary())
    cleaned = make_batch(whole.slice(1, 1), {})
    assert cleaned.texts.to_pylist() == ["a\nb"]
    assert cleaned.counts == {"empty": 0, "invalid_utf8": 0}


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(0, 30)), size=st.integers(1, 40), number=st.integers(1, 5))
def test_cuts_cover_everything_once_within_the_limits(
    lengths: list[int], size: int, number: int
) -> None:
    limits = BatchLimits(num_bytes=size, num_documents=number)
    pieces = cut(pa.array(lengths, pa.int64()).to_numpy(), limits)
    assert [at for start, stop in pieces for at in range(start, stop)] == list(range(len(lengths)))
    for start, stop in pieces:
        assert 1 <= stop - start <= number
        assert sum(lengths[start:stop]) <= size or stop - start == 1
    for start, stop in pieces[:-1]:  # no piece could have been longer
        assert sum(lengths[start : stop + 1]) > size or stop - start == number


def test_batches_are_about_four_mebibytes_and_a_huge_document_is_alone(tmp_path: Path) -> None:
    huge = "h" * (5 * 2**20)
    rows = ["s" * 2**20] * 6 + [huge] + ["t"] * 9000
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    parquet = tmp_path / "rows.parquet"
    parquet.write_bytes(parquet_bytes(pa.array(rows), row_group_size=10_000))
    for source in (JsonlSource(path), ParquetSource(parquet), MemorySource(rows)):
        batches = list(source.batches())
        assert account(batches).texts == rows
        for batch in batches:
            assert len(batch.texts) <= 8192
            assert byte_lengths(batch.texts).sum() <= 4 * 2**20 or batch.texts.to_pylist() == [huge]
        assert len(batches) <= 8


@pytest.mark.slow
def test_a_large_row_group_is_read_in_bounded_memory(tmp_path: Path) -> None:
    pages = [random.Random(number).randbytes(8192).hex() for number in range(4096)]  # 64 MiB
    path = tmp_path / "one_group.parquet"
    pq.write_table(pa.table({"text": pages}), path, row_group_size=4096, use_dictionary=False)
    before = pa.total_allocated_bytes()
    peak, texts = 0, 0
    for batch in ParquetSource(path).batches():
        peak = max(peak, pa.total_allocated_bytes() - before)
        texts += len(batch.texts)
    assert texts == 4096
    assert 4 * 2**20 < peak < 32 * 2**20  # 24 MiB, for 32 as for 256 MiB of text


def test_many_small_files_share_a_batch(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number:02}.jsonl").write_text(f'{{"text": "{number}"}}\n{{}}')
    (batch,) = JsonlSource(tmp_path).batches()
    assert batch.texts.to_pylist() == [str(number) for number in range(50)]
    assert len(batch.drops) == 50


def test_the_field_is_text_or_the_first_string_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1, "body": "b", "title": "t"}\n{"text": "x"}\n')
    with caplog.at_level(logging.INFO):
        source = JsonlSource(path)
        found = account(source.batches())
    assert found.texts == ["b"]
    assert found.drops == [Drop(id="a.jsonl:2", reason="no_text")]
    assert source.describe()["field"] == "body"
    assert "the documents are read from 'body'" in caplog.text
    path.write_bytes(b'{"a": "x", "text": null}\n{"text": "y"}')
    assert account(JsonlSource(path).batches()).texts == ["y"]
    path.write_bytes(b'{"n": 1, "tags": ["x"]}\n')
    with pytest.raises(SourceError, match=r"neither a field 'text' nor any .*'n', 'tags'"):
        list(JsonlSource(path).batches())


def test_the_field_of_a_parquet_file_follows_the_same_rule(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes(pa.array(["x", None, "y"]), name="body"))
    found = account(ParquetSource(path).batches())
    assert found.texts == ["x", "y"]
    assert found.drops == [Drop(id="a.parquet:row 1", reason="no_text")]
    with pytest.raises(SourceError, match="no field 'text'; found the fields 'number', 'body'"):
        list(ParquetSource(path, field="text").batches())
    with pytest.raises(SourceError, match="'number' holds int64, wanted strings"):
        list(ParquetSource(path, field="number").batches())


@pytest.mark.parametrize(
    ("line", "words", "reason"),
    [
        (b'{"text": "b"', "line 3: broken JSON", "bad_json"),
        (b'{"text": 5}', "line 3: the field 'text' holds a number", "not_a_string"),
        (b'"text"', "line 3: a string, but a row is an object", "bad_json"),
        (b'{"text": "b"} {"text": "c"}', "line 3: broken JSON", "bad_json"),
        (b"[" * 100_000, "line 3: broken JSON", "bad_json"),
    ],
)
def test_a_bad_line_is_named_or_skipped_on_request(
    tmp_path: Path, line: bytes, words: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "d"}')
    with pytest.raises(SourceError, match=f"rows.jsonl, {words}"):
        list(JsonlSource(path).batches())

    found = account(JsonlSource(path, on_bad="skip").batches())
    assert found.texts == ["a", "d"]
    assert found.drops == [Drop(id="rows.jsonl:3", reason=reason)]
    assert found.num_read == 3


def test_a_value_over_two_lines_is_never_joined(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"} {"text":\n"b"}\n{"text": "c"}\n')
    found = account(JsonlSource(path, field="text", on_bad="skip").batches())
    assert found.texts == ["c"]
    assert [drop.id for drop in found.drops] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_two_values_on_a_line_are_not_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"} {"text": "c"}\n{"text": "d"}\n')
    found = account(JsonlSource(path, on_bad="skip").batches())
    assert found.texts == ["a", "d"]
    assert found.drops == [Drop(id="rows.jsonl:2", reason="bad_json")]


def test_only_newlines_end_a_line_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\x0b\x0c\x1c\u2028\u0085\r\n\r\n\n two\rstill two\n\nthree".encode())
    found = account(TextSource(path, split="line").batches())
    assert found.texts == ["one\x0b\x0c\x1c\u2028\u0085", " two\rstill two", "three"]
    assert found.num_read == 3


def test_a_generator_is_read_once_and_never_taken_for_empty() -> None:
    source = MemorySource(text for text in ["a", "b"])
    assert account(source.batches()).texts == ["a", "b"]
    with pytest.raises(SourceError, match="can be read only once"):
        source.batches()
    with pytest.raises(SourceError, match="pass a list, or a function"):
        MemorySource(iter(["a"])).batches({"documents": 1})


def test_memory_refuses_what_is_not_text() -> None:
    with pytest.raises(SourceError, match=r"document 1 \(from 0\): found int 5, wanted str"):
        list(MemorySource(["a", 5]).batches())  # type: ignore[list-item]
    with pytest.raises(SourceError, match="found bytes"):
        list(MemorySource([b"a"]).batches())  # type: ignore[list-item]
    with pytest.raises(SourceError, match="is not a list of texts"):
        MemorySource("abc")
    with pytest.raises(SourceError, match="there are only 1"):
        MemorySource(["a"]).batches({"documents": 2})


@given(
    st.lists(
        st.lists(st.sampled_from(["\r", "\n", "\ufeff", "a", "\u00e9"]), max_size=5).map("".join),
        max_size=5,
    )
)
def test_arrays_are_cleaned_as_strings_are(texts: list[str]) -> None:
    array = pa.array(["\r", *texts, "\n"], pa.large_string()).slice(1, len(texts))
    cleaned, wanted = make_batch(array, {}), string_batch(texts, {})
    assert cleaned.texts.to_pylist() == wanted.texts.to_pylist()
    assert cleaned.counts == wanted.counts
    cleaned.texts.validate(full=True)


def test_the_footer_of_a_file_is_read_once_and_again_when_it_was_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    read = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda path: looks.append(path) or read(path))
    path = tmp_path / "a.parquet"
    for round, letters in enumerate(["abc", "abd", "abcde"], 1):
        table = pa.table({"text": [letter * 2000 for letter in letters]})
        pq.write_table(table, path, row_group_size=1, compression=None, use_dictionary=False)
        pieces = ParquetSource(path).cut(1)
        found = [text[0] for piece in pieces for text in account(piece.batches()).texts]
        assert (found, len(pieces)) == (list(letters), len(letters))
        assert looks == [path] * round


@pytest.mark.parametrize(
    "kind", ["string", "binary", "large_string", "large_binary", "string_view"]
)
@pytest.mark.parametrize("texts", [["a", "", None, "\u00e9"], [None, None], ["", ""]])
def test_a_column_of_any_text_type_is_the_same_documents(kind: str, texts: list[str]) -> None:
    whole = pa.array(texts, pa.string()).cast(getattr(pa, kind)())
    for start in range(len(whole) + 1):
        part = whole.slice(start)
        found = to_binary(part)
        assert found.equals(part.cast(pa.large_binary()))
        found.validate(full=True)
