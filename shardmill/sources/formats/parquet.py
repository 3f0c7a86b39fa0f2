"""Parquet columns as documents.

In: `.parquet` files.  Out: documents of one column, and a drop "no_text" for each null.
Promise: as `parquetcolumn`, for files on this machine or on object storage, where only footers and
the column are fetched; a source of few files can be divided into row groups, and a large file cut
into runs of them.
Not here: nested columns.

Parquet files that are read by ranges, wherever they lie.

In: an open `RangedFile`.  Out: its footer; an open `ParquetFile`; which ranges hold a column.
Promise: only the footer and the planned column chunks are asked for. Footers are remembered, up to
a few MiB. A damaged file is an error that names it.
Not here: how ranges are fetched, and retried.

Parquet files on object storage, opened in place.

In: a file that was listed, and what will be read of it.  Out: an open `ParquetFile`.
Promise: the footer is read once, and then only what is asked for; of a column that is named the
chunks of the wanted row groups, fetched ahead.
Not here: documents (`parquetcolumn`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.records import JSON, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, name_of
from shardmill.sources.cleaning import choose_field
from shardmill.sources.file_source import FileReader, FileSource
from shardmill.sources.formats.parquet_column import (
    Column,
    Groups,
    chunk_range,
    column_bytes,
    column_chunks,
    cut_groups,
    group_edges,
    groups_from,
    is_text,
    read_column,
)
from shardmill.storage.files import InputFile, Where, list_files, unreadable
from shardmill.storage.object_store import ObjectPath, open_object
from shardmill.storage.ranges import Range, RangedFile, blocks_of

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


Key = TypeVar("Key", bound=Hashable)

_FOOTER_BYTES = 16 * 2**20


class Footer(NamedTuple):
    num_bytes: int  # of the file
    metadata: pq.FileMetaData


class Footers(Generic[Key]):
    """The last footers that were read: row groups of one file are often read in turn."""

    def __init__(self) -> None:
        self._known: dict[Key, Footer] = {}
        self._lock = threading.Lock()

    def get(self, file: Key) -> Footer | None:
        with self._lock:
            footer = self._known.pop(file, None)
            if footer is not None:
                self._known[file] = footer  # the last one again
            return footer

    def add(self, file: Key, footer: Footer) -> None:
        with self._lock:
            self._known[file] = footer
            while len(self._known) > 1 and self._num_bytes() > _FOOTER_BYTES:
                del self._known[next(iter(self._known))]

    def _num_bytes(self) -> int:
        return sum(footer.metadata.serialized_size for footer in self._known.values())


def read_metadata(stream: RangedFile) -> pq.FileMetaData:
    with pq.ParquetFile(stream, pre_buffer=False) as parquet:
        return parquet.metadata


def parquet_of(stream: RangedFile, metadata: pq.FileMetaData) -> pq.ParquetFile:
    """A file whose footer is known."""
    return pq.ParquetFile(
        stream,
        metadata=metadata,
        pre_buffer=False,
        buffer_size=_READ_BYTES,
        page_checksum_verification=True,
    )


def column_ranges(footer: Footer, field: str, groups: Iterable[int]) -> Iterator[Range]:
    """Where a column lies in these row groups."""
    for group in groups:
        for chunk in column_chunks(footer.metadata, group, field):
            start, stop = chunk_range(chunk)
            yield start, min(stop, footer.num_bytes)


@contextmanager
def refusing_damage(where: str, remedy: str) -> Iterator[None]:
    """Errors of Arrow's own are damage; those of a fetch pass through Arrow and out as they are."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow raises OSError itself for damaged bytes, the network only ever its subclasses.
        if isinstance(error, OSError) and type(error) is not OSError:
            raise
        raise SourceError(f"{where}: not a readable Parquet file ({error}); {remedy}") from error


_footers = Footers[ObjectPath]()
_REMEDY = "write it again"


@contextmanager
def open_far_parquet(
    path: ObjectPath, num_bytes: int, column: Column | None, position: JSON
) -> Iterator[pq.ParquetFile]:
    """The file; what will be read of it from `position` on is on its way."""
    with refusing_damage(str(path), _REMEDY):
        footer = _footer_of(path, num_bytes)
        blocks = []
        if column is not None:
            groups, _ = groups_from(group_edges(footer.metadata), column, position)
            blocks = blocks_of(column_ranges(footer, column.field, groups))
        with (
            open_object(path, num_bytes, blocks) as stream,
            parquet_of(stream, footer.metadata) as parquet,
        ):
            yield parquet


def _footer_of(path: ObjectPath, num_bytes: int) -> Footer:
    footer = _footers.get(path)
    if footer is None:
        with open_object(path, num_bytes) as stream:
            footer = Footer(num_bytes, read_metadata(stream))
        _footers.add(path, footer)
    return footer
