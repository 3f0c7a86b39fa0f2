"""Documents end to end, cut into rows of seq_len + 1 tokens.

In: encoded documents in stream order.  Out: `Rows`, with the mark behind each row.
Promise: every id is in exactly one row and nothing else is, except padding in the last row of a
stream. Rows and marks do not depend on how the documents came in chunks; from the mark behind any
row the later rows are made again. Linear in the ids, however small the chunks and long the rows.
Not here: reading, encoding, the shift to labels.

Encoded chunks as one table of documents, the same however the chunks fell.

In: consecutive `Encoded` records.  Out: `Documents`: flat ids with a column for each thing that
packers ask about a document.
Promise: documents keep their order; a document is known by the place of its block and its number
there, whichever chunk brought it.
Not here: how documents become rows (sequential, bins).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import StateMismatchError
from shardmill.loading.streaming.records import (
    Encoded,
    Mark,
    StreamCursor,
    StreamRows,
    Tally,
    Tokens,
)
from shardmill.records import OffsetArray, Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentTable:
    """Consecutive documents of a stream; some may be without ids."""

    values: Tokens  # (total,) their ids, end to end
    offsets: OffsetArray  # (n + 1,) from 0: where each begins in `values`
    places: tuple[StreamCursor, ...]  # of their blocks, in order
    place: OffsetArray  # (n,) which of `places`
    document: OffsetArray  # (n,) number in the block
    cut: OffsetArray  # (n,) ids taken off its end

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> OffsetArray:
        return np.diff(self.offsets)


def table_of(parts: Sequence[Encoded]) -> DocumentTable:
    """The documents of all parts, in order. Needs at least one part."""
    ids = Ragged.concatenate([part.ids for part in parts])
    counts = [len(part.ids) for part in parts]
    places: list[StreamCursor] = []
    numbers = []
    for part in parts:
        if not places or places[-1] != part.block:
            places.append(part.block)
        numbers.append(len(places) - 1)
    firsts = np.array([part.first for part in parts], dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    return DocumentTable(
        values=ids.values.astype(np.int32, copy=False),
        offsets=ids.offsets,
        places=tuple(places),
        place=np.repeat(np.array(numbers, dtype=np.int64), counts),
        document=np.arange(sum(counts), dtype=np.int64) + np.repeat(firsts - before, counts),
        cut=np.concatenate([part.cut for part in parts]).astype(np.int64, copy=False),
    )


def part_of(encoded: Encoded, start: int, stop: int) -> Encoded:
    """Documents `start..stop` of a chunk, sharing its ids."""
    return replace(
        encoded,
        first=encoded.first + start,
        ids=encoded.ids.slice(start, stop),
        cut=encoded.cut[start:stop],
    )


def without_ids(encoded: Encoded, num_ids: int) -> Encoded:
    """The chunk without the first `num_ids` ids of its first document."""
    ids = encoded.ids
    offsets = ids.offsets - num_ids
    offsets[0] = 0
    return replace(encoded, ids=Ragged(ids.values[num_ids:], offsets))


def resumed(encoded: Encoded, start: Mark) -> Encoded:
    """The first chunk with documents after a resume, without the ids that earlier rows hold."""
    if (encoded.block, encoded.first) != (start.place, start.document):
        raise StateMismatchError(
            f"the state goes on inside document {start.document:,} of the block at "
            f"{start.place}, but the stream begins with document {encoded.first:,} of the block at "
            f"{encoded.block}: the source is not the one that the state was taken from"
        )
    length = int(encoded.ids.offsets[1])
    if length <= start.part:
        raise StateMismatchError(
            f"document {start.document:,} of the block at {start.place}: the state says that "
            f"{start.part:,} of its ids are done and more follow, but it has {length:,}: the "
            "source or the tokenizer is not the one that the state was taken from"
        )
    return without_ids(encoded, start.part)


def no_rows(width: int, read: Tally) -> StreamRows:
    """What was read at the end of a stream and gave no row: input without text."""
    tokens: Tokens = np.empty((0, width), np.int32)
    none = np.empty(0, np.int64)
    return StreamRows(
        tokens=tokens,
        segments=tokens,
        places=(),
        place=none,
        document=none,
        part=none,
        begun=none,
        cut_documents=none,
        cut_tokens=none,
        read=read,
    )


def nothing_left(start: Mark) -> StateMismatchError:
    """For a stream that ends where the state promises more."""
    return StateMismatchError(
        f"the state goes on inside document {start.document:,} of the block at {start.place}, but "
        "nothing comes from there: the source is not the one that the state was taken from"
    )


def sequential_rows(
    encoded: Iterator[Encoded], *, seq_len: int, pad_id: int, start: Mark | None = None
) -> Generator[StreamRows, None, None]:
    """All rows of a stream; the last one is padded when the ids do not fill it."""
    width = whole_number(seq_len, "seq_len") + 1
    waiting: list[Encoded] = []  # documents of the row being filled: less ids than a row
    num_ids = 0  # of all that waits
    gone = 0  # ids of the first waiting document that are in earlier rows
    read = told = Tally()
    for chunk in encoded:
        read = chunk.read
        if not len(chunk.ids):
            continue
        if start is not None:
            gone = start.part
            chunk = resumed(chunk, start) if gone else chunk
            start = None
        waiting.append(chunk)
        num_ids += len(chunk.ids.values)
        if num_ids >= width:
            rows = _whole_rows(table_of(waiting), width, gone, read)
            num_ids %= width
            gone = int(rows.part[-1])
            waiting = _rest(chunk, int(rows.document[-1]), num_ids)
            told = read
            yield rows
    if start is not None and start.part:
        raise nothing_left(start)
    if num_ids:
        yield _padded_row(table_of(waiting), width, pad_id, gone, read)
    elif read != told:
        yield no_rows(width, read)


def _rest(chunk: Encoded, document: int, num_ids: int) -> list[Encoded]:
    """What the rows left over: `num_ids` ids, from `document` of the block on.

    All of it lies in the last chunk: what came before did not fill a row.
    """
    first = document - chunk.first
    if first == len(chunk.ids):
        return []
    used = len(chunk.ids.values) - num_ids - int(chunk.ids.offsets[first])
    return [without_ids(part_of(chunk, first, len(chunk.ids)), used)]


def _whole_rows(documents: DocumentTable, width: int, gone: int, read: Tally) -> StreamRows:
    """As many rows as the ids fill."""
    num_rows = len(documents.values) // width
    stop = num_rows * width
    ends = np.arange(1, num_rows + 1, dtype=np.int64) * width
    last = np.searchsorted(documents.offsets, ends - 1, side="right") - 1  # its document
    part = ends - documents.offsets[last]
    part[last == 0] += gone
    done = ends == documents.offsets[last + 1]
    part[done] = 0
    begun, cut_documents, cut_tokens = _counts(documents, num_rows, width, gone)
    return StreamRows(
        tokens=documents.values[:stop].reshape(num_rows, width),
        segments=_segments(documents, stop, width).reshape(num_rows, width),
        places=documents.places,
        place=documents.place[last],
        document=documents.document[last] + done,
        part=part,
        begun=begun,
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
        read=read,
    )


def _padded_row(
    documents: DocumentTable, width: int, pad_id: int, gone: int, read: Tally
) -> StreamRows:
    """The last row of a stream, whose ids do not fill it."""
    num_ids = len(documents.values)
    tokens = np.full((1, width), pad_id, dtype=np.int32)
    tokens[0, :num_ids] = documents.values
    segments = np.zeros((1, width), dtype=np.int32)
    segments[0, :num_ids] = _segments(documents, num_ids, width)
    begun, cut_documents, cut_tokens = _counts(documents, 1, width, gone)
    return StreamRows(
        tokens=tokens,
        segments=segments,
        places=documents.places,
        place=documents.place[-1:],
        document=documents.document[-1:] + 1,
        part=np.zeros(1, dtype=np.int64),
        begun=begun,
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
        read=read,
    )


def _segments(documents: DocumentTable, stop: int, width: int) -> Tokens:
    """(stop,) 1, 2, ... in each row, one more at each document; `stop` ids, whole rows or one.

    width 4, documents of 3, 4 and 1 ids: borders 0 3 4 7 -> numbers 1 2 1 2 -> 111 2 | 111 2
    """
    begins = documents.offsets[:-1]  # those without ids begin where the next one does
    borders = np.unique(np.concatenate((np.arange(0, stop, width), begins[begins < stop])))
    row = borders // width
    first = np.searchsorted(borders, np.arange(0, stop, width))  # the border that opens each row
    number = np.arange(1, len(borders) + 1, dtype=np.int64) - first[row]
    return np.repeat(number.astype(np.int32), np.diff(borders, append=stop))


def _counts(
    documents: DocumentTable, num_rows: int, width: int, gone: int
) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
    """For each row: documents that begin in it, how many of those were cut, and by how many ids.

    A document without ids begins nowhere; if it was cut, it counts in the row being filled.
    """
    row = documents.offsets[:-1] // width
    here = row < num_rows
    if gone:
        here[0] = False
    begun = np.bincount(row[here & (documents.lengths > 0)], minlength=num_rows)
    was_cut = here & (documents.cut > 0)
    cut_documents = np.bincount(row[was_cut], minlength=num_rows)
    cut_tokens = np.zeros(num_rows, dtype=np.int64)
    np.add.at(cut_tokens, row[was_cut], documents.cut[was_cut])
    return begun, cut_documents, cut_tokens
