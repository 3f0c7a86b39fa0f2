"""Compare two forms of the same data, token for token.

In: two streams of bins, or of documents, however they are divided.  Out: a `Parity`.
Promise: equal to the last token, border and mask, or an error that names the first difference;
memory is that of what the streams give at a time.
Not here: reading and writing; this only looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from shardmill.errors import DamagedStoreError
from shardmill.formats.packed.memmap import MemmapShard
from shardmill.formats.packed.records import PackedBin, PackedShard
from shardmill.records import JSON, IntArray, Ragged

_MAPPED = 2**23  # tokens: some 40 MB of ids and masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared and found equal."""

    unit: str  # "bins" or "documents"
    num_units: int
    num_tokens: int

    def to_json(self) -> dict[str, JSON]:
        return {"equal": True, self.unit: self.num_units, "tokens": self.num_tokens}


def shard_bins(shard: PackedShard) -> Iterator[PackedBin]:
    """The bins of a shard, in order. A mapped one is mapped anew now and then: pages that were read
    would stay resident, all of them in the end."""
    every = max(_MAPPED // shard.pack_size, 1)
    for number in range(len(shard)):
        if number % every == 0 and isinstance(shard, MemmapShard):
            shard.close()
        yield shard.read_bin(number)


def check_bins(first: Iterable[PackedBin], second: Iterable[PackedBin], where: str) -> Parity:
    """Ids, masks and starts of every bin. `where` names both sides."""
    num_bins = num_tokens = 0
    for number, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None:
            raise _different(where, f"one has {number:,} bins, the other more")
        for name in ("input_ids", "loss_mask", "seq_starts"):
            left, right = getattr(one, name), getattr(other, name)
            if not np.array_equal(left, right):
                place = _first_difference(left, right)
                raise _different(where, f"bin {number:,}: {name} differ at {place:,}")
        num_bins += 1
        num_tokens += len(one)
    return Parity(unit="bins", num_units=num_bins, num_tokens=num_tokens)


def check_documents(first: Iterable[Ragged], second: Iterable[Ragged], where: str) -> Parity:
    """Ids and lengths of every document. The batches of the two sides need not be alike."""
    left, right = _Side(first), _Side(second)
    done = dict.fromkeys(_NAMES, 0)
    moved = True
    while moved:
        moved = left.pull() | right.pull()
        for name in _NAMES:
            one, other = left.waiting[name], right.waiting[name]
            count = min(len(one), len(other))
            if not np.array_equal(one[:count], other[:count]):
                place = done[name] + _first_difference(one[:count], other[:count])
                raise _different(where, f"the {name} differ at {place:,}")
            left.waiting[name], right.waiting[name] = one[count:], other[count:]
            done[name] += count
            moved = moved or count > 0
    if left.has_some or right.has_some:
        raise _different(where, "one has more documents or tokens than the other")
    return Parity(unit="documents", num_units=done[_LENGTHS], num_tokens=done[_IDS])


_IDS, _LENGTHS = _NAMES = ("token ids", "lengths of documents")


class _Side:
    """A stream, and what of it was not compared yet."""

    def __init__(self, batches: Iterable[Ragged]) -> None:
        self._batches = iter(batches)
        self.waiting: dict[str, IntArray] = {name: np.empty(0, np.int64) for name in _NAMES}

    @property
    def has_some(self) -> bool:
        return any(len(array) for array in self.waiting.values())

    def pull(self) -> bool:
        """Take one batch when a kind has run out; whether there was one."""
        if all(len(array) for array in self.waiting.values()):
            return False
        batch = next(self._batches, None)
        if batch is None:
            return False
        for name, more in ((_IDS, batch.values), (_LENGTHS, batch.lengths)):
            rest = self.waiting[name]
            self.waiting[name] = np.concatenate((rest, more)) if len(rest) else more
        return True


def _first_difference(left: IntArray, right: IntArray) -> int:
    count = min(len(left), len(right))
    different = np.flatnonzero(left[:count] != right[:count])
    return int(different[0]) if len(different) else count


def _different(where: str, what: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"{where}: not the same data: {what}; a file was changed or damaged meanwhile: remove the "
        "copy and convert again"
    )
