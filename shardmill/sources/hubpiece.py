"""One Parquet file of a hub dataset, or one row group of it, as documents.

In: a file of a dataset at a commit, and the column.  Out: a `Source`, small to send.
Promise: a dropped connection, a 5xx, a timeout or a short answer is retried with growing, jittered
pauses, and reading goes on at the exact row; a reader that died is never taken for the end. Nothing
before the row group of the cursor is asked for, but for the footer.
Not here: which files there are (`hubparquet`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batching import BatchLimits, coalesce
from shardmill.sources.cursors import fields_of
from shardmill.sources.filesource import check_at_least
from shardmill.sources.hubsource import HubOptions, retry_of
from shardmill.sources.parquetcolumn import (
    Column,
    checked_field,
    group_edges,
    groups_from,
    read_column,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardmill.sources.hub import HubFile


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPiece:
    """A source of its own. Made by `HubParquetSource.divide`."""

    source: str  # the name of the whole
    dataset: str  # as the caller wrote it; drops are named after it
    options: HubOptions
    limits: BatchLimits
    file: HubFile
    field: str
    group: int | None = None  # this row group alone; None: all

    @property
    def name(self) -> str:
        group = "" if self.group is None else f":row group {self.group}"
        return f"{self.source}/{self.file.path}{group}"

    def describe(self) -> dict[str, JSON]:
        return {
            "kind": "hub",
            "name": self.name,
            "dataset": self.dataset,
            "config": self.options.config,
            "split": self.options.split,
            "revision": self.file.revision,
            "field": self.field,
            "file": self.file.path,
            "row_group": self.group,
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return coalesce(self.read(cursor), self.limits)

    def divide(self, at_least: int) -> Sequence[HubPiece]:
        check_at_least(at_least)
        return (self,) if at_least == 1 else self.row_groups()

    def row_groups(self) -> Sequence[HubPiece]:
        """A source per row group; reads the footer. A file without row groups is one piece."""
        if self.group is not None:
            return (self,)
        num_groups = self._metadata().num_row_groups
        return [replace(self, group=group) for group in range(num_groups)] or (self,)

    def schema(self) -> pa.Schema:
        return self._metadata().schema.to_arrow_schema()

    def read(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Batches as they come out of the file; `batches` joins those that are small."""
        from shardmill.sources.hub import TROUBLE, wait_or_raise

        position = self._position_of(cursor)
        failures = 0
        while True:
            try:
                with closing(self._open(position)) as batches:
                    for batch in batches:
                        failures = 0
                        position = batch.cursor
                        yield replace(batch, cursor={"file": self.file.path, "position": position})
                return
            except SourceError:
                raise
            except TROUBLE as error:
                failures += 1
                progress = f"it was read up to {position or 'its start'}"
                wait_or_raise(error, failures, retry_of(self.options), str(self.file), progress)

    def _open(self, position: JSON) -> Generator[TextBatch, None, None]:
        from shardmill.sources.hubfiles import footer_of, open_column

        metadata = footer_of(self.file).metadata
        column = Column(
            field=self.field,
            file=f"{self.dataset}/{self.file.path}",
            where=str(self.file),
            limits=self.limits,
            group=self.group,
        )
        checked_field(metadata.schema.to_arrow_schema(), self.field, column.where)
        groups, _ = groups_from(group_edges(metadata), column, position)
        with open_column(self.file, self.field, groups) as parquet:
            yield from read_column(parquet, column, position)

    def _metadata(self) -> pq.FileMetaData:
        from shardmill.sources.hub import retried
        from shardmill.sources.hubfiles import footer_of

        retry = retry_of(self.options)
        return retried(lambda: footer_of(self.file), retry, str(self.file)).metadata

    def _position_of(self, cursor: Cursor | None) -> JSON:
        if cursor is None:
            return None
        path, position = fields_of(cursor, ("file", "position"), self.name)
        if path != self.file.path:
            raise SourceError(
                f"source {self.name!r}: the cursor stands in {path!r:.200}; resume with the piece "
                "the cursor came from"
            )
        return position
