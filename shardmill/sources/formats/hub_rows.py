"""Rows of a hub dataset, streamed and never lost.

In: a dataset, pinned to a commit.  Out: rows in order, each with the place behind it.
Promise: a dropped connection, a 5xx or a timeout is retried with growing, jittered pauses, and the
stream goes on at the exact row. A dead iterator is never asked again, so it cannot be taken for the
end. To go on, the last rows before the place are read again and compared: through the client's own
state where that leads to the same rows, else by counting from the start (always, when shuffled: the
client's shuffle buffer is not in its state). Other rows there are an error, never a guess.
Not here: which field is the text, batches; what the client does (`hub`).
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.storage.hub import (
    HubDataset,
    bounded_client,
    client_version,
    columns_of,
    load_stream,
)
from shardmill.storage.retry import RetryPolicy

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_Rows = Generator[tuple[Row, JSON], None, None]

OVERLAP = 16
"""So many rows before a place are read again to recognise it (texts such as "" repeat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCursor:
    """Where a stream goes on: behind its first `rows` rows, the last `overlap` of them known."""

    rows: int
    overlap: int
    digest: str  # of the last `overlap` rows
    state: JSON  # the client's state before them; None when shuffled


class Trail:
    """The last rows of a stream, enough to find the place behind them again."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._last: deque[tuple[Row, JSON]] = deque(maxlen=OVERLAP)

    def add(self, row: Row, state: JSON) -> None:
        """A row that was read, and the client's state before it."""
        self.num_rows += 1
        self._last.append((row, state))

    def place(self) -> HubCursor | None:
        """None at the start of the stream."""
        if not self._last:
            return None
        return HubCursor(
            rows=self.num_rows,
            overlap=len(self._last),
            digest=digest(row for row, _ in self._last),
            state=self._last[0][1],
        )


def stream_rows(
    source: HubDataset, place: HubCursor | None, retry: RetryPolicy
) -> Iterator[tuple[Row, JSON]]:
    """Each row from `place` on, with the client's state before it."""
    failures = 0
    trail = Trail(place.rows if place else 0)
    while True:
        try:
            with closing(_rows_from(source, trail.place() or place)) as rows:
                for row, state in rows:
                    failures = 0
                    trail.add(row, state)
                    yield row, state
            return
        except Exception as error:  # noqa: BLE001 - clients raise what they like
            failures += 1
            progress = f"{trail.num_rows:,} rows were read"
            retry.wait_or_raise(error, failures, str(source), progress=progress)


def column_kinds(source: HubDataset, retry: RetryPolicy) -> list[tuple[str, bool]]:
    """Each column and whether it holds strings: as declared, else as in the first row."""
    features = retry.call(lambda: _features(source), str(source))
    declared = columns_of(features)
    if declared is not None:
        return list(declared)
    for row, _ in stream_rows(source, None, retry):
        return [(name, isinstance(value, str)) for name, value in row.items()]
    return []


def digest(rows: Iterable[Row]) -> str:
    """Recognises rows: equal rows, equal digests."""
    found = repr([sorted(row.items()) for row in rows])
    return hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()


def _rows_from(source: HubDataset, place: HubCursor | None) -> _Rows:
    if place is None:
        yield from _open(source, None)
        return
    if place.state is not None:
        with closing(_open(source, place.state)) as rows:
            if _is_at(rows, place):
                yield from rows
                return
        logger.warning("%s: the client's state leads elsewhere; counting rows instead", source)
    with closing(_open(source, None)) as rows:
        num_before = place.rows - place.overlap
        deque(islice(rows, num_before), maxlen=0)
        if not _is_at(rows, place):
            raise SourceError(
                f"{source}: rows {num_before:,} to {place.rows - 1:,} are not those that were read "
                f"before, so going on would lose or repeat rows ({client_version()} orders them "
                "differently, or the data changed); build anew, or with the earlier client"
            )
        yield from rows


def _is_at(rows: _Rows, place: HubCursor) -> bool:
    """Read the overlap: is it the one that was read before?"""
    return digest(row for row, _ in islice(rows, place.overlap)) == place.digest


def _open(source: HubDataset, state: JSON) -> _Rows:
    """A fresh stream from the start or from the client's state."""
    with bounded_client():
        stream = load_stream(source)
        if state is not None:
            stream.load_state_dict(state)
        before = None if source.shuffle else stream.state_dict()
        with closing(iter(stream)) as rows:
            for row in rows:
                yield row, before
                before = None if source.shuffle else stream.state_dict()


def _features(source: HubDataset) -> Any:
    with bounded_client():
        return load_stream(source).features
