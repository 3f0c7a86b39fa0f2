"""Parquet files of a hub, opened in place.

In: a file of a dataset at a commit.  Out: its footer; an open `ParquetFile` for one column.
Promise: only the footer and the wanted column chunks are asked for, from the first wanted row group
on.
Not here: retries, documents; what the client does (`hub`).

A hub dataset of Parquet files as documents, read in place.

In: "owner/name", and which configuration, split, field and revision.  Out: a `Source` that can be
divided and cut.
Promise: the documents of `HubSource`, in the same order. The client says which files make the split
at the pinned commit; they are read by ranges of bytes, the text column alone. A cursor names file,
row group and row, so resuming asks for nothing before that row group. Trouble is borne as by
`HubSource`, and reading goes on at the exact row. A null is dropped as "no_text", with the id
"owner/name/data/train-0.parquet:row 40", counted from 0 through the file.
Not here: the network (`hub`, imported on first use, needs the extra "hub"); other formats and the
client's shuffle, which are `HubSource`'s: `open_hub` chooses.

One Parquet file of a hub dataset, or some row groups of it, as documents.

In: a file of a dataset at a commit, and the column.  Out: a `Source`, small to send.
Promise: a dropped connection, a 5xx, a timeout or a short answer is retried with growing, jittered
pauses, and reading goes on at the exact row; a reader that died is never taken for the end. Nothing
before the row group of the cursor is asked for, but for the footer.
Not here: which files there are (`hubparquet`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

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
from shardmill.sources.concat import join_small
from shardmill.sources.file_source import check_at_least
from shardmill.sources.formats.hub_source import (
    HubOptions,
    HubSource,
    hub_options,
    pin_dataset,
    pinned_commit,
    retry_of,
)
from shardmill.sources.formats.parquet import (
    Footer,
    Footers,
    column_ranges,
    parquet_of,
    read_metadata,
    refusing_damage,
)
from shardmill.sources.formats.parquet_column import (
    Column,
    Groups,
    checked_field,
    column_bytes,
    cut_groups,
    group_edges,
    groups_from,
    is_text,
    read_column,
)
from shardmill.storage.ranges import RangedFile, blocks_of
from shardmill.urls import Url

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardmill.storage.hub import HubFile, ParquetSplit


_footers: Footers[HubFile] = Footers()
_REMEDY = "the dataset must be mended, or name another revision"


def footer_of(file: HubFile) -> Footer:
    """A file's size and footer: two or three requests, the first time."""
    from shardmill.storage.hub import file_size

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
    from shardmill.storage.hub import fetch_range

    return fetch_range(file, start, stop, num_bytes)


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
            except Exception as error:  # noqa: BLE001 - clients raise what they like
                failures += 1
                progress = f"it was read up to {position or 'its start'}"
                retry_of(self.options).wait_or_raise(
                    error, failures, str(self.file), progress=progress
                )

    def _open(self, position: JSON) -> Generator[TextBatch, None, None]:

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
        retry = retry_of(self.options)
        return retry.call(lambda: footer_of(self.file), str(self.file)).metadata

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
            from shardmill.storage.hub import parquet_split

            pinned = pin_dataset(self._dataset, self.revision, self._options, None)
            retry = retry_of(self._options)
            self._found = retry.call(lambda: parquet_split(pinned), str(pinned))
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
