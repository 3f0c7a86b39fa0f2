"""A block of JSON lines that is decoded at once gives what its lines give one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.sources.batches import string_batch
from shardmill.sources.formats import jsonl
from shardmill.testing.sources import account

KEYS = [b'"text"', b'"te\\u0078t"', b'"tex"', b'"Text"', b'"text "', b'"\xff"', b'"\\ud800"', b'""']
STRINGS = [
    b'"plain"',
    b'""',
    b'"caf\xc3\xa9 \xe7\xb4\xa0\xe6\x97\xa9"',
    b'"\xf0\x9f\x98\x80\\ud83d\\ude00"',
    b'"a\\nb\\\\\\"\\/\\t\\u00e9"',
    b'"a\\r\\nb"',
    b'"lone \\r"',
    b'"\xef\xbb\xbfmarked\xef\xbb\xbf"',
    b'"\\ufeff"',
    b'"\\u0000"',
    b'"\\"text\\": \\"inside\\""',
    b'"}{"',
    b'"\\ud800"',
    b'"\\udc00 \\ud83dx"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"cut \xe7\xb4"',
    b'"a\tb"',
    b'"\x00"',
    b'"\\q"',
    b'"\\u12"',
    b'"open',
]
VALUES = [
    *STRINGS,
    b"null",
    b"true",
    b"tru",
    b"1",
    b"01",
    b"-",
    b"1.5e3",
    b"1e999",
    b"9" * 40,
    b"NaN",
    b"-NaN",
    b"Inf",
    b"-Infinity",
    b'{"text": "inner"}',
    b'["text", {"text": "list"}]',
    b"[1,]",
    b"[" * 300 + b"]" * 300,
    b"",
]
WHITE = [b"", b" ", b"\t", b"\r", b"  "]


def members() -> st.SearchStrategy[bytes]:
    text = st.tuples(st.just(KEYS[0]), st.sampled_from(STRINGS))
    other = st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES))
    pairs = st.lists(st.one_of(text, text, other), min_size=1, max_size=3)
    join = st.sampled_from([b", ", b",", b",", b" , ", b",,", b" "])
    colon = st.sampled_from([b":", b": ", b" :", b"\t: ", b"="])
    return st.builds(
        lambda pairs, join, colon: join.join(key + colon + value for key, value in pairs),
        pairs,
        join,
        colon,
    )


def lines() -> st.SearchStrategy[bytes]:
    usual = st.builds(lambda text: b'{"text": ' + text + b"}\n", st.sampled_from(STRINGS[:11]))
    odd = st.builds(
        lambda before, open, inside, close, end: before + open + inside + close + end,
        st.sampled_from([b"", b"", b"", b" ", b"\xef\xbb\xbf", b"\n", b"\x0b"]),
        st.sampled_from([b"{", b"{", b"{", b"{ ", b"[", b""]),
        members(),
        st.sampled_from([b"}", b"}", b"}", b"} ", b"}}", b"} {}", b'} {"text": "two"}', b""]),
        st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\n \r\n", b"\x00\n", b""]),
    )
    return st.one_of(usual, usual, odd)


def outcome(path: Path, on_bad: Any, size: int) -> Any:
    """Everything that reading a file shows, or its error."""
    limits = BatchLimits(num_bytes=size)
    source = JsonlSource(path, field="text", on_bad=on_bad, limits=limits)
    try:
        whole = account(source.batches())
        pieces = [account(piece.batches()) for piece in source.cut(64)]
        ends = [batch.cursor for batch in source.batches()]
    except SourceError as error:
        return str(error)
    return whole, pieces, ends


@pytest.mark.slow
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(lines(), max_size=6),
    on_bad=st.sampled_from(["error", "skip"]),
    size=st.sampled_from([1, 100, 2**20]),
)
@example(rows=[b'{"text": "a"} {"text": "b"}\n', b'{"text": "c"}\n'], on_bad="skip", size=2**20)
@example(rows=[b'{"text":\n', b'"a"} {"text": "b"}\n'], on_bad="skip", size=2**20)
@example(rows=[b'{"text": {}\n', b'{"text": "c"}}\n'], on_bad="skip", size=2**20)
@example(rows=[b'{"text": "a", "text": null}\n'], on_bad="skip", size=2**20)
@example(rows=[b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b', "text": "a"}\n'], on_bad="skip", size=99)
def test_a_block_is_read_as_its_lines_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[bytes], on_bad: Any, size: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(rows))
    at_once = outcome(path, on_bad, size)
    with monkeypatch.context() as patched:
        patched.setattr(jsonl.JsonlFormat, "_batch", jsonl.JsonlFormat._batch_by_lines)
        assert at_once == outcome(path, on_bad, size)
    with monkeypatch.context() as patched:  # as Arrow reads it
        patched.setattr(jsonl.TextDecoder, "decode_strings", lambda *_: None)
        assert at_once == outcome(path, on_bad, size)


def test_usual_rows_come_as_strings_and_huge_or_odd_ones_need_not(tmp_path: Path) -> None:
    usual = '{"id": 1, "text": "caf\u00e9\\r\\n"}\n{"id": 2, "text": "\ufeff"}\n{"text": "b"}\n'
    (tmp_path / "a.jsonl").write_text(usual)
    (batch,) = JsonlSource(tmp_path / "a.jsonl").batches()
    assert batch.strings == batch.texts.to_pylist() == ["caf\u00e9\n", "b"]
    assert batch.counts == {"empty": 1, "invalid_utf8": 0}
    (tmp_path / "a.jsonl").write_text('{"text": "' + "a" * 2**23 + '"}\n')
    (batch,) = JsonlSource(tmp_path / "a.jsonl").batches()
    assert (batch.strings, batch.texts.to_pylist()) == (None, ["a" * 2**23])


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    times=st.sampled_from([1, 2, 13, 100, 4000]),
)
@example(text="\u00e9" * 15 + "a", times=1)  # 31, 32 and 33 bytes: where msgpack's headers grow
@example(text="\u00e9" * 16, times=1)
@example(text="\u00e9" * 16 + "a", times=1)
@example(text="\u00e9" * 127 + "a", times=1)
@example(text="\u00e9" * 128, times=1)
@example(text="\u00e9" * 32767 + "a", times=1)
@example(text="\u00e9" * 32768, times=1)
def test_strings_become_arrow_byte_for_byte(text: str, times: int) -> None:
    strings = ["a" + text * times, "\u7d20" + text * times + "z"]
    batch = string_batch(strings, {})
    assert batch.texts.to_pylist() == batch.strings
    batch.texts.validate(full=True)
