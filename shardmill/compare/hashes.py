"""A hash for each document of a split.

In: a store, a split, a range of its documents.  Out: blocks of (hash, second hash, mask hash).
Promise: equal documents give equal hashes whatever the dtype, shards and places they lie in; a few
ten MiB of memory, also for a document that is larger than a block. Two different documents share
both hashes by chance once in about 2**128: exact enough, but no guard against forgers.
Not here: what is made of them (documents.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.mapped import TokenSpace, open_tokens
from shardmill.records import IntArray, OffsetArray
from shardmill.shards import Store

Hashes = npt.NDArray[np.uint64]
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 2**18
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_MASK = np.uint64(0x8CB92BA72F3D8DD7)


def document_hashes(store: Store, split: str, first: int, *, masks: bool) -> Iterator[Hashes]:
    """(n, 3) for documents from `first` on, in order; the third is 0 without `masks`."""
    starts, num_tokens = store.document_starts(split), store.num_tokens(split)
    bits = store.chat_arrays(split).mask_bits if masks else None
    with closing(open_tokens(store, split)) as space:
        while first < len(starts):
            stop = _stop(starts, first)
            ends = np.append(starts[first + 1 : stop + 1], [num_tokens] * (stop == len(starts)))
            here = np.asarray(starts[first:stop])
            if (ends < here).any():
                raise DamagedStoreError(
                    f"{store.folder}: split {split!r}: its index falls behind document {first:,}; "
                    "`shardmill verify` lists all damage"
                )
            yield _hash_documents(space, bits, here, ends)
            first = stop


def _stop(starts: OffsetArray, first: int) -> int:
    """Documents `first..stop` are a block: as many as fit, and one at least."""
    some = starts[first : first + BLOCK_DOCUMENTS + 1]
    fit = int(np.searchsorted(some, int(some[0]) + BLOCK_TOKENS, side="right")) - 1
    return min(first + max(fit, 1), first + BLOCK_DOCUMENTS, len(starts))


def _hash_documents(
    space: TokenSpace, bits: npt.NDArray[np.uint8] | None, starts: OffsetArray, ends: OffsetArray
) -> Hashes:
    """Documents that follow one another. Only one that is alone may be larger than a block."""
    lengths = ends - starts
    sums = np.zeros((len(starts), 3), np.uint64)
    filled = np.flatnonzero(lengths)
    for low in range(int(starts[0]), int(ends[-1]), BLOCK_TOKENS):
        high = min(low + BLOCK_TOKENS, int(ends[-1]))
        touched = filled[(ends[filled] > low) & (starts[filled] < high)]
        begins = np.maximum(starts[touched], low) - low
        owners = np.repeat(touched, np.diff(begins, append=high - low))
        places = np.arange(low, high) - starts[owners]
        parts = _token_parts(space.read(low, high), places, bits, low)
        for column, part in enumerate(parts):
            sums[touched, column] += np.add.reduceat(part, begins)
    # the length: a token that adds nothing must not go unseen
    sums[:, :2] = _mix(sums[:, :2] + lengths.astype(np.uint64)[:, None] * _ODD)
    return sums


def _token_parts(
    tokens: IntArray,
    places: OffsetArray,
    bits: npt.NDArray[np.uint8] | None,
    low: int,
) -> Iterator[Hashes]:
    """What each token adds to the sums of its document; `low` is the number of the first."""
    at = places.astype(np.uint64)
    one = _mix(((at << np.uint64(32)) | tokens.astype(np.uint64)) + _ODD)
    yield one
    yield _mix(one ^ _SECOND)
    if bits is not None:
        stop = low + len(tokens)
        packed = bits[low // 8 : -(-stop // 8)]
        trained = np.unpackbits(packed, bitorder="little")[low % 8 :][: len(tokens)]
        yield _mix(at + _MASK) * trained.astype(np.uint64)


def _mix(values: Hashes) -> Hashes:
    """A bijection of 64 bits in which every bit depends on all (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
