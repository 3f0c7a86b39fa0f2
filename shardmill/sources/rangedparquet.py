"""Parquet files that are read by ranges, wherever they lie.

In: an open `RangedFile`.  Out: its footer; an open `ParquetFile`; which ranges hold a column.
Promise: only the footer and the planned column chunks are asked for. Footers are remembered, up to
a few MiB. A damaged file is an error that names it.
Not here: how ranges are fetched, and retried.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.sources.parquetcolumn import chunk_range, column_chunks
from shardmill.sources.ranges import Range, RangedFile

Key = TypeVar("Key", bound=Hashable)

_FOOTER_BYTES = 16 * 2**20
_READ_BYTES = 2**20  # of a column at a time; what is fetched at a time is in `ranges`


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
