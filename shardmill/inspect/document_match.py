"""Which documents of two heaps are in both.

In: the records of both stores that are in heaps of one number, and the border of splits.  Out: a
`Matched`.
Promise: pure; equal documents are paired as often as both sides have them, within splits of one
name.
Not here: reading and hashing; which of equal documents has no partner (order.py).

A hash for each document of a split.

In: a store, a split, a range of its documents.  Out: blocks of (hash, second hash, mask hash).
Promise: equal documents give equal hashes whatever the dtype, shards and places they lie in; a few
ten MiB of memory, also for a document that is larger than a block. Two different documents share
both hashes by chance once in about 2**128: exact enough, but no guard against forgers.
Not here: what is made of them (documents.py).

Records by the million, sorted into heaps on disk by their hash.

In: (n, 4) records: two hashes of a document, that of its mask, its number.  Out: heap by heap.
Promise: equal documents are in the heap of one number; a heap fits into memory, all of them need
not; few records stay in memory.
Not here: what is compared (documents.py).

What a comparison says, as frozen records. The two stores are called a and b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.records import BoolArray, IntArray, OffsetArray
from shardmill.store import Store
from shardmill.store.readers import TokenSpace, open_tokens

Hashes = npt.NDArray[np.uint64]
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 2**18
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_MASK = np.uint64(0x8CB92BA72F3D8DD7)


def document_hashes(store: Store, split: str, first: int, *, masks: bool) -> Iterator[Hashes]:
    """(n, 3) for documents from `first` on, in order; the third is 0 without `masks`."""
    starts, num_tokens = store.document_starts(split), store.num_tokens(split)
    bits = store.chat_arrays(split).mask_bits if masks else None
    with closing(open_tokens(store, split)) as space:
        while first < len(starts):
            stop = _stop(starts, first)
            ends = np.append(starts[first + 1 : stop + 1], [num_tokens] * (stop == len(starts)))
            here = np.asarray(starts[first:stop])
            if (ends < here).any():
                raise DamagedStoreError(
                    f"{store.folder}: split {split!r}: its index falls behind document {first:,}; "
                    "`shardmill verify` lists all damage"
                )
            yield _hash_documents(space, bits, here, ends)
            first = stop


def _stop(starts: OffsetArray, first: int) -> int:
    """Documents `first..stop` are a block: as many as fit, and one at least."""
    some = starts[first : first + BLOCK_DOCUMENTS + 1]
    fit = int(np.searchsorted(some, int(some[0]) + BLOCK_TOKENS, side="right")) - 1
    return min(first + max(fit, 1), first + BLOCK_DOCUMENTS, len(starts))


def _hash_documents(
    space: TokenSpace, bits: npt.NDArray[np.uint8] | None, starts: OffsetArray, ends: OffsetArray
) -> Hashes:
    """Documents that follow one another. Only one that is alone may be larger than a block."""
    lengths = ends - starts
    sums = np.zeros((len(starts), 3), np.uint64)
    filled = np.flatnonzero(lengths)
    for low in range(int(starts[0]), int(ends[-1]), BLOCK_TOKENS):
        high = min(low + BLOCK_TOKENS, int(ends[-1]))
        touched = filled[(ends[filled] > low) & (starts[filled] < high)]
        begins = np.maximum(starts[touched], low) - low
        owners = np.repeat(touched, np.diff(begins, append=high - low))
        places = np.arange(low, high) - starts[owners]
        parts = _token_parts(space.read(low, high), places, bits, low)
        for column, part in enumerate(parts):
            sums[touched, column] += np.add.reduceat(part, begins)
    # the length: a token that adds nothing must not go unseen
    sums[:, :2] = _mix(sums[:, :2] + lengths.astype(np.uint64)[:, None] * _ODD)
    return sums


def _token_parts(
    tokens: IntArray,
    places: OffsetArray,
    bits: npt.NDArray[np.uint8] | None,
    low: int,
) -> Iterator[Hashes]:
    """What each token adds to the sums of its document; `low` is the number of the first."""
    at = places.astype(np.uint64)
    one = _mix(((at << np.uint64(32)) | tokens.astype(np.uint64)) + _ODD)
    yield one
    yield _mix(one ^ _SECOND)
    if bits is not None:
        stop = low + len(tokens)
        packed = bits[low // 8 : -(-stop // 8)]
        trained = np.unpackbits(packed, bitorder="little")[low % 8 :][: len(tokens)]
        yield _mix(at + _MASK) * trained.astype(np.uint64)


def _mix(values: Hashes) -> Hashes:
    """A bijection of 64 bits in which every bit depends on all (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surplus:
    """Documents that both sides have, and one of them more often."""

    hashes: Hashes  # (n,) the first of each
    more: OffsetArray  # (n,) how many more a has; below 0: b has more

    @classmethod
    def joined(cls, parts: Sequence[Surplus]) -> Surplus:
        """All of some, by hash."""
        hashes = np.concatenate([part.hashes for part in parts])
        order = np.argsort(hashes, kind="stable")
        return cls(hashes=hashes[order], more=np.concatenate([p.more for p in parts])[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """What was found in one pair of heaps."""

    shared: tuple[OffsetArray, OffsetArray]  # places of each side whose document both have
    surplus: tuple[Surplus, ...]  # by split: what one side has more often
    both: OffsetArray  # (splits,) pairs
    both_anywhere: int  # pairs, whatever their splits
    other_mask: OffsetArray  # (splits,) pairs of equal tokens and unequal masks
    masked: OffsetArray  # places in a of such


def match(a: Hashes, b: Hashes, edges: tuple[OffsetArray, OffsetArray]) -> Matched:
    """`edges` of each side: the place of the first document of every split, and one behind all."""
    records = np.concatenate((a, b))
    side = np.repeat([0, 1], [len(a), len(b)])
    place = records[:, 3].astype(np.int64)
    split = np.concatenate([_split_of(x[:, 3], e) for x, e in zip((a, b), edges, strict=True)])
    num_splits = len(edges[0]) - 1
    columns = (records[:, 0], records[:, 1], split, records[:, 2])
    document, inside, masked = (_numbered(columns[:width]) for width in (2, 3, 4))
    paired, masked_too = (_paired(group, side, place) for group in (inside, masked))
    anywhere = _paired(document, side, place)
    left = side == 0
    counts = _counts(inside, side)
    common = ((counts[:, 0] > 0) & (counts[:, 1] > 0))[inside]
    both = np.bincount(split[paired & left], minlength=num_splits)
    equal = np.bincount(split[masked_too & left], minlength=num_splits)
    return Matched(
        shared=(place[common & left], place[common & ~left]),
        surplus=tuple(_surpluses(inside, counts, records[:, 0], split, num_splits)),
        both=both,
        both_anywhere=int(np.count_nonzero(anywhere & left)),
        other_mask=both - equal,
        masked=place[_unequal(inside, masked_too, paired, side, place)],
    )


def _split_of(places: Hashes, edges: OffsetArray) -> OffsetArray:
    return np.searchsorted(edges, places.astype(np.int64), side="right") - 1


def _numbered(columns: tuple[Hashes | OffsetArray, ...]) -> OffsetArray:
    """A number for each row, equal for equal rows."""
    order = np.lexsort(columns)
    differs = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(differs)
    return numbers


def _paired(group: OffsetArray, side: OffsetArray, place: OffsetArray) -> BoolArray:
    """Whether a record has a partner of its group on the other side; the first ones have."""
    most: OffsetArray = _counts(group, side).min(axis=1, initial=len(group))
    return np.less(_ranks(2 * group + side, place), most[group])


def _counts(group: OffsetArray, side: OffsetArray) -> OffsetArray:
    """(groups, 2) records of each group on each side."""
    num_groups = int(group.max(initial=-1)) + 1
    return np.bincount(2 * group + side, minlength=2 * num_groups).reshape(-1, 2)


def _surpluses(
    group: OffsetArray, counts: OffsetArray, first: Hashes, split: OffsetArray, num_splits: int
) -> Iterator[Surplus]:
    """For each split; `group` tells the splits apart."""
    wanted = (counts[:, 0] > 0) & (counts[:, 1] > 0) & (counts[:, 0] != counts[:, 1])
    rows = np.flatnonzero(wanted[group])
    rows = rows[np.unique(group[rows], return_index=True)[1]]  # one of each group
    more = (counts[:, 0] - counts[:, 1])[group[rows]]
    for number in range(num_splits):
        mine = split[rows] == number
        yield Surplus(hashes=first[rows[mine]], more=more[mine])


def _ranks(keys: OffsetArray, place: OffsetArray) -> OffsetArray:
    """How many records of the same key lie before each, by place."""
    order = np.lexsort((place, keys))
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered, side="left")
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys)) - first
    return ranks


def _unequal(
    inside: OffsetArray,
    masked_too: BoolArray,
    paired: BoolArray,
    side: OffsetArray,
    place: OffsetArray,
) -> OffsetArray:
    """Rows of a whose tokens have a partner, and whose mask has none: as many as there are pairs
    left of their group."""
    left = side == 0
    num_groups = int(inside.max(initial=-1)) + 1
    pairs = np.bincount(inside[paired & left], minlength=num_groups)
    pairs -= np.bincount(inside[masked_too & left], minlength=num_groups)
    rows = np.flatnonzero(left & ~masked_too)
    found: OffsetArray = rows[_ranks(inside[rows], place[rows]) < pairs[inside[rows]]]
    return found


HEAP_RECORDS = 2**20
_MOST_HEAPS = 256  # open files of a store, and a process may have a thousand
_WIDTH = 4


def num_heaps(num_records: int) -> int:
    return min(_MOST_HEAPS, -(-num_records // HEAP_RECORDS) or 1)


class Heaps:
    """The records of one store."""

    def __init__(self, folder: Path, count: int) -> None:
        """`count` heaps; one is kept in memory, more in files of `folder`."""
        self._parts: list[Hashes] = []
        names = [f"{at:03d}" for at in range(count)] if count > 1 else []
        self._files = [(folder / name).open("w+b") for name in names]

    def add(self, records: Hashes) -> None:
        if not self._files:
            self._parts.append(records)
            return
        heaps = records[:, 0] % np.uint64(len(self._files))
        order = np.argsort(heaps, kind="stable")
        edges = np.searchsorted(heaps[order], np.arange(len(self._files) + 1, dtype=np.uint64))
        sorted_records = records[order]
        for at, file in enumerate(self._files):
            file.write(np.ascontiguousarray(sorted_records[edges[at] : edges[at + 1]]).data)

    def heap(self, at: int) -> Hashes:
        """All records of a heap: (n, 4)."""
        if not self._files:
            return np.concatenate([np.empty((0, _WIDTH), np.uint64), *self._parts])
        self._files[at].seek(0)
        return np.fromfile(self._files[at], np.uint64).reshape(-1, _WIDTH)

    def close(self) -> None:
        for file in self._files:
            file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPlace:
    """One document of a store."""

    split: str
    document: int  # its number in the split
    token: int  # where it starts in the split


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBreak:
    """The first place where the documents that both stores hold come in another order."""

    a: DocumentPlace
    b: DocumentPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDocuments:
    """The documents of the splits of one name. Equal documents count as often as they are there."""

    split: str
    both: int
    only_a: int
    only_b: int
    other_mask: int  # of those in both: the tokens are equal, and what of them is trained is not
    first_only_a: tuple[int, ...]  # the numbers of the first few
    first_only_b: tuple[int, ...]
    first_other_mask: tuple[int, ...]  # their numbers in a
    order: OrderBreak | None  # None: what is in both comes in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiff:
    """All that differs between two stores."""

    a: str  # the folders
    b: str
    identical: bool  # every file that the manifests list, the manifests, and what is excluded
    facts: dict[str, tuple[str, ...]]  # section -> sentences, "before -> now"; none, no section
    documents: tuple[SplitDocuments, ...]  # by split
    moved: int  # documents that are in both stores, but in splits of other names
    trained_share: tuple[float, float] | None  # of all tokens; None: not both hold conversations
