"""Laws of packed shards, with slow references, and small sequences to try them on.

In: sequences with a mask per token, and what was packed of them.  Out: nothing, or AssertionError.
Promise: what is expected comes from the sequences and plain Python, never from the code under test.
Not here: a runner; call these from your own tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.errors import missing_extra
from shardmill.formats.packed import PackedBin, PackedShard, SequenceSpoolWriter

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "Bin",
    "TokenSequence",
    "aligned_slowly",
    "assert_holds_bins",
    "assert_trains_the_same_labels",
    "packed_bins",
    "plain",
    "token_sequences",
    "write_spool",
]

TokenSequence = tuple[list[int], list[int]]
"""Ids, and for each whether this very token is trained (0 or 1)."""
Bin = tuple[list[int], list[int], list[int]]
"""Ids, loss mask as stored, starts."""


def token_sequences(
    *, max_sequences: int = 12, max_tokens: int = 9, largest: int = 2**15, min_tokens: int = 0
) -> st.SearchStrategy[list[TokenSequence]]:
    """Sequences of ids up to `largest`, each token trained or not; some may have none."""
    token = st.tuples(st.integers(0, largest), st.integers(0, 1))
    one = st.lists(token, min_size=min_tokens, max_size=max_tokens)
    return st.lists(
        one.map(lambda pairs: ([i for i, _ in pairs], [m for _, m in pairs])),
        max_size=max_sequences,
    )


def packed_bins(
    *, pack_size: int, max_bins: int = 8, largest: int = 2**15
) -> st.SearchStrategy[list[Bin]]:
    """Bins by the invariant: 1 to `pack_size` tokens, starts from 0, rising."""

    def starts_of(pairs: list[tuple[int, int]]) -> st.SearchStrategy[Bin]:
        inner = st.sets(st.integers(1, len(pairs) - 1)) if len(pairs) > 1 else st.just(set[int]())
        ids, mask = [i for i, _ in pairs], [m for _, m in pairs]
        return inner.map(lambda starts: (ids, mask, [0, *sorted(starts)]))

    token = st.tuples(st.integers(0, largest), st.integers(0, 1))
    one = st.lists(token, min_size=1, max_size=pack_size).flatmap(starts_of)
    return st.lists(one, max_size=max_bins)


def write_spool(
    folder: Path, sequences: Sequence[TokenSequence], dtype: npt.DTypeLike = np.int32
) -> Path:
    """A finished spool of these sequences."""
    with SequenceSpoolWriter(folder, dtype=dtype) as spool:
        for ids, mask in sequences:
            spool.append(ids, mask)
    return folder


def plain(found: PackedBin) -> Bin:
    """A bin as lists."""
    return found.input_ids.tolist(), found.loss_mask.tolist(), found.seq_starts.tolist()


def assert_holds_bins(shard: PackedShard, bins: Sequence[Bin]) -> None:
    """These bins, in this order, and no others."""
    assert len(shard) == len(bins)
    for number, (ids, mask, starts) in enumerate(bins):
        found = shard.read_bin(number)
        assert plain(found) == (ids, mask, starts), f"bin {number}"
        assert found.seq_boundaries == [*starts, len(ids)], f"bin {number}"


def assert_trains_the_same_labels(shard: PackedShard, sequences: Sequence[TokenSequence]) -> None:
    """Law of "label": cut at its boundaries, a shard holds exactly these sequences, and of each
    the labels of exactly its trained tokens but the first, which nothing predicts."""
    assert shard.loss_mask_alignment == "label"
    wanted = Counter(
        (tuple(ids), tuple(at for at in range(1, len(ids)) if mask[at]))
        for ids, mask in sequences
        if ids
    )
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for number in range(len(shard)):
        ids, mask, _ = plain(shard.read_bin(number))
        for start, stop in pairwise(shard.read_bin(number).seq_boundaries):
            assert mask[stop - 1] == 0, f"bin {number}: the last place of a sequence is trained"
            labels = tuple(at + 1 - start for at in range(start, stop - 1) if mask[at])
            found[tuple(ids[start:stop]), labels] += 1
    assert found == wanted


def aligned_slowly(sequences: Sequence[TokenSequence], alignment: str) -> Bin:
    """One bin of these sequences, token by token, as the two alignments are defined."""
    ids = [number for part, _ in sequences for number in part]
    token_mask = [bit for _, part in sequences for bit in part]
    starts: list[int] = []
    at = 0
    for part, _ in sequences:
        if part:
            starts.append(at)
        at += len(part)
    if alignment == "roll_right":
        return ids, ([0, *token_mask[:-1]] if ids else []), starts
    ends = {stop - 1 for stop in [*starts[1:], len(ids)]}
    mask = [0 if at in ends else token_mask[at + 1] for at in range(len(ids))]
    return ids, mask, starts
