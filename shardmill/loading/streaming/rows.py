"""Turn encoded documents into rows of `seq_len + 1` tokens, with the position after each row.

`sequential_rows` lays documents end to end and cuts every `seq_len + 1` ids. `bin_rows` packs a
buffer of whole documents at a time and splits only those that are longer than a row. In both, every
id is in exactly one row, and rows and positions do not depend on how documents came in chunks. From
the position after any row, the later rows are made again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import StateMismatchError
from shardmill.loading.streaming.documents import ReadCounts, StreamCursor
from shardmill.loading.streaming.encode import Encoded
from shardmill.packing import PACKERS, Algorithm, PackPlan
from shardmill.records import OffsetArray, Ragged
from shardmill.sampling import Permutation
from shardmill.store.readers.files import take
from shardmill.store.readers.packed_rows import fill_rows

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPosition:
    """Where the next row of a stream comes from."""

    block: StreamCursor  # start of the block that holds its oldest document
    document: int = 0  # of that block; the number of its documents: nothing of it is left
    part: int = 0  # sequential: ids of that document in earlier rows; bins: rows already given of
    # the buffer that begins with that document


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRows:
    """Some consecutive rows, and the position after each of them."""

    tokens: Tokens  # (n, seq_len + 1), padded at the end
    segments: Tokens  # (n, seq_len + 1): 1, 2, ... for the documents of a row; 0: padding
    blocks: tuple[StreamCursor, ...]  # those that the positions refer to
    block: OffsetArray  # (n,) which of `blocks`
    document: OffsetArray  # (n,) RowPosition.document
    part: OffsetArray  # (n,) RowPosition.part
    begun: OffsetArray  # (n,) documents whose first token is in the row
    cut_documents: OffsetArray  # (n,) how many of those had ids cut off
    cut_tokens: OffsetArray  # (n,) and how many ids
    read: ReadCounts  # what was read for these rows

    def __len__(self) -> int:
        return len(self.tokens)

    def position_after(self, row: int) -> RowPosition:
        return RowPosition(
            block=self.blocks[self.block[row]],
            document=int(self.document[row]),
            part=int(self.part[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BinRules:
    """How whole documents share rows."""

    buffer_documents: int = 4096  # packed together; more fill rows better and take more memory
    buffer_tokens: int = 2**24  # a buffer ends before the document that would exceed this
    max_per_row: int | None = None  # pieces in a row
    algorithm: Algorithm = "first-fit"  # one that takes no seed
    seed: int | None = None  # of the order of a buffer's rows; None: by their first document


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentTable:
    """Consecutive documents of a stream, whatever chunks they came in."""

    values: Tokens  # (total,) their ids, end to end
    offsets: OffsetArray  # (n + 1,) where each begins in `values`; some may have no ids
    blocks: tuple[StreamCursor, ...]  # starts of their blocks, in order
    block: OffsetArray  # (n,) which of `blocks`
    document: OffsetArray  # (n,) number in the block
    cut: OffsetArray  # (n,) ids taken off its end

    @property
    def lengths(self) -> OffsetArray:
        return np.diff(self.offsets)


def table_of(chunks: Sequence[Encoded]) -> DocumentTable:
    """The documents of at least one chunk, in order."""
    ids = Ragged.concatenate([chunk.ids for chunk in chunks])
    counts = [len(chunk.ids) for chunk in chunks]
    blocks: list[StreamCursor] = []
    numbers = []
    for chunk in chunks:
        if not blocks or blocks[-1] != chunk.block:
            blocks.append(chunk.block)
        numbers.append(len(blocks) - 1)
    firsts = np.array([chunk.first for chunk in chunks], dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    return DocumentTable(
        values=ids.values.astype(np.int32, copy=False),
        offsets=ids.offsets,
        blocks=tuple(blocks),
        block=np.repeat(np.array(numbers, dtype=np.int64), counts),
        document=np.arange(sum(counts), dtype=np.int64) + np.repeat(firsts - before, counts),
        cut=np.concatenate([chunk.cut for chunk in chunks]).astype(np.int64, copy=False),
    )


def _slice(chunk: Encoded, start: int, stop: int) -> Encoded:
    """Documents `start..stop` of a chunk, sharing its ids."""
    return replace(
        chunk,
        first=chunk.first + start,
        ids=chunk.ids.slice(start, stop),
        cut=chunk.cut[start:stop],
    )


def _without_ids(chunk: Encoded, num_ids: int) -> Encoded:
    """The chunk without the first `num_ids` ids of its first document."""
    offsets = chunk.ids.offsets - num_ids
    offsets[0] = 0
    return replace(chunk, ids=Ragged(chunk.ids.values[num_ids:], offsets))


def _counts(
    row: OffsetArray, lengths: OffsetArray, cut: OffsetArray, num_rows: int
) -> dict[str, OffsetArray]:
    """For each row: documents that begin in it, how many of those were cut, and by how many ids.

    `row` is where each document begins. One without ids begins nowhere, but its cut counts there.
    """
    was_cut = cut > 0
    cut_tokens = np.zeros(num_rows, dtype=np.int64)
    np.add.at(cut_tokens, row[was_cut], cut[was_cut])
    return {
        "begun": np.bincount(row[lengths > 0], minlength=num_rows),
        "cut_documents": np.bincount(row[was_cut], minlength=num_rows),
        "cut_tokens": cut_tokens,
    }


# documents end to end


def sequential_rows(
    encoded: Iterator[Encoded], *, seq_len: int, pad_id: int, start: RowPosition | None = None
) -> Generator[StreamRows, None, None]:
    """All rows of a stream. Only the last one may be padded. Linear in the ids."""
    width = seq_len + 1
    waiting: list[Encoded] = []  # documents of the row being filled: fewer ids than a row
    num_ids = 0  # that wait
    done = 0  # ids of the first waiting document that are in earlier rows
    read = reported = ReadCounts()
    for chunk in encoded:
        read = chunk.read
        if not len(chunk.ids):
            continue
        if start is not None:
            done = start.part
            chunk = _resumed(chunk, start) if done else chunk
            start = None
        waiting.append(chunk)
        num_ids += len(chunk.ids.values)
        if num_ids >= width:
            documents, num_rows = table_of(waiting), num_ids // width
            stop = num_rows * width
            rows = StreamRows(
                tokens=documents.values[:stop].reshape(num_rows, width),
                segments=_segments(documents, stop, width).reshape(num_rows, width),
                **_cut_rows(documents, num_rows, width, done),
                read=read,
            )
            num_ids %= width
            done = int(rows.part[-1])
            # what is left is in the last chunk: the ones before did not fill a row
            first = int(rows.document[-1]) - chunk.first
            waiting = []
            if first < len(chunk.ids):
                used = len(chunk.ids.values) - num_ids - int(chunk.ids.offsets[first])
                waiting = [_without_ids(_slice(chunk, first, len(chunk.ids)), used)]
            reported = read
            yield rows
    if start is not None and start.part:
        raise StateMismatchError(
            f"the state resumes inside document {start.document:,} of the block at {start.block}, "
            "but nothing comes from there: the source is not the one that the state was taken from"
        )
    if num_ids:
        documents = table_of(waiting)
        yield StreamRows(
            tokens=_padded(documents.values, width, pad_id),
            segments=_padded(_segments(documents, num_ids, width), width, 0),
            **_cut_rows(documents, 1, width, done),
            read=read,
        )
    elif read != reported:
        yield _no_rows(chunk, width)


def _no_rows(last: Encoded, width: int) -> StreamRows:
    """Reports input at the end of a stream that gave no row."""
    tokens: Tokens = np.empty((0, width), np.int32)
    fields = _cut_rows(table_of([_slice(last, 0, 0)]), 0, width, 0)
    return StreamRows(tokens=tokens, segments=tokens, **fields, read=last.read)


def _resumed(chunk: Encoded, start: RowPosition) -> Encoded:
    """The first chunk with documents after a resume, without the ids that earlier rows hold."""
    if (chunk.block, chunk.first) != (start.block, start.document):
        raise StateMismatchError(
            f"the state resumes inside document {start.document:,} of the block at {start.block}, "
            f"but the stream begins with document {chunk.first:,} of the block at {chunk.block}: "
            "the source is not the one that the state was taken from"
        )
    length = int(chunk.ids.offsets[1])
    if length <= start.part:
        raise StateMismatchError(
            f"document {start.document:,} of the block at {start.block}: the state says that "
            f"{start.part:,} of its ids are done and more follow, but it has {length:,}: the "
            "source or the tokenizer is not the one that the state was taken from"
        )
    return _without_ids(chunk, start.part)


def _cut_rows(documents: DocumentTable, num_rows: int, width: int, done: int) -> dict[str, Any]:
    """The first `num_rows` rows, as fields of `StreamRows`; the ids may not fill the last one.

    `done` ids of the first document are in earlier rows.
    """
    num_ids = len(documents.values)
    ends = np.minimum(np.arange(1, num_rows + 1, dtype=np.int64) * width, num_ids)
    last = np.searchsorted(documents.offsets, ends - 1, side="right") - 1  # document of the last id
    if num_rows * width > num_ids:
        last[-1] = len(documents.document) - 1  # no row follows, so documents without ids are done
    part = ends - documents.offsets[last]
    part[last == 0] += done
    is_end = ends == documents.offsets[last + 1]
    part[is_end] = 0
    row = documents.offsets[:-1] // width
    here = row < num_rows
    if done:
        here[0] = False
    return {
        "blocks": documents.blocks,
        "block": documents.block[last],
        "document": documents.document[last] + is_end,
        "part": part,
        **_counts(row[here], documents.lengths[here], documents.cut[here], num_rows),
    }


def _padded(ids: Tokens, width: int, pad_id: int) -> Tokens:
    """One row."""
    row = np.full((1, width), pad_id, np.int32)
    row[0, : len(ids)] = ids
    return row


def _segments(documents: DocumentTable, stop: int, width: int) -> Tokens:
    """(stop,) 1, 2, ... in each row, one more at each document; `stop` ids, whole rows or one.

    width 4, documents of 3, 4 and 1 ids: edges 0 3 4 7 -> numbers 1 2 1 2 -> 111 2 | 111 2
    """
    begins = documents.offsets[:-1]  # a document without ids begins where the next one does
    edges = np.unique(np.concatenate((np.arange(0, stop, width), begins[begins < stop])))
    row = edges // width
    first = np.searchsorted(edges, np.arange(0, stop, width))  # the edge that opens each row
    number = np.arange(1, len(edges) + 1, dtype=np.int64) - first[row]
    return np.repeat(number.astype(np.int32), np.diff(edges, append=stop))


# whole documents


def bin_rows(
    encoded: Iterator[Encoded],
    rules: BinRules,
    *,
    seq_len: int,
    pad_id: int,
    start: RowPosition | None = None,
) -> Generator[StreamRows, None, None]:
    """All rows of a stream, one `StreamRows` for each buffer.

    A buffer is emptied before the next begins, so no document waits. Where buffers begin depends on
    the documents alone.
    """
    width = seq_len + 1
    done = 0 if start is None else start.part  # rows of the first buffer that were given already
    begin, parts, num_documents, num_ids = start, list[Encoded](), 0, 0
    read = reported = ReadCounts()

    def packed(buffer: list[Encoded], read: ReadCounts) -> Iterator[StreamRows]:
        nonlocal begin, done, reported
        assert begin is not None
        end = RowPosition(block=buffer[-1].block, document=buffer[-1].first + len(buffer[-1].ids))
        rows = _packed_rows(table_of(buffer), rules, width, pad_id, begin, end, read)
        if done and len(rows) <= done:
            raise _too_few_rows(begin, done, len(rows))
        if len(rows):
            reported = read
            yield _rows_from(rows, done)
        begin, done = end, 0

    for chunk in encoded:
        read, at = chunk.read, 0
        begin = begin or RowPosition(block=chunk.block, document=chunk.first)
        while at < len(chunk.ids):
            # as many documents as the buffer still takes; the first one always fits
            limit = int(chunk.ids.offsets[at]) + rules.buffer_tokens - num_ids
            fit = int(np.searchsorted(chunk.ids.offsets, limit, side="right")) - 1 - at
            taken = min(max(fit, 0 if parts else 1), rules.buffer_documents - num_documents)
            if taken:
                parts.append(_slice(chunk, at, at + taken))
                at += taken
                num_documents += taken
                num_ids += len(parts[-1].ids.values)
            if at < len(chunk.ids) or num_documents == rules.buffer_documents:
                yield from packed(parts, parts[-1].read)
                parts, num_documents, num_ids = [], 0, 0
    if parts:
        yield from packed(parts, read)
    if done and start is not None:
        raise _too_few_rows(start, done, 0)
    if read != reported:
        yield _no_rows(chunk, width)


def _packed_rows(
    documents: DocumentTable,
    rules: BinRules,
    width: int,
    pad_id: int,
    begin: RowPosition,
    end: RowPosition,
    read: ReadCounts,
) -> StreamRows:
    """The rows of one buffer. Pieces are in stream order within a row, without gaps."""
    plan = PACKERS[rules.algorithm](
        documents.lengths, width, max_per_row=rules.max_per_row, long="split"
    )
    order = _row_order(plan, rules.seed, begin)
    counts = np.diff(plan.rows.offsets)[order]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)  # pieces before each row
    row = np.repeat(np.arange(len(order), dtype=np.int64), counts)  # of each piece
    source = np.arange(len(row)) + (plan.rows.offsets[:-1][order] - offsets[:-1])[row]
    piece = plan.rows.indices[source].astype(np.int64)
    example, start = plan.pieces.example[piece], plan.pieces.start[piece]
    length = plan.pieces.lengths[piece].astype(np.int64)

    before = np.concatenate(([0], np.cumsum(length)))
    tokens = np.full((len(order), width), pad_id, np.int32)
    columns = Ragged(before[:-1] - before[offsets[:-1]][row], offsets)
    fill_rows(
        columns,
        length,
        (partial(take, documents.values), documents.offsets[example] + start, tokens),
    )
    # every row gets one more segment, perhaps of length 0: padding
    padding = width - np.diff(before[offsets])
    number = np.arange(1, len(piece) + 1) - offsets[row]
    segments = np.repeat(
        np.insert(number.astype(np.int32), offsets[1:], 0), np.insert(length, offsets[1:], padding)
    )

    # a document counts in the row of its first piece; one without ids, if it was cut, in row 0
    row_of = np.zeros(len(documents.cut) if len(order) else 0, np.int64)
    row_of[example[start == 0]] = row[start == 0]
    counted = len(row_of)  # none if there is no row
    begun = _counts(row_of, documents.lengths[:counted], documents.cut[:counted], len(order))

    given = np.arange(1, len(order) + 1, dtype=np.int64)
    last = given == len(order)
    return StreamRows(
        tokens=tokens,
        segments=segments.reshape(len(order), width),
        blocks=(begin.block, end.block),
        block=last.astype(np.int64),
        document=np.where(last, end.document, begin.document),
        part=np.where(last, 0, given),
        **begun,
        read=read,
    )


def _row_order(plan: PackPlan, seed: int | None, begin: RowPosition) -> OffsetArray:
    """Which row of the plan comes first, second, ..."""
    if seed is None:
        return np.argsort(plan.rows.indices[plan.rows.offsets[:-1]], kind="stable")
    path = (begin.block.epoch, begin.block.number, begin.document)
    return Permutation(len(plan), seed, "rows", *path).take(np.arange(len(plan)))


def _rows_from(rows: StreamRows, first: int) -> StreamRows:
    """The rows from `first` on."""
    names = ("tokens", "segments", "block", "document", "part", "begun")
    columns = (*names, "cut_documents", "cut_tokens")
    return replace(rows, **{name: getattr(rows, name)[first:] for name in columns})


def _too_few_rows(begin: RowPosition, done: int, num_rows: int) -> StateMismatchError:
    return StateMismatchError(
        f"the buffer from document {begin.document:,} of the block at {begin.block}: the state "
        f"says that {done:,} of its rows are done and more follow, but it gives {num_rows:,}: the "
        "source, the tokenizer or the packing is not the one that the state was taken from"
    )
