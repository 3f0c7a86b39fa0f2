"""JSON lines as documents: one object per line, one string of it the text.

In: `.jsonl` files, plain, `.gz` or `.zst`.  Out: documents, and a drop for each row without text.
Promise: a row whose field is null or missing is dropped as "no_text". Broken JSON or a field that
is no string is an error naming file, line and snippet, or with on_bad="skip" a drop ("bad_json",
"not_a_string"). Blank lines are not rows. A drop's id is "name.jsonl:17", the line from 1; a range
of a file gives the file's name and the line in the range. An error names the line of the file.
Not here: chats; they are read as rows (`rows`).

Decode lines of JSON: one string out of each object, or the exact line that is bad.

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
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, name_of
from shardmill.sources.cleaning import choose_field, clean, replace_surrogates, strings_to_arrow
from shardmill.sources.file_source import FileSource
from shardmill.sources.formats.lines import LineBlock, LinesOfFiles, line_blocks
from shardmill.storage.files import InputFile, Where, list_files

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
class JsonRows:
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

    def decode(self, block: LineBlock) -> JsonRows:
        """The rows of a block, quickly when it can be."""
        if _is_regular(block):
            texts = self._decode_quickly(block.data)
            if texts is not None and len(texts) == len(block.stops):
                return JsonRows(texts, range(block.first_line, block.first_line + len(texts)))
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

    def _decode_slowly(self, block: LineBlock) -> JsonRows:
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
        return JsonRows(texts, lines, repaired, bad_rows)

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


JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

_LOOK_BYTES = 2**16  # the first row is enough to know the fields

OnBad: TypeAlias = Literal["error", "skip"]


class JsonlSource(FileSource):
    """JSON lines files. `field=None`: "text", else the first string field of the first row."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        on_bad: OnBad = "error",
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if on_bad not in ("error", "skip"):
            raise OptionError(f"on_bad={on_bad!r}: wanted 'error' or 'skip'")
        files = list_files(where, suffixes=JSONL_SUFFIXES)
        reader = _JsonlReader(files, field, on_bad, limits)
        super().__init__(files, reader, name=name or name_of(where), limits=limits)


class _JsonlReader(LinesOfFiles):
    """Lines of files, whole or in ranges."""

    kind = "jsonl"
    _is_json = True

    def __init__(
        self, files: tuple[InputFile, ...], field: str | None, on_bad: OnBad, limits: BatchLimits
    ) -> None:
        self._files = files
        self._field = [] if field is None else [field]  # filled once for all copies
        self._on_bad = on_bad
        self._limits = limits

    def options(self) -> dict[str, JSON]:
        return {"field": self._resolved_field(), "on_bad": self._on_bad, **self._range_options()}

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        decoder = TextDecoder(self._resolved_field())
        for block in self._blocks(file, position):
            rows = decoder.decode(block)
            if rows.bad and self._on_bad == "error":
                bad = rows.bad[0]
                raise bad_row_error(file, replace(bad, line=self._lines_before(file) + bad.line))
            if self._range is not None:
                # All lines are told, or the lines behind this range could not be numbered.
                yield _batch(rows, file.name, self._position(block), num_lines=len(block.stops))
            elif rows.texts or rows.bad:
                batch = _batch(rows, file.name, self._position(block))
                yield replace(batch, drops=tuple(drop.numbered(0) for drop in batch.drops))

    def settled(self) -> Self:
        reader = copy(self)
        reader._field, reader._files = [self._resolved_field()], ()
        return reader

    def _resolved_field(self) -> str:
        """The field, found once: in the first readable row of all files."""
        if not self._field:
            found = (self._field_in(file) for file in self._files)
            self._field.append(next((field for field in found if field is not None), "text"))
        return self._field[0]

    def _field_in(self, file: InputFile) -> str | None:
        limits = self._limits
        if limits.most_bytes is not None:  # the same lines are refused as when they are read
            limits = limits.refusing(max(limits.most_bytes + limits.num_bytes - _LOOK_BYTES, 1))
        limits = replace(limits, num_bytes=_LOOK_BYTES)
        for block in line_blocks(file, start=0, first_line=0, limits=limits, is_json=True):
            for number, line in filled_lines(block):
                try:
                    row = read_object(line)
                except BadJsonError as bad:
                    if self._on_bad == "error":
                        raise bad_row_error(file, bad_row(number, line, bad)) from bad
                    continue
                fields = ((key, isinstance(value, str)) for key, value in row.items())
                where = f"{file.place}, line {number + 1}"
                return choose_field(fields, wanted=None, where=where)
        return None


def _batch(rows: JsonRows, name: str, cursor: Cursor, *, num_lines: int = 0) -> TextBatch:
    texts, repaired = rows.texts, None
    if isinstance(texts, list):
        texts, repaired = strings_to_arrow(texts)
    if rows.repaired:
        repaired = np.zeros(len(texts), np.bool_) if repaired is None else repaired
        repaired[rows.repaired] = True
    dropped = {bad.line: bad.reason for bad in rows.bad}
    if texts.null_count:
        missing = texts.is_null().to_numpy(zero_copy_only=False)
        dropped |= {rows.lines[row]: "no_text" for row in np.flatnonzero(missing).tolist()}
        texts = texts.drop_null()
        repaired = None if repaired is None else repaired[~missing]
    cleaned = clean(texts, repaired=repaired)
    drops = (Drop(id=name, reason=dropped[line], row=line) for line in sorted(dropped))
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(rows.texts) + len(rows.bad),
        counts=cleaned.counts,
        drops=tuple(drops),
        num_rows=num_lines,
        cursor=cursor,
    )


def bad_row_error(file: InputFile, bad: BadRow) -> SourceError:
    return SourceError(
        f"{file.place}, line {bad.line + 1}: {bad.problem}; found {bad.snippet!r}; "
        "mend the line, name another field=, or leave such rows out with on_bad='skip'"
    )
