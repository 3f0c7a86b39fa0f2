"""Hugging Face datasets as rows or documents, streamed by the client library.

The revision is resolved to a commit before reading and pinned. With `shuffle` the order is exactly
the client's own. A dropped connection, a 5xx or a timeout is retried with growing pauses, and the
stream continues at the exact row. To resume, the last rows before the cursor are read again and
compared: through the client's own state where that leads to the same rows, else by counting from
the start (always when shuffled: the client's shuffle buffer is not in its state). Other rows there
are an error. The client is imported on first use and needs the extra "hub".
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, fields_of
from shardmill.sources.cleaning import choose_field, clean, strings_to_arrow
from shardmill.sources.source import InputRow, RowLocation
from shardmill.storage.hub import (
    HubDataset,
    bounded_client,
    client_version,
    columns_of,
    load_stream,
    resolve_revision,
)
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url

logger = logging.getLogger(__name__)

OVERLAP = 16
"""Rows before a cursor that are read again to recognise it (texts such as "" repeat)."""

_Rows = Generator[tuple[dict[str, Any], JSON], None, None]  # each with the client's state before it


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Everything about a hub dataset except its name."""

    config: str | None = None
    split: str = "train"
    field: str | None = None  # None: "text", else the first string column
    revision: str | None = None  # a branch, tag or commit; None: the head
    shuffle: tuple[int, int] | None = None  # seed and buffer size
    max_retries: int = 5
    retry_delay: float = 1.0  # seconds before the first retry; doubles each time

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise OptionError("{max_retries}: wanted 0 or more", max_retries=self.max_retries)
        if self.retry_delay < 0:
            raise OptionError("{retry_delay}: wanted 0 or more", retry_delay=self.retry_delay)
        if self.shuffle is not None and self.shuffle[1] < 1:
            raise OptionError(
                "{shuffle}: wanted (seed, buffer size of at least 1)", shuffle=self.shuffle
            )


class _HubCursor(NamedTuple):
    """After the first `rows` rows of a stream, the last `overlap` of which are known."""

    rows: int
    overlap: int
    digest: str  # of the last `overlap` rows
    state: JSON  # the client's state before them; None when shuffled


class HubSplit:
    """One split of a hub dataset at a pinned commit, as rows."""

    def __init__(self, dataset: str, options: dict[str, Any]) -> None:
        try:
            self.options = HubOptions(**options)
        except TypeError as error:
            raise OptionError(f"hub dataset {dataset}: {error}") from error
        self.dataset = dataset
        self._revision: str | None = None

    @property
    def revision(self) -> str:
        """The commit; asks the hub once."""
        if self._revision is None:
            self._revision = resolve_revision(self.dataset, self.options.revision, self.retry)
        return self._revision

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(max_retries=self.options.max_retries, delay=self.options.retry_delay)

    def pinned(self, columns: tuple[str, ...] | None = None) -> HubDataset:
        return HubDataset(
            dataset=self.dataset,
            config=self.options.config,
            split=self.options.split,
            revision=self.revision,
            shuffle=self.options.shuffle,
            columns=columns,
        )

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit."""
        return {
            "dataset": self.dataset,
            "config": self.options.config,
            "split": self.options.split,
            "revision": self.revision,
        }

    def describe_shuffle(self) -> JSON:
        if self.options.shuffle is None:
            return None
        seed, size = self.options.shuffle
        # The order is the client's, so its version is part of it.
        return {"seed": seed, "buffer_size": size, "by": client_version()}

    def columns(self) -> list[tuple[str, bool]]:
        """Each column and whether it holds strings: as declared, else as in the first row."""
        pinned = self.pinned()

        def features() -> Any:
            with bounded_client():
                return load_stream(pinned).features

        declared = columns_of(self.retry.call(features, str(pinned)))
        if declared is not None:
            return list(declared)
        first = next(self.rows(None), None)
        if first is None:
            return []
        assert isinstance(first.value, dict)
        return [(name, isinstance(value, str)) for name, value in first.value.items()]

    def check_cursor(self, position: JSON) -> _HubCursor:
        """A cursor of this dataset's rows, or an error."""
        keys = _HubCursor._fields
        rows, overlap, digest, state = fields_of(position, keys, self.dataset)
        counts: JSON = {"rows": rows, "overlap": overlap}
        num_rows, num_known = counts_of(counts, ("rows", "overlap"), self.dataset)
        if not isinstance(digest, str) or not 0 < num_known <= num_rows:
            raise SourceError(
                f"hub dataset {self.dataset}: not a cursor of a hub dataset: {position!r:.200}; "
                "use a cursor of this source, or start over"
            )
        return _HubCursor(num_rows, num_known, digest, state)

    def rows(self, position: JSON, columns: tuple[str, ...] | None = None) -> Iterator[InputRow]:
        """Each row from `position` on (None: the start), retried. Positions are functions."""
        cursor = None if position is None else self.check_cursor(position)
        pinned = self.pinned(columns)
        num_rows = cursor.rows if cursor else 0
        last: deque[tuple[dict[str, Any], JSON]] = deque(maxlen=OVERLAP)
        failures = 0
        while True:
            try:
                with closing(_rows_from(pinned, cursor)) as rows:
                    for row, state in rows:
                        failures = 0
                        last.append((row, state))
                        num_rows += 1
                        after = partial(_position, num_rows, tuple(last))
                        yield InputRow(row, f"{self.dataset}:row {num_rows - 1}", after)
                return
            except Exception as error:  # noqa: BLE001 - clients raise what they like
                failures += 1
                progress = f"{num_rows:,} rows were read"
                self.retry.wait_or_raise(error, failures, str(pinned), progress=progress)
            if last:
                cursor = _cursor_after(num_rows, last)


def _cursor_after(num_rows: int, last: Iterable[tuple[dict[str, Any], JSON]]) -> _HubCursor:
    rows = list(last)
    return _HubCursor(num_rows, len(rows), _digest(row for row, _ in rows), rows[0][1])


def _position(num_rows: int, last: Iterable[tuple[dict[str, Any], JSON]]) -> JSON:
    return _cursor_after(num_rows, last)._asdict()


def _digest(rows: Iterable[dict[str, Any]]) -> str:
    """Equal for equal rows."""
    found = repr([sorted(row.items()) for row in rows])
    return hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()


def _rows_from(source: HubDataset, cursor: _HubCursor | None) -> _Rows:
    if cursor is None:
        yield from _open(source, None)
        return
    if cursor.state is not None:
        with closing(_open(source, cursor.state)) as rows:
            if _is_at(rows, cursor):
                yield from rows
                return
        logger.warning("%s: the client's state leads elsewhere; counting rows instead", source)
    with closing(_open(source, None)) as rows:
        num_before = cursor.rows - cursor.overlap
        deque(islice(rows, num_before), maxlen=0)
        if not _is_at(rows, cursor):
            raise SourceError(
                f"{source}: rows {num_before:,} to {cursor.rows - 1:,} are not those that were "
                f"read before, so continuing would lose or repeat rows ({client_version()} orders "
                "them differently, or the data changed); start over, or use the earlier client"
            )
        yield from rows


def _is_at(rows: _Rows, cursor: _HubCursor) -> bool:
    """Read the overlap: is it the one that was read before?"""
    return _digest(row for row, _ in islice(rows, cursor.overlap)) == cursor.digest


def _open(source: HubDataset, state: JSON) -> _Rows:
    """A fresh stream from the start or from the client's state. After an error a stream is never
    used again, so a dead one is not taken for the end."""
    with bounded_client():
        stream = load_stream(source)
        if state is not None:
            stream.load_state_dict(state)
        before = None if source.shuffle else stream.state_dict()
        with closing(iter(stream)) as rows:
            for row in rows:
                yield row, before
                before = None if source.shuffle else stream.state_dict()


class HubSource:
    """Documents of one split of a hub dataset. Options are those of `HubOptions`."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        **options: Any,
    ) -> None:
        self._split = HubSplit(dataset, options)
        self._name = name or dataset
        self._limits = limits
        self._field: str | None = None

    def __repr__(self) -> str:
        split = self._split
        return f"HubSource({str(Url(split.dataset))!r}, split={split.options.split!r})"

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
        """Asks the hub for the commit, and for the columns when no field was named."""
        return {
            "kind": "hub",
            "name": self._name,
            **self._split.describe(),
            "field": self._text_field(),
            "shuffle": self._split.describe_shuffle(),
        }

    def size_hint(self) -> int | None:
        return None

    def with_limits(self, limits: BatchLimits) -> Self:
        """The same documents in other batches."""
        source = copy(self)
        source._limits = limits
        return source

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        if cursor is not None:
            self._split.check_cursor(cursor)
        return self._read(cursor)

    def locate(
        self, _before: Cursor | None, after: Cursor, _rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`."""
        row = self._split.check_cursor(after).rows - 1
        return RowLocation(id=f"{self._split.dataset}:row {row}", row=row)

    def _read(self, cursor: Cursor | None) -> Iterator[TextBatch]:
        field = self._text_field()
        held: list[InputRow] = []
        texts: list[str | None] = []
        num_bytes = 0
        for row in self._split.rows(cursor, (field,)):
            text = self._text(row, field)
            size = 0 if text is None else len(text.encode("utf-8", "surrogatepass"))
            is_full = num_bytes + size > self._limits.num_bytes
            if held and (is_full or len(held) == self._limits.num_documents):
                yield _batch(held, texts)
                held, texts, num_bytes = [], [], 0
            held.append(row)
            texts.append(text)
            num_bytes += size
        if held:
            yield _batch(held, texts)

    def _text_field(self) -> str:
        if self._field is None:
            self._field = choose_field(
                self._split.columns(),
                wanted=self._split.options.field,
                where=f"hub dataset {self._split.dataset}",
            )
        return self._field

    def _text(self, row: InputRow, field: str) -> str | None:
        assert isinstance(row.value, dict)
        value = row.value[field]
        if value is None or isinstance(value, str):
            return value
        raise SourceError(
            f"hub dataset {row.id}: the column {field!r} holds {type(value).__name__} "
            f"{value!r:.60}, wanted a string; name another with {{field}}",
            field=...,
        )


def _batch(rows: list[InputRow], texts: list[str | None]) -> TextBatch:
    array, repaired = strings_to_arrow(texts)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if repaired is not None:
        repaired = repaired[~missing]
    cleaned = clean(array.drop_null(), repaired=repaired)
    position: Any = rows[-1].position
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(rows),
        counts=cleaned.counts,
        drops=tuple(
            Drop(id=rows[number].id, reason="no_text")
            for number in np.flatnonzero(missing).tolist()
        ),
        cursor=position(),
    )


def iter_rows(dataset: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Whole rows of a hub dataset, in order, with retries.

    For data that is more than one text. Options are those of `HubOptions`.
    """
    split = HubSplit(dataset, options)
    if split.options.field is not None:
        raise OptionError("iter_rows reads whole rows: leave out {field}", field=...)
    split.revision  # noqa: B018 - ask the hub now, not at the first row
    return (row.value for row in split.rows(None) if isinstance(row.value, dict))
