"""One Parquet file of a hub dataset, or some row groups of it, as documents.

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
from shardmill.sources.cutting import check_num_bytes
from shardmill.sources.filesource import check_at_least
from shardmill.sources.hubsource import HubOptions, retry_of
from shardmill.sources.parquetcolumn import (
    Column,
    Groups,
    checked_field,
    column_bytes,
    cut_groups,
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
    """A source of its own. Made by `HubParquetSource.divide` and `cut`."""

    source: str  # the name of the whole
    dataset: str  # as the caller wrote it; drops are named after it
    options: HubOptions
    limits: BatchLimits
    file: HubFile
    field: str
    groups: Groups | None = None  # these row groups alone; None: all

    @property
    def name(self) -> str:
        groups = "" if self.groups is None else f":{self.groups}"
        return f"{self.source}/{self.file.path}{groups}"

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
            "row_group": None,
            **({} if self.groups is None else self.groups.options()),
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return coalesce(self.read(cursor), self.limits)

    def limited(self, num_bytes: int) -> HubPiece:
        """The same piece, which refuses a document over `num_bytes`."""
        return replace(self, limits=self.limits.refusing(num_bytes))

    def divide(self, at_least: int) -> Sequence[HubPiece]:
        check_at_least(at_least)
        return (self,) if at_least == 1 else self.row_groups()

    def row_groups(self) -> Sequence[HubPiece]:
        """A source per row group, or per run of them; reads the footer. A file without row groups
        is one piece."""
        found = self.groups or Groups(0, self._metadata().num_row_groups)
        return [replace(self, groups=groups) for groups in found.parts()] or (self,)

    def cut(self, num_bytes: int) -> Sequence[HubPiece]:
        """Runs of row groups; reads the footer."""
        check_num_bytes(num_bytes)
        found = cut_groups(self._metadata(), self.field, self.groups, num_bytes)
        return [replace(self, groups=groups) for groups in found] if len(found) > 1 else (self,)

    def text_bytes(self) -> int:
        """The column's size before compression; reads the footer."""
        metadata = self._metadata()
        groups = range(*(self.groups or (0, metadata.num_row_groups)))
        return sum(column_bytes(metadata, group, self.field) for group in groups)

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
            groups=self.groups,
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
