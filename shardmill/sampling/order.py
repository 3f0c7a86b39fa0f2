"""Orders: which item comes at which index, how epochs follow one another, which rank reads what.

An order is a pure function of (n, seed, path): no memory grows with n, and every index costs the
same. Only hashes and wrapping integer arithmetic are used, so every machine and every numpy gives
the same numbers. Paths never collide by addition: (seed 1, epoch 1) is unrelated to (seed 2,
epoch 0).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, SupportsIndex, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.records import JSON

Words: TypeAlias = npt.NDArray[np.uint64]
Indices: TypeAlias = npt.NDArray[np.int64]

MAX_ITEMS = 2**63 - 1
"""Indices are int64."""


def checked_seed(seed: SupportsIndex) -> int:
    """`seed` as an int of 0 to 2**64 - 1."""
    number = whole_number(seed, "seed", least=0)
    if number >= 2**64:
        raise OptionError("{seed}: wanted less than 2**64; hash longer seeds first", seed=number)
    return number


def checked_count(count: SupportsIndex, name: str, *, least: int = 0) -> int:
    """`count` as an int that int64 indices can reach."""
    number = whole_number(count, name, least=least)
    if number > MAX_ITEMS:
        raise OptionError(f"{{{name}}}: wanted at most 2**63 - 1", **{name: number})
    return number


def checked_path(path: tuple[str | SupportsIndex, ...]) -> tuple[str | int, ...]:
    """The path with plain str and int parts; a bool, float or None is refused."""
    for part in path:
        if isinstance(part, bool) or not (isinstance(part, str) or hasattr(part, "__index__")):
            raise OptionError(f"path part {part!r}: wanted a name or a whole number")
    return tuple(str(part) if isinstance(part, str) else int(part) for part in path)


def words_at(seed: int, path: tuple[str | int, ...], num_words: int) -> tuple[int, ...]:
    """`num_words` random 64-bit words for this seed and path."""
    address = hashlib.sha256(repr((seed, *path)).encode()).digest()
    blocks = [hashlib.sha256(address + bytes([i])).digest() for i in range(-(-num_words // 4))]
    return struct.unpack(f"<{num_words}Q", b"".join(blocks)[: 8 * num_words])


def fingerprint_of(**what: JSON) -> str:
    """sha256 hex over everything that decides an order."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def as_words(indices: npt.ArrayLike, num_items: int) -> Words:
    """A fresh uint64 array of these indices, checked to be in 0..num_items - 1."""
    array = np.asarray(indices)
    if array.ndim != 1:
        raise OptionError(f"indices have shape {array.shape}, wanted one dimension")
    if not array.size:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise OptionError(f"indices have dtype {array.dtype}, wanted integers")
    words = array.astype(np.uint64)  # a negative index becomes too large, as it should
    if words[words.argmax()] >= num_items:
        wrong = int(np.flatnonzero(words >= num_items)[0])
        raise IndexError(f"index {int(array[wrong]):,} of {num_items:,}")
    return words


@runtime_checkable
class Order(Protocol):
    """A bijection of 0..n - 1 and a pure function. Your own class needs only these methods."""

    def __len__(self) -> int: ...

    def take(self, indices: npt.ArrayLike) -> Indices:
        """The items at these indices, int64; an index outside 0..n - 1 is an IndexError."""

    def find(self, items: npt.ArrayLike) -> Indices:
        """The indices at which these items come: the inverse of `take`."""

    @property
    def fingerprint(self) -> str:
        """sha256 hex over everything that decides the order."""


class OrderFactory(Protocol):
    """Makes the order of an epoch: `Permutation`, `InOrder`, or `BlockShuffle` with its options
    filled in by `functools.partial`."""

    def __call__(self, n: int, seed: int, /, *path: str | int) -> Order: ...


class IndexedOrder:
    """Length and single items, for an order that has `take`."""

    __slots__ = ("_num_items",)
    _num_items: int
    take: Callable[[npt.ArrayLike], Indices]

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> int:
        return int(self.take([index])[0])


class InOrder(IndexedOrder):
    """No shuffle: item `i` comes at index `i`. Seed and path are accepted and ignored."""

    __slots__ = ()

    def __init__(
        self, n: SupportsIndex, seed: SupportsIndex = 0, *path: str | SupportsIndex
    ) -> None:
        self._num_items = checked_count(n, "n")
        checked_seed(seed)
        checked_path(path)

    def take(self, indices: npt.ArrayLike) -> Indices:
        return as_words(indices, self._num_items).view("i8")

    find = take

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(order="in order", version=1, n=len(self))

    def __repr__(self) -> str:
        return f"InOrder({len(self)})"


def epochs(make_order: Callable[[int], Order], positions: npt.ArrayLike) -> tuple[Indices, Indices]:
    """Positions in an endless stream -> (epochs, items); `make_order(epoch)` is an epoch's order.

    Every item comes once per epoch; all epochs have the same number of items. Calls `make_order`
    once for each epoch that is touched, and once more for the first.
    """
    num_items = len(make_order(0))
    if not num_items:
        raise OptionError("an order of no items has no epochs; leave the empty source out")
    return items_of_epochs(make_order, num_items, as_words(positions, MAX_ITEMS + 1).view("i8"))


def items_of_epochs(
    make_order: Callable[[int], Order], num_items: int, positions: Indices
) -> tuple[Indices, Indices]:
    """`epochs` for positions that were checked."""
    numbers, within = np.divmod(positions, num_items)
    items = np.empty_like(positions)
    for epoch, chosen in by_value(numbers):
        items[chosen] = make_order(epoch).take(within[chosen])
    return numbers, items


def by_value(values: Indices) -> Iterator[tuple[int, Indices | slice]]:
    """Each distinct value, ascending, with the indices where it occurs."""
    if not len(values):
        return
    low, high = int(values[values.argmin()]), int(values[values.argmax()])
    if low == high:
        yield low, slice(None)
    elif high - low < 16:
        for value in range(low, high + 1):
            found = (values == value).nonzero()[0]
            if len(found):
                yield value, found
    else:
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        cuts = [0, *((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist(), len(values)]
        for start, stop in pairwise(cuts):
            yield int(ordered[start]), order[start:stop]


def rank_slice(
    start: SupportsIndex, stop: SupportsIndex, *, rank: SupportsIndex, world: SupportsIndex
) -> range:
    """The global samples that `rank` reads of the global batch `start..stop`.

    The ranks are a disjoint cover, and their numbers of samples differ by at most one. World and
    batch size decide who reads a sample, never which sample comes next. Each rank reads
    neighbouring samples, not every `world`-th: a mixture is periodic, and with two equal sources
    and two ranks every second sample would always be of the same source.
    """
    first = checked_count(start, "start")
    size = checked_count(stop, "stop") - first
    ranks, number = whole_number(world, "world"), whole_number(rank, "rank", least=0)
    if size < 0:
        raise OptionError("{start}, {stop}: wanted start <= stop", start=first, stop=first + size)
    if number >= ranks:
        raise OptionError(
            f"{{rank}}: wanted 0 to {ranks - 1:,}, for {{world}}", rank=number, world=ranks
        )
    return range(first + size * number // ranks, first + size * (number + 1) // ranks)


# A shuffle of any number of items that is computed, never stored.
#
# On the next power of two, 2**b >= n, one round is
#
#     x = (x * odd + word) mod 2**b;   x = x ^ (x >> ceil(b / 2))
#
# Both steps can be undone: an odd number has an inverse modulo 2**b, and a shift by at least half
# of the bits undoes itself. The product carries low bits up, the shift brings high bits down. A
# result of n or above goes through the rounds again ("cycle walking") until it is below n: an orbit
# of a bijection returns to where it began, so this ends, after fewer than two passes on average.

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
        mixed = mixed_words(words, numbers)
        return cls(bits, tuple(zip(mixed[::2] | np.uint64(1), mixed[1::2], strict=True)))

    @classmethod
    def of_number(cls, bits: int, words: Sequence[int], number: int) -> Rounds:
        """The single bijection that `numbered` has for this number."""
        return cls.single(bits, mixed_words(words, np.array([number], np.uint64))[:, 0].tolist())

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


def mixed_words(words: Sequence[int], numbers: Words) -> Words:
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


class Permutation(IndexedOrder):
    """Item numbers 0..n - 1 in an order that the seed and the path decide.

    The path is for names: `Permutation(n, seed, "wiki", "epoch", 3)`.
    """

    __slots__ = ("_back", "_rounds", "path", "seed")

    def __init__(self, n: SupportsIndex, seed: SupportsIndex, *path: str | SupportsIndex) -> None:
        self._num_items = checked_count(n, "n")
        self.seed = checked_seed(seed)
        self.path = checked_path(path)
        bits = bits_for(self._num_items)
        # n is part of the address: orders of n and of n + 1 items are unrelated
        address = ("permutation", self._num_items, *self.path)
        self._rounds = Rounds.single(bits, words_at(self.seed, address, 2 * rounds_for(bits)))
        self._back: Rounds | None = None  # made at the first `find`

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
