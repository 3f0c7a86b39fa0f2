"""Examples become pieces that fit into a row, each with the labels it trains.

In: lengths, the bits of a loss mask, a rule for examples over capacity.  Out: `Pieces`.
Promise: a label is a trained token with a token of its own piece in front of it. Split pieces share
one token with the next, so every label of an example is in exactly one of its pieces. Bits are
counted a block at a time: memory grows with pieces, never with tokens.
Not here: which pieces share a row (packing), the account (packs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import BoolArray, OffsetArray
from shardmill.shards.plan_entries import LongRule

_BLOCK = 2**17  # bytes of a mask at a time: a million tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Piece `i` is `start[i]..stop[i]` of the tokens of `example[i]`, by example and start."""

    example: OffsetArray  # (n,) never falls
    start: OffsetArray  # (n,)
    stop: OffsetArray  # (n,)
    long: OffsetArray  # numbers of the examples over capacity, whatever became of them

    @property
    def lengths(self) -> OffsetArray:
        return self.stop - self.start

    def joins(self) -> OffsetArray:
        """Numbers of the pieces whose first token is also the last of the piece before."""
        return np.flatnonzero(self.start)


def cut_examples(lengths: OffsetArray, capacity: int, rule: LongRule) -> Pieces:
    """The pieces of all examples. One without tokens gives none."""
    long = np.flatnonzero(lengths > capacity)
    if len(long) and rule == "error":
        raise OptionError(
            f"example {long[0]:,}: {lengths[long[0]]:,} tokens, but a row holds {capacity:,} "
            f"({len(long):,} of {len(lengths):,} examples are too long): long='split' trains all "
            "of them in pieces, 'truncate' cuts off their ends, 'drop' leaves them out"
        )
    if rule == "split" and len(long):
        return _split(lengths, capacity, long)
    kept = lengths > 0
    if rule == "drop":
        kept[long] = False
    example = np.flatnonzero(kept)
    stop = np.minimum(lengths[example], capacity)
    return Pieces(example=example, start=np.zeros_like(stop), stop=stop, long=long)


def _split(lengths: OffsetArray, capacity: int, long: OffsetArray) -> Pieces:
    # capacity 4, length 8: 0..4, 3..7, 6..8. Each piece but the first repeats a token, so it
    # brings capacity - 1 transitions from a token to the next, of which 8 tokens have 7.
    step = capacity - 1
    counts = np.minimum(lengths, 1)
    counts[long] = -(-(lengths[long] - 1) // step)
    example = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts  # the number of each example's first piece
    start = (np.arange(len(example)) - first[example]) * step
    stop = np.minimum(start + capacity, lengths[example])
    return Pieces(example=example, start=start, stop=stop, long=long)


def count_labels(
    mask_bits: npt.NDArray[np.uint8], starts: OffsetArray, stops: OffsetArray
) -> OffsetArray:
    """(n,) trained tokens of each span of a split but its first, which nothing predicts.

    Spans hold tokens, rise, and overlap by one token at most.
    """
    edges = np.stack((starts + 1, stops), axis=1)
    before = trained_before(mask_bits, edges.reshape(-1)).reshape(edges.shape)
    return before[:, 1] - before[:, 0]


def trained_before(mask_bits: npt.NDArray[np.uint8], positions: OffsetArray) -> OffsetArray:
    """(n,) how many tokens in front of each position are trained; positions never fall."""
    found = np.empty(len(positions), np.int64)
    trained = done = 0
    for first in range(0, len(mask_bits) + 1, _BLOCK):  # + 1: a position behind the last token
        words = _words(mask_bits[first : first + _BLOCK])
        sums = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.bitwise_count(words), out=sums[1:])
        stop = int(np.searchsorted(positions, 8 * (first + _BLOCK)))
        here = positions[done:stop] - 8 * first
        word = here >> 6
        below = (np.uint64(1) << (here & 63).astype(np.uint64)) - np.uint64(1)
        found[done:stop] = trained + sums[word] + np.bitwise_count(words[word] & below)
        trained, done = trained + int(sums[-1]), stop
    return found


def is_trained(mask_bits: npt.NDArray[np.uint8], positions: OffsetArray) -> BoolArray:
    """(n,) whether the tokens at these positions are trained."""
    bits = mask_bits[positions >> 3] >> (positions & 7).astype(np.uint8)
    trained: BoolArray = (bits & 1).view(np.bool_)
    return trained


def _words(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """64 bits each, the lowest first, and at least one bit 0 behind the last."""
    words = np.zeros(len(packed) // 8 + 1, np.dtype("<u8"))
    words.view(np.uint8)[: len(packed)] = packed
    return words
