"""Parquet files of a hub, opened in place.

In: a file of a dataset at a commit.  Out: its footer; an open `ParquetFile` for one column.
Promise: only the footer and the wanted column chunks are asked for, from the first wanted row group
on. Footers are remembered, up to a few MiB. A damaged file is an error that names it.
Not here: retries, documents; what the client does (`hub`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import SourceError
from shardmill.sources.hub import HubFile, fetch_range, file_size
from shardmill.sources.parquetcolumn import column_chunks
from shardmill.sources.ranges import Range, RangedFile, blocks_of

_FOOTER_BYTES = 16 * 2**20
_READ_BYTES = 2**20  # of the column at a time; what is fetched at a time is in `ranges`


class Footer(NamedTuple):
    num_bytes: int  # of the file
    metadata: pq.FileMetaData


class _Footers:
    """The last footers that were read: row groups of one file are often read in turn."""

    def __init__(self) -> None:
        self._known: dict[HubFile, Footer] = {}
        self._lock = threading.Lock()

    def get(self, file: HubFile) -> Footer | None:
        with self._lock:
            footer = self._known.pop(file, None)
            if footer is not None:
                self._known[file] = footer  # the last one again
            return footer

    def add(self, file: HubFile, footer: Footer) -> None:
        with self._lock:
            self._known[file] = footer
            while len(self._known) > 1 and self._num_bytes() > _FOOTER_BYTES:
                del self._known[next(iter(self._known))]

    def _num_bytes(self) -> int:
        return sum(footer.metadata.serialized_size for footer in self._known.values())


_footers = _Footers()


def footer_of(file: HubFile) -> Footer:
    """A file's size and footer: two or three requests, the first time."""
    footer = _footers.get(file)
    if footer is None:
        num_bytes = file_size(file)
        with (
            _refusing_damage(file),
            RangedFile(partial(_fetch, file, num_bytes), num_bytes) as stream,
            pq.ParquetFile(stream, pre_buffer=False) as parquet,
        ):
            footer = Footer(num_bytes, parquet.metadata)
        _footers.add(file, footer)
    return footer


@contextmanager
def open_column(file: HubFile, field: str, groups: Iterable[int]) -> Iterator[pq.ParquetFile]:
    """The file, with the column's chunks in `groups` on their way as they are read."""
    num_bytes, metadata = footer_of(file)
    blocks = blocks_of(_chunk_ranges(metadata, field, groups, num_bytes))
    with (
        _refusing_damage(file),
        RangedFile(partial(_fetch, file, num_bytes), num_bytes, blocks) as stream,
        pq.ParquetFile(
            stream,
            metadata=metadata,
            pre_buffer=False,
            buffer_size=_READ_BYTES,
            page_checksum_verification=True,
        ) as parquet,
    ):
        yield parquet


def _fetch(file: HubFile, num_bytes: int, start: int, stop: int) -> bytes:
    return fetch_range(file, start, stop, num_bytes)


def _chunk_ranges(
    metadata: pq.FileMetaData, field: str, groups: Iterable[int], num_bytes: int
) -> Iterator[Range]:
    for group in groups:
        for chunk in column_chunks(metadata, group, field):
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            yield start, min(start + chunk.total_compressed_size, num_bytes)


@contextmanager
def _refusing_damage(file: HubFile) -> Iterator[None]:
    """Errors of Arrow's own are damage; those of a fetch pass through Arrow and out as they are."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow raises OSError itself for damaged bytes, the network only ever its subclasses.
        if isinstance(error, OSError) and type(error) is not OSError:
            raise
        raise SourceError(
            f"{file}: not a readable Parquet file ({error}); the dataset must be mended, or name "
            "another revision"
        ) from error
