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

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.streaming.documents import ReadCounts, StreamCursor
from shardmill.loading.streaming.encode import Encoded
from shardmill.packing import PACKERS, Algorithm, PackPlan, takes_seed
from shardmill.records import OffsetArray, Ragged
from shardmill.sampling import Permutation
from shardmill.store.readers.files import take
from shardmill.store.readers.packed_rows import fill_rows

Tokens = npt.NDArray[np.int32]

ALGORITHMS = [name for name in PACKERS if not takes_seed(name)]


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


def _no_rows(width: int, read: ReadCounts) -> StreamRows:
    """Reports input at the end of a stream that gave no row."""
    tokens: Tokens = np.empty((0, width), np.int32)
    none = np.empty(0, np.int64)
    return StreamRows(
        tokens=tokens,
        segments=tokens,
        blocks=(),
        block=none,
        document=none,
        part=none,
        begun=none,
        cut_documents=none,
        cut_tokens=none,
        read=read,
    )


# documents end to end


def sequential_rows(
    encoded: Iterator[Encoded], *, seq_len: int, pad_id: int, start: RowPosition | None = None
) -> Generator[StreamRows, None, None]:
    """All rows of a stream. Only the last one may be padded. Linear in the ids."""
    width = whole_number(seq_len, "seq_len") + 1
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
            rows = _whole_rows(table_of(waiting), width, done, read)
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
        yield _padded_row(table_of(waiting), width, pad_id, done, read)
    elif read != reported:
        yield _no_rows(width, read)


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


def _whole_rows(documents: DocumentTable, width: int, done: int, read: ReadCounts) -> StreamRows:
    """As many rows as the ids fill."""
    num_rows = len(documents.values) // width
    stop = num_rows * width
    ends = np.arange(1, num_rows + 1, dtype=np.int64) * width
    last = np.searchsorted(documents.offsets, ends - 1, side="right") - 1  # document of the last id
    part = ends - documents.offsets[last]
    part[last == 0] += done
    is_end = ends == documents.offsets[last + 1]
    part[is_end] = 0
    begun, cut_documents, cut_tokens = _sequential_counts(documents, num_rows, width, done)
    return StreamRows(
        tokens=documents.values[:stop].reshape(num_rows, width),
        segments=_segments(documents, stop, width).reshape(num_rows, width),
        blocks=documents.blocks,
        block=documents.block[last],
        document=documents.document[last] + is_end,
        part=part,
        begun=begun,
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
        read=read,
    )


def _padded_row(
    documents: DocumentTable, width: int, pad_id: int, done: int, read: ReadCounts
) -> StreamRows:
    """The last row of a stream, which the ids do not fill."""
    num_ids = len(documents.values)
    tokens = np.full((1, width), pad_id, dtype=np.int32)
    tokens[0, :num_ids] = documents.values
    segments = np.zeros((1, width), dtype=np.int32)
    segments[0, :num_ids] = _segments(documents, num_ids, width)
    begun, cut_documents, cut_tokens = _sequential_counts(documents, 1, width, done)
    return StreamRows(
        tokens=tokens,
        segments=segments,
        blocks=documents.blocks,
        block=documents.block[-1:],
        document=documents.document[-1:] + 1,
        part=np.zeros(1, dtype=np.int64),
        begun=begun,
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
        read=read,
    )


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


def _sequential_counts(
    documents: DocumentTable, num_rows: int, width: int, done: int
) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
    """For each row: documents that begin in it, how many of those were cut, and by how many ids.

    A document without ids begins nowhere; if it was cut, it counts in the row being filled.
    """
    row = documents.offsets[:-1] // width
    here = row < num_rows
    if done:
        here[0] = False
    begun = np.bincount(row[here & (documents.lengths > 0)], minlength=num_rows)
    was_cut = here & (documents.cut > 0)
    cut_documents = np.bincount(row[was_cut], minlength=num_rows)
    cut_tokens = np.zeros(num_rows, dtype=np.int64)
    np.add.at(cut_tokens, row[was_cut], documents.cut[was_cut])
    return begun, cut_documents, cut_tokens


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
    width = whole_number(seq_len, "seq_len") + 1
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
        yield _no_rows(width, read)


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
    first = start == 0
    cut = documents.cut[example][first]
    cut_documents = np.bincount(row[first][cut > 0], minlength=len(order))
    cut_tokens = np.zeros(len(order), dtype=np.int64)
    np.add.at(cut_tokens, row[first], cut)
    if len(order):
        cut_away = documents.cut[documents.lengths == 0]
        cut_documents[0] += np.count_nonzero(cut_away)
        cut_tokens[0] += cut_away.sum()

    given = np.arange(1, len(order) + 1, dtype=np.int64)
    last = given == len(order)
    return StreamRows(
        tokens=tokens,
        segments=segments.reshape(len(order), width),
        blocks=(begin.block, end.block),
        block=last.astype(np.int64),
        document=np.where(last, end.document, begin.document),
        part=np.where(last, 0, given),
        begun=np.bincount(row[first], minlength=len(order)),
        cut_documents=cut_documents,
        cut_tokens=cut_tokens,
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
