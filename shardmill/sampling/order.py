"""What an order is, and what comes after its end.

In: indices.  Out: items, or (epoch, item) of an endless stream of epochs.
Promise: an order is a bijection of 0..n - 1 and a pure function; in an endless stream every item
comes once an epoch, in an order of the epoch's own.
Not here: how an order is made (permutation, block).

Who reads what.

In: the samples of a global batch, a rank and how many ranks there are.  Out: the rank's samples.
Promise: the ranks are a disjoint cover; their numbers of samples differ by at most one. The number
of ranks and the size of a batch decide who reads a sample, never which sample comes next: a run's
position is one number, the samples consumed.
Not here: batches, padding, dropping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.sampling.seeds import (
    MOST_ITEMS,
    Indices,
    as_words,
    checked_count,
    checked_path,
    checked_seed,
    fingerprint_of,
)


@runtime_checkable
class Order(Protocol):
    """Which item comes at an index. Your own class needs these names and nothing else."""

    def __len__(self) -> int: ...

    def take(self, indices: npt.ArrayLike) -> Indices:
        """The items at these indices, int64; an index outside 0..n - 1 is an IndexError."""

    def find(self, items: npt.ArrayLike) -> Indices:
        """The indices at which these items come: the inverse of `take`."""

    @property
    def fingerprint(self) -> str:
        """sha256 hex over all that decides the order."""


class OrderFactory(Protocol):
    """What makes the order of an epoch: `Permutation`, `InOrder`, or `BlockShuffle` with its
    options filled in by `functools.partial`."""

    def __call__(self, n: int, seed: int, /, *path: str | int) -> Order: ...


class InOrder:
    """No shuffle: item `i` comes at index `i`. Seed and path are taken and change nothing."""

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
    """Positions in an endless stream -> (epochs, items); `make_order(epoch)` is the epoch's order.

    All epochs have the same number of items. Costs one `make_order` an epoch that is touched, and
    one more for the first.
    """
    num_items = len(make_order(0))
    if not num_items:
        raise OptionError("an order of no items has no epochs; leave the empty source out")
    places = as_words(positions, MOST_ITEMS + 1).view("i8")
    numbers, within = np.divmod(places, num_items)
    items = np.empty(len(places), np.int64)
    for epoch, chosen in by_value(numbers):
        items[chosen] = make_order(epoch).take(within[chosen])
    return numbers, items


def by_value(values: Indices) -> Iterator[tuple[int, Indices | slice]]:
    """Each distinct value, ascending, with where it stands."""
    if not len(values):
        return
    low, high = int(values[values.argmin()]), int(values[values.argmax()])
    if low == high:
        yield low, slice(None)
    elif high - low < 16:
        for value in range(low, high + 1):
            places = (values == value).nonzero()[0]
            if len(places):
                yield value, places
    else:
        places = np.argsort(values, kind="stable")
        ordered = values[places]
        cuts = [0, *((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist(), len(values)]
        for start, stop in pairwise(cuts):
            yield int(ordered[start]), places[start:stop]


def rank_slice(
    start: SupportsIndex, stop: SupportsIndex, *, rank: SupportsIndex, world: SupportsIndex
) -> range:
    """The global samples that `rank` reads of the global batch `start..stop`.

    A run of neighbours, not every `world`-th: a mixture is periodic, and with two equal sources
    and two ranks every second sample would be one source for ever.
    """
    first = checked_count(start, "start")
    size = checked_count(stop, "stop") - first
    ranks, number = whole_number(world, "world"), whole_number(rank, "rank", least=0)
    if size < 0:
        raise OptionError(f"start={first:,}, stop={first + size:,}: wanted start <= stop")
    if number >= ranks:
        raise OptionError(f"rank={number:,}: wanted 0 to {ranks - 1:,}, for world={ranks:,}")
    return range(first + size * number // ranks, first + size * (number + 1) // ranks)
