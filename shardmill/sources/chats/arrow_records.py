"""Records of Parquet files and hub datasets, each with the place behind it.

In: a Parquet file, or a split of a hub dataset.  Out: `Placed`s, one per row.
Promise: rows in order; from a mark, exactly those behind it. Arrow writes every field of a struct
in every row, null where the record had none; so a null inside a list or object is as if absent,
but for a message's "content": null. Columns themselves stay, null or not.
Not here: JSON (see `inputs`); what a record means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON
from shardmill.sources.batches import DEFAULT_LIMITS, counts_of
from shardmill.sources.chats.json_records import FileInput, Record, RecordAt
from shardmill.sources.formats.hub_source import HubSource, pin_dataset, place_of, retry_of
from shardmill.sources.formats.parquet import open_parquet
from shardmill.sources.formats.parquet_column import group_edges
from shardmill.storage.files import check_unchanged


class ParquetRecords(FileInput):
    """Whole rows; a mark is a row group and the rows of it that were read."""

    def records(self, mark: Any) -> Iterator[RecordAt]:
        group, skip = mark or (0, 0)
        check_unchanged(self.file)
        with open_parquet(self.file) as parquet:
            edges = group_edges(parquet.metadata)
            if group >= len(edges) or edges[group] + skip > edges[-1]:
                raise SourceError(
                    f"{self.file.place}: the cursor stands at row {skip:,} of row group {group}, "
                    f"but there are {len(edges) - 1} row groups with {edges[-1]:,} rows; resume "
                    "with the input the cursor came from"
                )
            self._refuse_twins(parquet)
            for number in range(group, len(edges) - 1):
                for row, record in self._rows(parquet, number, skip):
                    place = f"{self.file.name}:row {edges[number] + row}"
                    yield RecordAt(record, place, (number, row + 1))
                skip = 0
        check_unchanged(self.file)

    def mark_of(self, position: JSON) -> Any:
        return counts_of(position, ("row_group", "rows"), self.name)

    def position_of(self, mark: Any) -> JSON:
        return {"row_group": mark[0], "rows": mark[1]}

    def _refuse_twins(self, parquet: pq.ParquetFile) -> None:
        names = parquet.schema_arrow.names
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise SourceError(f"{self.file.place}: two columns {twice!r:.60}; rename one of them")

    def _rows(self, parquet: pq.ParquetFile, group: int, skip: int) -> Iterator[tuple[int, Record]]:
        metadata = parquet.metadata.row_group(group)
        row_bytes = metadata.total_byte_size / max(metadata.num_rows, 1)
        size = max(int(DEFAULT_LIMITS.num_bytes / max(row_bytes, 1)), 1)
        size = min(size, DEFAULT_LIMITS.num_documents)
        start = 0
        for batch in parquet.iter_batches(size, row_groups=[group]):
            done = min(max(skip - start, 0), batch.num_rows)
            try:
                rows = batch.slice(done).to_pylist()
            except ValueError as error:  # no UTF-8, or two fields of one name in a struct
                stop = start + batch.num_rows
                raise SourceError(
                    f"{self.file.place}, row group {group}, rows {start + done:,} to {stop:,}: "
                    f"cannot be read as records: {error}; write the file again"
                ) from error
            for row, record in enumerate(rows, start + done):
                yield row, without_nulls(record)
            start += batch.num_rows


class HubRecords:
    """Whole rows of one split of a hub dataset. Options are those of `HubOptions`, but field."""

    def __init__(self, dataset: str, **options: Any) -> None:
        if "field" in options:
            raise OptionError("conversations are whole rows: field= has no meaning here")
        self._dataset = dataset
        self._source = HubSource(dataset, **options)

    @property
    def name(self) -> str:
        return self._dataset

    def where(self, place: str) -> str:
        return f"hub dataset {place}"

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit."""
        options = self._source._options
        shuffle: JSON = None
        if options.shuffle is not None:
            from shardmill.storage.hub import client_version

            seed, size = options.shuffle
            shuffle = {"seed": seed, "buffer_size": size, "by": client_version()}
        return {
            "dataset": self._dataset,
            "config": options.config,
            "split": options.split,
            "revision": self._source.revision,
            "shuffle": shuffle,
        }

    def records(self, mark: Any) -> Iterator[RecordAt]:
        """A mark is the number of rows read and the last of them, or a place to go on."""
        from shardmill.sources.formats.hub_rows import OVERLAP, HubCursor, stream_rows

        place = mark if mark is None or isinstance(mark, HubCursor) else self._place(mark)
        options = self._source._options
        pinned = pin_dataset(self._dataset, self._source.revision, options, None)
        last: deque[tuple[Record, JSON]] = deque(maxlen=OVERLAP)
        start = place.rows if place else 0
        rows = stream_rows(pinned, place, retry_of(options))
        for number, (row, state) in enumerate(rows, start):
            last.append((row, state))
            name = f"{self._dataset}:row {number}"
            yield RecordAt(without_nulls(row), name, (number + 1, tuple(last)))

    def mark_of(self, position: JSON) -> Any:
        if not isinstance(position, dict):
            raise SourceError(f"hub dataset {self._dataset}: no place: {position!r:.80}")
        return place_of(position, self.name)

    def position_of(self, mark: Any) -> JSON:
        from shardmill.sources.formats.hub_rows import HubCursor

        place = mark if isinstance(mark, HubCursor) else self._place(mark)
        return {
            "rows": place.rows,
            "overlap": place.overlap,
            "digest": place.digest,
            "state": place.state,
        }

    def _place(self, mark: Any) -> Any:
        from shardmill.sources.formats.hub_rows import Trail

        num_rows, last = mark
        trail = Trail(num_rows - len(last))
        for row, state in last:
            trail.add(row, state)
        return trail.place()


def without_nulls(record: Record) -> Record:
    """A copy in which objects inside lists and objects lack their null fields; see above."""
    return {key: _inner(value) for key, value in record.items()}


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(part) for part in value]
    if isinstance(value, dict):
        return {
            key: _inner(part)
            for key, part in value.items()
            if part is not None or (key == "content" and "role" in value)
        }
    return value
