"""A shuffle for data larger than memory: it reads whole blocks.

In: how many items, how many lie in a block, how many blocks a buffer holds, a seed and a path.
Out: which item comes at an index, and back.
Promise: a bijection and a pure function, as `Permutation`; and while a group of `buffer_blocks`
blocks lasts, nothing outside these blocks is read.

How: the blocks come in a permuted order; each `buffer_blocks` of them, one after the other in that
order, are a group, and the items of a group are permuted together.

    blocks of 4      [0 1 2 3] [4 5 6 7] [8 9]
    their order      [4 5 6 7] [8 9] [0 1 2 3]
    groups of 2      (4 5 6 7 8 9) (0 1 2 3)
    the order        6 9 4 8 7 5 | 2 0 3 1

Not here: reading. How well it mixes is in docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.sampling.permutation import (
    CHUNK,
    Permutation,
    Rounds,
    bits_for,
    numbered_rounds,
    rounds_for,
    rounds_of_number,
    walk,
)
from shardmill.sampling.seeds import Indices, Words, as_words, fingerprint_of, words_at

BLOCK_BYTES = 4 * 2**20


def items_per_block(item_bytes: SupportsIndex, *, block_bytes: SupportsIndex = BLOCK_BYTES) -> int:
    """How many items of this size make a block; at least one."""
    size = whole_number(item_bytes, "item_bytes")
    return max(1, whole_number(block_bytes, "block_bytes") // size)


class BlockShuffle:
    """Item numbers 0..n - 1, block by block in random order, mixed inside a buffer of blocks."""

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
        asked = whole_number(block_items, "block_items")
        self._block = min(asked, max(1, self._num_items))
        num_blocks = -(-self._num_items // self._block)
        self._per_group = min(whole_number(buffer_blocks, "buffer_blocks"), max(1, num_blocks))
        self._group_items = self._block * self._per_group
        self._blocks = Permutation(num_blocks, self._seed, *self._path, "blocks")
        # The last block may be short. It stands somewhere in the order, at place `_short`, and
        # from the index `_edge` on everything comes `_missing` earlier than whole blocks would.
        self._missing = num_blocks * self._block - self._num_items
        self._short = int(self._blocks.find([num_blocks - 1])[0]) if num_blocks else 0
        self._edge = (self._short + 1) * self._block - self._missing
        self._bits = bits_for(self._group_items)
        self._words = words_at(
            self._seed, ("groups", self._group_items, *self._path), 2 * rounds_for(self._bits)
        )
        self._uneven = self._uneven_groups()
        self._recent: tuple[int, Rounds] | None = None  # the group used last: most calls stay in it

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> int:
        return int(self.take([index])[0])

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
        """Which group each index lies in. Groups come one after the other."""
        padded = self._padded(as_words(indices, self._num_items))
        return (padded // self._group_items).view("i8")

    def ranges(self, group: int) -> Indices:
        """(blocks, 2): the items `start..stop` of each block of a group; ask these ahead."""
        number = int(as_words([group], self.num_groups)[0])
        first = number * self._per_group
        places = np.arange(first, min(first + self._per_group, len(self._blocks)))
        starts = self._blocks.take(places) * self._block
        stops = np.minimum(starts + self._block, self._num_items)
        return np.stack([starts, stops], axis=1)

    @property
    def fingerprint(self) -> str:
        """sha256 hex over all that decides the order."""
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

    def _padded(self, places: Words) -> Words:
        """Where these places would be if the short block were whole."""
        return places + (places >= self._edge) * np.uint64(self._missing)

    def _start(self, group: Words) -> Words:
        """The first index of a group."""
        late = group * self._per_group > self._short
        return group * self._group_items - late * np.uint64(self._missing)

    def _uneven_groups(self) -> dict[int, int]:
        """The groups that are not full, with their sizes: the last, and that of the short block."""
        if not self._num_items:
            return {}
        numbers = {self.num_groups - 1, self._short // self._per_group}
        sizes = {}
        for number in sorted(numbers):
            start, stop = self._start(np.array([number, number + 1], np.uint64)).tolist()
            size = min(stop, self._num_items) - start
            if size != self._group_items:
                sizes[number] = size
        return sizes

    def _rounds_of(self, group: int) -> Rounds:
        if self._recent is None or self._recent[0] != group:
            self._recent = group, rounds_of_number(self._bits, self._words, group)
        return self._recent[1]

    def _take(self, places: Words) -> Words:
        group = self._padded(places) // self._group_items
        start = self._start(group)
        places = self._padded(start + self._mixed(group, places - start, back=False))
        place = places // self._block
        return places + (self._blocks.take(place).view("u8") - place) * self._block

    def _find(self, items: Words) -> Words:
        block = items // self._block
        place = self._blocks.find(block).view("u8")
        group = place // self._per_group
        start = self._start(group)
        index = items + (place - block) * self._block
        index -= (place > self._short) * np.uint64(self._missing)
        return start + self._mixed(group, index - start, back=True)

    def _mixed(self, group: Words, places: Words, *, back: bool) -> Words:
        """Places within their groups, permuted group by group, in place."""
        assert (places < self._group_items).all()  # a walk from outside might never come back
        cuts = (group[1:] != group[:-1]).nonzero()[0] + 1
        if len(cuts) > len(group) // 256:
            return self._mixed_scattered(group, places, back=back)
        edges = [0, *cuts.tolist(), len(group)]
        for start, stop in pairwise(edges):
            run = places[start:stop]
            run[:] = self._mixed_group(int(group[start]), run, back=back)
        return places

    def _mixed_group(self, group: int, places: Words, *, back: bool) -> Words:
        if group in self._uneven:
            order = Permutation(self._uneven[group], self._seed, *self._path, "group", group)
            return (order.find(places) if back else order.take(places)).view("u8")
        rounds = self._rounds_of(group)
        return walk(places, self._group_items, rounds.inverse() if back else rounds)

    def _mixed_scattered(self, group: Words, places: Words, *, back: bool) -> Words:
        """The same where neighbours are of other groups: words for each place, not each group."""
        full = np.ones(len(group), bool)
        for number in self._uneven:
            chosen = group == number
            places[chosen] = self._mixed_group(number, places[chosen], back=back)
            full &= ~chosen
        rounds = numbered_rounds(self._bits, self._words, group[full])
        rounds = rounds.inverse() if back else rounds
        places[full] = walk(places[full], self._group_items, rounds)
        return places


def _in_chunks(function: Callable[[Words], Words], words: Words) -> Indices:
    """The function over all words, in place, so many at a time that they stay in the cache."""
    for start in range(0, len(words), CHUNK):
        words[start : start + CHUNK] = function(words[start : start + CHUNK])
    return words.view("i8")
