"""Which documents two stores have in common, and whether they come in the same order.

Each document is hashed (128 bits of its tokens, 64 of its loss mask), so stores of other dtypes and
shards can be compared. Documents at the front of two splits that are in shards of equal hashes are
not read. Memory is one heap of records, and 16 bytes for each text that both stores hold unequally
often; the rest, at most 58 bytes a document, is in temporary files without a name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.records import BoolArray, IntArray, OffsetArray
from shardmill.store import Store
from shardmill.store.readers import TokenSpace, open_tokens

Hashes: TypeAlias = npt.NDArray[np.uint64]

HEAP_RECORDS = 2**20
_MOST_HEAPS = 256  # open files of a store, and a process may have a thousand
_SHOWN = 5  # numbers of documents
_LEAST, _CHUNK = 64, 2**18  # documents compared at a time
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 2**18
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_MASK = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPlace:
    """One document of a store."""

    split: str
    document: int  # its number in the split
    token: int  # where it starts in the split


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBreak:
    """The first documents, of those that both stores hold, that come in another order."""

    a: DocumentPlace
    b: DocumentPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDocuments:
    """The documents of the splits of one name. Equal documents count as often as they occur."""

    split: str
    both: int
    only_a: int = 0
    only_b: int = 0
    other_mask: int = 0  # of those in both: equal tokens, of which others are trained
    first_only_a: tuple[int, ...] = ()  # the numbers of the first few
    first_only_b: tuple[int, ...] = ()
    first_other_mask: tuple[int, ...] = ()  # their numbers in a
    order: OrderBreak | None = None  # None: what is in both comes in the same order


def compare_documents(a: Store, b: Store) -> tuple[tuple[SplitDocuments, ...], int]:
    """The documents of each split, and how many documents are in a split of another name.

    Reads what is not equal at the front of the splits, once.
    """
    names = list(dict.fromkeys([*a.splits, *b.splits]))
    masks = a.is_chat and b.is_chat
    skip = [
        common_prefix(a, b, name, masks=masks) if name in a.splits and name in b.splits else 0
        for name in names
    ]
    total = max(sum(map(store.num_documents, store.splits)) for store in (a, b))
    num_heaps = min(_MOST_HEAPS, -(-(total - sum(skip)) // HEAP_RECORDS) or 1)
    with ExitStack() as files:
        left, right = (_Side(store, names, skip) for store in (a, b))
        for side in (left, right):
            opened = (files.enter_context(tempfile.TemporaryFile()) for _ in range(num_heaps))
            side.read(list(opened), masks=masks)
        return _compare(left, right, num_heaps)


def _on_disk(dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
    """An array of zeros in a file, which goes with the array. It has one entry more: a file must
    not be empty."""
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a crash later
            os.posix_fallocate(file.fileno(), 0, (size + 1) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "w+", shape=size + 1)


class _Side:
    """One store: its documents after those that are skipped, numbered 0..n through all splits.

    Such a number is called a place below.
    """

    def __init__(self, store: Store, names: list[str], skip: list[int]) -> None:
        self.store, self.names, self.skip = store, names, skip
        there = [store.num_documents(name) if name in store.splits else 0 for name in names]
        self.edges: OffsetArray = np.cumsum([0, *np.subtract(there, skip)], dtype=np.int64)
        size = int(self.edges[-1])
        self.hashes: Hashes = _on_disk(np.uint64, size)  # the first hash of every document
        self.shared: BoolArray = _on_disk(np.bool_, size)  # it is in both
        self.masked: BoolArray = _on_disk(np.bool_, size)  # and other tokens of it are trained
        # Records (n, 4) in files: two hashes of a document, that of its mask, its place. Equal
        # documents are in the heap of one number, and one heap at a time fits into memory.
        self._heaps: Sequence[Any] = ()

    def read(self, heaps: Sequence[Any], *, masks: bool) -> None:
        """Hash the documents, and sort their records into `heaps`, which are open files."""
        self._heaps, place = heaps, 0
        for name, skip in zip(self.names, self.skip, strict=True):
            if name not in self.store.splits:
                continue
            for hashes in document_hashes(self.store, name, skip, masks=masks):
                stop = place + len(hashes)
                self.hashes[place:stop] = hashes[:, 0]
                records = np.column_stack((hashes, np.arange(place, stop, dtype=np.uint64)))
                number = hashes[:, 0] % np.uint64(len(heaps))
                order = np.argsort(number, kind="stable")
                edges = np.searchsorted(number[order], np.arange(len(heaps) + 1, dtype=np.uint64))
                for file, (low, high) in zip(heaps, pairwise(edges.tolist()), strict=True):
                    file.write(records[order[low:high]].data)
                place = stop

    def heap(self, at: int) -> Hashes:
        self._heaps[at].seek(0)
        return np.fromfile(self._heaps[at], np.uint64).reshape(-1, 4)

    def in_both(self, split: int) -> tuple[Hashes, OffsetArray]:
        """Hashes and places of the documents of a split that are in both, in order."""
        low, high = self.edges[split : split + 2].tolist()
        count = int(np.count_nonzero(self.shared[low:high]))
        hashes, places, done = _on_disk(np.uint64, count), _on_disk(np.int64, count), 0
        for start in range(low, high, _CHUNK):
            found = np.flatnonzero(self.shared[start : min(start + _CHUNK, high)]) + start
            part = slice(done, done + len(found))
            hashes[part], places[part], done = self.hashes[found], found, part.stop
        return hashes[:count], places[:count]

    def first(self, flags: BoolArray, split: int, *, wanted: bool) -> tuple[int, ...]:
        """Numbers of the first few documents of a split with this flag."""
        found: list[int] = []
        at, high = self.edges[split : split + 2].tolist()
        while at < high and len(found) < _SHOWN:
            at += int((np.argmax if wanted else np.argmin)(flags[at:high]))
            if flags[at] != wanted:
                break
            found.append(self._number(split, at))
            at += 1
        return tuple(found)

    def where(self, split: int, place: int) -> DocumentPlace:
        name, number = self.names[split], self._number(split, place)
        token = int(self.store.document_starts(name)[number])
        return DocumentPlace(split=name, document=number, token=token)

    def _number(self, split: int, place: int) -> int:
        return int(place - self.edges[split]) + self.skip[split]


def _compare(a: _Side, b: _Side, num_heaps: int) -> tuple[tuple[SplitDocuments, ...], int]:
    both = np.array(a.skip, np.int64)
    other_mask, anywhere = np.zeros(len(a.names), np.int64), sum(a.skip)
    surpluses = []
    for at in range(num_heaps):
        surplus, pairs, masked, pairs_anywhere = match(a, b, at)
        surpluses.append(surplus)
        both += pairs
        other_mask += masked
        anywhere += pairs_anywhere
    hashes, more, split = (np.concatenate(column) for column in zip(*surpluses, strict=True))
    left, right = (np.diff(side.edges) + np.array(side.skip) for side in (a, b))
    splits = []
    for at, name in enumerate(a.names):
        mine = np.flatnonzero(split == at)
        mine = mine[np.argsort(hashes[mine], kind="stable")]
        order = align(a, b, at, hashes[mine], more[mine])
        splits.append(
            SplitDocuments(
                split=name,
                both=int(both[at]),
                only_a=int(left[at] - both[at]),
                only_b=int(right[at] - both[at]),
                other_mask=int(other_mask[at]),
                first_only_a=a.first(a.shared, at, wanted=False),
                first_only_b=b.first(b.shared, at, wanted=False),
                first_other_mask=a.first(a.masked, at, wanted=True),
                order=order,
            )
        )
    return tuple(splits), anywhere - int(both.sum())


# --- what is equal at the front, without reading tokens


def common_prefix(a: Store, b: Store, split: str, *, masks: bool) -> int:
    """Documents 0..n of the split that are surely equal: shards of equal hashes, equal starts and
    masks. There may be more; this is what comes for free, for instance after files were added."""
    num_tokens = _equal_tokens(a, b, split)
    if not num_tokens:
        return 0
    starts = a.document_starts(split)
    equal = _first_difference(starts, b.document_starts(split))
    if masks:
        bits = [store.chat_arrays(split).mask_bits for store in (a, b)]
        num_tokens = min(num_tokens, 8 * _first_difference(bits[0], bits[1]))
    # the last of the equal starts may belong to documents that end at different tokens
    inside = int(np.searchsorted(starts[:equal], num_tokens, side="right"))
    return max(0, inside - 1)


def _equal_tokens(a: Store, b: Store, split: str) -> int:
    """Tokens of the shards at the front that have equal hashes."""
    if a.dtype != b.dtype:
        return 0
    total = 0
    for left, right in zip(*(s.manifest.splits[split].shards for s in (a, b)), strict=False):
        if (left.tokens, left.sha256) != (right.tokens, right.sha256):
            break
        total += left.tokens
    return total


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many entries are equal from the front."""
    shorter = min(len(a), len(b))
    for low in range(0, shorter, _CHUNK):
        part = slice(low, min(low + _CHUNK, shorter))
        differ = np.flatnonzero(a[part] != b[part])
        if len(differ):
            return low + int(differ[0])
    return shorter


# --- which documents are in both


def match(
    a: _Side, b: _Side, heap: int
) -> tuple[tuple[Hashes, OffsetArray, OffsetArray], OffsetArray, OffsetArray, int]:
    """Pair equal documents of a heap as often as both sides have them, within splits of one name.

    Marks those that both have. Returns of documents that both have unequally often the first hash,
    how many more a has (below 0: b has more) and the split; then the number of pairs in each split,
    those of unequal masks among them, and the number of pairs whatever their splits.
    """
    parts = a.heap(heap), b.heap(heap)
    records = np.concatenate(parts)
    left = np.repeat([True, False], [len(part) for part in parts])
    place = records[:, 3].astype(np.int64)
    split = np.where(left, *(np.searchsorted(s.edges, place, side="right") - 1 for s in (a, b)))
    columns = (records[:, 0], records[:, 1], split, records[:, 2])
    # groups of equal documents; of those in one split; of those with one mask
    document, inside, masked = (_numbered(columns[:width]) for width in (2, 3, 4))
    counts = _counts(inside, left)
    pairs, more = counts.min(axis=1), counts[:, 0] - counts[:, 1]
    first = np.unique(inside, return_index=True)[1]  # a record of each group
    with_mask = _counts(masked, left).min(axis=1)
    owner = inside[np.unique(masked, return_index=True)[1]]  # the group of each group with one mask
    other = pairs.copy()
    np.subtract.at(other, owner, with_mask)
    both, other_mask = np.zeros((2, len(a.names)), np.int64)
    np.add.at(both, split[first], pairs)
    np.add.at(other_mask, split[first], other)
    # rows of a without a partner of the same mask: of each group as many as pairs have other masks
    rows = np.flatnonzero(left & (_ranks(2 * masked + left, place) >= with_mask[masked]))
    rows = rows[_ranks(inside[rows], place[rows]) < other[inside[rows]]]
    a.masked[place[rows]] = True
    common = (pairs > 0)[inside]
    a.shared[place[common & left]] = True
    b.shared[place[common & ~left]] = True
    uneven = np.flatnonzero((pairs > 0) & (more != 0))
    surplus = records[first[uneven], 0], more[uneven], split[first[uneven]]
    return surplus, both, other_mask, int(_counts(document, left).min(axis=1).sum())


def _numbered(columns: tuple[Hashes | OffsetArray, ...]) -> OffsetArray:
    """A number for each row, from 0, equal for equal rows."""
    order = np.lexsort(columns)
    differs = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(differs)
    return numbers


def _counts(group: OffsetArray, left: BoolArray) -> OffsetArray:
    """(groups, 2) records of each group in a and in b."""
    num_groups = int(group.max(initial=-1)) + 1
    return np.bincount(2 * group + ~left, minlength=2 * num_groups).reshape(-1, 2)


def _ranks(keys: OffsetArray, place: OffsetArray) -> OffsetArray:
    """How many records of the same key come before each, by place."""
    order = np.lexsort((place, keys))
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered, side="left")
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys)) - first
    return ranks


# --- whether they come in the same order


def align(a: _Side, b: _Side, split: int, surplus: Hashes, more: OffsetArray) -> OrderBreak | None:
    """Where the order of the documents that both have first differs, or None.

    A document that one side has more often is passed over where the other side continues without
    it, so leaving out one of several equal documents is no other order. It is then marked as one
    that is not in both. `surplus` holds the hashes of such documents, sorted, and `more` how many
    more a has.
    """

    def passed(side: _Side, one: np.uint64, place: int) -> bool:
        """Whether this side still has more of this document; then this one is passed over."""
        sign = 1 if side is a else -1
        at = int(np.searchsorted(surplus, one))
        if at == len(surplus) or surplus[at] != one or sign * more[at] <= 0:
            return False
        more[at] -= sign
        side.shared[place] = False
        return True

    (left, left_places), (right, right_places) = a.in_both(split), b.in_both(split)
    found, window, i, j = None, _LEAST, 0, 0
    while i < len(left) and j < len(right) and found is None:
        size = min(len(left) - i, len(right) - j, window)
        parts = np.flatnonzero(left[i : i + size] != right[j : j + size])
        step = int(parts[0]) if len(parts) else size
        i, j = i + step, j + step
        if not len(parts):
            window = min(2 * window, _CHUNK)
            continue
        window = _LEAST
        if passed(a, left[i], left_places[i]):
            i += 1
        elif passed(b, right[j], right_places[j]):
            j += 1
        else:
            found = OrderBreak(a=a.where(split, left_places[i]), b=b.where(split, right_places[j]))
    # after the last common document the first surplus ones have no partner
    for side, hashes, places, rest in ((a, left, left_places, i), (b, right, right_places, j)):
        for low in range(rest, len(hashes), _CHUNK):
            uneven = np.isin(hashes[low : low + _CHUNK], surplus[more != 0])
            for at in (np.flatnonzero(uneven) + low).tolist():
                passed(side, hashes[at], places[at])
    return found


# --- hashes of documents


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
                    f"{store.folder}: split {split!r}: its index decreases after document "
                    f"{first:,}; `shardmill verify` lists all damage"
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
