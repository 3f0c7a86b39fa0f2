"""Hub datasets of Parquet files, read in place by byte ranges.

The documents are those of `HubSource`, in the same order: the client decides which files make the
split at the pinned commit. Only footers and the text column are fetched. A cursor is the file, row
group and row, so resuming fetches nothing before that row group. Every request is retried as the
options say. Other file formats and the client's shuffle need `HubSource`; `open_hub` chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    check_num_bytes,
    coalesce,
    fields_of,
)
from shardmill.sources.cleaning import choose_field
from shardmill.sources.formats.parquet import HubInput, ParquetFormat, columns_of, open_parquet
from shardmill.sources.hub import HubSource, HubSplit
from shardmill.sources.source import RowLocation, check_at_least, join_small
from shardmill.storage.hub import ParquetSplit, parquet_split
from shardmill.urls import Url

_FOOTER_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPiece:
    """One Parquet file of a hub dataset, or some row groups of it. Small when pickled."""

    name: str
    described: dict[str, JSON]  # the part of `describe` that all pieces of a split share
    file: HubInput
    format: ParquetFormat

    @property
    def limits(self) -> BatchLimits:
        return self.format.limits

    @property
    def path(self) -> str:
        """The file in the dataset."""
        return self.file.place.path

    def describe(self) -> dict[str, JSON]:
        return {
            "kind": "hub",
            "name": self.name,
            **self.described,
            "field": self.format.field,
            "file": self.path,
            "row_group": None,
            **({} if self.format.groups is None else self.format.groups.options()),
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return coalesce(self.read(cursor), self.limits)

    def read(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Batches as the file gives them; `batches` joins small ones."""
        for batch in self.format.read(self.file, self._position(cursor)):
            yield replace(batch, cursor={"file": self.path, "position": batch.cursor})

    def limited(self, num_bytes: int) -> HubPiece:
        """The same piece, which refuses a document over `num_bytes`."""
        return self.with_limits(self.limits.refusing(num_bytes))

    def with_limits(self, limits: BatchLimits) -> HubPiece:
        """The same documents in other batches."""
        return replace(self, format=replace(self.format, limits=limits))

    def divide(self, at_least: int) -> Sequence[HubPiece]:
        check_at_least(at_least)
        return (self,) if at_least == 1 else self.split(None)

    def cut(self, num_bytes: int) -> Sequence[HubPiece]:
        """Runs of row groups; reads the footer."""
        check_num_bytes(num_bytes)
        return self.split(num_bytes)

    def split(self, num_bytes: int | None) -> Sequence[HubPiece]:
        """As `Format.split`."""
        whole = self.name.removesuffix(self.format.range_name)
        return [
            replace(self, format=part, name=f"{whole}{part.range_name}")
            for part in self.format.split(self.file, num_bytes)
        ]

    def text_bytes(self) -> int:
        """The column's size before compression; reads the footer."""
        return self.format.size_hint(self.file)

    def locate(
        self, before: Cursor | None, after: Cursor, rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`."""
        found = self.format.locate(self.file, before, self._position(after), rows_before)
        return replace(found, file=self.path)

    def _position(self, cursor: Cursor | None) -> JSON:
        if cursor is None:
            return None
        path, position = fields_of(cursor, ("file", "position"), self.name)
        if path != self.path:
            raise SourceError(
                f"source {self.name!r}: the cursor is in {path!r:.200}; resume with the piece the "
                "cursor came from"
            )
        return position


def open_hub(
    dataset: str, *, name: str | None = None, limits: BatchLimits = DEFAULT_LIMITS, **options: Any
) -> Source:
    """A split of a hub dataset: by row groups when it is made of Parquet files, else as the client
    streams it. Asks the hub. Options are those of `HubOptions`."""
    if HubSplit(dataset, options).options.shuffle is not None:
        return HubSource(dataset, name=name, limits=limits, **options)
    source = HubParquetSource(dataset, name=name, limits=limits, **options)
    if isinstance(source.found(), str):
        pinned = {**options, "revision": source.revision}
        return HubSource(dataset, name=name, limits=limits, **pinned)
    return source


class HubParquetSource:
    """Documents of one split of a hub dataset of Parquet files. Options are those of `HubOptions`
    without `shuffle`."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        **options: Any,
    ) -> None:
        self._split = HubSplit(dataset, options)
        if self._split.options.shuffle is not None:
            raise OptionError(
                f"hub dataset {dataset}: {{shuffle}} is the client's own order; use HubSource",
                shuffle=...,
            )
        self._name = name or dataset
        self._limits = limits
        self._found: ParquetSplit | str | None = None
        self._files: tuple[HubPiece, ...] | None = None

    def __repr__(self) -> str:
        split = self._split
        return f"HubParquetSource({str(Url(split.dataset))!r}, split={split.options.split!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def limits(self) -> BatchLimits:
        return self._limits

    @property
    def revision(self) -> str:
        """The commit; asks the hub once."""
        return self._split.revision

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit and the files, and perhaps for the columns."""
        files = self.files()
        names = "\n".join(piece.path for piece in files)
        return {
            "kind": "hub",
            "name": self._name,
            **self._split.describe(),
            "field": files[0].format.field,
            # Which files make a split, and their order, depends on the client's version.
            "num_files": len(files),
            "sha256_of_names": hashlib.sha256(names.encode()).hexdigest(),
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return coalesce(self._read(cursor), self._limits)

    def limited(self, num_bytes: int) -> Self:
        """The same source, which refuses a document over `num_bytes`."""
        return self.with_limits(self._limits.refusing(num_bytes))

    def with_limits(self, limits: BatchLimits) -> Self:
        """The same documents in other batches."""
        source = copy(self)
        source._limits = limits
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
            found = pool.map(partial(HubPiece.split, num_bytes=None), files)
            return [piece for pieces in found for piece in pieces]

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """Runs of row groups, small files together; reads the footers of all files."""
        check_num_bytes(num_bytes)
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            found = pool.map(lambda file: (file.cut(num_bytes), file.text_bytes()), self.files())
            pieces, sizes = zip(*found, strict=True)
        return join_small(pieces, sizes, num_bytes, name=self._name)

    def locate(
        self, before: Cursor | None, after: Cursor, rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`."""
        return self._files_from(after)[0].locate(before, after, rows_before)

    def found(self) -> ParquetSplit | str:
        """The files of the split; or why it cannot be read by row groups. Asks the hub once."""
        if self._found is None:
            pinned = self._split.pinned()
            self._found = self._split.retry.call(lambda: parquet_split(pinned), str(pinned))
        return self._found

    def files(self) -> tuple[HubPiece, ...]:
        """Each file as a source, in order; at least one."""
        if self._files is None:
            found, dataset = self.found(), self._split.dataset
            if isinstance(found, str):
                raise SourceError(
                    f"hub dataset {dataset}, split {self._split.options.split}: {found}; "
                    "open it with open_hub or HubSource"
                )
            files = [
                HubInput(place=file, name=f"{dataset}/{file.path}", retry=self._split.retry)
                for file in found.files
            ]
            columns: Sequence[tuple[str, bool]] | None = found.columns
            if not columns:
                with open_parquet(files[0]) as parquet:
                    columns = columns_of(parquet.schema_arrow)
            wanted = self._split.options.field
            field = choose_field(columns, wanted=wanted, where=f"hub dataset {dataset}")
            self._files = tuple(
                HubPiece(
                    name=f"{self._name}/{file.place.path}",
                    described=self._split.describe(),
                    file=file,
                    format=ParquetFormat(field=field, limits=self._limits),
                )
                for file in files
            )
        return self._files

    def _files_from(self, cursor: Cursor | None) -> Sequence[HubPiece]:
        """The files from that of the cursor on."""
        files = self.files()
        if cursor is None:
            return files
        path, _ = fields_of(cursor, ("file", "position"), self._name)
        for number, piece in enumerate(files):
            if piece.path == path:
                return files[number:]
        raise SourceError(
            f"source {self._name!r}: the cursor is in {path!r:.200}, which is not among its "
            f"{len(files):,} files; resume with the input the cursor came from"
        )

    def _read(self, cursor: Cursor | None) -> Iterator[TextBatch]:
        for piece in self._files_from(cursor):
            yield from piece.read(cursor)
            cursor = None
