"""Parquet files on object storage, opened in place.

In: a file that was listed, and what will be read of it.  Out: an open `ParquetFile`.
Promise: the footer is read once, and then only what is asked for; of a column that is named the
chunks of the wanted row groups, fetched ahead.
Not here: documents (`parquetcolumn`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.parquet as pq

from shardmill.records import JSON
from shardmill.sources.far import FarPath, open_far
from shardmill.sources.parquetcolumn import Column, group_edges, groups_from
from shardmill.sources.rangedparquet import (
    Footer,
    Footers,
    column_ranges,
    parquet_of,
    read_metadata,
    refusing_damage,
)
from shardmill.sources.ranges import blocks_of

_footers = Footers[FarPath]()
_REMEDY = "write it again"


@contextmanager
def open_far_parquet(
    path: FarPath, num_bytes: int, column: Column | None, position: JSON
) -> Iterator[pq.ParquetFile]:
    """The file; what will be read of it from `position` on is on its way."""
    with refusing_damage(str(path), _REMEDY):
        footer = _footer_of(path, num_bytes)
        blocks = []
        if column is not None:
            groups, _ = groups_from(group_edges(footer.metadata), column, position)
            blocks = blocks_of(column_ranges(footer, column.field, groups))
        with (
            open_far(path, num_bytes, blocks) as stream,
            parquet_of(stream, footer.metadata) as parquet,
        ):
            yield parquet


def _footer_of(path: FarPath, num_bytes: int) -> Footer:
    footer = _footers.get(path)
    if footer is None:
        with open_far(path, num_bytes) as stream:
            footer = Footer(num_bytes, read_metadata(stream))
        _footers.add(path, footer)
    return footer
