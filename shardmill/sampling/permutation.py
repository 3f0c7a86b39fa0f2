"""A shuffle of any number of items, without an array of them.

In: how many items, a seed and a path of names.  Out: which item comes at an index, and back.
Promise: a bijection; a pure function of (n, seed, path); no memory that grows with n; an index
costs the same at the end as at the start.
Not here: epochs (order), order made for disks (block).
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy.typing as npt

from shardmill.sampling.cipher import Rounds, bits_for, rounds_for, single_rounds, walk
from shardmill.sampling.keys import (
    Indices,
    as_words,
    checked_count,
    checked_path,
    checked_seed,
    fingerprint_of,
    words_at,
)


class Permutation:
    """Item numbers 0..n - 1 in an order that the seed and the path decide.

    The path is for names: `Permutation(n, seed, "wiki", "epoch", 3)`.
    """

    __slots__ = ("_back", "_num_items", "_path", "_rounds", "_seed")

    def __init__(self, n: SupportsIndex, seed: SupportsIndex, *path: str | SupportsIndex) -> None:
        self._num_items = checked_count(n, "n")
        self._seed = checked_seed(seed)
        self._path = checked_path(path)
        bits = bits_for(self._num_items)
        # n is part of the address: orders of n and of n + 1 items are unrelated
        address = ("permutation", self._num_items, *self._path)
        words = words_at(self._seed, address, 2 * rounds_for(bits))
        self._rounds = single_rounds(bits, words)
        self._back: Rounds | None = None  # made when somebody asks the way back

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def path(self) -> tuple[str | int, ...]:
        return self._path

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> int:
        return int(self.take([index])[0])

    def take(self, indices: npt.ArrayLike) -> Indices:
        """The items at these indices, int64, in their order."""
        words = as_words(indices, self._num_items)
        return walk(words, self._num_items, self._rounds).view("i8")

    def find(self, items: npt.ArrayLike) -> Indices:
        """The indices at which these items come: the inverse of `take`."""
        words = as_words(items, self._num_items)
        if self._back is None:
            self._back = self._rounds.inverse()
        return walk(words, self._num_items, self._back).view("i8")

    @property
    def fingerprint(self) -> str:
        """sha256 hex over all that decides the order."""
        return fingerprint_of(
            order="permutation", version=1, n=len(self), seed=self._seed, path=list(self._path)
        )

    def __repr__(self) -> str:
        return f"Permutation({', '.join(map(repr, (len(self), self._seed, *self._path)))})"
