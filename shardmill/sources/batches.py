"""Bound batches: cut what is too large, join what is too small.

In: byte lengths of texts, or batches in order.  Out: half-open cuts, or batches in order.
Promise: no batch holds more than the limits, except one document that alone is larger; order,
counts and drops are kept; the cursor of a joined batch is that of its last part. With `most_bytes`
no document may be larger than that, and readers refuse it before they hold it.
Not here: reading or cleaning.

Read numbers and names out of a cursor, or refuse it by name.

In: a cursor (untrusted JSON from a journal).  Out: checked values.
Promise: exact keys, exact types; nothing is defaulted.

Join what is small into units of about one size.

In: sizes, in order, and how large a unit should be.  Out: runs of neighbours.
Promise: every neighbour once, in order; a run is as long as its size allows, and what alone is
larger stands alone; a pure function of its arguments.
Not here: cutting what is too large; each kind of input knows its own parts.

A bound on the size of one document, where a source can keep to it.

In: a source, bytes.  Out: the same source, which refuses a larger document while it reads it.
Promise: names, descriptions, batches and cursors stay as they are. A source that has no such bound,
such as one of a user, is given back as it is: what it gives has been read when it can be measured.
Not here: how much is allowed; who builds knows what memory there is.

What must not change between a stop and a resume, on one machine.

`describe` identifies input on any machine, so it cannot see an edit in the middle of a large file
that keeps its size. A stamp may hold what only this machine knows, such as times; it stays in the
workplace of a build and never reaches a store.

A short name for input the caller did not name.

In: a path, a glob, a URL, or a list of them.  Out: one word for reports; never an absolute path,
never a secret.
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
from shardmill.records import JSON, Cursor, IntArray, TextBatch
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
        """Bytes of input that a document may take when each of its own takes `expansion` at most;
        beside them there may be as many as a batch has, which are held anyway."""
        if self.most_bytes is None:
            return None
        return self.most_bytes * expansion + self.num_bytes


DEFAULT_LIMITS = BatchLimits()


def too_large(where: str, found: str, most: int) -> SourceError:
    """The one wording for what does not fit into memory."""
    return SourceError(
        f"{where}: {found}; with the memory that there is, {most:,} can be read: cut it into "
        "several, allow more memory (memory=), or use fewer workers"
    )


def cut(lengths: IntArray, limits: BatchLimits) -> list[tuple[int, int]]:
    """Cover `range(len(lengths))` with as few consecutive `(start, stop)` as the limits allow."""
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
    """Join neighbours while they fit. At most one batch is held back, and read ahead, at a time."""
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


def cursor_count(cursor: Cursor | None, key: str, source: str) -> int:
    """The one count of a cursor `{key: count}`; 0 when there is no cursor."""
    if cursor is None:
        return 0
    (count,) = counts_of(cursor, (key,), source)
    return count


def counts_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[int, ...]:
    """The counts of a cursor that holds exactly `keys`."""
    found = fields_of(cursor, keys, source)
    for key, value in zip(keys, found, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _bad(cursor, source, f"{key!r} must be a count, 0 or more")
    return tuple(value for value in found if isinstance(value, int))


def fields_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[JSON, ...]:
    """The values of a cursor that holds exactly `keys`."""
    if not isinstance(cursor, dict) or set(cursor) != set(keys):
        raise _bad(cursor, source, f"wanted exactly the keys {', '.join(map(repr, keys))}")
    return tuple(cursor[key] for key in keys)


def _bad(cursor: JSON, source: str, wanted: str) -> SourceError:
    return SourceError(
        f"source {source!r} cannot resume from the cursor {cursor!r:.200}: {wanted}; "
        "use a cursor that this kind of source gave, or start anew"
    )


MOST = 1024
"""Of so many neighbours a run consists at most: it stays small to send, whatever their size."""


def runs(sizes: Iterable[int | None], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of neighbours; one of size None stands alone."""
    start = stop = 0
    total: float = 0
    for size in sizes:
        weight = math.inf if size is None else size
        if start < stop and (total + weight > num_bytes or stop - start == MOST):
            yield start, stop
            start, total = stop, 0
        stop += 1
        total += weight
    if start < stop:
        yield start, stop


def check_num_bytes(num_bytes: int) -> None:
    if num_bytes < 1:
        raise OptionError(f"num_bytes={num_bytes}: wanted how large a piece should be, 1 or more")


AnySource = TypeVar("AnySource")


@runtime_checkable
class LimitedSource(Protocol):
    """A source that can refuse what is too large before it holds it."""

    def limited(self, num_bytes: int) -> Self: ...


def limited(source: AnySource, num_bytes: int) -> AnySource:
    """The source, bounded as far as it can be."""
    if isinstance(source, LimitedSource):
        return cast(AnySource, source.limited(num_bytes))
    return source


def stamp_of(source: Source | ConversationSource) -> JSON:
    """The source's own stamp; None when it has none."""
    stamp = getattr(source, "stamp", None)
    found: JSON = stamp() if callable(stamp) else None
    return found


def name_of(where: Where) -> str:
    """The last part of the path: "books" for "data/books/", "a.jsonl" for "data/a.jsonl"."""
    if isinstance(where, str | Path):
        path = Path(str(Url(str(where))))
        return path.name or path.resolve().name or "files"
    return name_of(where[0]) if len(where) == 1 else f"{len(where)} files"
