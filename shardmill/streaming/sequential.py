"""Documents end to end, cut into rows of seq_len + 1 tokens.

In: encoded documents in stream order.  Out: `Rows`, with the mark behind each row.
Promise: every id is in exactly one row and nothing else is, except padding in the last row of a
stream. Rows and marks do not depend on how the documents came in chunks; from the mark behind any
row the later rows are made again. Linear in the ids, however small the chunks and long the rows.
Not here: reading, encoding, the shift to labels.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from shardmill.arguments import whole_number
from shardmill.records import OffsetArray
from shardmill.streaming.records import Encoded, Mark, Rows, Tally, Tokens
from shardmill.streaming.rows import (
    Documents,
    no_rows,
    nothing_left,
    part_of,
    resumed,
    table_of,
    without_ids,
)


def sequential_rows(
    encoded: Iterator[Encoded], *, seq_len: int, pad_id: int, start: Mark | None = None
) -> Generator[Rows, None, None]:
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


def _whole_rows(documents: Documents, width: int, gone: int, read: Tally) -> Rows:
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
    return Rows(
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


def _padded_row(documents: Documents, width: int, pad_id: int, gone: int, read: Tally) -> Rows:
    """The last row of a stream, whose ids do not fill it."""
    num_ids = len(documents.values)
    tokens = np.full((1, width), pad_id, dtype=np.int32)
    tokens[0, :num_ids] = documents.values
    segments = np.zeros((1, width), dtype=np.int32)
    segments[0, :num_ids] = _segments(documents, num_ids, width)
    begun, cut_documents, cut_tokens = _counts(documents, 1, width, gone)
    return Rows(
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


def _segments(documents: Documents, stop: int, width: int) -> Tokens:
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
    documents: Documents, num_rows: int, width: int, gone: int
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
