"""Which documents two stores have in common, and whether they come in the same order.

Each document is hashed (128 bits of its tokens, 64 of its loss mask), so stores of other dtypes and
shards can be compared. Documents at the front of two splits that are in shards of equal hashes are
not read. Memory is a bit for each document, one heap of records, and 16 bytes for each text that
both stores hold unequally often; the rest, 40 bytes a document, is in a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.records import BoolArray, IntArray, OffsetArray
from shardmill.store import Store
from shardmill.store.readers import TokenSpace, open_tokens

Hashes: TypeAlias = npt.NDArray[np.uint64]
Chunks: TypeAlias = Iterator[tuple[Hashes, OffsetArray]]
_LeaveOut: TypeAlias = tuple[Callable[[int], None], Callable[[int], None]]

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
    with tempfile.TemporaryDirectory(prefix="shardmill-diff-") as temporary, ExitStack() as stack:
        total = max(sum(map(store.num_documents, store.splits)) for store in (a, b))
        num_heaps = min(_MOST_HEAPS, -(-(total - sum(skip)) // HEAP_RECORDS) or 1)
        sides = []
        for number, store in enumerate((a, b)):
            folder = Path(temporary, str(number))
            folder.mkdir()
            side = stack.enter_context(closing(_Side(store, names, skip, folder, num_heaps)))
            side.read(masks=masks)
            sides.append(side)
        return _compare(sides[0], sides[1], num_heaps)


class _Side:
    """One store: its documents after those that are skipped, numbered 0..n through all splits.

    Such a number is called a place below.
    """

    def __init__(
        self, store: Store, names: list[str], skip: list[int], folder: Path, num_heaps: int
    ) -> None:
        self.store, self.names, self.skip = store, names, skip
        there = [store.num_documents(name) if name in store.splits else 0 for name in names]
        left = np.array(there, np.int64) - np.array(skip, np.int64)
        self.edges: OffsetArray = np.concatenate(([0], np.cumsum(left))).astype(np.int64)
        self.heaps = Heaps(folder, num_heaps)
        self._shared = np.zeros(-(-int(self.edges[-1]) // 8), np.uint8)  # a bit for each place
        self._sequence = (folder / "sequence").open("w+b")  # the first hash of every document

    def read(self, *, masks: bool) -> None:
        place = 0
        for name, skip in zip(self.names, self.skip, strict=True):
            if name not in self.store.splits:
                continue
            for hashes in document_hashes(self.store, name, skip, masks=masks):
                places = np.arange(place, place + len(hashes), dtype=np.uint64)
                self.heaps.add(np.column_stack((hashes, places)))
                self._sequence.write(np.ascontiguousarray(hashes[:, 0]).data)
                place += len(hashes)
        self._sequence.flush()

    def share(self, places: OffsetArray) -> None:
        """Note places that are in both."""
        np.bitwise_or.at(self._shared, places >> 3, (1 << (places & 7)).astype(np.uint8))

    def leave_out(self, place: int) -> None:
        """A place that is not in both after all."""
        self._shared[place >> 3] &= np.uint8(~(1 << (place & 7)) & 0xFF)

    def only_here(self, split: int) -> tuple[int, ...]:
        """Numbers of the first few documents of a split that are not in both."""
        found: list[int] = []
        for low, shared in self._chunks(split):
            found += (np.flatnonzero(~shared)[:_SHOWN] + low).tolist()
            if len(found) >= _SHOWN:
                break
        return tuple(self._number(split, place) for place in found[:_SHOWN])

    def in_both(self, split: int) -> Chunks:
        """(hashes, places) of the documents of a split that are in both, in order."""
        for low, shared in self._chunks(split):
            self._sequence.seek(8 * low)
            hashes = np.fromfile(self._sequence, np.uint64, len(shared))
            yield hashes[shared], np.flatnonzero(shared) + low

    def where(self, split: int, place: int) -> DocumentPlace:
        name, number = self.names[split], self._number(split, place)
        token = int(self.store.document_starts(name)[number])
        return DocumentPlace(split=name, document=number, token=token)

    def numbers(self, places: OffsetArray, split: int) -> tuple[int, ...]:
        """Those of a split among some places, as numbers of documents."""
        low, high = self.edges[split : split + 2]
        mine = np.sort(places[(places >= low) & (places < high)])
        return tuple(self._number(split, place) for place in mine[:_SHOWN].tolist())

    def _number(self, split: int, place: int) -> int:
        return int(place - self.edges[split]) + self.skip[split]

    def _chunks(self, split: int) -> Iterator[tuple[int, BoolArray]]:
        """(first place, which are in both) through a split."""
        low, high = self.edges[split : split + 2].tolist()
        for start in range(low, high, _CHUNK):
            stop = min(start + _CHUNK, high)
            bits = np.unpackbits(self._shared[start // 8 : -(-stop // 8)], bitorder="little")
            yield start, bits[start % 8 :][: stop - start].astype(np.bool_)

    def close(self) -> None:
        self.heaps.close()
        self._sequence.close()


def _compare(a: _Side, b: _Side, num_heaps: int) -> tuple[tuple[SplitDocuments, ...], int]:
    both = np.array(a.skip, np.int64)
    other_mask, anywhere = np.zeros(len(a.names), np.int64), sum(a.skip)
    masked: OffsetArray = np.empty(0, np.int64)
    surpluses: list[tuple[Hashes, OffsetArray, OffsetArray]] = []
    for at in range(num_heaps):
        found = match(a.heaps.heap(at), b.heaps.heap(at), (a.edges, b.edges))
        a.share(found.shared[0])
        b.share(found.shared[1])
        both += found.both
        other_mask += found.other_mask
        anywhere += found.both_anywhere
        surpluses.append(found.surplus)
        masked = _first_few(np.append(masked, found.masked), a.edges)
    hashes, more, split = (np.concatenate(column) for column in zip(*surpluses, strict=True))
    left, right = (np.diff(side.edges) + np.array(side.skip) for side in (a, b))
    splits = []
    for at, name in enumerate(a.names):
        mine = np.flatnonzero(split == at)
        mine = mine[np.argsort(hashes[mine], kind="stable")]
        streams, leave_out = (a.in_both(at), b.in_both(at)), (a.leave_out, b.leave_out)
        broken = align(streams, (hashes[mine], more[mine]), leave_out)
        order = broken and OrderBreak(a=a.where(at, broken[0]), b=b.where(at, broken[1]))
        splits.append(
            SplitDocuments(
                split=name,
                both=int(both[at]),
                only_a=int(left[at] - both[at]),
                only_b=int(right[at] - both[at]),
                other_mask=int(other_mask[at]),
                first_only_a=a.only_here(at),
                first_only_b=b.only_here(at),
                first_other_mask=a.numbers(masked, at),
                order=order,
            )
        )
    return tuple(splits), anywhere - int(both.sum())


def _first_few(places: OffsetArray, edges: OffsetArray) -> OffsetArray:
    """The first few places of every split."""
    ordered = np.sort(places)
    starts = np.searchsorted(ordered, edges[:-1])
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff(starts, append=len(ordered)))
    few: OffsetArray = ordered[rank < _SHOWN]
    return few


# --- what is equal at the front, without reading tokens


def common_prefix(a: Store, b: Store, split: str, *, masks: bool) -> int:
    """Documents 0..n of the split that are surely equal: shards of equal hashes, equal starts and
    masks. There may be more; this is what comes for free, for instance after files were added."""
    num_tokens = _equal_tokens(a, b, split)
    if not num_tokens:
        return 0
    left, right = (store.document_starts(split) for store in (a, b))
    equal = _first_difference(left, right)
    if masks:
        bits = [store.chat_arrays(split).mask_bits for store in (a, b)]
        num_tokens = min(num_tokens, 8 * _first_difference(bits[0], bits[1], whole=True))
    ends = [
        int(starts[equal]) if equal < len(starts) else store.num_tokens(split)
        for store, starts in ((a, left), (b, right))
    ]
    if ends[0] == ends[1] <= num_tokens:
        return equal
    # the last of the equal starts may belong to documents that end at different tokens
    inside = int(np.searchsorted(left[:equal], num_tokens, side="right"))
    return max(0, min(inside, equal) - 1)


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


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any], *, whole: bool = False) -> int:
    """How many entries are equal from the front. `whole`: of arrays that are entirely equal, one
    more than there are, since nothing follows either of them."""
    shorter = min(len(a), len(b))
    for low in range(0, shorter, _CHUNK):
        part = slice(low, min(low + _CHUNK, shorter))
        differ = np.flatnonzero(a[part] != b[part])
        if len(differ):
            return low + int(differ[0])
    return shorter + int(whole and len(a) == len(b))


# --- which documents are in both


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """What was found in one pair of heaps."""

    shared: tuple[OffsetArray, OffsetArray]  # places of each side whose document both have
    surplus: tuple[Hashes, OffsetArray, OffsetArray]  # of documents in both: the first hash, how
    # many more a has (below 0: b has more), the split
    both: OffsetArray  # (splits,) pairs
    both_anywhere: int  # pairs, whatever their splits
    other_mask: OffsetArray  # (splits,) pairs of equal tokens and unequal masks
    masked: OffsetArray  # places in a of such


def match(a: Hashes, b: Hashes, edges: tuple[OffsetArray, OffsetArray]) -> Matched:
    """Pair equal documents as often as both sides have them, within splits of one name.

    `edges` of each side: the place of the first document of every split, and one after all.
    """
    records = np.concatenate((a, b))
    left = np.repeat([True, False], [len(a), len(b)])
    place = records[:, 3].astype(np.int64)
    split = np.concatenate(
        [
            np.searchsorted(ends, places, side="right") - 1
            for ends, places in zip(edges, (place[left], place[~left]), strict=True)
        ]
    )
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
    both, other_mask = np.zeros((2, len(edges[0]) - 1), np.int64)
    np.add.at(both, split[first], pairs)
    np.add.at(other_mask, split[first], other)
    # rows of a without a partner of the same mask: of each group as many as pairs have other masks
    rows = np.flatnonzero(left & (_ranks(2 * masked + left, place) >= with_mask[masked]))
    rows = rows[_ranks(inside[rows], place[rows]) < other[inside[rows]]]
    common = (pairs > 0)[inside]
    uneven = np.flatnonzero((pairs > 0) & (more != 0))
    return Matched(
        shared=(place[common & left], place[common & ~left]),
        surplus=(records[first[uneven], 0], more[uneven], split[first[uneven]]),
        both=both,
        both_anywhere=int(_counts(document, left).min(axis=1).sum()),
        other_mask=other_mask,
        masked=place[rows],
    )


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


def align(
    streams: tuple[Chunks, Chunks], surplus: tuple[Hashes, OffsetArray], leave_out: _LeaveOut
) -> tuple[int, int] | None:
    """The places where the order of the documents that both have first differs, or None.

    A document that one side has more often is passed over where the other side continues without
    it, so leaving out one of several equal documents is no other order. `surplus` holds the hashes
    of such documents, sorted, and how many more a has; `leave_out` is called with each place that
    is passed over.
    """
    a, b = _Stream(streams[0]), _Stream(streams[1])
    left = _Left(*surplus)
    found, window = None, _LEAST
    while a.fill() and b.fill():
        size = min(len(a.hashes), len(b.hashes), window)
        parts = np.flatnonzero(a.hashes[:size] != b.hashes[:size])
        step = int(parts[0]) if len(parts) else size
        a.skip(step)
        b.skip(step)
        if not len(parts):
            window = min(2 * window, _CHUNK)
            continue
        window = _LEAST
        if left.take(a.hashes[0], 1):
            leave_out[0](a.skip(1))
        elif left.take(b.hashes[0], -1):
            leave_out[1](b.skip(1))
        else:
            found = int(a.places[0]), int(b.places[0])
            break
    for stream, sign, leave in ((a, 1, leave_out[0]), (b, -1, leave_out[1])):
        while (
            stream.fill()
        ):  # after the last common document the first surplus ones have no partner
            for at in left.among(stream.hashes).tolist():
                if left.take(stream.hashes[at], sign):
                    leave(int(stream.places[at]))
            stream.skip(len(stream.hashes))
    return found


class _Stream:
    """Chunks as one run with a front."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.places: OffsetArray = np.empty(0, np.int64)

    def fill(self) -> bool:
        """Whether there is anything more; then the front is here."""
        while not len(self.hashes):
            found = next(self._chunks, None)
            if found is None:
                return False
            self.hashes, self.places = found
        return True

    def skip(self, count: int) -> int:
        """The place at the front, which is passed with `count - 1` others."""
        place = int(self.places[0])
        self.hashes, self.places = self.hashes[count:], self.places[count:]
        return place


class _Left:
    """How many documents more one side still has."""

    def __init__(self, hashes: Hashes, more: OffsetArray) -> None:
        self._hashes, self._more = hashes, more.copy()

    def take(self, one: np.uint64, sign: int) -> bool:
        """Whether the side of this sign has one more of this document; then it is passed over."""
        at = int(np.searchsorted(self._hashes, one))
        known = at < len(self._hashes) and self._hashes[at] == one
        if not known or sign * self._more[at] <= 0:
            return False
        self._more[at] -= sign
        return True

    def among(self, hashes: Hashes) -> OffsetArray:
        """Which of these may be taken."""
        return np.flatnonzero(np.isin(hashes, self._hashes[self._more != 0]))


# --- hashes of documents, and heaps of them


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


class Heaps:
    """Records of one store, (n, 4): two hashes of a document, that of its mask, its place.

    They are sorted into heaps by their hash: equal documents are in the heap of one number, and one
    heap at a time fits into memory.
    """

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
        if not self._files:
            return np.concatenate([np.empty((0, 4), np.uint64), *self._parts])
        self._files[at].seek(0)
        return np.fromfile(self._files[at], np.uint64).reshape(-1, 4)

    def close(self) -> None:
        for file in self._files:
            file.close()
