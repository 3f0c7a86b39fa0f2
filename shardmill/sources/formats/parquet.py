"""Parquet files: one column as documents, or whole rows, wherever the file is.

Only footers and the needed column chunks are read, row group after row group, in pieces of about
one batch, so memory grows only with the largest page. Footers are remembered. Remote files are read
by byte ranges that are fetched ahead. Rows count from 0 through the whole file.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, Drop, OffsetArray, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    byte_lengths,
    choose_field,
    counts_of,
    cut,
    make_batch,
    null_rows,
    runs,
    to_binary,
    too_large,
)
from shardmill.sources.formats.jsonl import Object, own_id
from shardmill.sources.source import FileSource, InputRow, RowLocation, RowTable, TableFormat
from shardmill.storage.files import Endings, InputFile, Where, unreadable
from shardmill.storage.hub import HubFile, fetch_range
from shardmill.storage.object_store import ObjectPath, open_object
from shardmill.storage.ranges import BLOCK_BYTES, Range, RangedFile, blocks_of

MOST_RANGES = 256
"""Ranges of one file, when it is split as finely as possible: each reads the footer."""
_READ_BYTES = 2**20  # else all of a column chunk is fetched before its first row
_READ_ROWS = 1024  # decoded at a time at least, where batches are smaller: each time has a cost
_PAGE = 4  # a page, which Arrow holds whole, may be this many times as large as a document
_FOOTER_BYTES = 16 * 2**20  # of remembered footers
_serialized_size = attrgetter("serialized_size")


ParquetInput = InputFile | HubFile


_footers: dict[Hashable, pq.FileMetaData] = {}  # in the order of their last use
_footers_lock = threading.Lock()


def _footer(file: ParquetInput) -> pq.FileMetaData:
    """Remembered for the files used last: row groups of one file are often read in turn, and the
    footer of a thousand of them takes as long as a tenth of a chunk."""
    key: Hashable = file.place
    if isinstance(file.place, Path):
        found = file.place.stat()
        key = (file.place, found.st_ino, found.st_size, found.st_mtime_ns)
    with _footers_lock:
        footer = _footers.pop(key, None)
    if footer is None and isinstance(file.place, Path):
        footer = pq.read_metadata(file.place)
    elif footer is None:
        with _open_ranges(file) as stream, pq.ParquetFile(stream, pre_buffer=False) as parquet:
            footer = parquet.metadata
    with _footers_lock:
        _footers[key] = footer
        while len(_footers) > 1 and sum(map(_serialized_size, _footers.values())) > _FOOTER_BYTES:
            del _footers[next(iter(_footers))]
    return footer


def _open_ranges(file: ParquetInput, blocks: Sequence[Range] = ()) -> RangedFile:
    if isinstance(file, InputFile):
        return open_object(cast(ObjectPath, file.place), file.num_bytes, blocks)
    num_bytes = file.num_bytes
    retry = partial(file.retry.call, what=str(file))
    return RangedFile(partial(fetch_range, file, num_bytes), num_bytes, blocks, retry=retry)


@contextmanager
def open_parquet(
    file: ParquetInput, ahead: Callable[[pq.FileMetaData], Iterable[Range]] | None = None
) -> Iterator[pq.ParquetFile]:
    """An open file. `ahead` gives the byte ranges that will be read; of a remote file they are
    fetched ahead."""
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": _READ_BYTES}
    options["page_checksum_verification"] = True
    try:
        if isinstance(file.place, Path):
            with pq.ParquetFile(file.place, metadata=_footer(file), **options) as parquet:
                yield parquet
            return
        metadata, num_bytes = _footer(file), file.num_bytes
        wanted = [] if ahead is None else ahead(metadata)
        blocks = blocks_of((start, min(stop, num_bytes)) for start, stop in wanted)
        with (
            _open_ranges(file, blocks) as stream,
            pq.ParquetFile(stream, metadata=metadata, **options) as parquet,
        ):
            yield parquet
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow raises a bare OSError for damaged bytes; the system and the network raise
        # subclasses, and what a remote read raised passes through Arrow as it is.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno):
            if isinstance(file.place, Path):
                raise unreadable(file.place, error) from error
            raise
        remedy = "fetch or write it again"
        if not isinstance(file, InputFile):
            remedy = "the dataset must be corrected, or name another {revision}"
        raise SourceError(
            f"{file.place}: not a readable Parquet file ({error}); {remedy}", revision=...
        ) from error


@dataclass(frozen=True, kw_only=True)
class ParquetFormat(TableFormat):
    """Parquet. A position is a row group and how many of its rows were read."""

    kind = "parquet"
    endings = (".parquet",)

    field: str | None = None  # the column that holds the text; None: found in the first file, or
    # whole rows are read
    groups: Range | None = None  # only these row groups, half-open; None: all

    @property
    def range_name(self) -> str:
        if self.groups is None:
            return ""
        first, last = self.groups[0], self.groups[1] - 1
        return f":row group {first}" if first == last else f":row groups {first} to {last}"

    def options(self) -> dict[str, JSON]:
        if self.groups is None:
            return {"field": self.field}
        if self.groups[1] == self.groups[0] + 1:
            return {"field": self.field, "row_group": self.groups[0]}
        return {"field": self.field, "row_groups": list(self.groups)}

    def settled(self, files: Sequence[ParquetInput], _limits: BatchLimits, /) -> Self:
        """With a column that is in the first file."""
        first = files[0]
        field = choose_field(text_columns(first), wanted=self.field, where=str(first.place))
        return replace(self, field=field)

    def size_hint(self, file: ParquetInput) -> int:
        """The size before compression of the column, or of all for whole rows."""
        return sum(self._sizes(file))

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        """By the share of its rows."""
        group, rows = counts_of(position, ("row_group", "rows"), file.name)
        with open_parquet(file) as parquet:
            edges = _row_edges(parquet.metadata)
        start, stop = self.groups or (0, len(edges) - 1)
        done = edges[group] + rows - edges[start]
        return self.size_hint(file) * done // max(edges[stop] - edges[start], 1)

    def split(self, file: ParquetInput, num_bytes: int | None, /) -> Sequence[Self]:
        """Runs of row groups; reads the footer. A file without row groups is one piece."""
        sizes = self._sizes(file)
        if num_bytes is None:
            step = max(-(-len(sizes) // MOST_RANGES), 1)
            found = [(n, min(n + step, len(sizes))) for n in range(0, len(sizes), step)]
        else:
            found = list(runs(sizes, num_bytes))
            if len(found) == 1:
                return (self,)
        first = 0 if self.groups is None else self.groups[0]
        parts = [(first + start, first + stop) for start, stop in found]
        return [replace(self, groups=groups) for groups in parts] or (self,)

    def read(self, file: ParquetInput, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        column = self.field
        assert column is not None

        def ahead(metadata: pq.FileMetaData) -> Iterator[Range]:
            for group in self._left(file, _row_edges(metadata), position)[0]:
                yield from map(_chunk_range, _chunks(metadata, group, column))

        with open_parquet(file, ahead) as parquet:
            metadata = parquet.metadata
            edges = _row_edges(metadata)
            _check_column(parquet.schema_arrow, column, str(file.place))

            def num_rows(group: int) -> int:
                self._check_sizes(file, metadata, group, column, limits)
                num_bytes = _column_bytes(metadata, group, column)
                return _rows_at_a_time(num_bytes, metadata.row_group(group).num_rows, limits)

            for group, start, batch in self._left_rows(parquet, file, position, num_rows, [column]):
                texts = to_binary(batch.column(0))
                for first, stop in cut(byte_lengths(texts), limits):
                    some = texts.slice(first, stop - first)
                    row = edges[group] + start + first
                    ids = (_row_id(file, row + number) for number in null_rows(some))
                    drops = [Drop(id=id, reason="no_text") for id in ids]
                    after: Cursor = {"row_group": group, "rows": start + stop}
                    yield make_batch(some, after, drops=drops)

    def tables(
        self,
        file: ParquetInput,
        position: JSON,
        limits: BatchLimits,
        columns: Sequence[str] | None,
    ) -> Iterator[RowTable]:
        schema = self.schema_of(file)
        names = [name for name in schema.names if columns is None or name in columns]

        def ahead(metadata: pq.FileMetaData) -> Iterator[Range]:
            for group in self._left(file, _row_edges(metadata), position)[0]:
                chunks = [chunk for name in names for chunk in _chunks(metadata, group, name)]
                spans = [_chunk_range(chunk) for chunk in chunks]
                whole = min(spans)[0], max(stop for _, stop in spans)
                # Columns are read in turn. Going back and forth between the blocks of two of them
                # would fetch blocks several times, so only the longest is fetched ahead.
                longest = max(spans, key=lambda span: span[1] - span[0])
                yield whole if whole[1] - whole[0] <= BLOCK_BYTES else longest

        with open_parquet(file, ahead) as parquet:
            metadata = parquet.metadata
            edges = _row_edges(metadata)

            def num_rows(group: int) -> int:
                for name in names:
                    self._check_sizes(file, metadata, group, name, limits)
                num_bytes = sum(_column_bytes(metadata, group, name) for name in names)
                return _rows_at_a_time(num_bytes, metadata.row_group(group).num_rows, limits)

            for group, start, batch in self._left_rows(parquet, file, position, num_rows, names):
                rows = batch.select(names)
                for first, stop in cut(_row_bytes(rows), limits):
                    after: JSON = {"row_group": group, "rows": start + stop}
                    some = rows.slice(first, stop - first)
                    yield RowTable(some, after, edges[group] + start + first, ())

    def schema_of(self, file: ParquetInput) -> pa.Schema:
        with open_parquet(file) as parquet:
            found: pa.Schema = parquet.schema_arrow
            return found

    def drop_of(self, file: ParquetInput, row: int, reason: str) -> Drop:
        return Drop(id=_row_id(file, row), reason=reason)

    def rows(self, file: ParquetInput, position: JSON, _limits: BatchLimits) -> Iterator[InputRow]:
        """Whole rows.

        Arrow writes every field of a struct in every row, null where the row had none. So a null
        inside a list or object counts as absent, except for a message's "content". Columns stay.
        """

        def ahead(metadata: pq.FileMetaData) -> Iterator[Range]:
            for group in self._left(file, _row_edges(metadata), position)[0]:
                spans = [_chunk_range(chunk) for chunk in _chunks(metadata, group, None)]
                whole = min(spans)[0], max(stop for _, stop in spans)
                # Columns are read in turn, so of a row group that is more than a block the blocks
                # would be fetched several times.
                if whole[1] - whole[0] <= BLOCK_BYTES:
                    yield whole

        with open_parquet(file, ahead) as parquet:
            names = parquet.schema_arrow.names
            if len(set(names)) < len(names):
                twice = max(names, key=names.count)
                raise SourceError(f"{file.place}: two columns {twice!r:.60}; rename one of them")
            edges = _row_edges(parquet.metadata)

            def num_rows(group: int) -> int:
                stored = parquet.metadata.row_group(group)
                return _rows_at_a_time(stored.total_byte_size, stored.num_rows, DEFAULT_LIMITS)

            for group, start, batch in self._left_rows(parquet, file, position, num_rows):
                try:
                    found = batch.to_pylist()
                except ValueError as error:  # not UTF-8, or two fields of one name in a struct
                    raise SourceError(
                        f"{file.place}, row group {group}, rows {start:,} to "
                        f"{start + batch.num_rows:,}: cannot be read: {error}; write the file again"
                    ) from error
                for row, value in enumerate(found, start):
                    after: JSON = {"row_group": group, "rows": row + 1}
                    yield InputRow(without_nulls(value), _row_id(file, edges[group] + row), after)

    def _left_rows(
        self,
        parquet: pq.ParquetFile,
        file: ParquetInput,
        position: JSON,
        num_rows: Callable[[int], int],
        columns: list[str] | None = None,
    ) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """The rows that are left to read, `num_rows(group)` at a time: the row group, its rows
        before these, and these."""
        groups, skip = self._left(file, _row_edges(parquet.metadata), position)
        for group in groups:
            start = 0
            size = num_rows(group)
            # Arrow has a thread for each column: for a single one it would only be another core.
            for batch in parquet.iter_batches(
                size, row_groups=[group], columns=columns, use_threads=columns is None
            ):
                done = min(max(skip - start, 0), batch.num_rows)
                yield group, start + done, batch.slice(done)
                start += batch.num_rows
            skip = 0

    def locate(
        self, file: ParquetInput, _before: JSON, after: JSON, _rows_before: int | None, /
    ) -> RowLocation:
        group, rows = counts_of(after, ("row_group", "rows"), file.name)
        with open_parquet(file) as parquet:
            row = _row_edges(parquet.metadata)[group] + rows - 1
            own = None
            if isinstance(file, InputFile) and "id" in parquet.schema_arrow.names:
                own = parquet.read_row_group(group, columns=["id"]).column(0)[rows - 1].as_py()
        id = _row_id(file, row)
        return RowLocation(id=id, file=file.name, row=row, own_id=own_id(own))

    def _sizes(self, file: ParquetInput) -> list[int]:
        """The size before compression of each row group, of the column or of all."""
        return [size for _, size in row_groups(file, self.field)][slice(*(self.groups or (None,)))]

    def _left(self, file: ParquetInput, edges: list[int], position: JSON) -> tuple[range, int]:
        """The row groups that are left to read, and how many rows of the first are done."""
        num_groups = len(edges) - 1
        start, stop = self.groups or (0, num_groups)
        group, skip = start, 0
        if position is not None:
            group, skip = counts_of(position, ("row_group", "rows"), file.name)
        if not start <= group <= stop or stop > num_groups or edges[group] + skip > edges[stop]:
            only = "" if self.groups is None else f", and only {self.range_name[1:]} is read"
            raise SourceError(
                f"{file.place}: the cursor is at row {skip:,} of row group {group}, but there are "
                f"{num_groups} row groups with {edges[-1]:,} rows{only}; resume with the input the "
                "cursor came from"
            )
        return range(group, stop), skip

    def _check_sizes(
        self,
        file: ParquetInput,
        metadata: pq.FileMetaData,
        group: int,
        column: str,
        limits: BatchLimits,
    ) -> None:
        """Refuse a row group with a document or a page that is certainly too large. Pages are only
        looked at in a file on this machine."""
        most, most_page = limits.most_bytes, limits.most_input(_PAGE)
        if most is None or most_page is None:
            return
        where, num_rows = f"{file.place}, row group {group}", metadata.row_group(group).num_rows
        size = _column_bytes(metadata, group, column)
        if num_rows and size > most * num_rows:  # an empty row group has a few bytes
            found = f"{size:,} bytes in {num_rows:,} document{'s' if num_rows > 1 else ''}"
            raise too_large(where, found, most)
        if size <= most_page or not isinstance(file.place, Path):
            return
        with file.place.open("rb") as stream:
            for chunk in _chunks(metadata, group, column):
                page = max(_page_sizes(stream, *_chunk_range(chunk)), default=0)
                if page > most_page:
                    raise too_large(
                        where, f"a page of {page:,} bytes, which is read whole", most_page
                    )


class ParquetSource(FileSource):
    """Parquet files. `field=None`: "text", else the first string column of the first file."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(where, ParquetFormat(field=field), ext=ext, name=name, limits=limits)


RowGroups = tuple[tuple[int, int], ...]


def row_groups(file: ParquetInput, column: str | None) -> RowGroups:
    """Rows of each row group, and bytes before compression of a column, or of all. Those of remote
    files are remembered: to cut a source takes several looks at them, and a footer is large."""
    return (_row_groups if isinstance(file.place, Path) else _known_groups)(file, column)


def _row_groups(file: ParquetInput, column: str | None) -> RowGroups:
    with open_parquet(file) as parquet:
        metadata = parquet.metadata
        return tuple(
            (metadata.row_group(group).num_rows, _column_bytes(metadata, group, column))
            for group in range(metadata.num_row_groups)
        )


_known_groups = lru_cache(maxsize=2**12)(_row_groups)


def text_columns(file: ParquetInput) -> list[tuple[str, bool]]:
    """Each column, and whether it holds text."""
    with open_parquet(file) as parquet:
        return [(one.name, _is_one_of(one.type, _TEXT_TYPES)) for one in parquet.schema_arrow]


def _row_id(file: ParquetInput, row: int) -> str:
    return file.row_id(row) if isinstance(file, HubFile) else f"{file.name}:row {row}"


def _rows_at_a_time(num_bytes: int, num_rows: int, limits: BatchLimits) -> int:
    """Rows of a row group that make about one batch."""
    wanted = int(limits.num_bytes / max(num_bytes / max(num_rows, 1), 1))
    return min(max(wanted, 1), max(limits.num_documents, _READ_ROWS))


def _row_bytes(rows: pa.RecordBatch) -> OffsetArray:
    """About how many bytes the texts of each row have, and a byte for each other value."""
    sizes = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        is_text = _is_one_of(column.type, (*_TEXT_TYPES, *_BINARY_TYPES))
        sizes += byte_lengths(to_binary(column)) if is_text else 1
    return sizes


def _row_edges(metadata: pq.FileMetaData) -> list[int]:
    """Rows before each row group, and in all."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [0, *accumulate(group.num_rows for group in groups)]


def _column_bytes(metadata: pq.FileMetaData, group: int, column: str | None) -> int:
    """Size of a column in a row group, before compression."""
    return sum(chunk.total_uncompressed_size for chunk in _chunks(metadata, group, column))


def _chunks(
    metadata: pq.FileMetaData, group: int, column: str | None
) -> list[pq.ColumnChunkMetaData]:
    row_group = metadata.row_group(group)
    chunks = map(row_group.column, range(row_group.num_columns))
    if column is None:
        return list(chunks)
    inside = f"{column}."  # of a struct or a list
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(inside)]


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    """The bytes of a column chunk in its file, its dictionary included."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def _check_column(schema: pa.Schema, column: str, where: str) -> None:
    """Refuse a column that is missing, there twice, or not text."""
    found = [one.type for one in schema if one.name == column]
    if len(found) != 1:
        names = ", ".join(map(repr, schema.names))
        raise SourceError(f"{where}: {len(found)} columns {column!r}, wanted one; found {names}")
    if not _is_one_of(found[0], (*_TEXT_TYPES, *_BINARY_TYPES, pa.types.is_null)):
        raise SourceError(
            f"{where}: the column {column!r} holds {found[0]}, wanted strings or bytes; "
            "name another with {field}",
            field=...,
        )


_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARY_TYPES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def _is_one_of(kind: pa.DataType, checks: Iterable[Callable[[pa.DataType], bool]]) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(check(plain) for check in checks)


def without_nulls(row: Object) -> Object:
    """A copy in which objects inside lists and objects lack their null fields; see
    `ParquetFormat.rows`."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(part)
            for key, part in value.items()
            if part is not None or (key == "content" and "role" in value)
        }
    return value


# Page sizes, read from the pages' headers without the pages. A header is a struct in Thrift's
# compact protocol: fields, each a byte (the step from the last field's number in the high half, the
# type in the low half) and a value. Fields 2 and 3 are a page's sizes, decompressed and stored.

_HEADER_BYTES = 2**16  # longer ones hold statistics of odd length
_UNPACKED, _STORED = 2, 3
_I16, _I32, _I64, _BINARY, _STRUCT = 4, 5, 6, 8, 12
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of the values true, false, byte and double
_MOST_DEPTH = 8


def _page_sizes(stream: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """Decompressed bytes of each page between two offsets of a file, in order. Bytes that are not
    a page header end the list: reading the pages will report them."""
    while start < stop:
        stream.seek(start)
        header = io.BytesIO(stream.read(min(_HEADER_BYTES, stop - start)))
        try:
            sizes = _read_struct(header, 0)
        except (ValueError, IndexError, OverflowError):
            return
        if sizes.get(_STORED, -1) < 0 or sizes.get(_UNPACKED, -1) < 0:
            return
        yield sizes[_UNPACKED]
        start += header.tell() + sizes[_STORED]


def _read_struct(header: BinaryIO, depth: int) -> dict[int, int]:
    """The whole numbers among the fields of a struct, by field; other fields are skipped."""
    numbers: dict[int, int] = {}
    field = 0
    while head := header.read(1)[0]:
        kind, step = head & 15, head >> 4
        field = field + step if step else _zigzag(header)
        if kind in (_I16, _I32, _I64):
            numbers[field] = _zigzag(header)
        elif kind == _BINARY:
            length = _varint(header)  # first: it moves the offset itself
            header.seek(length, io.SEEK_CUR)
        elif kind == _STRUCT and depth < _MOST_DEPTH:
            _read_struct(header, depth + 1)
        elif kind in _FIXED:
            header.seek(_FIXED[kind], io.SEEK_CUR)
        else:  # page headers have neither lists nor maps
            raise ValueError("not a page header")
    return numbers


def _varint(header: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = header.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7


def _zigzag(header: BinaryIO) -> int:
    """0, -1, 1, -2, ... are written as 0, 1, 2, 3, ..."""
    value = _varint(header)
    return (value >> 1) ^ -(value & 1)
