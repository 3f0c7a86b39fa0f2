"""A shuffle for data larger than memory: it reads whole blocks.

A bijection and a pure function, like `Permutation`; and until a group of `buffer_blocks` blocks is
finished, nothing outside these blocks is read. The blocks come in a permuted order; every
`buffer_blocks` consecutive blocks of that order are a group, and the items of a group are permuted
together. docs/sampling.md shows how well this mixes.

    blocks of 4      [0 1 2 3] [4 5 6 7] [8 9]
    their order      [4 5 6 7] [8 9] [0 1 2 3]
    groups of 2      (4 5 6 7 8 9) (0 1 2 3)
    the order        6 9 4 8 7 5 | 2 0 3 1
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.sampling.order import (
    CHUNK,
    IndexedOrder,
    Indices,
    Permutation,
    Rounds,
    Words,
    as_words,
    bits_for,
    fingerprint_of,
    rounds_for,
    walk,
    words_at,
)

BLOCK_BYTES = 4 * 2**20


def items_per_block(item_bytes: SupportsIndex, *, block_bytes: SupportsIndex = BLOCK_BYTES) -> int:
    """How many items of this size make a block; at least one."""
    size = whole_number(item_bytes, "item_bytes")
    return max(1, whole_number(block_bytes, "block_bytes") // size)


class BlockShuffle(IndexedOrder):
    """Item numbers 0..n - 1, block by block in random order, mixed within a buffer of blocks."""

    def __init__(
        self,
        n: SupportsIndex,
        seed: SupportsIndex,
        *path: str | SupportsIndex,
        block_items: SupportsIndex,
        buffer_blocks: SupportsIndex = 16,
    ) -> None:
        whole = Permutation(n, seed, *path)  # checks n, seed and path
        self._num_items, self._seed, self._path = len(whole), whole.seed, whole.path
        self._block = min(whole_number(block_items, "block_items"), max(1, self._num_items))
        num_blocks = -(-self._num_items // self._block)
        self._per_group = min(whole_number(buffer_blocks, "buffer_blocks"), max(1, num_blocks))
        self._group_items = self._block * self._per_group
        self._blocks = Permutation(num_blocks, self._seed, *self._path, "blocks")
        # The last block may be short. It is number `_short` in the order of blocks, and from the
        # index `_edge` on everything comes `_missing` earlier than with whole blocks only.
        self._missing = num_blocks * self._block - self._num_items
        self._short = int(self._blocks.find([num_blocks - 1])[0]) if num_blocks else 0
        self._edge = (self._short + 1) * self._block - self._missing
        self._bits = bits_for(self._group_items)
        self._words = words_at(
            self._seed, ("groups", self._group_items, *self._path), 2 * rounds_for(self._bits)
        )
        self._uneven = self._uneven_groups()
        self._recent: tuple[int, Rounds] | None = None  # the group used last: most calls reuse it

    def take(self, indices: npt.ArrayLike) -> Indices:
        """The items at these indices, int64, in their order."""
        return _in_chunks(self._take, as_words(indices, self._num_items))

    def find(self, items: npt.ArrayLike) -> Indices:
        """The indices at which these items come: the inverse of `take`."""
        return _in_chunks(self._find, as_words(items, self._num_items))

    @property
    def num_groups(self) -> int:
        return -(-len(self._blocks) // self._per_group)

    def group_of(self, indices: npt.ArrayLike) -> Indices:
        """The group of each index. Groups follow one another."""
        padded = self._padded(as_words(indices, self._num_items))
        return (padded // self._group_items).view("i8")

    def ranges(self, group: int) -> Indices:
        """(blocks, 2): the items `start..stop` of each block of a group, for reading ahead."""
        first = int(as_words([group], self.num_groups)[0]) * self._per_group
        blocks = np.arange(first, min(first + self._per_group, len(self._blocks)))
        starts = self._blocks.take(blocks) * self._block
        stops = np.minimum(starts + self._block, self._num_items)
        return np.stack([starts, stops], axis=1)

    @property
    def fingerprint(self) -> str:
        """sha256 hex over everything that decides the order."""
        return fingerprint_of(
            order="block",
            version=1,
            n=len(self),
            seed=self._seed,
            path=list(self._path),
            block_items=self._block,
            buffer_blocks=self._per_group,
        )

    def __repr__(self) -> str:
        names = ", ".join(map(repr, (len(self), self._seed, *self._path)))
        sizes = f"block_items={self._block}, buffer_blocks={self._per_group}"
        return f"BlockShuffle({names}, {sizes})"

    def _padded(self, indices: Words) -> Words:
        """What these indices would be if the short block were whole."""
        return indices + (indices >= self._edge) * np.uint64(self._missing)

    def _start(self, group: Words) -> Words:
        """The first index of a group."""
        late = group * self._per_group > self._short
        return group * self._group_items - late * np.uint64(self._missing)

    def _uneven_groups(self) -> dict[int, int]:
        """The groups that are not full -> their sizes: the last, and that of the short block."""
        if not self._num_items:
            return {}
        sizes = {}
        for number in sorted({self.num_groups - 1, self._short // self._per_group}):
            start, stop = self._start(np.array([number, number + 1], np.uint64)).tolist()
            size = min(stop, self._num_items) - start
            if size != self._group_items:
                sizes[number] = size
        return sizes

    def _take(self, indices: Words) -> Words:
        group = self._padded(indices) // self._group_items
        start = self._start(group)
        padded = self._padded(start + self._mixed(group, indices - start, back=False))
        at = padded // self._block
        return padded + (self._blocks.take(at).view("u8") - at) * self._block

    def _find(self, items: Words) -> Words:
        block = items // self._block
        at = self._blocks.find(block).view("u8")
        group = at // self._per_group
        start = self._start(group)
        index = items + (at - block) * self._block
        index -= (at > self._short) * np.uint64(self._missing)
        return start + self._mixed(group, index - start, back=True)

    def _mixed(self, group: Words, within: Words, *, back: bool) -> Words:
        """Indices within their groups, permuted group by group, in place."""
        assert (within < self._group_items).all()  # a walk from outside might never come back
        cuts = (group[1:] != group[:-1]).nonzero()[0] + 1
        if len(cuts) <= len(group) // 256:
            for start, stop in pairwise([0, *cuts.tolist(), len(group)]):
                run = within[start:stop]
                run[:] = self._mixed_group(int(group[start]), run, back=back)
            return within
        # Neighbours are of different groups: words for each index, not for each group.
        full = np.ones(len(group), bool)
        for number in self._uneven:
            chosen = group == number
            within[chosen] = self._mixed_group(number, within[chosen], back=back)
            full &= ~chosen
        rounds = Rounds.numbered(self._bits, self._words, group[full])
        rounds = rounds.inverse() if back else rounds
        within[full] = walk(within[full], self._group_items, rounds)
        return within

    def _mixed_group(self, group: int, within: Words, *, back: bool) -> Words:
        if group in self._uneven:
            order = Permutation(self._uneven[group], self._seed, *self._path, "group", group)
            return (order.find(within) if back else order.take(within)).view("u8")
        if self._recent is None or self._recent[0] != group:
            self._recent = group, Rounds.of_number(self._bits, self._words, group)
        rounds = self._recent[1]
        return walk(within, self._group_items, rounds.inverse() if back else rounds)


def _in_chunks(function: Callable[[Words], Words], words: Words) -> Indices:
    """The function over all words, in place, in chunks that stay in the processor's cache."""
    for start in range(0, len(words), CHUNK):
        words[start : start + CHUNK] = function(words[start : start + CHUNK])
    return words.view("i8")
