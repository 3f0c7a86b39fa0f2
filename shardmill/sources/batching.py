"""Bound batches: cut what is too large, join what is too small.

In: byte lengths of texts, or batches in order.  Out: half-open cuts, or batches in order.
Promise: no batch holds more than the limits, except one document that alone is larger; order,
counts and drops are kept; the cursor of a joined batch is that of its last part. With `most_bytes`
no document may be larger than that, and readers refuse it before they hold it.
Not here: reading or cleaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.records import IntArray, TextBatch
from shardmill.sources.clean import byte_lengths


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
