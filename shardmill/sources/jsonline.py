"""Decode lines of JSON: one string out of each object, or the exact line that is bad.

In: a block of whole lines and a field name.  Out: the text of each row, and the rows that are bad.
Promise: each line is judged alone, so how lines fall into blocks never changes the outcome. Blank
lines are not rows. A field that is null or missing gives None. Where the field itself holds
invalid UTF-8 or half a surrogate pair the text is repaired and marked. NaN and Infinity, which
Python writes, are read.
Not here: files, and what to do about a bad row.

Speed: a block is decoded at once when each of its lines begins with "{" and ends with "}": then no
value can cross a line's end, and as many values as lines means one on each. Any other block is read
line by line: what any of the three decoders takes is taken, as it would have been by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from shardmill.errors import SourceError
from shardmill.sources.clean import replace_surrogates
from shardmill.sources.lines import LineBlock

_OPEN, _CLOSE, _NEWLINE, _RETURN = b"{}\n\r"
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_JSON_NAMES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
_JSON_NAMES |= {str: "a string", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A line that is no object, or whose field is no string."""

    line: int  # from 0
    reason: str  # "bad_json" or "not_a_string"
    problem: str  # for the reader of an error
    snippet: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a block, in order; `texts` and `lines` go together."""

    texts: list[str | None] | pa.LargeStringArray = field(default_factory=list)
    lines: list[int] | range = field(default_factory=list)  # from 0
    repaired: list[int] = field(default_factory=list)  # positions in `texts`
    bad: list[BadRow] = field(default_factory=list)  # rows not among `texts`


class BadJsonError(Exception):
    """Inside this room only: why a line cannot be read."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class TextDecoder:
    """Takes the string `name` out of each row."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._schema = pa.schema([(name, pa.large_string())])
        except UnicodeEncodeError as error:
            raise SourceError(f"field {name!r} is not valid Unicode; name another") from error
        self._decoder = _row_decoder(name)

    def decode(self, block: LineBlock) -> Rows:
        """The rows of a block, quickly when it can be."""
        if _is_regular(block):
            texts = self._decode_quickly(block.data)
            if texts is not None and len(texts) == len(block.stops):
                return Rows(texts, range(block.first_line, block.first_line + len(texts)))
        return self._decode_slowly(block)

    def _decode_quickly(self, data: bytes) -> pa.LargeStringArray | None:
        """All rows by Arrow, without Python strings; None when a row is out of the ordinary.

        Bytes that are no UTF-8 come through: cleaning finds them.
        """
        options = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pj.read_json(pa.BufferReader(data), options, self._parse_options())
        except pa.ArrowInvalid:
            return None
        return table.column(0).combine_chunks()

    def _parse_options(self) -> pj.ParseOptions:
        return pj.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore")

    def _decode_slowly(self, block: LineBlock) -> Rows:
        texts: list[str | None] = []
        lines: list[int] = []
        repaired: list[int] = []
        bad_rows: list[BadRow] = []
        for number, line in filled_lines(block):
            try:
                text, is_repaired = self._decode_line(line)
            except BadJsonError as bad:
                bad_rows.append(bad_row(number, line, bad))
                continue
            if is_repaired:
                repaired.append(len(texts))
            texts.append(text)
            lines.append(number)
        return Rows(texts, lines, repaired, bad_rows)

    def _decode_line(self, line: bytes) -> tuple[str | None, bool]:
        try:
            if self._decoder is not None:
                found: str | None = self._decoder.decode(line).text
                return found, False
        except _REFUSALS:
            pass
        try:
            row = read_object(line)
        except BadJsonError as bad:
            return self._decode_leniently(line, bad)
        text = self._checked(row.get(self._name))
        if text is None:
            return None, False
        # Bytes that are no UTF-8 show up as surrogates here, and halves of pairs are some.
        marked = str(read_object(line, errors="surrogateescape")[self._name])
        repaired = replace_surrogates(text)
        return repaired, marked != replace_surrogates(marked)

    def _decode_leniently(self, line: bytes, bad: BadJsonError) -> tuple[str | None, bool]:
        """A line that Arrow alone takes (deep nesting, Inf): the quick way would have taken it."""
        texts = self._decode_quickly(line) if line.startswith(b"{") else None
        if texts is None or len(texts) != 1:
            raise bad
        data = texts.cast(pa.large_binary())[0].as_py()
        if data is None:
            return None, False
        text = data.decode("utf-8", "replace")
        return text, text.encode() != data

    def _checked(self, value: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        found = _JSON_NAMES[type(value)]
        raise BadJsonError("not_a_string", f"the field {self._name!r} holds {found}, no string")


def _row_decoder(name: str) -> msgspec.json.Decoder[Any] | None:
    """None for the few names that msgspec does not take: with quotes, backslashes, controls."""
    member = ("text", str | None, msgspec.field(default=None, name=name))
    try:
        row: Any = msgspec.defstruct("Row", [member], gc=False)
        return msgspec.json.Decoder(row)
    except ValueError:
        return None


def read_object(line: bytes, *, errors: str = "replace") -> dict[str, object]:
    """One line as a dict, by Python's own decoder; `errors` is about bytes that are no UTF-8."""
    try:
        value = json.loads(line.decode("utf-8", errors))
    except ValueError as error:
        raise BadJsonError("bad_json", f"broken JSON: {error}") from error
    except RecursionError as error:
        raise BadJsonError("bad_json", f"broken JSON: {error}") from error
    if not isinstance(value, dict):
        found = _JSON_NAMES[type(value)]
        raise BadJsonError("bad_json", f"{found}, but a row is an object")
    return value


def filled_lines(block: LineBlock) -> Iterator[tuple[int, bytes]]:
    """Number (from 0) and bytes of each line that is not blank."""
    for number, line in enumerate(block.lines(), block.first_line):
        if stripped := line.strip(b" \t\r\n"):
            yield number, stripped


def bad_row(number: int, line: bytes, bad: BadJsonError) -> BadRow:
    snippet = line[:80].decode("utf-8", "replace") + ("..." if len(line) > 80 else "")
    return BadRow(line=number, reason=bad.reason, problem=str(bad), snippet=snippet)


def _is_regular(block: LineBlock) -> bool:
    """Does each line begin with "{" and end with "}" (before LF, CR LF or the end of the file)?"""
    data = np.frombuffer(block.data, np.uint8)
    stops = block.stops
    if len(data) == 0 or stops[0] < 4:
        return False
    starts = np.concatenate(([0], stops[:-1]))
    if not (data[starts] == _OPEN).all():
        return False
    ends = stops - 1
    ends = ends - (data[ends] == _NEWLINE)
    ends = ends - (data[ends] == _RETURN)
    return bool((data[ends] == _CLOSE).all())
