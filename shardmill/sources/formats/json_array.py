"""A `.json` file that is one list of rows, or an object with exactly one list: streamed.
As documents a file may also be JSON lines, which the first line tells.

The list is cut into its rows by looking at brackets and quotes only, half a MiB at a time, and each
row is decoded alone, as a line of JSON lines is: the same rows are read, repaired or refused, and
memory is a block and a row. A position is the number of rows and the byte after the last of them,
where reading continues (a compressed file is decompressed up to there). What is no such list is an
error where that is found, which may be at the end of the file.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, Drop, IntArray, TextBatch
from shardmill.sources.batches import (
    BOM_BYTES,
    DEFAULT_LIMITS,
    BatchLimits,
    choose_field,
    counts_of,
    grouped,
    string_batch,
    too_large,
    utf8_bytes,
)
from shardmill.sources.formats.jsonl import (
    WHITE,
    JsonlFormat,
    Object,
    OnBad,
    TextDecoder,
    check_on_bad,
    decode_row,
    kind_of,
    own_id,
    read_row,
)
from shardmill.sources.formats.lines import TextLength, codec_of, read_chunks, stored_before
from shardmill.sources.source import (
    BadRowError,
    FileSource,
    InputRow,
    RowFormat,
    RowLocation,
    RowTable,
    TableFormat,
    bad_row,
    name_row,
)
from shardmill.storage.files import Endings, InputFile, Where, packed

HEAD_BYTES = 2**16
"""The list of an object begins within so many bytes, and no more follow it."""

_BLOCK_BYTES = 2**19
_OPEN, _CLOSE, _COMMA, _QUOTE, _ESCAPE = range(1, 6)
_KINDS = np.zeros(256, np.uint8)
_KINDS[[*b"[{"]], _KINDS[[*b"]}"]] = _OPEN, _CLOSE
_KINDS[[*b',"\\']] = _COMMA, _QUOTE, _ESCAPE
_DECODER = json.JSONDecoder()


class FoundList(NamedTuple):
    """The list of rows in a file."""

    start: int  # the byte after its opening bracket
    key: str | None  # its name in the object around it; None: it is the whole file


class Beginning(NamedTuple):
    """The beginning of a file."""

    is_object: bool
    line: bytes  # the first one; b"": longer than `HEAD_BYTES`
    has_more: bool  # whether more than white space follows it
    found: FoundList | None  # the first list in the object that it begins with


class _Item(NamedTuple):
    """The JSON of a row in a list."""

    data: bytes
    number: int
    end: int  # the byte after it

    @property
    def position(self) -> Cursor:
        return {"records": self.number + 1, "bytes": self.end}


@dataclass(frozen=True, kw_only=True)
class JsonFormat(TableFormat):
    """Rows of the list in a `.json` file, which is one piece; or of JSON lines."""

    kind = "json"
    endings = packed(".json")

    field: str | None = None  # None: that of the first row
    on_bad: OnBad = "error"

    def options(self) -> dict[str, JSON]:
        return {"field": self.field, "on_bad": self.on_bad}

    def settled(self, files: Sequence[InputFile], limits: BatchLimits, /) -> Self:
        """With the field of the first readable row of the first file that has rows."""
        field = self.field
        for file in files:
            if field is not None:
                break
            lines = self._lines(file)
            if lines is not None:
                field = lines.settled([file], limits).field
                break
            with closing(_numbered_items(file, None, limits)) as items:
                rows = (_readable(item.data) for item in items)
                row = next((found for found in rows if found is not None), None)
            if row is not None:
                known = ((key, isinstance(value, str)) for key, value in row.items())
                field = choose_field(known, wanted=None, where=str(file.place))
        return replace(self, field=field or "text")

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        lines = self._lines(file)
        if lines is not None:
            return lines.bytes_before(file, position)
        done = counts_of(position, ("records", "bytes"), file.name)[1]
        codec = codec_of(file)
        return done if codec is None else stored_before(file, codec, done)

    def split(self, file: InputFile, num_bytes: int | None, /) -> Sequence[Any]:
        """One piece; of JSON lines ranges."""
        if num_bytes is None or num_bytes >= file.num_bytes or codec_of(file) is not None:
            return (self,)
        lines = self._lines(file)
        return (self,) if lines is None else lines.split(file, num_bytes)

    def drop_of(self, file: InputFile, row: int, reason: str) -> Drop:
        return Drop(id=f"{file.name}:record {row}", reason=reason)

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        """As JSON lines are read: one field is decoded, many rows at a time."""
        assert self.field is not None
        lines = self._lines(file)
        if lines is not None:
            yield from lines.read(file, position, limits)
            return
        decoder = TextDecoder(self.field)
        for items in grouped(_sized_items(file, position, limits), limits):
            texts = decoder.decode_list([item.data for item in items])
            num_repaired, drops = 0, []
            if texts is None:
                texts = []
                for item in items:
                    try:
                        text, is_repaired = decoder.decode_line(item.data)
                    except BadRowError as bad:
                        drop = self.drop_of(file, item.number, bad.reason)
                        if self.on_bad == "error":
                            raise bad_row(name_row(self, file, drop), bad) from bad
                        drops.append(drop)
                        continue
                    texts.append(text)
                    num_repaired += is_repaired
                    if text is None:
                        drops.append(self.drop_of(file, item.number, "no_text"))
            elif None in texts:
                pairs = zip(items, texts, strict=True)
                numbers = (item.number for item, text in pairs if text is None)
                drops = [self.drop_of(file, number, "no_text") for number in numbers]
            yield string_batch(
                [text for text in texts if text is not None],
                items[-1].position,
                num_repaired=num_repaired,
                drops=drops,
                num_read=len(items),
            )

    def tables(
        self,
        file: InputFile,
        position: JSON,
        limits: BatchLimits,
        columns: Sequence[str] | None,
        /,
    ) -> Iterator[RowTable]:
        lines = self._lines(file)
        if lines is not None:
            yield from _tables_of_lines(lines, file, position, limits, columns)
            return
        for items in grouped(_sized_items(file, position, limits), limits):
            rows: list[Object | None] = []
            bad: list[tuple[int, BadRowError]] = []
            for number, item in enumerate(items):
                try:
                    rows.append(decode_row(item.data)[0])
                except BadRowError as problem:
                    rows.append(None)
                    bad.append((number, problem))
            found = rows_to_arrow(rows, columns, bad)
            yield RowTable(found, items[-1].position, items[0].number, tuple(sorted(bad)))

    def locate(
        self, file: InputFile, before: JSON, after: JSON, rows_before: int | None, /
    ) -> RowLocation:
        lines = self._lines(file)
        if lines is not None:
            return lines.locate(file, before, after, rows_before)
        row = counts_of(after, ("records", "bytes"), file.name)[0] - 1
        items = _numbered_items(file, before, DEFAULT_LIMITS)
        with closing(items):
            found = next(_readable(item.data) for item in items if item.number == row)
        own = None if found is None else own_id(found.get("id"))
        id = self.drop_of(file, row, "").id
        return RowLocation(id=id, file=file.name, row=row, own_id=own)

    def _lines(self, file: InputFile) -> JsonlFormat | None:
        """How a file is read that is JSON lines: it begins with an object that is a row."""
        seen = look(file)
        if not seen.is_object:
            return None
        row = _readable(seen.line) if seen.line else None
        is_row = row is not None and isinstance(row.get(self.field or "text"), str)
        if not (is_row or (row is not None and seen.has_more)):
            item = None
            if seen.found is not None:
                item = _readable(first_item(file, seen.found, DEFAULT_LIMITS))
            if item is not None or (row is None and seen.line):
                return None
        return JsonlFormat(field=self.field, on_bad=self.on_bad)


def _readable(data: bytes) -> Object | None:
    try:
        return decode_row(data)[0]
    except BadRowError:
        return None


def _numbered_items(
    file: InputFile, position: JSON, limits: BatchLimits
) -> Generator[_Item, None, None]:
    found = find_list(file)
    if found is None:
        return
    number, start = 0, found.start
    if position is not None:
        number, start = counts_of(position, ("records", "bytes"), file.name)
    items = _items(file, found.key, start, limits, is_resumed=position is not None)
    for item, end in items:
        yield _Item(item, number, end)
        number += 1


def _sized_items(
    file: InputFile, position: JSON, limits: BatchLimits
) -> Iterator[tuple[_Item, int, int]]:
    return ((item, len(item.data), 1) for item in _numbered_items(file, position, limits))


def _tables_of_lines(
    lines: JsonlFormat,
    file: InputFile,
    position: JSON,
    limits: BatchLimits,
    columns: Sequence[str] | None,
) -> Iterator[RowTable]:
    def size(row: InputRow) -> int:
        values = row.value.values() if isinstance(row.value, dict) else ()
        return sum(utf8_bytes(value) for value in values if isinstance(value, str))

    before = 0 if position is None else counts_of(position, ("bytes", "lines"), file.name)[1]
    sized = ((row, size(row), 1) for row in lines.rows(file, position, limits))
    for held in grouped(sized, limits):
        bad = [(n, row.value) for n, row in enumerate(held) if isinstance(row.value, BadRowError)]
        values = [row.value if isinstance(row.value, dict) else None for row in held]
        after = held[-1].position
        assert not callable(after), "a position in a file is no function"
        yield RowTable(rows_to_arrow(values, columns, bad), after, before, tuple(bad))
        before += len(held)


def rows_to_arrow(
    rows: Sequence[Object | None],
    columns: Sequence[str] | None,
    bad: list[tuple[int, BadRowError]],
) -> pa.RecordBatch:
    """Objects as columns: those asked for that any of them has, in the order in which they come.

    None is a bad row. A row whose value is of another type than the first one in its column becomes
    one too, `mixed_types`.
    """
    names = list(dict.fromkeys(name for row in rows if row is not None for name in row))
    wanted = [name for name in names if columns is None or name in columns]
    arrays = []
    for name in wanted:
        values = [None if row is None else row.get(name) for row in rows]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowException, OverflowError):
            kind = pa.array([next(value for value in values if value is not None)]).type
            for number, value in enumerate(values):
                try:
                    pa.array([value], kind)
                except (pa.ArrowException, OverflowError):
                    values[number] = None
                    problem = f"the field {name!r:.60} holds {kind_of(value)}, others {kind}"
                    bad.append((number, BadRowError("mixed_types", problem)))
            arrays.append(pa.array(values, kind))
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, wanted)


class JsonSource(FileSource):
    """`.json` files. `field=None`: "text", else the first string field of the first row."""

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
        format = JsonFormat(field=field, on_bad=on_bad)
        super().__init__(where, format, ext=ext, name=name, limits=limits)


class JsonArrayFormat(RowFormat):
    """Rows of the list in a `.json` file, which is one piece."""

    def rows(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[InputRow]:
        for item in _numbered_items(file, position, limits):
            yield read_row(item.data, f"{file.name}:record {item.number}", item.position)


def find_list(file: InputFile) -> FoundList | None:
    """Where the rows are; None for an empty file."""
    start, head = _head(file)
    if not head:
        return None
    if head.startswith(b"["):
        return FoundList(start + 1, None)
    found = _list_in_object(start, head)
    if found is None:
        kinds = {b"{": "an object without a list at its beginning", b"n": "null", b'"': "a string"}
        kinds |= dict.fromkeys((b"t", b"f"), "a boolean")
        kinds |= {bytes([digit]): "a number" for digit in b"-0123456789"}
        raise _no_list(file, kinds.get(head[:1], f"found {head[:20]!r}"))
    return found


def _list_in_object(start: int, head: bytes) -> FoundList | None:
    text, at = head.decode("latin-1"), 0  # a character for each byte
    try:
        while text[at] in "{,":
            key, at = _DECODER.raw_decode(text, _after_spaces(text, at + 1))
            at = _after_spaces(text, at)
            if not isinstance(key, str) or text[at] != ":":
                return None
            at = _after_spaces(text, at + 1)
            if text[at] == "[":
                name = key.encode("latin-1", "replace").decode("utf-8", "replace")
                return FoundList(start + at + 1, name)
            _, at = _DECODER.raw_decode(text, at)
            at = _after_spaces(text, at)
    except (ValueError, IndexError, RecursionError):
        pass  # no JSON, or it goes on after the head
    return None


def first_item(file: InputFile, found: FoundList, limits: BatchLimits) -> bytes:
    """The JSON of the first row of a list; b"" of an empty one."""
    with closing(_items(file, found.key, found.start, limits, is_resumed=False)) as items:
        return next(items, (b"", 0))[0]


def look(file: InputFile) -> Beginning:
    """What tells whether a file that begins with an object is that object, or JSON lines."""
    start, head = _head(file)
    line, end, rest = head.partition(b"\n")
    if not end and len(head) == HEAD_BYTES:
        line, rest = b"", head
    found = _list_in_object(start, head)
    return Beginning(head.startswith(b"{"), line.strip(WHITE), bool(rest.strip(WHITE)), found)


def _head(file: InputFile) -> tuple[int, bytes]:
    """The first bytes of a file after its white space, and where they begin."""
    start, head = 0, b""
    with closing(read_chunks(file, 0, HEAD_BYTES)) as chunks:
        for chunk in chunks:
            head += chunk
            if start == 0 and len(head) < len(BOM_BYTES) and BOM_BYTES.startswith(head):
                continue
            filled = head.removeprefix(BOM_BYTES) if start == 0 else head
            filled = filled.lstrip(WHITE)
            start += len(head) - len(filled)
            head = filled
            if len(head) >= HEAD_BYTES:
                break
    return start, head[:HEAD_BYTES]


def _after_spaces(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _items(
    file: InputFile, key: str | None, start: int, limits: BatchLimits, *, is_resumed: bool
) -> Generator[tuple[bytes, int], None, None]:
    """The JSON of each row from byte `start` on, and where the comma or bracket after it is.

    `start` is after the opening bracket; or, when resumed, at such a comma or bracket.
    """
    most, edges = limits.most_input(), _Edges()
    size = min(_BLOCK_BYTES, max(limits.num_bytes // 8, 1))  # a block is less than a row may be
    pending: list[bytes] = []
    length = TextLength(is_json=True)
    offset, after_comma = start, False
    with closing(read_chunks(file, start, size)) as chunks:
        for chunk in chunks:
            begin = 0
            if is_resumed and offset == start:
                after_comma = chunk.startswith(b",")
                begin = int(after_comma)
                if not after_comma and not chunk.startswith(b"]"):
                    break
            for stop in edges.find(chunk, begin):
                piece, is_last = chunk[begin:stop], chunk[stop : stop + 1] != b","
                if pending and most is not None and length.add(piece) > most:
                    raise _long_row(file, offset + stop, most)
                item = b"".join((*pending, piece)).strip(WHITE)
                pending, length = [], TextLength(is_json=True)
                if is_last and chunk[stop : stop + 1] != b"]":
                    raise _no_list(file, f"a '}}' at byte {offset + stop:,} closes nothing")
                if item or after_comma or not is_last:
                    yield item, offset + stop
                begin, after_comma = stop + 1, True
            if edges.is_closed:
                _check_tail(file, key, chain([chunk[begin:]], chunks))
                return
            pending.append(chunk[begin:])
            if most is not None and length.add(chunk[begin:]) > most:
                raise _long_row(file, offset + len(chunk), most)
            offset += len(chunk)
    if is_resumed and offset == start:
        raise SourceError(
            f"{file.place}: the cursor is at byte {start:,}, where no row ends; resume with the "
            "input the cursor came from"
        )
    raise _no_list(file, "it has no end")


def _check_tail(file: InputFile, key: str | None, rest: Iterator[bytes]) -> None:
    """What follows the list: nothing, or the other members of the object, which are no lists."""
    tail = b""
    for chunk in rest:
        tail = (tail + chunk).lstrip(WHITE)
        if len(tail) > HEAD_BYTES or (tail and key is None):
            break
    if key is None:
        if tail:
            raise _no_list(file, f"after it comes {tail[:20]!r}")
        return
    name = f"{key!r:.40}"
    if len(tail) > HEAD_BYTES:
        raise _no_list(file, f"more than {HEAD_BYTES:,} bytes follow the list {name} of the object")
    try:
        others = json.loads('{"": 0' + tail.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise _no_list(file, f"after the list {name}: {error}") from error
    lists = [other for other, value in others.items() if isinstance(value, list)]
    if lists:
        raise _no_list(
            file, f"an object with several lists, {name} and {lists[0]!r:.40}, wanted exactly one"
        )


def _no_list(file: InputFile, problem: str) -> SourceError:
    return SourceError(
        f"{file.place}: not one JSON list of rows: {problem}; correct it, or write one row per "
        "line as .jsonl"
    )


def _long_row(file: InputFile, stop: int, most: int) -> SourceError:
    return too_large(f"{file.place}, byte {stop:,}", "a row that is longer than that", most)


class _Edges:
    """Where the items of a list end, in consecutive blocks that begin inside it."""

    def __init__(self) -> None:
        self._depth = 0  # of brackets inside the list
        self._in_string = False
        self._is_escaped = False  # a backslash at the end of a block escapes the byte after it
        self.is_closed = False

    def find(self, block: bytes, begin: int) -> list[int]:
        """The commas between items from `begin` on, and last the bracket that closes the list.

        block   "a": [1, 2]}, {"b": 3}]          an item is open when it begins
        depth   1    2    1 0  1    0-1
        found              ^          ^
        """
        kinds: IntArray = _KINDS[np.frombuffer(block, np.uint8)[begin:]]
        at = np.flatnonzero(kinds)
        size, kinds = len(kinds), kinds[at]
        if self._is_escaped or (kinds == _ESCAPE).any():
            kinds = self._without_escaped(at, kinds, size)
        if not len(at):
            return []
        inside = (np.cumsum(kinds == _QUOTE) + self._in_string) % 2 == 1
        kinds = np.where(inside, 0, kinds)
        depths = self._depth + np.cumsum((kinds == _OPEN) * 1 - (kinds == _CLOSE))
        self._in_string, self._depth = bool(inside[-1]), int(depths[-1])
        is_end = (kinds == _COMMA) & (depths == 0)
        closing_at = np.flatnonzero(depths < 0)[:1]
        self.is_closed = len(closing_at) > 0
        is_end[closing_at] = True
        if self.is_closed:
            is_end[closing_at[0] + 1 :] = False
        found: list[int] = (at[is_end] + begin).tolist()
        return found

    def _without_escaped(self, at: IntArray, kinds: IntArray, size: int) -> IntArray:
        """The kinds, with 0 for what a backslash stands before: of a run of backslashes every
        second one is itself escaped."""
        escapes = at[kinds == _ESCAPE]
        if self._is_escaped:
            escapes = np.concatenate(([-1], escapes))
        is_first = np.diff(escapes, prepend=-2) != 1
        numbers = np.arange(len(escapes))
        firsts = escapes[np.maximum.accumulate(np.where(is_first, numbers, 0))]
        escaping = escapes[(escapes - firsts) % 2 == 0]
        self._is_escaped = bool(len(escaping)) and int(escaping[-1]) == size - 1
        return np.where(np.isin(at, escaping + 1), 0, kinds)
