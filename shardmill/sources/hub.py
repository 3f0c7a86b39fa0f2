"""Hugging Face datasets as rows or documents: streamed by the client, or read by byte ranges.

To resume a stream, the last rows before the cursor are read again and compared: through the
client's own state where that leads to the same rows, else by counting from the start (always when
shuffled: the client's shuffle buffer is not in its state). `HubParquetSource` gives the same
documents of a dataset of Parquet files, in the same order, and resumes at the cursor's row group;
the pieces of a stream of such a dataset are read in this way.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple, Self

from shardmill.arguments import choices, whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    NamedSource,
    choose_field,
    fields_of,
    grouped,
    make_batch,
    null_rows,
    strings_to_arrow,
    utf8_bytes,
)
from shardmill.sources.formats.parquet import ParquetFormat, row_groups, text_columns
from shardmill.sources.mapping import RowMapping, take_mapping, without_front_matter
from shardmill.sources.source import (
    ConcatSource,
    FileListSource,
    Format,
    InputRow,
    RowLocation,
    each_input,
)
from shardmill.storage.hub import HubFile, HubSplit, NotByFilesError, bounded_client, client_version

logger = logging.getLogger(__name__)

OVERLAP = 16
"""Rows before a cursor that are read again to recognise it (texts such as "" repeat)."""

_Rows = Generator[tuple[dict[str, Any], JSON], None, None]  # each with the client's state before it


class _HubCursor(NamedTuple):
    """After the first `rows` rows of a stream, the last `overlap` of which are known."""

    rows: int
    overlap: int
    digest: str  # of the last `overlap` rows
    state: JSON  # the client's state before them; None when shuffled


def check_hub_cursor(split: HubSplit, position: JSON) -> _HubCursor:
    """A cursor of the split's rows, or an error."""
    keys, counts = _HubCursor._fields, ("rows", "overlap")
    cursor = _HubCursor(*fields_of(position, keys, split.dataset, counts=counts))
    if not isinstance(cursor.digest, str) or not 0 < cursor.overlap <= cursor.rows:
        raise SourceError(
            f"hub dataset {split.dataset}: not a cursor of a hub dataset: {position!r:.200}; "
            "use a cursor of this source, or start over"
        )
    return cursor


def hub_rows(
    split: HubSplit, position: JSON, columns: tuple[str, ...] | None = None
) -> Iterator[InputRow]:
    """Each row from `position` on (None: the start), retried. Positions are functions."""
    cursor = None if position is None else check_hub_cursor(split, position)
    num_rows = cursor.rows if cursor else 0
    last: deque[tuple[dict[str, Any], JSON]] = deque(maxlen=OVERLAP)
    failures = 0
    split.revision  # noqa: B018 - asked for with retries of its own
    while True:
        try:
            with closing(_rows_from(split, columns, cursor)) as rows:
                for row, state in rows:
                    failures = 0
                    last.append((row, state))
                    num_rows += 1
                    after = partial(_cursor_after, num_rows, tuple(last))
                    yield InputRow(row, f"{split.dataset}:row {num_rows - 1}", after)
            return
        except Exception as error:  # noqa: BLE001 - clients raise what they like
            failures += 1
            progress = f"{num_rows:,} rows were read"
            split.retry.wait_or_raise(error, failures, str(split), progress=progress)
        if last:
            cursor = check_hub_cursor(split, _cursor_after(num_rows, last))


def _cursor_after(num_rows: int, last: Sequence[tuple[dict[str, Any], JSON]]) -> dict[str, JSON]:
    digest = _digest(row for row, _ in last)
    return _HubCursor(num_rows, len(last), digest, last[0][1])._asdict()


def _digest(rows: Iterable[dict[str, Any]]) -> str:
    """Equal for equal rows."""
    found = repr([sorted(row.items()) for row in rows])
    return hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()


def _rows_from(
    split: HubSplit, columns: tuple[str, ...] | None, cursor: _HubCursor | None
) -> _Rows:
    if cursor is None:
        yield from _open(split, columns, None)
        return
    if cursor.state is not None:
        with closing(_open(split, columns, cursor.state)) as rows:
            if _is_at(rows, cursor):
                yield from rows
                return
        logger.warning("%s: the client's state leads elsewhere; counting rows instead", split)
    with closing(_open(split, columns, None)) as rows:
        num_before = cursor.rows - cursor.overlap
        deque(islice(rows, num_before), maxlen=0)
        if not _is_at(rows, cursor):
            raise SourceError(
                f"{split}: rows {num_before:,} to {cursor.rows - 1:,} are not those that were "
                f"read before, so continuing would lose or repeat rows ({client_version()} orders "
                "them differently, or the data changed); start over, or use the earlier client"
            )
        yield from rows


def _is_at(rows: _Rows, cursor: _HubCursor) -> bool:
    """Read the overlap: is it the one that was read before?"""
    return _digest(row for row, _ in islice(rows, cursor.overlap)) == cursor.digest


def _open(split: HubSplit, columns: tuple[str, ...] | None, state: JSON) -> _Rows:
    """A fresh stream from the start or from the client's state. After an error a stream is never
    used again, so a dead one is not taken for the end."""
    is_shuffled = split.options.shuffle is not None
    with bounded_client():
        stream = split.load(columns)
        if state is not None:
            stream.load_state_dict(state)
        before = None if is_shuffled else stream.state_dict()
        with closing(iter(stream)) as rows:
            for row in rows:
                yield row, before
                before = None if is_shuffled else stream.state_dict()


class HubSource(NamedSource):
    """Documents of one split of a hub dataset. Options are those of `HubOptions`."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        mapping: RowMapping | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name or dataset, limits)
        self._split = HubSplit(dataset, options)
        self.mapping = mapping

    def __repr__(self) -> str:
        return f"HubSource({self._split})"

    @property
    def revision(self) -> str:
        """The commit; asks the hub once."""
        return self._split.revision

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit, and for the columns when no field was named."""
        facts = self._split.describe()
        shuffle = facts.pop("shuffle")
        mapped = {} if self.mapping is None else self.mapping.described()
        facts |= {"field": self._field, "shuffle": shuffle}
        return {"kind": "hub", "name": self.name, **facts, **mapped}

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        if cursor is not None:
            check_hub_cursor(self._split, cursor)
        return self._read(cursor)

    def locate(
        self, _before: Cursor | None, after: Cursor, _rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`."""
        row = check_hub_cursor(self._split, after).rows - 1
        return RowLocation(id=f"{self._split.dataset}:row {row}", row=row)

    def _read(self, cursor: Cursor | None) -> Iterator[TextBatch]:
        mapping = self.mapping
        if mapping is None:
            return self._read_field(cursor)
        if not mapping.takes_rows:
            return map(without_front_matter, self._read_field(cursor))
        rows = hub_rows(self._split, cursor, mapping.columns(self._field))
        batches = mapping.row_batches(
            rows, self._field, self.limits, lambda row: f"hub dataset {row.id}"
        )
        return map(without_front_matter, batches) if mapping.strip_front_matter else batches

    def _read_field(self, cursor: Cursor | None) -> Iterator[TextBatch]:
        for held in grouped(self._texts(cursor), self.limits):
            array, repaired = strings_to_arrow([text for _, text in held])
            missing = (held[number][0].id for number in null_rows(array))
            position: Any = held[-1][0].position
            yield make_batch(
                array,
                position(),
                repaired=repaired,
                drops=(Drop(id=id, reason="no_text") for id in missing),
            )

    def _texts(
        self, cursor: Cursor | None
    ) -> Iterator[tuple[tuple[InputRow, str | None], int, int]]:
        """Each row with its text, and the size of the text."""
        field = self._field
        assert field is not None, "else rows are mapped"
        for row in hub_rows(self._split, cursor, (field,)):
            assert isinstance(row.value, dict)
            text = row.value[field]
            if text is not None and not isinstance(text, str):
                raise SourceError(
                    f"hub dataset {row.id}: the column {field!r} holds {type(text).__name__} "
                    f"{text!r:.60}, wanted a string; name another with {{field}}",
                    field=...,
                )
            yield (row, text), utf8_bytes(text or ""), 1

    def limited(self, num_bytes: int) -> Self:
        """The same, whose pieces refuse a document over `num_bytes` before it is read whole. The
        client's stream has no such bound."""
        return self.with_limits(most_bytes=num_bytes)

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """Runs of row groups and of small files, when the split is the rows of Parquet files; else,
        and when it is shuffled, this source itself. Asks the hub, and reads all footers."""
        whole_number(num_bytes, "num_bytes")
        options = {**asdict(self._split.options), "revision": self.revision}
        if options.pop("shuffle") is not None:
            return (self,)
        options["field"] = self._field
        try:
            whole = HubParquetSource(
                self._split.dataset,
                name=self.name,
                limits=self.limits,
                mapping=self.mapping,
                **options,
            )
        except NotByFilesError:
            return (self,)
        known = dict(text_columns(whole.files[0]))
        if not all(known.get(name) for name in self._text_names()) or not self._is_plain():
            return (self,)  # the client makes text of it
        return whole.of_split().cut(num_bytes)

    def _text_names(self) -> tuple[str, ...]:
        """The columns that hold the text; none where a function makes it."""
        fields = None if self.mapping is None else self.mapping.fields
        return fields or (() if self._field is None else (self._field,))

    def _is_plain(self) -> bool:
        """Whether the client gives every column that is read as it is stored."""
        names = self._text_names()
        columns = names if self.mapping is None else self.mapping.columns(self._field)
        return all(map(self._split.is_plain, (None,) if columns is None else columns))

    @cached_property
    def _field(self) -> str | None:
        """The column of the text; None where the mapping says what it is."""
        mapping = self.mapping
        columns = self._split.declared_columns()
        if columns is None:  # those of the first row
            first: Any = next(hub_rows(self._split, None), None)
            row = first.value if first else {}
            columns = tuple((name, isinstance(value, str)) for name, value in row.items())
        field = None
        if mapping is None or not mapping.picks_text:
            wanted = self._split.options.field
            field = choose_field(columns, wanted=wanted, where=self._split.place)
        names = dict(columns)
        for name in () if mapping is None else mapping.columns(field) or ():
            if name not in names:
                listed = choices(name, names, verb="found")
                raise SourceError(f"{self._split.place}: no column {name!r}; {listed}")
        return field


def stored_rows(split: HubSplit) -> tuple[HubFile, ...] | None:
    """The Parquet files whose rows are those of a split, as the client streams them; None when
    there are none. Asks the hub, and reads the footers."""
    if split.options.shuffle is not None:
        return None
    try:
        files, _ = split.parquet_files()
    except NotByFilesError:
        return None
    return _numbered(files, None) if split.is_plain() else None


def _numbered(files: Sequence[HubFile], column: str | None) -> tuple[HubFile, ...]:
    """All files of a split, which know the rows before them. Reads the footers."""
    groups = each_input(row_groups, [(file, column) for file in files])
    before = accumulate((sum(rows for rows, _ in found) for found in groups), initial=0)
    return tuple(replace(file, rows_before=rows) for file, rows in zip(files, before, strict=False))


def iter_rows(dataset: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Whole rows of a hub dataset, in order, with retries.

    For data that is more than one text. Options are those of `HubOptions`.
    """
    split = HubSplit(dataset, options)
    if split.options.field is not None:
        raise OptionError("iter_rows reads whole rows: leave out {field}", field=...)
    split.revision  # noqa: B018 - ask the hub now, not at the first row
    return (row.value for row in hub_rows(split, None) if isinstance(row.value, dict))


def open_hub(
    dataset: str, *, name: str | None = None, limits: BatchLimits = DEFAULT_LIMITS, **options: Any
) -> Source:
    """A split of a hub dataset: by row groups when it is made of Parquet files, else as the client
    streams it. Asks the hub. Options are those of `HubOptions`, and of `open_source` those that say
    what becomes of a row."""
    mapping, options = take_mapping(options)
    if mapping is not None and mapping.map is not None:
        options.pop("on_bad", None)
    split = HubSplit(dataset, options)
    given: dict[str, Any] = {"name": name, "limits": limits, "mapping": mapping}
    if split.options.shuffle is None:
        options["revision"] = split.revision
        with suppress(NotByFilesError):
            return HubParquetSource(dataset, **given, **options)
    return HubSource(dataset, **given, **options)


class HubParquetSource(FileListSource):
    """Documents of one split of a hub dataset of Parquet files, which are listed at the call, or a
    piece of it. Options are those of `HubOptions` without `shuffle`."""

    files: tuple[HubFile, ...]

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        mapping: RowMapping | None = None,
        **options: Any,
    ) -> None:
        self._split = HubSplit(dataset, options)
        if self._split.options.shuffle is not None:
            raise OptionError(
                f"hub dataset {dataset}: {{shuffle}} is the client's own order; use HubSource",
                shuffle=...,
            )
        files, columns = self._split.parquet_files()
        field = self._split.options.field
        if columns and (mapping is None or not mapping.picks_text):
            field = choose_field(columns, wanted=field, where=self._split.place)
        super().__init__(files, ParquetFormat(field=field), name=name or dataset, limits=limits)
        self._is_settled = bool(columns) and mapping is None
        self.mapping = mapping
        self._is_piece = False

    def describe(self) -> dict[str, JSON]:
        """May read the columns in the first file."""
        settings = self._settled().options()
        facts = {"kind": "hub", "name": self.name, **self._split.describe()}
        del facts["shuffle"]
        facts["field"] = settings.pop("field")
        facts |= {} if self.mapping is None else self.mapping.described()
        if self._is_piece:
            return {**facts, "file": self.files[0].path, "row_group": None, **settings}
        # Which files make a split, and their order, depends on the client's version.
        names = "\n".join(file.path for file in self.files)
        digest = hashlib.sha256(names.encode()).hexdigest()
        return {**facts, "num_files": len(self.files), "sha256_of_names": digest}

    def of_split(self) -> Self:
        """The same, with ids that number the rows of the whole split, as the stream's do."""
        format = self._settled()
        return self._over(_numbered(self.files, self._split.options.field), format, self.name)

    def _piece(self, files: tuple[HubFile, ...], format: Format) -> Source:
        """One file, or some row groups of it. Several files are pieces that are joined."""
        base = self.name
        if self._is_piece:
            base = base.removesuffix(f"/{files[0].path}{self._format.range_name}")
        pieces: list[Source] = []
        for file in files:
            piece = self._over((file,), format, f"{base}/{file.path}{format.range_name}")
            piece._is_piece = True
            pieces.append(piece)
        if len(pieces) == 1:
            return pieces[0]
        first = self.files.index(files[0])
        return ConcatSource(pieces, name=f"{self.name}/parts {first} to {first + len(files) - 1}")
