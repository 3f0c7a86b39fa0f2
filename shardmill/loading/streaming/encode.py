"""Blocks of texts become ids, framed by BOS and EOS.

In: `Block`s, an encoder, rules.  Out: `Encoded`s, in order, each a slice of one block.
Promise: int32 ids, checked against the vocabulary; a document keeps its first `max_doc_tokens` ids,
and then gets no EOS: its end was not seen. What was cut is counted. A text that gives no id stays
an empty document, without BOS or EOS. Slicing never changes ids.
Threads: `encode_blocks` has none; `encoded_ahead` reads and shuffles in one thread, encodes in
another, and its caller packs in a third.
Not here: rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from threading import Event

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError, TokenizerError, TokenRangeError
from shardmill.loading.streaming.documents import DocumentStream
from shardmill.loading.streaming.records import Block, Encoded, StreamCursor, Tokens
from shardmill.protocols import Encoder
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.sources import BatchLimits, byte_lengths, cut
from shardmill.threads import read_ahead

SLICE = BatchLimits(num_bytes=2 * 2**20, num_documents=2**15)
"""What one call of the encoder gets: enough to be quick, little enough to flow."""
PATIENCE = 2.0
"""Seconds that closing waits for a source in a pause between retries, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """What becomes of the ids of a text. Each of them changes the stream."""

    bos_id: int | None = None  # before each document
    eos_id: int | None = None  # behind each document that was not cut
    max_doc_tokens: int | None = None  # ids of the text, without BOS and EOS
    vocab_size: int | None = None  # every id is below it; None: not known

    def __post_init__(self) -> None:
        if self.max_doc_tokens is not None:
            whole_number(self.max_doc_tokens, "max_doc_tokens")
        if self.vocab_size is not None:
            whole_number(self.vocab_size, "vocab_size")
        for name in ("bos_id", "eos_id"):
            value = getattr(self, name)
            if value is not None and whole_number(value, name, least=0) >= self.num_ids:
                raise OptionError(f"{name}={value:,}: wanted less than {self.num_ids:,}")

    @property
    def num_ids(self) -> int:
        """One more than the largest id there may be; ids are int32."""
        return min(2**31, self.vocab_size or 2**31)


def encode_blocks(
    blocks: Iterator[Block], encoder: Encoder, rules: DocumentRules, *, skip: int = 0
) -> Generator[Encoded, None, None]:
    """The documents of the blocks; a block without documents gives one `Encoded` without any.

    `skip` documents of the first block are not encoded.
    """
    for block in blocks:
        if skip > len(block.texts):
            raise StateMismatchError(
                f"{_where(block.start)}: {skip:,} documents of the block are done, but it holds "
                f"{len(block.texts):,}; resume with the input that the state came from"
            )
        sizes = byte_lengths(block.texts)[skip:]
        for start, stop in cut(sizes, SLICE) or [(0, 0)]:
            yield _encode(block, skip + start, skip + stop, encoder=encoder, rules=rules)
        skip = 0


def encoded_ahead(
    documents: DocumentStream,
    encoder: Encoder,
    rules: DocumentRules,
    *,
    start: StreamCursor | None = None,
    skip: int = 0,
    interrupt: Event | None = None,
) -> Generator[Encoded, None, None]:
    """`encode_blocks` over `documents.blocks(start)`, with the next block and two slices ahead.

    Threads start with the first `next`. Closing ends them; it waits `PATIENCE` seconds at most.
    `interrupt`, set from any thread, ends them too, and this generator with a StoppedError.
    """
    stop = Event()

    def encode() -> Generator[Encoded, None, None]:
        blocks = read_ahead(documents.blocks(start, stop=stop), depth=1, stop=stop)
        with closing(blocks):
            yield from encode_blocks(blocks, encoder, rules, skip=skip)

    ahead = read_ahead(encode(), depth=2, stop=stop, interrupt=interrupt, patience=PATIENCE)
    with closing(ahead) as encoded:
        yield from encoded


def frame(ids: Ragged, rules: DocumentRules) -> tuple[Ragged, OffsetArray]:
    """The ids of texts as documents, int32, and how many ids each lost at its end.

    BOS 1, EOS 2, at most 2 ids:  [4 5 | 6 7 8 | ] -> [1 4 5 2 | 1 6 7 | ] and [0 1 0].
    """
    lengths = ids.lengths
    most = rules.max_doc_tokens
    lost = np.zeros_like(lengths) if most is None else np.maximum(lengths - most, 0)
    kept, filled = lengths - lost, lengths > 0
    has_bos = filled & (rules.bos_id is not None)
    has_eos = filled & (lost == 0) & (rules.eos_id is not None)
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(kept + has_bos + has_eos, out=offsets[1:])
    if offsets[-1] == len(ids.values) and not lost.any():
        return Ragged(ids.values.astype(np.int32, copy=False), offsets), lost
    values: Tokens = np.empty(offsets[-1], np.int32)
    is_text = np.ones(len(values), bool)
    for token, places in (
        (rules.bos_id, offsets[:-1][has_bos]),
        (rules.eos_id, offsets[1:][has_eos] - 1),
    ):
        if token is not None:
            values[places] = token
            is_text[places] = False
    values[is_text] = _heads(ids, kept) if lost.any() else ids.values
    return Ragged(values, offsets), lost


def _heads(ids: Ragged, kept: OffsetArray) -> IntArray:
    """The first `kept` ids of each document, end to end."""
    lengths = ids.lengths
    inside = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1], lengths)
    return ids.values[inside < np.repeat(kept, lengths)]


def _encode(
    block: Block, start: int, stop: int, *, encoder: Encoder, rules: DocumentRules
) -> Encoded:
    ids = Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
    if start < stop:
        ids = encoder.encode_batch(block.texts.slice(start, stop - start))
    if len(ids) != stop - start:
        raise TokenizerError(
            f"{_where(block.start)}: the encoder {encoder!r} gave {len(ids):,} sequences for "
            f"{stop - start:,} texts; wanted one for each"
        )
    _check(ids, rules, block.start, start)
    documents, lost = frame(ids, rules)
    return Encoded(block=block.start, first=start, ids=documents, cut=lost, read=block.end.tally)


def _check(ids: Ragged, rules: DocumentRules, place: StreamCursor, first: int) -> None:
    """Refuse ids that a model would read out of its table."""
    values = ids.values
    if not len(values) or (values.min() >= 0 and values.max() < rules.num_ids):
        return
    index = int(np.flatnonzero((values < 0) | (values >= rules.num_ids))[0])
    document = int(np.searchsorted(ids.offsets, index, side="right")) - 1
    raise TokenRangeError(
        f"{_where(place)}, document {first + document:,} of the block: id {values[index]:,} at "
        f"{index - ids.offsets[document]:,}, wanted 0 to {rules.num_ids - 1:,}; the encoder is not "
        "that of this vocabulary"
    )


def _where(place: StreamCursor) -> str:
    return (
        f"the block at epoch {place.epoch}, unit {place.unit}, {place.cursor or 'its start'}, "
        f"text {place.skip:,}"
    )
