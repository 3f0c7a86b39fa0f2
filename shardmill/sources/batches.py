"""What all sources share: bounded batches, checked cursors, and runs of small inputs.

A batch keeps within `BatchLimits`, except for one document that alone is larger. With `most_bytes`
no document may be larger than that, and readers refuse it before they hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar, cast, runtime_checkable

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, Source
from shardmill.records import JSON, IntArray, TextBatch
from shardmill.sources.cleaning import byte_lengths
from shardmill.storage.files import Where
from shardmill.urls import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large a batch may grow. Changes where batches end, never the documents."""

    num_bytes: int = 4 * 2**20  # of text
    num_documents: int = 8192  # of input rows, dropped and empty ones too
    most_bytes: int | None = None  # of one document, which is refused when it is larger; None: any

    def __post_init__(self) -> None:
        most = 1 if self.most_bytes is None else self.most_bytes
        if min(self.num_bytes, self.num_documents, most) < 1:
            raise OptionError(f"{self}: every limit must be at least 1")

    def refusing(self, most_bytes: int) -> BatchLimits:
        """The same batches, and no document over `most_bytes`."""
        return replace(self, most_bytes=most_bytes)

    def most_input(self, expansion: int = 1) -> int | None:
        """Bytes of input that may hold one document, when each of its bytes takes at most
        `expansion` of them. A batch more is allowed, because a batch is held anyway."""
        if self.most_bytes is None:
            return None
        return self.most_bytes * expansion + self.num_bytes


DEFAULT_LIMITS = BatchLimits()


def too_large(where: str, found: str, most: int) -> SourceError:
    """A document, line or page does not fit into memory."""
    return SourceError(
        f"{where}: {found}; with the available memory {most:,} can be read: cut it into several, "
        "allow more with {memory}, or use fewer {workers}",
        memory=...,
        workers=...,
    )


def cut(lengths: IntArray, limits: BatchLimits) -> list[tuple[int, int]]:
    """Cover `range(len(lengths))` with as few consecutive ranges as the limits allow."""
    edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    pieces = []
    start = 0
    while start < len(lengths):
        full = int(np.searchsorted(edges, edges[start] + limits.num_bytes, side="right")) - 1
        stop = min(max(full, start + 1), start + limits.num_documents, len(lengths))
        pieces.append((start, stop))
        start = stop
    return pieces


def coalesce(batches: Iterable[TextBatch], limits: BatchLimits) -> Iterator[TextBatch]:
    """Join neighbours while they fit; a joined batch has the cursor of its last part. At most one
    batch is read ahead."""
    held: list[TextBatch] = []
    num_bytes = num_read = 0
    for batch in batches:
        size = text_bytes(batch.texts)
        if held and (
            num_bytes + size > limits.num_bytes or num_read + batch.num_read > limits.num_documents
        ):
            yield _joined(held)
            held, num_bytes, num_read = [], 0, 0
        held.append(batch)
        num_bytes += size
        num_read += batch.num_read
        if num_bytes >= limits.num_bytes or num_read >= limits.num_documents:
            yield _joined(held)
            held, num_bytes, num_read = [], 0, 0
    if held:
        yield _joined(held)


def text_bytes(texts: pa.LargeStringArray) -> int:
    """Bytes of text in an array of large strings (not of the buffers it shares)."""
    return int(byte_lengths(texts).sum())


def _joined(batches: list[TextBatch]) -> TextBatch:
    if len(batches) == 1:
        return batches[0]
    counts: dict[str, int] = {}
    for batch in batches:
        for name, count in batch.counts.items():
            counts[name] = counts.get(name, 0) + count
    return TextBatch(
        texts=pa.concat_arrays([batch.texts for batch in batches]),
        num_read=sum(batch.num_read for batch in batches),
        counts=counts,
        drops=tuple(drop for batch in batches for drop in batch.drops),
        num_rows=sum(batch.num_rows for batch in batches),
        cursor=batches[-1].cursor,
    )


def counts_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[int, ...]:
    """The counts of a cursor that holds exactly `keys`."""
    found = fields_of(cursor, keys, source)
    for key, value in zip(keys, found, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _bad_cursor(cursor, source, f"{key!r} must be a count, 0 or more")
    return tuple(value for value in found if isinstance(value, int))


def fields_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[JSON, ...]:
    """The values of a cursor that holds exactly `keys`."""
    if not isinstance(cursor, dict) or set(cursor) != set(keys):
        raise _bad_cursor(cursor, source, f"wanted exactly the keys {', '.join(map(repr, keys))}")
    return tuple(cursor[key] for key in keys)


def _bad_cursor(cursor: JSON, source: str, wanted: str) -> SourceError:
    return SourceError(
        f"source {source!r} cannot resume from the cursor {cursor!r:.200}: {wanted}; "
        "use a cursor of this kind of source, or start over"
    )


MAX_RUN = 1024
"""Most inputs in a run, so that a piece stays small when pickled, however small its files."""


def runs(sizes: Iterable[int | None], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of neighbours that together have at most `num_bytes`; one that is larger, or
    whose size is None, is a run by itself."""
    start = stop = 0
    total: float = 0
    for size in sizes:
        weight = math.inf if size is None else size
        if start < stop and (total + weight > num_bytes or stop - start == MAX_RUN):
            yield start, stop
            start, total = stop, 0
        stop += 1
        total += weight
    if start < stop:
        yield start, stop


def check_num_bytes(num_bytes: int) -> None:
    if num_bytes < 1:
        raise OptionError("{num_bytes}: wanted the size of a piece, 1 or more", num_bytes=num_bytes)


AnySource = TypeVar("AnySource")


@runtime_checkable
class LimitedSource(Protocol):
    """A source that can refuse a document that is too large before it holds it."""

    def limited(self, num_bytes: int) -> Self: ...


def limited(source: AnySource, num_bytes: int) -> AnySource:
    """The same source, which refuses a document over `num_bytes`. Names, descriptions, batches and
    cursors stay. A source without such a bound, such as a user's own, is returned as it is."""
    if isinstance(source, LimitedSource):
        return cast(AnySource, source.limited(num_bytes))
    return source


def stamp_of(source: Source | ConversationSource) -> JSON:
    """What must not change between a stop and a resume on this machine, such as file times; None
    when the source has no stamp. It stays in a build's work folder and never reaches a store."""
    stamp = getattr(source, "stamp", None)
    found: JSON = stamp() if callable(stamp) else None
    return found


def name_of(where: Where) -> str:
    """A short name for input the caller did not name, without absolute paths or secrets: "books"
    for "data/books/", "a.jsonl" for "data/a.jsonl"."""
    if isinstance(where, str | Path):
        path = Path(str(Url(str(where))))
        return path.name or path.resolve().name or "files"
    return name_of(where[0]) if len(where) == 1 else f"{len(where)} files"
