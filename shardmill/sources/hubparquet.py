"""A hub dataset of Parquet files as documents, read in place.

In: "owner/name", and which configuration, split, field and revision.  Out: a `Source` that can be
divided and cut.
Promise: the documents of `HubSource`, in the same order. The client says which files make the split
at the pinned commit; they are read by ranges of bytes, the text column alone. A cursor names file,
row group and row, so resuming asks for nothing before that row group. Trouble is borne as by
`HubSource`, and reading goes on at the exact row. A null is dropped as "no_text", with the id
"owner/name/data/train-0.parquet:row 40", counted from 0 through the file.
Not here: the network (`hub`, imported on first use, needs the extra "hub"); other formats and the
client's shuffle, which are `HubSource`'s: `open_hub` chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, Any

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits, coalesce
from shardmill.sources.concat import join_small
from shardmill.sources.cursors import fields_of
from shardmill.sources.cutting import check_num_bytes
from shardmill.sources.fields import choose_field
from shardmill.sources.filesource import check_at_least
from shardmill.sources.hubpiece import HubPiece
from shardmill.sources.hubsource import (
    HubSource,
    hub_options,
    pin_dataset,
    pinned_commit,
    retry_of,
)
from shardmill.sources.parquetcolumn import is_text
from shardmill.urls import Url

if TYPE_CHECKING:
    from shardmill.sources.hub import HubFile, ParquetSplit

_FOOTER_THREADS = 8


def open_hub(
    dataset: str, *, name: str | None = None, limits: BatchLimits = DEFAULT_LIMITS, **options: Any
) -> Source:
    """A split of a hub dataset, in the best way there is: by row groups when it is made of Parquet
    files, else as the client streams it. Asks the hub. Options are those of `HubOptions`."""
    chosen = hub_options(dataset, options)
    if chosen.shuffle is not None:
        return HubSource(dataset, name=name, limits=limits, **options)
    source = HubParquetSource(dataset, name=name, limits=limits, **options)
    if isinstance(source.found(), str):
        pinned = {**options, "revision": source.revision}
        return HubSource(dataset, name=name, limits=limits, **pinned)
    return source


class HubParquetSource:
    """One split of a hub dataset of Parquet files. Options are those of `HubOptions`, but for the
    client's shuffle."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        **options: Any,
    ) -> None:
        self._options = hub_options(dataset, options)
        if self._options.shuffle is not None:
            raise OptionError(
                f"hub dataset {dataset}: shuffle= is the client's own order, which HubSource gives"
            )
        self._dataset = dataset
        self._name = name or dataset
        self._limits = limits
        self._revision: str | None = None
        self._found: ParquetSplit | str | None = None
        self._files: tuple[HubPiece, ...] | None = None

    def __repr__(self) -> str:
        return f"HubParquetSource({str(Url(self._dataset))!r}, split={self._options.split!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def revision(self) -> str:
        """The commit; asks the hub once."""
        if self._revision is None:
            self._revision = pinned_commit(self._dataset, self._options)
        return self._revision

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit and the files, and perhaps for the columns."""
        files = self.files()
        names = "\n".join(piece.file.path for piece in files)
        return {
            "kind": "hub",
            "name": self._name,
            "dataset": self._dataset,
            "config": self._options.config,
            "split": self._options.split,
            "revision": self.revision,
            "field": files[0].field,
            # Which files make a split, and their order, is for the client's version to say.
            "num_files": len(files),
            "sha256_of_names": hashlib.sha256(names.encode()).hexdigest(),
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return coalesce(self._read(cursor), self._limits)

    def limited(self, num_bytes: int) -> HubParquetSource:
        """The same source, which refuses a document over `num_bytes`."""
        source = copy(self)
        source._limits = self._limits.refusing(num_bytes)
        source._files = None
        return source

    def divide(self, at_least: int) -> Sequence[HubPiece]:
        """One source per file; when there are fewer than `at_least`, one per row group, which reads
        the footers of all files."""
        check_at_least(at_least)
        files = self.files()
        if len(files) >= at_least:
            return files
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            return [piece for pieces in pool.map(HubPiece.row_groups, files) for piece in pieces]

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """Runs of row groups, small files together; reads the footers of all files."""
        check_num_bytes(num_bytes)
        files = self.files()
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            found = list(pool.map(lambda file: (file.cut(num_bytes), file.text_bytes()), files))
        pieces, sizes = zip(*found, strict=True)
        return join_small(pieces, sizes, num_bytes, name=self._name)

    def found(self) -> ParquetSplit | str:
        """The files of the split; or why it cannot be read by row groups. Asks the hub once."""
        if self._found is None:
            from shardmill.sources.hub import parquet_split, retried

            pinned = pin_dataset(self._dataset, self.revision, self._options, None)
            retry = retry_of(self._options)
            self._found = retried(lambda: parquet_split(pinned), retry, str(pinned))
        return self._found

    def files(self) -> tuple[HubPiece, ...]:
        """Each file as a source, in order; at least one."""
        if self._files is None:
            found = self.found()
            if isinstance(found, str):
                raise SourceError(
                    f"hub dataset {self._dataset}, split {self._options.split}: {found}; "
                    "open it with open_hub or HubSource"
                )
            first = self._piece(found.files[0], "")
            columns = found.columns or [
                (column.name, is_text(column.type)) for column in first.schema()
            ]
            where = f"hub dataset {self._dataset}"
            field = choose_field(columns, wanted=self._options.field, where=where)
            self._files = tuple(self._piece(file, field) for file in found.files)
        return self._files

    def _piece(self, file: HubFile, field: str) -> HubPiece:
        return HubPiece(
            source=self._name,
            dataset=self._dataset,
            options=self._options,
            limits=self._limits,
            file=file,
            field=field,
        )

    def _read(self, cursor: Cursor | None) -> Iterator[TextBatch]:
        files = self.files()
        if cursor is not None:
            path, _ = fields_of(cursor, ("file", "position"), self._name)
            number = next((n for n, piece in enumerate(files) if piece.file.path == path), None)
            if number is None:
                raise SourceError(
                    f"source {self._name!r}: the cursor stands in {path!r:.200}, which is not "
                    f"among its {len(files):,} files; resume with the input the cursor came from"
                )
            files = files[number:]
        for piece in files:
            yield from piece.read(cursor)
            cursor = None
