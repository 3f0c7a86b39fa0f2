"""Spools and packed shards for tests, and what they must hold, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from shardmill.formats.packed import PackedBin, PackedShard, SequenceSpoolWriter

TokenSequence = tuple[list[int], list[int]]
"""Ids, and for each whether this very token is trained (0 or 1)."""


Bin = tuple[list[int], list[int], list[int]]
"""Ids, loss mask as stored, starts."""


def token_sequences(
    *, max_sequences: int = 12, max_tokens: int = 9, largest: int = 2**15, min_tokens: int = 0
) -> st.SearchStrategy[list[TokenSequence]]:
    """Sequences of ids up to `largest`, each token trained or not; some may have none."""
    return st.lists(_tokens(largest, min_tokens, max_tokens), max_size=max_sequences)


def _tokens(largest: int, least: int, most: int) -> st.SearchStrategy[TokenSequence]:
    token = st.tuples(st.integers(0, largest), st.integers(0, 1))
    return st.lists(token, min_size=least, max_size=most).map(
        lambda pairs: ([i for i, _ in pairs], [m for _, m in pairs])
    )


def packed_bins(
    *, pack_size: int, max_bins: int = 8, largest: int = 2**15
) -> st.SearchStrategy[list[Bin]]:
    """Bins of 1 to `pack_size` tokens, with starts that rise from 0."""

    def with_starts(tokens: TokenSequence) -> st.SearchStrategy[Bin]:
        inner = range(1, len(tokens[0]))
        starts = st.sets(st.sampled_from(inner)) if inner else st.just(set[int]())
        return starts.map(lambda found: (*tokens, [0, *sorted(found)]))

    one = _tokens(largest, 1, pack_size).flatmap(with_starts)
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
    """Of the alignment "label": cut at its boundaries, a shard holds exactly these sequences, each
    with the labels of its trained tokens except the first, which nothing predicts."""
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
            assert mask[stop - 1] == 0, f"bin {number}: the last position of a sequence is trained"
            labels = tuple(at + 1 - start for at in range(start, stop - 1) if mask[at])
            found[tuple(ids[start:stop]), labels] += 1
    assert found == wanted


def aligned_slowly(sequences: Sequence[TokenSequence], alignment: str) -> Bin:
    """One bin of these sequences, token by token, as the two alignments are defined."""
    ids = [number for part, _ in sequences for number in part]
    token_mask = [bit for _, part in sequences for bit in part]
    lengths = [len(part) for part, _ in sequences if part]
    starts = list(accumulate(lengths, initial=0))[: len(lengths)]
    if alignment == "roll_right":
        return ids, ([0, *token_mask[:-1]] if ids else []), starts
    ends = {stop - 1 for stop in [*starts[1:], len(ids)]}
    mask = [0 if at in ends else token_mask[at + 1] for at in range(len(ids))]
    return ids, mask, starts
