"""Compare two forms of the same data, token for token, however each is divided.

They are equal to the last token, document end and mask, or an error names the first difference.
Memory is that of what the streams yield at a time.
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
    """The bins of a shard, in order. A mapped one is mapped again now and then: otherwise all pages
    that were read would stay resident."""
    every = max(_MAPPED // shard.pack_size, 1)
    for number in range(len(shard)):
        if number % every == 0 and isinstance(shard, MemmapShard):
            shard.close()
        yield shard.read_bin(number)


def check_bins(first: Iterable[PackedBin], second: Iterable[PackedBin], where: str) -> Parity:
    """Compare ids, masks and starts of every bin. `where` names both sides."""
    num_bins = num_tokens = 0
    for number, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None:
            raise _different(where, f"one has {number:,} bins, the other more")
        for name in ("input_ids", "loss_mask", "seq_starts"):
            left, right = getattr(one, name), getattr(other, name)
            if not np.array_equal(left, right):
                raise _different(where, f"bin {number:,}: {name} {_first_difference(left, right)}")
        num_bins += 1
        num_tokens += len(one)
    return Parity(unit="bins", num_units=num_bins, num_tokens=num_tokens)


def check_documents(first: Iterable[Ragged], second: Iterable[Ragged], where: str) -> Parity:
    """Compare the ids and the length of every document. `where` names both sides."""
    streams = (iter(first), iter(second))
    rests = [Ragged(np.empty(0, np.int64), np.zeros(1, np.int64))] * 2  # not yet compared
    num_documents = num_tokens = 0
    while True:
        for side in (0, 1):
            while not len(rests[side]) and (batch := next(streams[side], None)) is not None:
                rests[side] = batch
        left, right = rests
        count = min(len(left), len(right))
        if not count:
            break
        one, other = left.slice(0, count), right.slice(0, count)
        if not np.array_equal(one.lengths, other.lengths):
            found = _first_difference(one.lengths, other.lengths, num_documents)
            raise _different(where, f"the lengths of documents {found}")
        if not np.array_equal(one.values, other.values):
            found = _first_difference(one.values, other.values, num_tokens)
            raise _different(where, f"the token ids {found}")
        num_documents += count
        num_tokens += len(one.values)
        rests = [left.slice(count, len(left)), right.slice(count, len(right))]
    if len(rests[0]) or len(rests[1]):
        raise _different(where, "one has more documents or tokens than the other")
    return Parity(unit="documents", num_units=num_documents, num_tokens=num_tokens)


def _first_difference(left: IntArray, right: IntArray, before: int = 0) -> str:
    count = min(len(left), len(right))
    different = np.flatnonzero(left[:count] != right[:count])
    place = int(different[0]) if len(different) else count
    return f"differ at {before + place:,}"


def _different(where: str, what: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"{where}: not the same data: {what}; a file was changed or damaged meanwhile: remove the "
        "copy and convert again"
    )
