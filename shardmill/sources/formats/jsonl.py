"""JSON lines of one object each (docs/sources.md).

A whole row is decoded alone and always in the same way. What is not UTF-8 and half a surrogate pair
become U+FFFD. Rows nested deeper than `MAX_DEPTH` are refused.

Speed: a block is decoded at once when each of its lines begins with "{" and ends with "}": then no
value crosses a line's end, and as many values as lines means one on each. msgspec does it, or else
Arrow, which reads more. Any other block is decoded line by line. Each line is judged alone in all
three ways, so that blocks never change the outcome.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Drop, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    REPLACEMENT,
    BatchLimits,
    choose_field,
    make_batch,
    null_rows,
    replace_surrogates,
    string_batch,
)
from shardmill.sources.formats.lines import LineBlock, LineFormat
from shardmill.sources.source import BadRowError, FileSource, InputRow, RowTable, TableFormat
from shardmill.storage.files import Endings, InputFile, Where, check_unchanged, list_files

Object: TypeAlias = dict[str, Any]
OnBad: TypeAlias = Literal["error", "skip"]

MAX_DEPTH = 256
"""Lists and objects inside one another. A decoder's own limit depends on the caller's stack."""
WHITE = b" \t\r\n"
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that another decoder may still read."""

_OPEN, _CLOSE, _NEWLINE, _RETURN = b"{}\n\r"
_LOOK_BYTES = 2**16  # the first row is enough to know the fields
_STRING_BYTES = 2**23  # two batches
_ROW_LIMITS = BatchLimits(most_bytes=256 * 2**20)  # so that a damaged file takes no more memory
_OBJECT = msgspec.json.Decoder(Object)
_ANYTHING = msgspec.json.Decoder()
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} lists and objects"
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
_KINDS |= {str: "a string", list: "a list", dict: "an object"}


def kind_of(value: object) -> str:
    """A value's kind in JSON's words, for an error."""
    return _KINDS.get(type(value), type(value).__name__)


def decode_row(data: bytes, *, of_any_depth: bool = False) -> tuple[Object, bool]:
    """One JSON object, without white space around it, and whether something was replaced."""
    try:
        row, marked = _OBJECT.decode(data), None
    except _REFUSALS:
        try:
            row = read_object(data)
            # Bytes that are not UTF-8 become surrogates here, as halves of pairs already are.
            marked = read_object(data, errors="surrogateescape")
        except BadRowError as bad:
            if isinstance(bad.__cause__, RecursionError):  # it names Python's own limit
                raise BadRowError("bad_json", _TOO_DEEP) from bad
            raise
    # Fewer brackets cannot nest too deep, and nearly every row has fewer.
    is_nested = not of_any_depth and data.count(b"{") + data.count(b"[") > MAX_DEPTH
    if is_nested and _is_too_deep(row):
        raise BadRowError("bad_json", _TOO_DEEP)
    if marked is None:
        return row, False
    try:
        return repaired(row), marked != repaired(marked)
    except RecursionError as error:
        raise BadRowError("bad_json", f"nested too deep: {error}") from error


def read_row(
    data: bytes, id: str, position: JSON, row: int | None = None, num_rows: int = 0
) -> InputRow:
    """`decode_row` as a row of an input; a bad one holds its problem."""
    try:
        value, is_repaired = decode_row(data)
    except BadRowError as bad:
        return InputRow(bad, id, position, row=row, num_rows=num_rows)
    return InputRow(value, id, position, is_repaired, row, num_rows)


def decode_value(text: str) -> Any:
    """JSON inside a string; None when it is not JSON, or nested too deep."""
    try:
        value = _ANYTHING.decode(text.encode("utf-8", "replace"))
    except _REFUSALS:
        return None
    return None if _is_too_deep(value) else value


def read_object(data: bytes, *, errors: str = "replace") -> Object:
    """A JSON object by Python's own decoder. `errors` is for bytes that are not UTF-8."""
    try:
        value = json.loads(data.decode("utf-8", errors))
    except (ValueError, RecursionError) as error:
        raise BadRowError("bad_json", f"broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRowError("bad_json", f"{kind_of(value)}, but a row is an object")
    return value


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = [
            outer.values() if isinstance(outer, dict) else outer
            for outer in level
            if isinstance(outer, dict | list)
        ]
        level = [inner for found in inside for inner in found if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def repaired(value: Any) -> Any:
    """Half a surrogate pair, however deep inside, becomes U+FFFD. The depth is already bounded."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return list(map(repaired, value))
    if isinstance(value, dict):
        keys = map(replace_surrogates, value)
        return dict(zip(keys, map(repaired, value.values()), strict=True))
    return value


class TextDecoder:
    """Reads one string field of each row."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            schema = pa.schema([(name, pa.large_string())])
        except UnicodeEncodeError as error:
            raise SourceError(f"field {name!r} is not valid Unicode; name another") from error
        self._parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        self._decoder: msgspec.json.Decoder[Any] | None = None
        self._list_decoder: msgspec.json.Decoder[Any] | None = None
        member = ("text", str | None, msgspec.field(default=None, name=name))
        try:
            row: Any = msgspec.defstruct("Row", [member], gc=False)
            self._decoder = msgspec.json.Decoder(row)
            self._list_decoder = msgspec.json.Decoder(list[row])
        except ValueError:
            pass  # a name that msgspec does not take: with quotes, backslashes, controls

    def decode_strings(self, data: bytes) -> list[str] | None:
        """All rows by msgspec; None when a row has no text or is not for msgspec, and for a block
        with a row so large that a string beside its bytes would be too much memory."""
        if self._decoder is None or len(data) > _STRING_BYTES:
            return None
        try:
            strings = [row.text for row in self._decoder.decode_lines(data)]
        except _REFUSALS:
            return None
        return None if None in strings else strings

    def decode_list(self, rows: Sequence[bytes]) -> list[str | None] | None:
        """The texts of rows that each are one JSON value, null where there is none; None when a row
        is not for msgspec."""
        if self._list_decoder is None:
            return None
        try:
            found = [row.text for row in self._list_decoder.decode(b"[%s]" % b",".join(rows))]
        except _REFUSALS:
            return None
        return found if len(found) == len(rows) else None

    def decode_block(self, data: bytes) -> pa.LargeStringArray | None:
        """All rows by Arrow, without Python strings; None when a row is out of the ordinary.

        Bytes that are not UTF-8 pass: cleaning finds them.
        """
        options = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pj.read_json(pa.BufferReader(data), options, self._parse)
        except pa.ArrowInvalid:
            return None
        return table.column(0).combine_chunks()

    def decode_line(self, line: bytes) -> tuple[str | None, bool]:
        """The text of a row, and whether something in it was replaced. A line that any of three
        decoders accepts is accepted."""
        if self._decoder is not None:
            try:
                return self._decoder.decode(line).text, False
            except _REFUSALS:
                pass
        try:
            row = read_object(line)
        except BadRowError:
            # A line that only Arrow reads (deep nesting, Inf), as it does when it reads the block.
            texts = self.decode_block(line) if line.startswith(b"{") else None
            if texts is None or len(texts) != 1:
                raise
            data = texts.cast(pa.large_binary())[0].as_py()
            text = None if data is None else data.decode("utf-8", "replace")
            return text, text is not None and text.encode() != data
        text = row.get(self._name)
        if text is None:
            return None, False
        if not isinstance(text, str):
            problem = f"the field {self._name!r} holds {kind_of(text)}, not a string"
            raise BadRowError("not_a_string", problem)
        # Bytes that are not UTF-8 become surrogates here, as halves of pairs already are.
        marked = str(read_object(line, errors="surrogateescape")[self._name])
        return replace_surrogates(text), marked != replace_surrogates(marked)


_JSON_COLUMN = {b"shardmill": b"json"}


def holds_json(column: pa.Field) -> bool:
    """Whether the values of a column are JSON: lists, objects, or of several kinds."""
    return (column.metadata or {}).get(b"shardmill") == b"json"


def json_values(column: pa.Array) -> list[Any]:
    """The values of such a column; None where a row has none. A byte that is no UTF-8 becomes half
    a surrogate pair, as Python has it."""
    found = column.to_pylist()
    try:
        return list(_ANYTHING.decode(b"[" + b",".join(one or b"null" for one in found) + b"]"))
    except _REFUSALS:  # such a byte, NaN or Infinity
        texts = [None if one is None else one.decode("utf-8", "surrogateescape") for one in found]
        return [None if text is None else json.loads(text) for text in texts]


class _TableDecoder:
    """Reads some fields of each row as columns; None: all.

    Where all values of a block have one kind the column has its type, else `holds_json`. A text in
    which something was replaced has a byte that is no UTF-8 in its place, for cleaning to find.
    """

    def __init__(self, columns: Sequence[str] | None) -> None:
        self._names = columns
        self._decoder: msgspec.json.Decoder[Any] | None = None
        self._texts: msgspec.json.Decoder[Any] | None = None  # quicker, for columns of strings
        if columns is None:
            self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        else:
            self._decoder = self._struct(dict.fromkeys(columns, msgspec.Raw))

    def _struct(self, kinds: Mapping[str, Any]) -> msgspec.json.Decoder[Any] | None:
        members = [
            (f"c{at}", kind, msgspec.field(default=None, name=name))
            for at, (name, kind) in enumerate(kinds.items())
        ]
        try:
            row: Any = msgspec.defstruct("Row", members, array_like=False, gc=False)
            return msgspec.json.Decoder(row)
        except (ValueError, UnicodeEncodeError):  # a name that msgspec does not take
            return None

    def decode_block(self, data: bytes) -> pa.RecordBatch | None:
        """All rows; None when a row is not for msgspec."""
        for decoder in (self._texts, self._decoder):
            if decoder is None:
                continue
            try:
                rows = decoder.decode_lines(data)
                columns = self._columns_of(rows)
                found = _record_batch({n: _decoded(raw) for n, raw in columns.items()}, len(rows))
            except _REFUSALS:
                continue
            strings = [one.name for one in found.schema if one.type == pa.large_string()]
            if self._texts is None and self._names is not None and strings:
                text: Any = str | None
                kinds = {name: text if name in strings else msgspec.Raw for name in self._names}
                self._texts = self._struct(kinds)
            return found
        return None

    def decode_lines(
        self, lines: Sequence[bytes]
    ) -> tuple[pa.RecordBatch, tuple[tuple[int, BadRowError], ...]]:
        """Each row alone, and those that cannot be read."""
        rows: list[dict[str, Any]] = []
        bad: list[tuple[int, BadRowError]] = []
        for number, line in enumerate(lines):
            try:
                rows.append(self._row(line) if line else {})
                if not line:
                    bad.append((number, BadRowError("", "a blank line")))
            except BadRowError as problem:
                rows.append({})
                bad.append((number, problem))
        names = self._names
        if names is None:
            names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        return _record_batch(columns, len(rows)), tuple(bad)

    def _row(self, line: bytes) -> Object:
        """The fields of a row, decoded. A line that either decoder accepts is accepted."""
        if self._decoder is not None:
            try:
                found = self._columns_of([self._decoder.decode(line)])
                return {name: _decoded(raw)[0] for name, raw in found.items()}
            except _REFUSALS:
                pass
        row, is_repaired = decode_row(line)
        if is_repaired:
            marked = read_object(line, errors="surrogateescape")
            for name, value in row.items():
                was = marked.get(name)
                if isinstance(value, str) and isinstance(was, str) and was != repaired(was):
                    row[name] = value.encode().replace(REPLACEMENT.encode(), b"\xff", 1)
        return row

    def _columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        if self._names is None:
            names = dict.fromkeys(name for row in rows for name in row)
            return {name: [row.get(name) for row in rows] for name in names}
        return {
            name: [getattr(row, f"c{at}") for row in rows] for at, name in enumerate(self._names)
        }


def _decoded(values: list[Any]) -> list[Any]:
    """The values of a column, of which some may be raw JSON."""
    if not any(isinstance(value, msgspec.Raw) for value in values):
        return values
    found = b",".join(b"null" if value is None else value for value in values)
    decoded: list[Any] = _ANYTHING.decode(b"[" + found + b"]")
    is_nested = found.count(b"{") + found.count(b"[") > MAX_DEPTH
    if is_nested and any(map(_is_too_deep, decoded)):
        raise msgspec.DecodeError(_TOO_DEEP)
    return decoded


def _record_batch(columns: Mapping[str, list[Any]], num_rows: int) -> pa.RecordBatch:
    made = [_column(name, values) for name, values in columns.items()]
    arrays, fields = [array for array, _ in made], [field for _, field in made]
    if not made:  # a batch without columns would have no rows
        arrays, fields = [pa.nulls(num_rows)], [pa.field("", pa.null())]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _column(name: str, values: list[Any]) -> tuple[pa.Array, pa.Field]:
    kinds = set(map(type, values)) - {type(None)}
    try:
        if kinds <= {str, bytes}:
            texts = [one.encode() if isinstance(one, str) else one for one in values]
            kind = pa.large_string() if kinds else pa.null()
            array = pa.array(texts, pa.large_binary() if kinds else pa.null())
            return pa.Array.from_buffers(kind, len(array), array.buffers()), pa.field(name, kind)
        if len(kinds) == 1 and kinds <= _ARROW_TYPES.keys():
            array = pa.array(values, _ARROW_TYPES[kinds.pop()])
            return array, pa.field(name, array.type)
    except OverflowError:  # an integer that no int64 holds
        pass
    found = [None if value is None else _as_json(value) for value in values]
    return pa.array(found, pa.large_binary()), pa.field(
        name, pa.large_binary(), metadata=_JSON_COLUMN
    )


_ARROW_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _as_json(value: Any) -> bytes:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")


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


def _filled_lines(block: LineBlock) -> Iterator[tuple[int, bytes]]:
    """Number (from 0) and bytes of each line that is not blank."""
    for number, line in enumerate(block.lines(), block.first_line):
        if stripped := line.strip(WHITE):
            yield number, stripped


def _bad_line(file: InputFile, number: int, line: bytes, bad: BadRowError) -> SourceError:
    snippet = line[:80].decode("utf-8", "replace") + ("..." if len(line) > 80 else "")
    return SourceError(
        f"{file.place}, line {number + 1}: {bad}; found {snippet!r}; "
        "correct the line, name another {field}, or leave such rows out with {on_bad}",
        field=...,
        on_bad="skip",
    )


@dataclass(frozen=True, kw_only=True)
class JsonlFormat(LineFormat, TableFormat):
    """JSON lines. `field` is the one that holds the text."""

    kind = "jsonl"
    endings = (".jsonl", ".jsonl.gz", ".jsonl.zst")
    _is_json: ClassVar[bool] = True

    field: str | None = None  # None: that of the first row
    on_bad: OnBad = "error"

    def options(self) -> dict[str, JSON]:
        return {"field": self.field, "on_bad": self.on_bad, **super().options()}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        assert self.field is not None
        decoder = TextDecoder(self.field)
        for block in self.blocks(file, position, limits):
            batch = self._batch(decoder, block, file)
            if self.range is not None:
                # The lines of every block count, or those after this range could not be numbered.
                yield batch.replaced(num_rows=len(block.stops))
            elif batch.num_read:
                yield batch.replaced(drops=tuple(drop.numbered(0) for drop in batch.drops))

    def rows(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[InputRow]:
        """Whole rows. Those of a range do not know their line of the file, so they count all lines:
        the last ones may come without a row."""
        block: LineBlock | None = None
        done = 0 if position is None else self._counts(file, position)[1]
        for block in self.blocks(file, position, limits):
            base = block.end - len(block.data)
            lines = zip(block.lines(), block.stops.tolist(), strict=True)
            for number, (line, stop) in enumerate(lines, block.first_line + 1):
                if not (filled := line.strip(WHITE)):
                    continue
                after = self.position_at(base + stop, number)
                if self.range is None:
                    yield read_row(filled, f"{file.name}:{number}", after)
                else:
                    yield read_row(filled, file.name, after, number - 1, number - done)
                    done = number
        if self.range is not None and block is not None:
            num_rows = block.first_line + len(block.stops) - done
            if num_rows:
                yield InputRow(None, file.name, self.position_after(block), num_rows=num_rows)

    def tables(
        self, file: InputFile, position: JSON, limits: BatchLimits, columns: Sequence[str] | None
    ) -> Iterator[RowTable]:
        """A table for each block; a blank line is a bad row without a reason."""
        decoder = _TableDecoder(columns)
        for block in self.blocks(file, position, limits):
            found = decoder.decode_block(block.data) if _is_regular(block) else None
            bad: tuple[tuple[int, BadRowError], ...] = ()
            if found is None or found.num_rows != len(block.stops):
                found, bad = decoder.decode_lines([line.strip(WHITE) for line in block.lines()])
            yield RowTable(found, self.position_after(block), block.first_line, bad)

    @property
    def counts_rows(self) -> bool:
        return self.range is not None

    def drop_of(self, file: InputFile, row: int, reason: str) -> Drop:
        drop = Drop(id=file.name, reason=reason, row=row)
        return drop.numbered(0) if self.range is None else drop

    def _batch(self, decoder: TextDecoder, block: LineBlock, file: InputFile) -> TextBatch:
        """The documents of a block; its drops have the line of the file or range."""
        after = self.position_after(block)
        if _is_regular(block):
            strings = decoder.decode_strings(block.data)
            if strings is not None and len(strings) == len(block.stops):
                return string_batch(strings, after)
            texts = decoder.decode_block(block.data)
            if texts is not None and len(texts) == len(block.stops):
                rows = (block.first_line + row for row in null_rows(texts))
                drops = [Drop(id=file.name, reason="no_text", row=row) for row in rows]
                return make_batch(texts, after, drops=drops)
        return self._batch_by_lines(decoder, block, file)

    def _batch_by_lines(self, decoder: TextDecoder, block: LineBlock, file: InputFile) -> TextBatch:
        found: list[str] = []
        drops: list[Drop] = []
        num_repaired = 0
        for number, line in _filled_lines(block):
            try:
                text, is_repaired = decoder.decode_line(line)
            except BadRowError as bad:
                if self.on_bad == "error":
                    raise _bad_line(file, self.rows_before(file) + number, line, bad) from bad
                drops.append(Drop(id=file.name, reason=bad.reason, row=number))
                continue
            if text is None:
                drops.append(Drop(id=file.name, reason="no_text", row=number))
            else:
                found.append(text)
                num_repaired += is_repaired
        return string_batch(
            found,
            self.position_after(block),
            num_repaired=num_repaired,
            drops=drops,
            num_read=len(found) + len(drops),
        )

    def _own_id(self, line: bytes, /) -> str | None:
        try:
            return own_id(read_object(line).get("id"))
        except BadRowError:
            return None

    def settled(self, files: Sequence[InputFile], limits: BatchLimits, /) -> Self:
        """With the field of the first readable row of all files."""
        if self.field is not None:
            return self
        found = (self._field_in(file, limits) for file in files)
        return replace(self, field=next((one for one in found if one is not None), "text"))

    def _field_in(self, file: InputFile, limits: BatchLimits) -> str | None:
        most = limits.most_input()
        if most is not None:  # the same lines are refused as when they are read
            most = max(most - _LOOK_BYTES, 1)
        limits = replace(limits, num_bytes=_LOOK_BYTES, most_bytes=most)
        for number, row in _rows(file, limits, read_object, self.on_bad):
            fields = ((key, isinstance(value, str)) for key, value in row.items())
            return choose_field(fields, wanted=None, where=f"{file.place}, line {number + 1}")
        return None


class JsonlSource(FileSource):
    """JSON lines files. `field=None`: "text", else the first string field of the first row."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        on_bad: OnBad = "error",
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        check_on_bad(on_bad)
        format = JsonlFormat(field=field, on_bad=on_bad)
        super().__init__(where, format, ext=ext, name=name, limits=limits)


def check_on_bad(on_bad: str) -> None:
    if on_bad not in ("error", "skip"):
        raise OptionError("{on_bad}: wanted 'error' or 'skip'", on_bad=on_bad)


def own_id(value: object) -> str | None:
    """A row's own id, when it is a string or a whole number."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, int) and not isinstance(value, bool) else None


def iter_jsonl_rows(where: Where) -> Iterator[Object]:
    """Every row of a file, folder, glob or list of files, as a dict. Files are listed at the call.

    For data that is more than one text. A line that is not a JSON object is an error with file and
    line; a row with more than 256 MiB of text is refused before it is read whole.
    """
    files = list_files(where, suffixes=JsonlFormat.endings)

    def decode(line: bytes) -> Object:
        return decode_row(line, of_any_depth=True)[0]

    def rows() -> Iterator[Object]:
        for file in files:
            check_unchanged(file)
            yield from (row for _, row in _rows(file, _ROW_LIMITS, decode, "error"))

    return rows()


def _rows(
    file: InputFile, limits: BatchLimits, decode: Callable[[bytes], Object], on_bad: OnBad
) -> Iterator[tuple[int, Object]]:
    """Each row and its line, from 0."""
    for block in JsonlFormat().blocks(file, None, limits):
        for number, line in _filled_lines(block):
            try:
                row = decode(line)
            except BadRowError as bad:
                if on_bad == "error":
                    raise _bad_line(file, number, line, bad) from bad
            else:
                yield number, row
