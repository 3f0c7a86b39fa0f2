"""A pack plan over documents becomes rows of tokens and segments.

In: documents, a plan of their pieces, the order of its rows.  Out: token and segment arrays, and
what begins in each row.
Promise: pieces lie in a row in stream order, without gaps, padding behind them. One gather: no
loop over rows, pieces or tokens.
Not here: choosing rows (packing), where buffers end (bins).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.packing import BinAssignment, PackPlan
from shardmill.records import OffsetArray
from shardmill.streaming.records import Tokens
from shardmill.streaming.rows import Documents

AT_ONCE = 2**16
"""About how many tokens are gathered at a time: their indices stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Pieces row by row."""

    piece: OffsetArray  # (pieces,) number in the plan
    row: OffsetArray  # (pieces,) never falls
    offsets: OffsetArray  # (rows + 1,) where each row's pieces begin


def in_order(rows: BinAssignment, order: OffsetArray) -> Layout:
    """The rows of an assignment in another order: `order[i]` comes at place i."""
    counts = np.diff(rows.offsets)[order]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    row = np.repeat(np.arange(len(order), dtype=np.int64), counts)
    source = np.arange(len(row)) + (rows.offsets[:-1][order] - offsets[:-1])[row]
    return Layout(piece=rows.indices[source].astype(np.int64), row=row, offsets=offsets)


def fill(
    layout: Layout, plan: PackPlan, documents: Documents, pad_id: int
) -> tuple[Tokens, Tokens]:
    """Tokens and segments, (rows, capacity) each."""
    width, num_rows = plan.metrics.capacity, len(layout.offsets) - 1
    pieces = plan.pieces
    length = pieces.lengths[layout.piece].astype(np.int64)
    begin = documents.offsets[pieces.example[layout.piece]] + pieces.start[layout.piece]
    # every row gets one more piece, perhaps of length 0: padding, read from behind the documents
    before = np.concatenate(([0], np.cumsum(length)))
    padding = width - np.diff(before[layout.offsets])
    at = layout.offsets[1:]
    length = np.insert(length, at, padding)
    begin = np.insert(begin, at, len(documents.values))
    number = np.arange(1, len(layout.piece) + 1) - layout.offsets[layout.row]
    segments = np.repeat(np.insert(number.astype(np.int32), at, 0), length)
    values = np.concatenate((documents.values, np.full(width, pad_id, dtype=np.int32)))
    tokens = _gather(values, begin, length)
    return tokens.reshape(num_rows, width), segments.reshape(num_rows, width)


def _gather(values: Tokens, begin: OffsetArray, length: OffsetArray) -> Tokens:
    """`values[begin:begin + length]` of all runs, end to end."""
    stops = np.cumsum(length)
    total = int(stops[-1]) if len(stops) else 0
    shift = begin - (stops - length)
    gathered = np.empty(total, dtype=np.int32)
    first = done = 0
    while done < total:
        last = min(int(np.searchsorted(stops, done + AT_ONCE)) + 1, len(stops))
        stop = int(stops[last - 1])
        index = np.repeat(shift[first:last], length[first:last])
        index += np.arange(done, stop)
        np.take(values, index, out=gathered[done:stop])
        first, done = last, stop
    return gathered


def counts(
    layout: Layout, plan: PackPlan, documents: Documents
) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
    """For each row: documents whose first piece is in it, how many of them were cut, and by how
    many ids. A document without ids has no piece; if it was cut, it counts in the first row."""
    num_rows = len(layout.offsets) - 1
    first = plan.pieces.start[layout.piece] == 0
    row = layout.row[first]
    cut = documents.cut[plan.pieces.example[layout.piece]][first]
    begun = np.bincount(row, minlength=num_rows)
    cut_documents = np.bincount(row[cut > 0], minlength=num_rows)
    cut_tokens = np.zeros(num_rows, dtype=np.int64)
    np.add.at(cut_tokens, row, cut)
    if num_rows:
        without = documents.cut[documents.lengths == 0]
        cut_documents[0] += np.count_nonzero(without)
        cut_tokens[0] += without.sum()
    return begun, cut_documents, cut_tokens
