"""Encode blocks of texts into documents of ids with BOS and EOS.

A document keeps its first `max_doc_tokens` ids; one that is cut gets no EOS, and the cut is
counted. A text that gives no id stays an empty document, without BOS and EOS. `encode_blocks` works
in the caller's thread; `encoded_ahead` reads and shuffles in one thread and encodes in another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from threading import Event

import numpy as np

from shardmill.errors import StateMismatchError, TokenizerError, TokenRangeError
from shardmill.loading.streaming.documents import Block, DocumentStream
from shardmill.loading.streaming.state import ReadCounts, StreamCursor
from shardmill.loading.streaming.tokenizer import DocumentIds, StreamTokenizer
from shardmill.protocols import Encoder
from shardmill.records import OffsetArray, Ragged
from shardmill.sources.batches import BatchLimits, byte_lengths, cut
from shardmill.threads import read_ahead

SLICE = BatchLimits(num_bytes=2 * 2**20, num_documents=2**15)
"""What one call of the encoder gets: large enough to be fast, small enough to keep flowing."""
PATIENCE = 2.0
"""Seconds that closing waits for a source, for instance one that pauses between retries."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Some documents of one block as ids, with BOS and EOS."""

    block: StreamCursor  # where the block starts
    first: int  # documents of the block before these
    ids: Ragged  # int32
    cut: OffsetArray  # (n,) ids that max_doc_tokens took off the end of each document
    read: ReadCounts  # up to the end of the block


def encoded_ahead(
    documents: DocumentStream,
    encoder: Encoder,
    tokenizer: StreamTokenizer,
    *,
    start: StreamCursor | None = None,
    skip: int = 0,
    interrupt: Event | None = None,
) -> Generator[Encoded, None, None]:
    """`encode_blocks` over `documents.blocks(start)`, with the next block and two slices ahead.

    Threads start with the first `next` and end when this is closed, which waits at most `PATIENCE`
    seconds. Setting `interrupt` from any thread ends them too, and this with a StoppedError.
    """
    stop = Event()

    def encode() -> Generator[Encoded, None, None]:
        blocks = read_ahead(documents.blocks(start, stop=stop), depth=1, stop=stop)
        with closing(blocks):
            yield from encode_blocks(blocks, encoder, tokenizer, skip=skip)

    ahead = read_ahead(encode(), depth=2, stop=stop, interrupt=interrupt, patience=PATIENCE)
    with closing(ahead) as encoded:
        yield from encoded


def encode_blocks(
    blocks: Iterator[Block], encoder: Encoder, tokenizer: StreamTokenizer, *, skip: int = 0
) -> Generator[Encoded, None, None]:
    """The documents of the blocks, without the first `skip` of the first block.

    A block without documents gives one `Encoded` without documents.
    """
    for block in blocks:
        if skip > len(block.texts):
            raise StateMismatchError(
                f"{_location(block.start)}: {skip:,} documents of the block are done, but it holds "
                f"{len(block.texts):,}; resume with the input that the state came from"
            )
        sizes = byte_lengths(block.texts)[skip:]
        for start, stop in cut(sizes, SLICE) or [(0, 0)]:
            yield _encode(block, skip + start, skip + stop, encoder, tokenizer)
        skip = 0


def _encode(
    block: Block, start: int, stop: int, encoder: Encoder, tokenizer: StreamTokenizer
) -> Encoded:
    ids = Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
    if start < stop:
        ids = encoder.encode_batch(block.texts.slice(start, stop - start))
    if len(ids) != stop - start:
        raise TokenizerError(
            f"{_location(block.start)}: the encoder {encoder!r} gave {len(ids):,} sequences for "
            f"{stop - start:,} texts; wanted one for each"
        )
    values, num_ids = ids.values, min(tokenizer.vocab_size, 2**31)  # documents are int32
    if len(values) and (values.min() < 0 or values.max() >= num_ids):
        index = int(np.flatnonzero((values < 0) | (values >= num_ids))[0])
        document = int(np.searchsorted(ids.offsets, index, side="right")) - 1
        raise TokenRangeError(
            f"{_location(block.start)}, document {start + document:,} of the block: id "
            f"{values[index]:,} at {index - ids.offsets[document]:,}, wanted 0 to "
            f"{num_ids - 1:,}; the encoder does not belong to this vocabulary"
        )
    documents, lost = frame(ids, tokenizer.ids)
    return Encoded(block=block.start, first=start, ids=documents, cut=lost, read=block.end.read)


def frame(ids: Ragged, rules: DocumentIds) -> tuple[Ragged, OffsetArray]:
    """The ids of texts as int32 documents, and how many ids each lost at its end.

    BOS 1, EOS 2, at most 2 ids:  [4 5 | 6 7 8 | ] -> [1 4 5 2 | 1 6 7 | ] and [0 1 0].
    """
    lengths, most = ids.lengths, rules.max_doc_tokens
    lost = np.zeros_like(lengths) if most is None else np.maximum(lengths - most, 0)
    kept, filled = lengths - lost, lengths > 0
    has_bos = filled & rules.add_bos
    has_eos = filled & (lost == 0) & rules.add_eos
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(kept + has_bos + has_eos, out=offsets[1:])
    text = ids.values
    if lost.any():  # the first `kept` ids of each document
        inside = np.arange(len(text)) - np.repeat(ids.offsets[:-1], lengths)
        text = text[inside < np.repeat(kept, lengths)]
    if offsets[-1] == len(text):
        return Ragged(text.astype(np.int32, copy=False), offsets), lost
    values = np.empty(offsets[-1], np.int32)
    is_text = np.ones(len(values), bool)
    for token, at in (
        (rules.bos_id, offsets[:-1][has_bos]),
        (rules.eos_id, offsets[1:][has_eos] - 1),
    ):
        if len(at):
            values[at] = token
            is_text[at] = False
    values[is_text] = text
    return Ragged(values, offsets), lost


def _location(cursor: StreamCursor) -> str:
    return (
        f"the block at epoch {cursor.epoch}, unit {cursor.unit}, {cursor.cursor or 'its start'}, "
        f"text {cursor.skip:,}"
    )
