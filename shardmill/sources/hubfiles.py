"""Parquet files of a hub, opened in place.

In: a file of a dataset at a commit.  Out: its footer; an open `ParquetFile` for one column.
Promise: only the footer and the wanted column chunks are asked for, from the first wanted row group
on.
Not here: retries, documents; what the client does (`hub`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow.parquet as pq

from shardmill.sources.hub import HubFile, fetch_range, file_size
from shardmill.sources.rangedparquet import (
    Footer,
    Footers,
    column_ranges,
    parquet_of,
    read_metadata,
    refusing_damage,
)
from shardmill.sources.ranges import RangedFile, blocks_of

_footers = Footers[HubFile]()
_REMEDY = "the dataset must be mended, or name another revision"


def footer_of(file: HubFile) -> Footer:
    """A file's size and footer: two or three requests, the first time."""
    footer = _footers.get(file)
    if footer is None:
        num_bytes = file_size(file)
        with (
            refusing_damage(str(file), _REMEDY),
            RangedFile(partial(_fetch, file, num_bytes), num_bytes) as stream,
        ):
            footer = Footer(num_bytes, read_metadata(stream))
        _footers.add(file, footer)
    return footer


@contextmanager
def open_column(file: HubFile, field: str, groups: Iterable[int]) -> Iterator[pq.ParquetFile]:
    """The file, with the column's chunks in `groups` on their way as they are read."""
    footer = footer_of(file)
    num_bytes = footer.num_bytes
    blocks = blocks_of(column_ranges(footer, field, groups))
    with (
        refusing_damage(str(file), _REMEDY),
        RangedFile(partial(_fetch, file, num_bytes), num_bytes, blocks) as stream,
        parquet_of(stream, footer.metadata) as parquet,
    ):
        yield parquet


def _fetch(file: HubFile, num_bytes: int, start: int, stop: int) -> bytes:
    return fetch_range(file, start, stop, num_bytes)
