"""Parquet columns as documents.

In: `.parquet` files.  Out: documents of one column, and a drop "no_text" for each null.
Promise: row groups in order, in pieces of about one batch, so that memory does not grow with the
file; only the column is read. String, binary and dictionary columns of all widths are one to us.
A drop's id is "part.parquet:row 40", counted from 0 through the file.
Not here: nested columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.records import JSON, Drop, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits, cut
from shardmill.sources.clean import byte_lengths, clean
from shardmill.sources.cursors import counts_of
from shardmill.sources.fields import choose_field
from shardmill.sources.files import InputFile, Where, list_files, unreadable
from shardmill.sources.filesource import FileSource
from shardmill.sources.naming import name_of

PARQUET_SUFFIXES = (".parquet",)
# Read in pieces: otherwise all of a row group's column is fetched before its first row.
_READ_BYTES = 2**20


class ParquetSource(FileSource):
    """Parquet files. `field=None`: "text", else the first string column of the first file."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        files = list_files(where, suffixes=PARQUET_SUFFIXES)
        reader = _ParquetReader(files[0], field, limits)
        super().__init__(files, reader, name=name or name_of(where), limits=limits)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece of a column begins."""

    file: str
    group: int
    rows_before: int  # in earlier row groups
    row: int  # in this row group


class _ParquetReader:
    """The position is a row group and the rows of it that were read."""

    kind = "parquet"

    def __init__(self, first: InputFile, field: str | None, limits: BatchLimits) -> None:
        self._first = first
        self._wanted = field
        self._limits = limits
        self._chosen: str | None = None

    def options(self) -> dict[str, JSON]:
        return {"field": self._field()}

    def size_hint(self, file: InputFile) -> int:
        """The column's size before compression."""
        with open_parquet(file.path) as parquet:
            groups = range(parquet.metadata.num_row_groups)
            return sum(_column_bytes(parquet, group, self._field()) for group in groups)

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        group, skip = 0, 0
        if position is not None:
            group, skip = counts_of(position, ("row_group", "rows"), file.name)
        with open_parquet(file.path) as parquet:
            field = _checked_field(parquet.schema_arrow, self._field(), file.path)
            edges = group_edges(parquet)
            if group >= len(edges) or edges[group] + skip > edges[-1]:
                raise SourceError(
                    f"{file.path}: the cursor stands at row {skip:,} of row group {group}, but "
                    f"there are {len(edges) - 1} row groups with {edges[-1]:,} rows; resume with "
                    "the input the cursor came from"
                )
            for number in range(group, len(edges) - 1):
                for start, column in self._columns(parquet, field, number):
                    done = min(max(skip - start, 0), len(column))
                    place = _Place(file.name, number, edges[number], start + done)
                    yield from self._batches(column.slice(done), place)
                skip = 0

    def _columns(
        self, parquet: pq.ParquetFile, field: str, group: int
    ) -> Iterator[tuple[int, pa.Array]]:
        """A row group in pieces, each with the number of its first row in the group."""
        num_rows = parquet.metadata.row_group(group).num_rows
        row_bytes = _column_bytes(parquet, group, field) / max(num_rows, 1)
        wanted = int(self._limits.num_bytes / max(row_bytes, 1))
        size = min(max(wanted, 1), self._limits.num_documents)
        start = 0
        for batch in parquet.iter_batches(size, row_groups=[group], columns=[field]):
            yield start, batch.column(0).cast(pa.large_binary())
            start += batch.num_rows

    def _batches(self, column: pa.LargeBinaryArray, place: _Place) -> Iterator[TextBatch]:
        for start, stop in cut(byte_lengths(column), self._limits):
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

    def _field(self) -> str:
        if self._chosen is None:
            with open_parquet(self._first.path) as parquet:
                fields = ((column.name, _is_text(column.type)) for column in parquet.schema_arrow)
                where = str(self._first.path)
                self._chosen = choose_field(fields, wanted=self._wanted, where=where)
        return self._chosen


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True
        ) as parquet:
            yield parquet
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise SourceError(
            f"{path}: not a readable Parquet file ({error}); fetch or write it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def group_edges(parquet: pq.ParquetFile) -> list[int]:
    """Rows before each row group, and in all."""
    groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
    return [0, *accumulate(group.num_rows for group in groups)]


def _column_bytes(parquet: pq.ParquetFile, group: int, field: str) -> int:
    """Size of the column in a row group, before compression."""
    metadata = parquet.metadata.row_group(group)
    columns = map(metadata.column, range(metadata.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)


def _checked_field(schema: pa.Schema, field: str, path: Path) -> str:
    found = [column.type for column in schema if column.name == field]
    if len(found) != 1:
        names = ", ".join(map(repr, schema.names))
        raise SourceError(f"{path}: {len(found)} columns {field!r}, wanted one; found {names}")
    if not (_is_text(found[0]) or _is_binary(found[0]) or pa.types.is_null(found[0])):
        raise SourceError(
            f"{path}: the column {field!r} holds {found[0]}, wanted strings or bytes; "
            "name another with field="
        )
    return field


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _is_binary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_binary(kind.value_type)
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks) or pa.types.is_fixed_size_binary(kind)
