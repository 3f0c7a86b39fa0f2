"""Where one document of a source lies: its file, and the row or line of it.

In: a source, one of its cursors, and which text behind it.  Out: the text and its `RowLocation`.
Promise: the source is read by its own code, a row at a time, so that the place is that of the very
row which gave the text; ids are those that a drop at the same place would have.
Not here: how many documents lie before the cursor (blame). A source that has no rows of its own, as
one of a user, is told by the number of the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from shardmill.errors import SourceError
from shardmill.protocols import Source
from shardmill.records import Cursor, TextBatch
from shardmill.sources.concat import ConcatSource
from shardmill.sources.file_source import FileSource
from shardmill.sources.formats.hub_parquet import HubParquetSource, HubPiece
from shardmill.sources.formats.hub_source import HubSource
from shardmill.sources.formats.jsonl import BadJsonError, read_object
from shardmill.sources.formats.lines import LineRange, line_start, lines_before, read_chunks
from shardmill.sources.formats.parquet import open_parquet
from shardmill.sources.formats.parquet_column import group_edges
from shardmill.sources.memory import MemorySource
from shardmill.storage.files import InputFile

_STEP = 64
"""Rows that are passed at a time: one alone costs nearly as much."""
_ID = "id"
"""The field or column in which rows usually name themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation:
    """Where one text was."""

    id: str  # "pages.jsonl:17", "part.parquet:row 40", "notes.txt"; as dropped rows are named
    file: str | None = None  # its name among the inputs; None: it lies in no file
    row: int | None = None  # a line counts from 1, a row of Parquet or a hub from 0
    own_id: str | None = None  # what the row calls itself in its field "id"


def read_document(
    source: Source, cursor: Cursor | None, number: int, *, rows_before: int | None = None
) -> tuple[str, RowLocation] | None:
    """The text `number` behind a cursor; None when the source cannot be read row by row.

    `rows_before` tells how many lines of its file lie before a part of one; None: they are counted.
    """
    steps, one = _rebatched(source, _STEP), _rebatched(source, 1)
    if steps is None or one is None:
        return None
    cursor, number, _ = _batch_with(steps, cursor, number)
    cursor, number, batch = _batch_with(one, cursor, number)
    return str(batch.texts[number].as_py()), _place(one, cursor, batch.cursor, rows_before)


def knows_rows(source: object) -> bool:
    """Whether a source can be cut, and tells the row of each of its documents."""
    if isinstance(source, ConcatSource):
        return all(map(knows_rows, source.parts))
    return isinstance(source, FileSource | HubParquetSource | HubPiece)


def _batch_with(
    source: Source, cursor: Cursor | None, number: int
) -> tuple[Cursor | None, int, TextBatch]:
    """The batch that holds text `number` behind a cursor: the cursor before it, which of its texts
    it is, and itself."""
    for batch in source.batches(cursor):
        if number < len(batch.texts):
            return cursor, number, batch
        number -= len(batch.texts)
        cursor = batch.cursor
    raise SourceError(f"source {source.name!r}: ends before a document that it had; it changed")


def _rebatched(source: Source, num_rows: int) -> Source | None:
    """The same source in batches of so many rows."""
    if isinstance(source, ConcatSource):
        parts = [_rebatched(part, num_rows) for part in source.parts]
        known = [part for part in parts if part is not None]
        return ConcatSource(known, name=source.name) if len(known) == len(parts) else None
    if isinstance(source, FileSource):
        return source.with_limits(replace(source.limits, num_documents=num_rows))
    if isinstance(source, HubPiece):
        return cast(Source, replace(source, limits=replace(source.limits, num_documents=num_rows)))
    if isinstance(source, HubParquetSource | HubSource | MemorySource):
        other: Any = copy(source)
        other._limits = replace(other._limits, num_documents=num_rows)
        if isinstance(source, HubParquetSource):
            other._files = None  # each of them has limits too
        return cast(Source, other)
    return None


def _place(
    source: Source, before: Cursor | None, behind: Cursor, rows_before: int | None
) -> RowLocation:
    """Of the row that ends at the cursor `behind`; the row before it ended at `before`."""
    if isinstance(source, ConcatSource):
        number: Any = behind["part"]
        inner: Any = before["cursor"] if before and before["part"] == number else None
        return _place(source.parts[number], inner, cast(Cursor, behind["cursor"]), rows_before)
    if isinstance(source, FileSource):
        file = next(one for one in source.files if one.name == behind["file"])
        start: Any = before["position"] if before and before["file"] == file.name else None
        place = _in_file(file, start, cast(dict[str, Any], behind["position"]), rows_before)
        # A line of plain text names itself nowhere, whatever it looks like.
        return replace(place, own_id=None) if source.settings["kind"] == "text" else place
    if isinstance(source, MemorySource):
        row = cast(int, behind["documents"]) - 1
        return RowLocation(id=f"{source.name}: document {row}", row=row)
    if isinstance(source, HubSource):
        row = cast(int, behind["rows"]) - 1
        return RowLocation(id=f"{source.describe()['dataset']}:row {row}", row=row)
    return _in_hub(source, cast(str, behind["file"]), cast(dict[str, int], behind["position"]))


def _in_file(
    file: InputFile, start: dict[str, Any] | None, stop: dict[str, Any], rows_before: int | None
) -> RowLocation:
    """By the kind of position that a reader of files gives."""
    if "documents" in stop:
        return RowLocation(id=file.name, file=file.name)
    if "row_group" in stop:
        with open_parquet(file) as parquet:
            row = group_edges(parquet.metadata)[stop["row_group"]] + stop["rows"] - 1
            own = None
            if _ID in parquet.schema_arrow.names:
                column = parquet.read_row_group(stop["row_group"], columns=[_ID]).column(0)
                own = column[stop["rows"] - 1].as_py()
        return RowLocation(id=f"{file.name}:row {row}", file=file.name, row=row, own_id=_named(own))
    line = stop["lines"]
    owned = LineRange(stop["start"], stop["stop"]) if "start" in stop else None
    if owned is not None:
        line += lines_before(file, owned) if rows_before is None else rows_before
    first = start["bytes"] if start else 0 if owned is None else line_start(file, owned)
    own = _own_id(_last_line(file, first or 0, stop["bytes"]))
    return RowLocation(id=f"{file.name}:{line}", file=file.name, row=line, own_id=own)


def _in_hub(source: Source, file: str, position: dict[str, int]) -> RowLocation:
    """A row of a hub's Parquet file; its footer tells how many lie before its row group."""
    from shardmill.sources.formats.hub_parquet import footer_of

    pieces = source.files() if isinstance(source, HubParquetSource) else (cast(HubPiece, source),)
    piece = next(one for one in pieces if one.file.path == file)
    edges = group_edges(footer_of(piece.file).metadata)
    row = edges[position["row_group"]] + position["rows"] - 1
    return RowLocation(id=f"{piece.dataset}/{file}:row {row}", file=file, row=row)


def _last_line(file: InputFile, start: int, stop: int) -> bytes:
    """The last line of these bytes; blank ones may lie before it."""
    found = b"".join(_bytes(file, start, stop))
    return found.strip().rpartition(b"\n")[2]


def _bytes(file: InputFile, start: int, stop: int) -> Iterator[bytes]:
    for chunk in read_chunks(file, start, 2**16, stop):
        yield chunk[: stop - start]
        start += len(chunk)
        if start >= stop:
            return


def _own_id(line: bytes) -> str | None:
    try:
        return _named(read_object(line).get(_ID))
    except BadJsonError:
        return None


def _named(value: object) -> str | None:
    known = isinstance(value, str | int) and not isinstance(value, bool)
    return (value if isinstance(value, str) else json.dumps(value)) if known else None
