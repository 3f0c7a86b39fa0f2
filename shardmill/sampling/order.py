"""What an order is, how epochs follow one another, and which rank reads which samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.sampling.seeds import (
    MAX_ITEMS,
    Indices,
    as_words,
    checked_count,
    checked_path,
    checked_seed,
    fingerprint_of,
)


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


class InOrder:
    """No shuffle: item `i` comes at index `i`. Seed and path are accepted and ignored."""

    __slots__ = ("_num_items",)

    def __init__(
        self, n: SupportsIndex, seed: SupportsIndex = 0, *path: str | SupportsIndex
    ) -> None:
        self._num_items = checked_count(n, "n")
        checked_seed(seed)
        checked_path(path)

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> int:
        return int(self.take([index])[0])

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
