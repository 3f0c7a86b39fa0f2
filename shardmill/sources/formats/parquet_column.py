"""One column of an open Parquet file as documents, wherever the file lies.

In: a `ParquetFile` and a range of its row groups.  Out: documents of one column, and a drop
"no_text" for each null.
Promise: row groups in order, in pieces of about one batch, so that memory does not grow with the
file, only with its largest page, and one beyond the limits is refused before it is read (when the
file is on this machine); only the column is read. String, binary and dictionary columns of all
widths are one to us. A drop's id is "part.parquet:row 40", counted from 0 through the file, also
when only some row groups are read.
Not here: opening files; nested columns.

How large the pages of a Parquet column are, told without reading them.

In: an open file and the place of a column chunk.  Out: the bytes of each page, unpacked.
Promise: only the headers are read, some dozen bytes a page. What is no page header ends the list:
whoever reads the pages will say what is wrong with them.
Not here: pages themselves (Arrow reads them, each whole).

A header is a struct in Thrift's compact protocol: fields, each a byte (the step from the last
field's number in the high half, the type in the low half) and a value. Of a page, fields 2 and 3
are the sizes, unpacked and as stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.records import JSON, Drop, TextBatch
from shardmill.sources.batches import BatchLimits, counts_of, cut, runs, too_large
from shardmill.sources.cleaning import byte_lengths, clean
from shardmill.storage.files import unreadable

_HEADER_BYTES = 2**16  # longer ones hold statistics of odd length
_UNPACKED, _STORED = 2, 3
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_FIXED = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8}
_MOST_DEPTH = 8


class _NoHeader(Exception):
    """Inside this file only."""


def page_sizes(stream: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """Unpacked bytes of each page between two places of a file, in order."""
    while start < stop:
        stream.seek(start)
        header = _Header(stream.read(min(_HEADER_BYTES, stop - start)))
        try:
            sizes = header.struct(0)
        except (_NoHeader, IndexError):
            return
        if sizes.get(_STORED, -1) < 0 or sizes.get(_UNPACKED, -1) < 0:
            return
        yield sizes[_UNPACKED]
        start += header.place + sizes[_STORED]


@dataclass(slots=True)
class _Header:
    """Bytes, and how many of them are read."""

    data: bytes
    place: int = 0

    def struct(self, depth: int) -> dict[int, int]:
        """The whole numbers among the fields of a struct, by field; the rest is passed over."""
        numbers: dict[int, int] = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self._signed()
            if kind in (_I16, _I32, _I64):
                numbers[field] = self._signed()
            else:
                self._skip(kind, depth)
        return numbers

    def _skip(self, kind: int, depth: int) -> None:
        if kind in _FIXED:
            self.place += _FIXED[kind]
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            length = self._varint()  # first: it moves the place itself
            self.place += length
        elif kind == _STRUCT and depth < _MOST_DEPTH:
            self.struct(depth + 1)
        else:  # pages have neither lists nor maps in their headers
            raise _NoHeader

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _signed(self) -> int:
        """Zigzag: 0, -1, 1, -2, ... are written as 0, 1, 2, 3, ..."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


MOST_PARTS = 256
"""Of one file, when it is divided as finely as possible."""
_READ_ROWS = 1024
"""Decoded at a time at least, where batches are smaller: each time costs as much as many rows."""
_PAGE = 4
"""A page, which Arrow holds whole, may be so many times as large as a document."""


class Groups(NamedTuple):
    """Consecutive row groups of a file, half-open."""

    start: int
    stop: int

    def __str__(self) -> str:
        if self.stop == self.start + 1:
            return f"row group {self.start}"
        return f"row groups {self.start} to {self.stop - 1}"

    def options(self) -> dict[str, JSON]:
        """For `describe`."""
        if self.stop == self.start + 1:
            return {"row_group": self.start}
        return {"row_groups": [self.start, self.stop]}

    def parts(self) -> list[Groups]:
        """One row group each, or runs of them when they are many: each part reads the footer."""
        step = -(-(self.stop - self.start) // MOST_PARTS)
        starts = range(self.start, self.stop, max(step, 1))
        return [Groups(group, min(group + step, self.stop)) for group in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What is read of a file."""

    field: str
    file: str  # its name in the ids of drops
    where: str  # the file as a person finds it, for errors
    limits: BatchLimits
    groups: Groups | None = None  # these row groups alone; None: all
    path: Path | None = None  # of a file on this machine


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece of a column begins."""

    file: str
    group: int
    rows_before: int  # in earlier row groups
    row: int  # in this row group


def read_column(parquet: pq.ParquetFile, column: Column, position: JSON) -> Iterator[TextBatch]:
    """Batches from `position` on (None: the start); their cursors are positions: a row group and
    the rows of it that were read."""
    edges = group_edges(parquet.metadata)
    groups, skip = groups_from(edges, column, position)
    field = checked_field(parquet.schema_arrow, column.field, column.where)
    for number in groups:
        _check_group(parquet.metadata, number, column)
        for start, texts in _pieces(parquet, field, number, column.limits):
            done = min(max(skip - start, 0), len(texts))
            place = _Place(column.file, number, edges[number], start + done)
            yield from _batches(texts.slice(done), place, column.limits)
        skip = 0


def _check_group(metadata: pq.FileMetaData, number: int, column: Column) -> None:
    """Refuse a row group with a document that is surely too large, or a page that is."""
    limits, num_rows = column.limits, metadata.row_group(number).num_rows
    most, most_page = limits.most_bytes, limits.most_input(_PAGE)
    if most is None or most_page is None:
        return
    where = f"{column.where}, row group {number}"
    size = column_bytes(metadata, number, column.field)
    if num_rows and size > most * num_rows:  # an empty group has a few bytes, and no document
        found = f"{size:,} bytes in {num_rows:,} document{'s' if num_rows > 1 else ''}"
        raise too_large(where, found, most)
    if size > most_page and column.path is not None:
        page = _largest_page(column.path, column_chunks(metadata, number, column.field))
        if page > most_page:
            raise too_large(where, f"a page of {page:,} bytes, which is read whole", most_page)


def _largest_page(path: Path, chunks: list[pq.ColumnChunkMetaData]) -> int:
    try:
        with path.open("rb") as stream:
            return max(
                (size for chunk in chunks for size in page_sizes(stream, *chunk_range(chunk))),
                default=0,
            )
    except OSError as error:
        raise unreadable(path, error) from error


def groups_from(edges: list[int], column: Column, position: JSON) -> tuple[range, int]:
    """The row groups still to be read, and the rows of the first that are done."""
    num_groups = len(edges) - 1
    all_groups = range(num_groups) if column.groups is None else range(*column.groups)
    group, skip = all_groups.start, 0
    if position is not None:
        group, skip = counts_of(position, ("row_group", "rows"), column.file)
    if (
        not all_groups.start <= group <= all_groups.stop
        or all_groups.stop > num_groups
        or edges[group] + skip > edges[all_groups.stop]
    ):
        raise SourceError(
            f"{column.where}: the cursor stands at row {skip:,} of row group {group}, but "
            f"there are {num_groups} row groups with {edges[-1]:,} rows"
            f"{'' if column.groups is None else f', and only {column.groups} is read'}; "
            "resume with the input the cursor came from"
        )
    return range(group, all_groups.stop), skip


def group_edges(metadata: pq.FileMetaData) -> list[int]:
    """Rows before each row group, and in all."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [0, *accumulate(group.num_rows for group in groups)]


def cut_groups(
    metadata: pq.FileMetaData, field: str, groups: Groups | None, num_bytes: int
) -> list[Groups]:
    """Runs of row groups whose column takes about `num_bytes` before compression."""
    start, stop = groups or (0, metadata.num_row_groups)
    sizes = [column_bytes(metadata, group, field) for group in range(start, stop)]
    return [Groups(start + first, start + last) for first, last in runs(sizes, num_bytes)]


def column_bytes(metadata: pq.FileMetaData, group: int, field: str) -> int:
    """Size of the column in a row group, before compression."""
    chunks = column_chunks(metadata, group, field)
    return sum(chunk.total_uncompressed_size for chunk in chunks)


def column_chunks(
    metadata: pq.FileMetaData, group: int, field: str
) -> list[pq.ColumnChunkMetaData]:
    row_group = metadata.row_group(group)
    chunks = map(row_group.column, range(row_group.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema == field]


def chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column chunk lies in its file, its dictionary included."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def checked_field(schema: pa.Schema, field: str, where: str) -> str:
    """Refuse a column that is not there, or twice, or holds no text."""
    found = [column.type for column in schema if column.name == field]
    if len(found) != 1:
        names = ", ".join(map(repr, schema.names))
        raise SourceError(f"{where}: {len(found)} columns {field!r}, wanted one; found {names}")
    if not (is_text(found[0]) or _is_binary(found[0]) or pa.types.is_null(found[0])):
        raise SourceError(
            f"{where}: the column {field!r} holds {found[0]}, wanted strings or bytes; "
            "name another with field="
        )
    return field


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _is_binary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_binary(kind.value_type)
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks) or pa.types.is_fixed_size_binary(kind)


def _pieces(
    parquet: pq.ParquetFile, field: str, group: int, limits: BatchLimits
) -> Iterator[tuple[int, pa.Array]]:
    """A row group in pieces, each with the number of its first row in the group."""
    num_rows = parquet.metadata.row_group(group).num_rows
    row_bytes = column_bytes(parquet.metadata, group, field) / max(num_rows, 1)
    wanted = int(limits.num_bytes / max(row_bytes, 1))
    size = min(max(wanted, 1), max(limits.num_documents, _READ_ROWS))
    start = 0
    for batch in parquet.iter_batches(size, row_groups=[group], columns=[field]):
        yield start, batch.column(0).cast(pa.large_binary())
        start += batch.num_rows


def _batches(
    column: pa.LargeBinaryArray, place: _Place, limits: BatchLimits
) -> Iterator[TextBatch]:
    for start, stop in cut(byte_lengths(column), limits):
        raw = column.slice(start, stop - start)
        missing: list[int] = []
        if raw.null_count:
            missing = np.flatnonzero(raw.is_null().to_numpy(zero_copy_only=False)).tolist()
        first = place.rows_before + place.row + start
        cleaned = clean(raw.drop_null() if missing else raw)
        yield TextBatch(
            texts=cleaned.texts,
            num_read=len(raw),
            counts=cleaned.counts,
            drops=tuple(
                Drop(id=f"{place.file}:row {first + row}", reason="no_text") for row in missing
            ),
            cursor={"row_group": place.group, "rows": place.row + stop},
        )
