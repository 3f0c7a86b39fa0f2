"""Parquet columns as documents.

In: `.parquet` files.  Out: documents of one column, and a drop "no_text" for each null.
Promise: as `parquetcolumn`, for files on this machine or on object storage, where only footers and
the column are fetched; a source of few files can be divided into row groups, and a large file cut
into runs of them.
Not here: nested columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.records import JSON, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.cursors import counts_of
from shardmill.sources.fields import choose_field
from shardmill.sources.files import InputFile, Where, list_files
from shardmill.sources.filesource import FileReader, FileSource
from shardmill.sources.localfiles import unreadable
from shardmill.sources.naming import name_of
from shardmill.sources.parquetcolumn import (
    Column,
    Groups,
    column_bytes,
    cut_groups,
    is_text,
    read_column,
)

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


class _ParquetReader:
    """Whole files, whose column is found once, in the first of them."""

    kind = "parquet"
    part = ""
    continues = False

    def __init__(self, first: InputFile, field: str | None, limits: BatchLimits) -> None:
        self._first = first
        self._wanted = field
        self._limits = limits
        self._found: list[str] = []  # the column, filled once for all copies

    def options(self) -> dict[str, JSON]:
        return self.settled().options()

    def size_hint(self, file: InputFile) -> int:
        return self.settled().size_hint(file)

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        return self.settled().read(file, position)

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        return self.settled().bytes_before(file, position)

    def divide(self, file: InputFile) -> Sequence[FileReader]:
        return self.settled().divide(file)

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[FileReader]:
        return self.settled().cut(file, num_bytes)

    def with_limits(self, limits: BatchLimits) -> _ParquetReader:
        reader = copy(self)
        reader._limits = limits
        return reader

    def settled(self) -> _ColumnReader:
        if not self._found:
            with open_parquet(self._first) as parquet:
                fields = ((column.name, is_text(column.type)) for column in parquet.schema_arrow)
                field = choose_field(fields, wanted=self._wanted, where=str(self._first.place))
            self._found.append(field)
        return _ColumnReader(self._found[0], self._limits)


@dataclass(frozen=True, slots=True)
class _ColumnReader:
    """A known column, of whole files or of some row groups. The position is a row group and the
    rows of it that were read."""

    field: str
    limits: BatchLimits
    groups: Groups | None = None  # these row groups alone; None: all

    @property
    def kind(self) -> str:
        return "parquet"

    @property
    def part(self) -> str:
        return "" if self.groups is None else f":{self.groups}"

    @property
    def continues(self) -> bool:
        return False  # the footer says how many rows lie before a row group

    def options(self) -> dict[str, JSON]:
        return {"field": self.field, **({} if self.groups is None else self.groups.options())}

    def size_hint(self, file: InputFile) -> int:
        """The column's size before compression."""
        with open_parquet(file) as parquet:
            groups = range(*self._groups_in(parquet))
            return sum(column_bytes(parquet.metadata, group, self.field) for group in groups)

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        """Of the last row group, its share of rows."""
        group, rows = counts_of(position, ("row_group", "rows"), file.name)
        with open_parquet(file) as parquet:
            metadata = parquet.metadata
            whole = range(self._groups_in(parquet).start, group)
            done = sum(column_bytes(metadata, number, self.field) for number in whole)
            if group < metadata.num_row_groups:
                share = rows / max(metadata.row_group(group).num_rows, 1)
                done += int(share * column_bytes(metadata, group, self.field))
        return done

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        column = Column(
            field=self.field,
            file=file.name,
            where=str(file.place),
            limits=self.limits,
            groups=self.groups,
            path=file.place if isinstance(file.place, Path) else None,
        )
        with open_parquet(file, column, position) as parquet:
            yield from read_column(parquet, column, position)

    def with_limits(self, limits: BatchLimits) -> _ColumnReader:
        return replace(self, limits=limits)

    def settled(self) -> _ColumnReader:
        return self

    def divide(self, file: InputFile) -> Sequence[FileReader]:
        """One reader per row group, or per run of them; reads the footer. A file without row groups
        is one piece."""
        with open_parquet(file) as parquet:
            found = self._groups_in(parquet)
        return [replace(self, groups=groups) for groups in found.parts()] or (self,)

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[FileReader]:
        """Runs of row groups; reads the footer."""
        with open_parquet(file) as parquet:
            found = cut_groups(parquet.metadata, self.field, self.groups, num_bytes)
        return [replace(self, groups=groups) for groups in found] if len(found) > 1 else (self,)

    def _groups_in(self, parquet: pq.ParquetFile) -> Groups:
        return self.groups or Groups(0, parquet.metadata.num_row_groups)


@contextmanager
def open_parquet(
    file: InputFile, column: Column | None = None, position: JSON = None
) -> Iterator[pq.ParquetFile]:
    """An open file. `column` and `position` say what will be read: a far file fetches it ahead."""
    path = file.place
    if not isinstance(path, Path):
        from shardmill.sources.farparquet import open_far_parquet

        with open_far_parquet(path, file.num_bytes, column, position) as parquet:
            yield parquet
        return
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
