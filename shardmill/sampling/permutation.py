"""A shuffle of any number of items that is computed, never stored.

A pure function of (n, seed, path): no memory grows with n, and every index costs the same. Only
wrapping integer arithmetic is used, so every machine and every numpy gives the same numbers.

On the next power of two, 2**b >= n, one round is

    x = (x * odd + word) mod 2**b;   x = x ^ (x >> ceil(b / 2))

Both steps can be undone: an odd number has an inverse modulo 2**b, and a shift by at least half of
the bits undoes itself. The product carries low bits up, the shift brings high bits down. A result
of n or above goes through the rounds again ("cycle walking") until it is below n: an orbit of a
bijection returns to where it began, so this ends, after fewer than two passes on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, SupportsIndex

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
"""Indices processed at a time: they and the temporaries stay in the processor's cache."""

_FEW = 10
"""Up to this many remaining indices are cheaper one by one, as plain integers."""


def bits_for(num_items: int) -> int:
    """b, the smallest with 2**b >= num_items, and at least 1."""
    return max(1, (num_items - 1).bit_length())


def rounds_for(bits: int) -> int:
    """At least one more than the statistics of docs/sampling.md can tell from a true shuffle."""
    return 6 if bits >= 28 else 8 if bits >= 19 else 10


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """All rounds once, on 0..2**bits - 1, in place; or their inverse, if `backward`.

    `steps` holds (odd, word) of each round: 0-d arrays for one bijection, arrays of m words for m
    bijections, one per index. (0-d arrays cost numpy half of what arrays of one cost.)
    """

    bits: int
    steps: tuple[tuple[Words, Words], ...]
    numbers: tuple[tuple[int, int], ...] = ()  # the steps of a single bijection as plain integers
    backward: bool = False  # then steps are reversed, with the inverses of the odd numbers

    @classmethod
    def single(cls, bits: int, words: Sequence[int]) -> Rounds:
        """One bijection; `words` holds two per round."""
        numbers = tuple((odd | 1, word) for odd, word in zip(words[::2], words[1::2], strict=True))
        return cls(bits, _as_arrays(numbers), numbers)

    @classmethod
    def numbered(cls, bits: int, words: Sequence[int], numbers: Words) -> Rounds:
        """A bijection for each number; `words` holds two per round."""
        mixed = _mixed(words, numbers)
        return cls(bits, tuple(zip(mixed[::2] | np.uint64(1), mixed[1::2], strict=True)))

    @classmethod
    def of_number(cls, bits: int, words: Sequence[int], number: int) -> Rounds:
        """The single bijection that `numbered` has for this number."""
        return cls.single(bits, _mixed(words, np.array([number], np.uint64))[:, 0].tolist())

    def inverse(self) -> Rounds:
        """The way back. Not for rounds that are backward already."""
        numbers = tuple((pow(odd, -1, 2**64), word) for odd, word in reversed(self.numbers))
        steps = _as_arrays(numbers) or tuple(
            (_inverse_of(odd), word) for odd, word in reversed(self.steps)
        )
        return Rounds(self.bits, steps, numbers, backward=True)

    def only(self, chosen: npt.NDArray[Any]) -> Rounds:
        """The bijections of the chosen indices."""
        if self.numbers:
            return self
        steps = tuple((odd[chosen], word[chosen]) for odd, word in self.steps)
        return Rounds(self.bits, steps, backward=self.backward)

    def turn(self, x: Words) -> None:
        mask, shift, spare = *_constants(self.bits), np.empty_like(x)
        if self.backward:
            for odd, word in self.steps:
                np.right_shift(x, shift, out=spare)
                np.bitwise_xor(x, spare, out=x)
                np.subtract(x, word, out=x)
                np.multiply(x, odd, out=x)
                np.bitwise_and(x, mask, out=x)
            return
        for odd, word in self.steps:
            np.multiply(x, odd, out=x)
            np.add(x, word, out=x)
            np.bitwise_and(x, mask, out=x)
            np.right_shift(x, shift, out=spare)
            np.bitwise_xor(x, spare, out=x)

    def turn_one(self, x: int) -> int:
        """`turn` for one index of a single bijection."""
        mask, shift = 2**self.bits - 1, (self.bits + 1) // 2
        for odd, word in self.numbers:
            if self.backward:
                x = ((x ^ (x >> shift)) - word) * odd & mask
            else:
                x = (x * odd + word) & mask
                x ^= x >> shift
        return x


def _as_arrays(numbers: Sequence[tuple[int, int]]) -> tuple[tuple[Words, Words], ...]:
    return tuple((np.array(odd, np.uint64), np.array(word, np.uint64)) for odd, word in numbers)


def _inverse_of(odd: Words) -> Words:
    """The inverses modulo 2**64, by Newton's method: correct bits double from 5 to 80."""
    inverse: Words = (odd * np.uint64(3)) ^ np.uint64(2)
    for _ in range(4):
        inverse *= np.uint64(2) - odd * inverse
    return inverse


def _mixed(words: Sequence[int], numbers: Words) -> Words:
    """(len(words), len(numbers)): each word moved by each number, then mixed by splitmix64."""
    mixed: Words = np.array(words, np.uint64)[:, None] + numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@cache
def _constants(bits: int) -> tuple[Words, Words]:
    """The mask of 0..2**bits - 1, and the shift."""
    return np.array(2**bits - 1, np.uint64), np.array((bits + 1) // 2, np.uint64)


def walk(x: Words, num_items: int, rounds: Rounds) -> Words:
    """Replace each index by its item, in place. All must be below `num_items`."""
    if not rounds.numbers:
        _walk(x, num_items, rounds)
        return x
    for start in range(0, len(x), CHUNK):
        _walk(x[start : start + CHUNK], num_items, rounds)
    return x


def _walk(x: Words, num_items: int, rounds: Rounds) -> None:
    rounds.turn(x)
    outside = (x >= num_items).nonzero()[0]
    rounds = rounds.only(outside)
    while len(outside) > _FEW or (len(outside) and not rounds.numbers):
        left = x[outside]
        rounds.turn(left)
        x[outside] = left
        again = (left >= num_items).nonzero()[0]
        outside, rounds = outside[again], rounds.only(again)
    for at in outside.tolist():
        item = rounds.turn_one(int(x[at]))
        while item >= num_items:
            item = rounds.turn_one(item)
        x[at] = item


class Permutation:
    """Item numbers 0..n - 1 in an order that the seed and the path decide.

    The path is for names: `Permutation(n, seed, "wiki", "epoch", 3)`.
    """

    __slots__ = ("_back", "_num_items", "_rounds", "path", "seed")

    def __init__(self, n: SupportsIndex, seed: SupportsIndex, *path: str | SupportsIndex) -> None:
        self._num_items = checked_count(n, "n")
        self.seed = checked_seed(seed)
        self.path = checked_path(path)
        bits = bits_for(self._num_items)
        # n is part of the address: orders of n and of n + 1 items are unrelated
        address = ("permutation", self._num_items, *self.path)
        self._rounds = Rounds.single(bits, words_at(self.seed, address, 2 * rounds_for(bits)))
        self._back: Rounds | None = None  # made at the first `find`

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
        """sha256 hex over everything that decides the order."""
        return fingerprint_of(
            order="permutation", version=1, n=len(self), seed=self.seed, path=list(self.path)
        )

    def __repr__(self) -> str:
        return f"Permutation({', '.join(map(repr, (len(self), self.seed, *self.path)))})"
