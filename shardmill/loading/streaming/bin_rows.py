"""Documents packed whole into rows, a buffer of them at a time.

In: encoded documents in stream order.  Out: `Rows`, one record a buffer, with marks.
Promise: a document is split only when it is longer than a row, into pieces of a row's length and
a rest; a piece is whole in one row. A buffer is emptied before the next begins, so no document
waits. Where buffers begin depends on the documents alone, never on how they came in chunks.
Not here: choosing rows (packing), reading, encoding, the shift to labels.

A pack plan over documents becomes rows of tokens and segments.

In: documents, a plan of their pieces, the order of its rows.  Out: token and segment arrays, and
what begins in each row.
Promise: pieces lie in a row in stream order, without gaps, padding behind them. One gather: no
loop over rows, pieces or tokens.
Not here: choosing rows (packing), where buffers end (bins).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.streaming.records import Encoded, Mark, StreamRows, Tally, Tokens
from shardmill.loading.streaming.sequential_rows import DocumentTable, no_rows, part_of, table_of
from shardmill.packing import PACKERS, Algorithm, BinAssignment, PackPlan, takes_seed
from shardmill.records import OffsetArray, Ragged
from shardmill.sampling import Permutation
from shardmill.store.readers.copying import lay_pieces, take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """Pieces row by row."""

    piece: OffsetArray  # (pieces,) number in the plan
    row: OffsetArray  # (pieces,) never falls
    offsets: OffsetArray  # (rows + 1,) where each row's pieces begin


def in_order(rows: BinAssignment, order: OffsetArray) -> RowLayout:
    """The rows of an assignment in another order: `order[i]` comes at place i."""
    counts = np.diff(rows.offsets)[order]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    row = np.repeat(np.arange(len(order), dtype=np.int64), counts)
    source = np.arange(len(row)) + (rows.offsets[:-1][order] - offsets[:-1])[row]
    return RowLayout(piece=rows.indices[source].astype(np.int64), row=row, offsets=offsets)


def fill(
    layout: RowLayout, plan: PackPlan, documents: DocumentTable, pad_id: int
) -> tuple[Tokens, Tokens]:
    """Tokens and segments, (rows, capacity) each."""
    width, num_rows = plan.metrics.capacity, len(layout.offsets) - 1
    pieces = plan.pieces
    length = pieces.lengths[layout.piece].astype(np.int64)
    begin = documents.offsets[pieces.example[layout.piece]] + pieces.start[layout.piece]
    before = np.concatenate(([0], np.cumsum(length)))
    columns = before[:-1] - before[layout.offsets[:-1]][layout.row]
    tokens = np.full((num_rows, width), pad_id, np.int32)
    laid = Ragged(columns, layout.offsets)
    lay_pieces(laid, length, (partial(take, documents.values), begin, tokens))
    # every row gets one more segment, perhaps of length 0: padding
    padding = width - np.diff(before[layout.offsets])
    at = layout.offsets[1:]
    number = np.arange(1, len(layout.piece) + 1) - layout.offsets[layout.row]
    segments = np.repeat(np.insert(number.astype(np.int32), at, 0), np.insert(length, at, padding))
    return tokens, segments.reshape(num_rows, width)


def counts(
    layout: RowLayout, plan: PackPlan, documents: DocumentTable
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


ALGORITHMS = [name for name in PACKERS if not takes_seed(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinRules:
    """How documents share rows."""

    buffer_documents: int = 4096  # packed together; more fill rows better and take more memory
    buffer_tokens: int = 2**24  # a buffer ends before the document that would bring it over this
    max_per_row: int | None = None  # pieces in a row
    algorithm: Algorithm = "first-fit"  # one that takes no seed
    seed: int | None = None  # of the order of a buffer's rows; None: by their first document

    def __post_init__(self) -> None:
        whole_number(self.buffer_documents, "buffer_documents")
        whole_number(self.buffer_tokens, "buffer_tokens")
        if self.max_per_row is not None:
            whole_number(self.max_per_row, "max_per_row")
        if self.seed is not None:
            whole_number(self.seed, "seed", least=0)
        if self.algorithm not in ALGORITHMS:
            raise OptionError(
                f"{{algorithm}}: wanted one of {', '.join(ALGORITHMS)}", algorithm=self.algorithm
            )


def bin_rows(
    encoded: Iterator[Encoded],
    rules: BinRules,
    *,
    seq_len: int,
    pad_id: int,
    start: Mark | None = None,
) -> Generator[StreamRows, None, None]:
    """All rows of a stream, buffer by buffer, without the first `start.part` of the first."""
    width = whole_number(seq_len, "seq_len") + 1
    done = 0 if start is None else start.part
    told = Tally()
    reading = _Reading(encoded)
    for buffer in _buffers(reading, rules, start):
        rows = _rows_of(buffer, rules, width, pad_id)
        if done and len(rows) <= done:
            raise _too_few(buffer.start, done, len(rows))
        if len(rows):
            told = rows.read
            yield _without(rows, done)
        done = 0
    if done and start is not None:
        raise _too_few(start, done, 0)
    if reading.read != told:
        yield no_rows(width, reading.read)


class _Reading(Iterator[Encoded]):
    """The chunks, and what was read up to the last of them."""

    def __init__(self, encoded: Iterator[Encoded]) -> None:
        self._encoded = encoded
        self.read = Tally()

    def __next__(self) -> Encoded:
        chunk = next(self._encoded)
        self.read = chunk.read
        return chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    """Documents that are packed together: at least one."""

    start: Mark  # behind the buffer before; its part says nothing here
    parts: list[Encoded]
    read: Tally

    @property
    def end(self) -> Mark:
        last = self.parts[-1]
        return Mark(place=last.block, document=last.first + len(last.ids))


def _buffers(
    encoded: Iterator[Encoded], rules: BinRules, start: Mark | None
) -> Generator[_Buffer, None, None]:
    begin = start
    parts: list[Encoded] = []
    num_documents = num_ids = 0
    read = Tally()
    for chunk in encoded:
        read, position = chunk.read, 0
        begin = begin or Mark(place=chunk.block, document=chunk.first)
        while position < len(chunk.ids):
            taken = _how_many(chunk, position, rules, num_documents, num_ids)
            if taken:
                parts.append(part_of(chunk, position, position + taken))
                position += taken
                num_documents += taken
                num_ids += len(parts[-1].ids.values)
            if position < len(chunk.ids) or num_documents == rules.buffer_documents:
                buffer = _Buffer(start=begin, parts=parts, read=parts[-1].read)
                begin, parts, num_documents, num_ids = buffer.end, [], 0, 0
                yield buffer
    if parts and begin is not None:
        yield _Buffer(start=begin, parts=parts, read=read)


def _how_many(
    chunk: Encoded, position: int, rules: BinRules, num_documents: int, num_ids: int
) -> int:
    """Documents of the chunk, from `position` on, that the buffer still takes."""
    offsets = chunk.ids.offsets
    limit = int(offsets[position]) + rules.buffer_tokens - num_ids
    fit = int(np.searchsorted(offsets, limit, side="right")) - 1 - position
    at_least = 0 if num_documents else 1
    return min(max(fit, at_least), rules.buffer_documents - num_documents)


def _rows_of(buffer: _Buffer, rules: BinRules, width: int, pad_id: int) -> StreamRows:
    documents, start, end = table_of(buffer.parts), buffer.start, buffer.end
    pack = PACKERS[rules.algorithm]
    plan = pack(documents.lengths, width, max_per_row=rules.max_per_row, long="split")
    laid = in_order(plan.rows, _row_order(plan, rules.seed, start))
    tokens, segments = fill(laid, plan, documents, pad_id)
    begun, cut_documents, cut_tokens = counts(laid, plan, documents)
    number = np.arange(1, len(tokens) + 1, dtype=np.int64)
    last = number == len(tokens)
    return StreamRows(
        tokens=tokens,
        segments=segments,
        places=(start.place, end.place),
        place=last.astype(np.int64),
        document=np.where(last, end.document, start.document),
        part=np.where(last, 0, number),
        begun=begun,
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
        read=buffer.read,
    )


def _row_order(plan: PackPlan, seed: int | None, start: Mark) -> OffsetArray:
    """Which row of the plan comes at each place."""
    if seed is None:
        return np.argsort(plan.rows.indices[plan.rows.offsets[:-1]], kind="stable")
    path = (start.place.epoch, start.place.number, start.document)
    return Permutation(len(plan), seed, "rows", *path).take(np.arange(len(plan)))


def _without(rows: StreamRows, num_done: int) -> StreamRows:
    """The rows behind the first `num_done`."""
    return replace(
        rows,
        tokens=rows.tokens[num_done:],
        segments=rows.segments[num_done:],
        place=rows.place[num_done:],
        document=rows.document[num_done:],
        part=rows.part[num_done:],
        begun=rows.begun[num_done:],
        cut_documents=rows.cut_documents[num_done:],
        cut_tokens=rows.cut_tokens[num_done:],
    )


def _too_few(start: Mark, num_done: int, num_rows: int) -> StateMismatchError:
    return StateMismatchError(
        f"the buffer from document {start.document:,} of the block at {start.place} on: the state "
        f"says that {num_done:,} of its rows are done and more follow, but it gives {num_rows:,}: "
        "the source, the tokenizer or the packing is not the one that the state was taken from"
    )
