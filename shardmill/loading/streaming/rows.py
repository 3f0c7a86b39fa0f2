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

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import StateMismatchError
from shardmill.loading.fim import EXTRA_TOKENS, FimCounts, FimRules, plan_fim
from shardmill.loading.state import Counts, Position, ReadCounts, StreamCursor
from shardmill.loading.streaming.documents import Encoded
from shardmill.packing import PACKERS, Algorithm, PackPlan
from shardmill.records import OffsetArray, Ragged
from shardmill.sampling import Permutation
from shardmill.store.readers.files import part_of, running_edges, take
from shardmill.store.readers.packed_rows import fill_rows

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRows:
    """Some consecutive rows, and the position after each of them."""

    tokens: Tokens  # (n, seq_len + 1), padded at the end
    segments: Tokens  # (n, seq_len + 1): 1, 2, ... for the documents of a row; 0: padding
    blocks: tuple[StreamCursor, ...]  # those that the positions refer to
    after: OffsetArray  # (n, 3) the position after each row: which of `blocks`, document, part
    begun: OffsetArray  # (n, 3) documents that begin in it, how many were cut, by how many ids
    whole: OffsetArray  # (k, 2) documents that are whole in their row: start and stop in the rows
    # end to end
    read: ReadCounts  # what was read for these rows
    fim: OffsetArray | None = None  # (n, 3) of each row, what `FimCounts` holds

    def __len__(self) -> int:
        return len(self.tokens)

    def position_after(
        self, row: int, counts: Counts | None = None, fim: FimCounts | None = None
    ) -> Position:
        """`counts` and `fim`: those up to there, for the position."""
        block, document, part = self.after[row].tolist()
        return Position(
            block=self.blocks[block],
            document=document,
            part=part,
            counts=counts or Counts(),
            fim=fim or msgspec.UNSET,
        )

    def fim_counts(self, start: int, stop: int) -> FimCounts | None:
        """What was rearranged in the rows `start..stop`; None: nothing ever is."""
        if self.fim is None:
            return None
        return FimCounts(*self.fim[start:stop].sum(axis=0).tolist())

    def counts(self, start: int, stop: int) -> Counts:
        """What the rows `start..stop` hold."""
        segments = self.segments[start:stop]
        tokens = int(np.count_nonzero(segments))
        documents, truncated_documents, truncated_tokens = self.begun[start:stop].sum(axis=0)
        return Counts(
            rows=stop - start,
            tokens=tokens,
            padding=segments.size - tokens,
            documents=int(documents),
            truncated_documents=int(truncated_documents),
            truncated_tokens=int(truncated_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BinRules:
    """How whole documents share rows."""

    buffer_documents: int = 4096  # packed together; more fill rows better and take more memory
    buffer_tokens: int = 2**24  # a buffer ends before the document that would exceed this
    max_per_row: int | None = None  # pieces in a row
    algorithm: Algorithm = "first-fit"  # one that takes no seed
    seed: int | None = None  # of the order of a buffer's rows; None: by their first document


def join(chunks: Sequence[Encoded]) -> tuple[Ragged, OffsetArray]:
    """The documents of at least one chunk, in order, and what was cut off each."""
    ids = Ragged.concatenate([chunk.ids for chunk in chunks])
    return ids, np.concatenate([chunk.cut for chunk in chunks])


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


def _begun(row: OffsetArray, lengths: OffsetArray, cut: OffsetArray, num_rows: int) -> OffsetArray:
    """`StreamRows.begun`. `row` is where each document begins. One without ids begins nowhere, but
    its cut counts there."""
    sums = [np.bincount(row, each, num_rows) for each in (lengths > 0, cut > 0, cut)]
    return np.stack(sums, axis=1).astype(np.int64)


# documents end to end


def sequential_rows(
    encoded: Iterator[Encoded], *, seq_len: int, pad_id: int, start: Position
) -> Generator[StreamRows, None, None]:
    """All rows of a stream. Only the last one may be padded. Linear in the ids."""
    width = seq_len + 1
    waiting: list[Encoded] = []  # documents of the row being filled: fewer ids than a row
    num_ids = 0  # that wait
    done = start.part  # ids of the first waiting document that are in earlier rows
    resumes = done > 0  # until the first document came
    read = reported = ReadCounts()
    for chunk in encoded:
        read = chunk.read
        if not len(chunk.ids):
            continue
        if resumes:
            chunk = _resumed(chunk, start)
            resumes = False
        waiting.append(chunk)
        num_ids += len(chunk.ids.values)
        if num_ids >= width:
            rows = _cut_rows(waiting, num_ids // width, width, pad_id, done, read)
            num_ids %= width
            _, document, done = rows.after[-1].tolist()
            # what is left is in the last chunk: the ones before did not fill a row
            first = document - chunk.first
            waiting = []
            if first < len(chunk.ids):
                used = len(chunk.ids.values) - num_ids - int(chunk.ids.offsets[first])
                waiting = [_without_ids(_slice(chunk, first, len(chunk.ids)), used)]
            reported = read
            yield rows
    if resumes:
        raise StateMismatchError(
            f"the state resumes inside document {start.document:,} of the block at {start.block}, "
            "but nothing comes from there: the source is not the one that the state was taken from"
        )
    if num_ids:
        yield _cut_rows(waiting, 1, width, pad_id, done, read)
    elif read != reported:
        yield _no_rows(chunk, width)


def _no_rows(last: Encoded, width: int) -> StreamRows:
    """Reports input at the end of a stream that gave no row."""
    return _cut_rows([_slice(last, 0, 0)], 0, width, 0, 0, last.read)


def _resumed(chunk: Encoded, start: Position) -> Encoded:
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


def _cut_rows(
    chunks: Sequence[Encoded], num_rows: int, width: int, pad_id: int, done: int, read: ReadCounts
) -> StreamRows:
    """The first `num_rows` rows; only the last one may be padded.

    `done` ids of the first document are in earlier rows.
    """
    ids, cut = join(chunks)
    num_ids = len(ids.values)
    ends = np.minimum(np.arange(1, num_rows + 1, dtype=np.int64) * width, num_ids)
    last = np.searchsorted(ids.offsets, ends - 1, side="right") - 1  # document of the last id
    missing = max(0, num_rows * width - num_ids)
    if missing:
        last[-1] = len(ids) - 1  # no row follows, so documents without ids are done
    part = ends - ids.offsets[last]
    part[last == 0] += done
    is_end = ends == ids.offsets[last + 1]
    part[is_end] = 0
    row = ids.offsets[:-1] // width
    here = row < num_rows
    if done:
        here[0] = False
    before = running_edges(np.array([len(chunk.ids) for chunk in chunks]))
    block = part_of(before, last)
    first = np.array([chunk.first for chunk in chunks], np.int64)
    stop = num_rows * width - missing
    tokens, segments = ids.values[:stop], _segments(ids.offsets[:-1], stop, width)
    if missing:
        tokens = np.pad(tokens, (0, missing), constant_values=pad_id)
        segments = np.pad(segments, (0, missing))
    return StreamRows(
        tokens=tokens.reshape(num_rows, width).astype(np.int32, copy=False),
        segments=segments.reshape(num_rows, width),
        blocks=tuple(chunk.block for chunk in chunks),
        after=np.stack((block, first[block] + last - before[block] + is_end, part), axis=1),
        begun=_begun(row[here], ids.lengths[here], cut[here], num_rows),
        whole=_whole_in_rows(ids.offsets, bool(done), width, stop),
        read=read,
    )


def _whole_in_rows(offsets: OffsetArray, is_begun: bool, width: int, stop: int) -> OffsetArray:
    """`StreamRows.whole` of documents end to end; the first one began earlier, if `is_begun`."""
    spans = np.stack((offsets[:-1], offsets[1:]), axis=1)
    whole = (spans[:, 0] // width == (spans[:, 1] - 1) // width) & (spans[:, 1] <= stop)
    whole &= spans[:, 0] < spans[:, 1]
    whole[: 1 if is_begun else 0] = False
    found: OffsetArray = spans[whole]
    return found


def _segments(begins: OffsetArray, stop: int, width: int) -> Tokens:
    """(stop,) 1, 2, ... in each row, one more at each document; `stop` ids, whole rows or one.

    width 4, documents of 3, 4 and 1 ids: edges 0 3 4 7 -> numbers 1 2 1 2 -> 111 2 | 111 2
    """
    # a document without ids begins where the next one does
    edges = np.unique(np.concatenate((np.arange(0, stop, width), begins[begins < stop])))
    row = edges // width
    first = np.searchsorted(edges, np.arange(0, stop, width))  # the edge that opens each row
    number = np.arange(1, len(edges) + 1, dtype=np.int64) - first[row]
    return np.repeat(number.astype(np.int32), np.diff(edges, append=stop))


# whole documents


def bin_rows(
    encoded: Iterator[Encoded], rules: BinRules, *, seq_len: int, pad_id: int, start: Position
) -> Generator[StreamRows, None, None]:
    """All rows of a stream, one `StreamRows` for each buffer.

    A buffer is emptied before the next begins, so no document waits. Where buffers begin depends on
    the documents alone.
    """
    width, begin = seq_len + 1, start
    done = start.part  # rows of the first buffer that were given already
    parts, num_documents, num_ids = list[Encoded](), 0, 0
    read = reported = ReadCounts()

    def packed(buffer: list[Encoded], read: ReadCounts) -> Iterator[StreamRows]:
        nonlocal begin, done, reported
        end = Position(block=buffer[-1].block, document=buffer[-1].first + len(buffer[-1].ids))
        rows = _packed_rows(buffer, rules, width, pad_id, begin, end, read)
        if done and len(rows) <= done:
            raise _too_few_rows(begin, done, len(rows))
        if len(rows):
            reported = read
            columns = ("tokens", "segments", "after", "begun")
            left = {name: getattr(rows, name)[done:] for name in columns}
            whole = rows.whole - done * width
            yield replace(rows, **left, whole=whole[whole[:, 0] >= 0])
        begin, done = end, 0

    for chunk in encoded:
        read, at = chunk.read, 0
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
    if done:
        raise _too_few_rows(start, done, 0)
    if read != reported:
        yield _no_rows(chunk, width)


def _packed_rows(
    buffer: Sequence[Encoded],
    rules: BinRules,
    width: int,
    pad_id: int,
    begin: Position,
    end: Position,
    read: ReadCounts,
) -> StreamRows:
    """The rows of one buffer. Pieces are in stream order within a row, without gaps."""
    ids, cut = join(buffer)
    plan = PACKERS[rules.algorithm](ids.lengths, width, max_per_row=rules.max_per_row, long="split")
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
    begins = fill_rows(
        columns, length, (partial(take, ids.values), ids.offsets[example] + start, tokens)
    )
    whole = (start == 0) & (length == ids.lengths[example])
    # every row gets one more segment, perhaps of length 0: padding
    padding = width - np.diff(before[offsets])
    number = np.arange(1, len(piece) + 1) - offsets[row]
    segments = np.repeat(
        np.insert(number.astype(np.int32), offsets[1:], 0), np.insert(length, offsets[1:], padding)
    )

    # a document counts in the row of its first piece; one without ids, if it was cut, in row 0
    row_of = np.zeros(len(cut) if len(order) else 0, np.int64)
    row_of[example[start == 0]] = row[start == 0]
    counted = len(row_of)  # none if there is no row

    given = np.arange(1, len(order) + 1)
    after = np.stack((np.zeros_like(given), np.full_like(given, begin.document), given), axis=1)
    after[-1:] = 1, end.document, 0
    return StreamRows(
        tokens=tokens,
        segments=segments.reshape(len(order), width),
        blocks=(begin.block, end.block),
        after=after,
        begun=_begun(row_of, ids.lengths[:counted], cut[:counted], len(order)),
        whole=np.stack((begins, begins + length), axis=1)[whole],
        read=read,
    )


def _row_order(plan: PackPlan, seed: int | None, begin: Position) -> OffsetArray:
    """Which row of the plan comes first, second, ..."""
    if seed is None:
        return np.argsort(plan.rows.indices[plan.rows.offsets[:-1]], kind="stable")
    path = (begin.block.epoch, begin.block.number, begin.document)
    return Permutation(len(plan), seed, "rows", *path).take(np.arange(len(plan)))


def _too_few_rows(begin: Position, done: int, num_rows: int) -> StateMismatchError:
    return StateMismatchError(
        f"the buffer from document {begin.document:,} of the block at {begin.block}: the state "
        f"says that {done:,} of its rows are done and more follow, but it gives {num_rows:,}: the "
        "source, the tokenizer or the packing is not the one that the state was taken from"
    )


# fill in the middle


def rearranged_rows(
    rows: StreamRows, rules: FimRules, *, first: int, stream: int, num_streams: int
) -> StreamRows:
    """The rows with some documents rearranged; `first` rows of this stream came before them.

    What a row loses at its end is in no row: the next one begins where it would without.
    """
    fim = np.zeros((len(rows), 3), np.int64)
    numbers, width = first + np.arange(len(rows)), rows.tokens.shape[1]
    chosen = rules.of_stream(stream, num_streams).chosen(numbers)
    plan = plan_fim(width, *rows.whole[chosen[rows.whole[:, 0] // width]].T)
    if not len(plan.rows):
        return replace(rows, fim=fim)
    tokens, segments = rows.tokens.copy(), rows.segments.copy()
    samples = numbers[plan.rows] * num_streams + stream
    tokens[plan.rows] = rules.rearranged(tokens[plan.rows], plan, samples)
    padding = np.count_nonzero(segments[plan.rows] == 0, axis=1)
    cut = np.maximum(EXTRA_TOKENS * plan.each - padding, 0)
    fim[plan.rows] = np.stack((np.ones_like(cut), plan.each, cut), axis=1)
    segments[plan.rows] = plan.stretched(segments[plan.rows])
    return replace(rows, tokens=tokens, segments=segments, fim=fim)
