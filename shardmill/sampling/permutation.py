"""A shuffle of any number of items, without an array of them.

In: how many items, a seed and a path of names.  Out: which item comes at an index, and back.
Promise: a bijection; a pure function of (n, seed, path); no memory that grows with n; an index
costs the same at the end as at the start.
Not here: epochs (order), order made for disks (block).

A bijection of 0..n - 1 that is computed, never stored.

In: uint64 indices, how many items there are, and random words.  Out: the items, in place.
Promise: for any words a bijection of 0..n - 1; the inverse is exact; only wrapping integer
arithmetic, so every machine and every numpy gives the same numbers.

How: on the next power of two, 2**b >= n, one round is

    x = (x * odd + word) mod 2**b;   x = x ^ (x >> ceil(b / 2))

Both steps can be undone: an odd number has an inverse modulo 2**b, and a shift by half of the bits
or more undoes itself. The product carries low bits up, the shift brings high bits down. What
lands at n or above goes through again ("cycle walking") until it lands below: an orbit of a
bijection comes back to where it began, so this ends, after fewer than two turns on average.

Not here: seeds and paths (keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.sampling.seeds import (
    Indices,
    Words,
    as_words,
    checked_count,
    checked_path,
    checked_seed,
    fingerprint_of,
    words_at,
)

CHUNK = 16384
"""Indices worked on at a time: they, and what is worked with, stay in the processor's cache."""

FEW = 10
"""So many stragglers of a walk are cheaper one by one."""


def bits_for(num_items: int) -> int:
    """b, the smallest with 2**b >= num_items, and at least 1."""
    return max(1, (num_items - 1).bit_length())


def rounds_for(bits: int) -> int:
    """One or more beyond what the statistics of docs/sampling.md can tell from a true shuffle."""
    return 6 if bits >= 28 else 8 if bits >= 19 else 10


def inverse_of(odd: Words) -> Words:
    """The inverses modulo 2**64, by Newton's steps: correct bits double from 5 to 80."""
    inverse: Words = (odd * np.uint64(3)) ^ np.uint64(2)
    for _ in range(4):
        inverse *= np.uint64(2) - odd * inverse
    return inverse


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """Once through all rounds, forward: in 0..2**bits - 1, in place.

    `steps` holds (odd, word) of each round: 0-d arrays for one bijection, rows of m words for m
    bijections, one an index. (0-d arrays cost numpy half of what arrays of one cost.)
    """

    bits: int
    steps: tuple[tuple[Words, Words], ...]
    numbers: tuple[tuple[int, int], ...] = ()  # the steps of a single bijection as plain integers

    @property
    def single(self) -> bool:
        return bool(self.numbers)

    def inverse(self) -> Unrounds:
        if self.single:
            back = [(pow(odd, -1, 2**64), word) for odd, word in reversed(self.numbers)]
            return Unrounds(self.bits, _steps(back), tuple(back))
        rows = [(inverse_of(odd), word) for odd, word in reversed(self.steps)]
        return Unrounds(self.bits, tuple(rows))

    def only(self, chosen: npt.NDArray[Any]) -> Self:
        """The bijections of the chosen indices."""
        if self.single:
            return self
        return type(self)(self.bits, tuple((odd[chosen], word[chosen]) for odd, word in self.steps))

    def turn(self, x: Words) -> None:
        mask, shift, spare = *_constants(self.bits), np.empty_like(x)
        for odd, word in self.steps:
            np.multiply(x, odd, out=x)
            np.add(x, word, out=x)
            np.bitwise_and(x, mask, out=x)
            np.right_shift(x, shift, out=spare)
            np.bitwise_xor(x, spare, out=x)

    def turn_one(self, x: int) -> int:
        """`turn` for one index of a single bijection: plain integers beat numpy below about ten."""
        mask, shift = 2**self.bits - 1, (self.bits + 1) // 2
        for odd, word in self.numbers:
            x = (x * odd + word) & mask
            x ^= x >> shift
        return x


class Unrounds(Rounds):
    """The way back: `steps` in reverse, with the inverses of the odd numbers."""

    __slots__ = ()

    def turn(self, x: Words) -> None:
        mask, shift, spare = *_constants(self.bits), np.empty_like(x)
        for odd, word in self.steps:
            np.right_shift(x, shift, out=spare)
            np.bitwise_xor(x, spare, out=x)
            np.subtract(x, word, out=x)
            np.multiply(x, odd, out=x)
            np.bitwise_and(x, mask, out=x)

    def turn_one(self, x: int) -> int:
        mask, shift = 2**self.bits - 1, (self.bits + 1) // 2
        for odd, word in self.numbers:
            x = ((x ^ (x >> shift)) - word) * odd & mask
        return x


def single_rounds(bits: int, words: Sequence[int]) -> Rounds:
    """One bijection; `words` holds two a round."""
    numbers = tuple((odd | 1, word) for odd, word in zip(words[::2], words[1::2], strict=True))
    return Rounds(bits, _steps(numbers), numbers)


def numbered_rounds(bits: int, words: Sequence[int], numbers: Words) -> Rounds:
    """For each number a bijection of its own; `words` holds two a round."""
    mixed = _mixed(words, numbers)
    return Rounds(bits, tuple(zip(mixed[::2] | np.uint64(1), mixed[1::2], strict=True)))


def rounds_of_number(bits: int, words: Sequence[int], number: int) -> Rounds:
    """The bijection that `numbered_rounds` has for this number, on its own."""
    mixed = _mixed(words, np.array([number], np.uint64))
    return single_rounds(bits, mixed[:, 0].tolist())


def _mixed(words: Sequence[int], numbers: Words) -> Words:
    """(len(words), len(numbers)) words: each word moved on by each number, and well mixed."""
    mixed: Words = np.array(words, np.uint64)[:, None] + numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def walk(x: Words, num_items: int, rounds: Rounds) -> Words:
    """Take each index to its item, in place. All must be below `num_items`."""
    if not rounds.single:
        _walk(x, num_items, rounds)
        return x
    for start in range(0, len(x), CHUNK):
        _walk(x[start : start + CHUNK], num_items, rounds)
    return x


def _walk(x: Words, num_items: int, rounds: Rounds) -> None:
    rounds.turn(x)
    outside = (x >= num_items).nonzero()[0]
    rounds = rounds.only(outside)
    while len(outside) > FEW or (len(outside) and not rounds.single):
        left = x[outside]
        rounds.turn(left)
        x[outside] = left
        again = (left >= num_items).nonzero()[0]
        outside, rounds = outside[again], rounds.only(again)
    for place in outside.tolist():
        item = rounds.turn_one(int(x[place]))
        while item >= num_items:
            item = rounds.turn_one(item)
        x[place] = item


def _steps(numbers: Sequence[tuple[int, int]]) -> tuple[tuple[Words, Words], ...]:
    return tuple((np.array(odd, np.uint64), np.array(word, np.uint64)) for odd, word in numbers)


@cache
def _constants(bits: int) -> tuple[Words, Words]:
    """The mask of 0..2**bits - 1, and the shift."""
    return np.array(2**bits - 1, np.uint64), np.array((bits + 1) // 2, np.uint64)


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
