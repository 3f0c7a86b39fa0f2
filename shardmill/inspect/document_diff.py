"""Which documents two stores have in common, and in which order.

In: two stores.  Out: `SplitDocuments` for each split, and how many documents changed their split.
Promise: documents are compared by the hashes of `hashes.py`; memory is a bit for each document, a
heap (spill.py), and 16 bytes for each text that both hold unequally often; the rest, 40 bytes a
document, lies in a temporary folder; what is equal at the front of two splits is not read.
Not here: facts of the manifests (facts.py).

Do two sequences of documents come in the same order?

In: the documents of a split that both stores have, as streams of (hashes, places), and which of
them one side has more often.  Out: the places where the order first differs, or None.
Promise: a document that one side has more often is passed over where the other side goes on
without it, so that leaving one of several equal documents out is no other order; each that is
passed over is told. Memory is that of a chunk of the streams.
Not here: which documents both have (match.py).

How many documents two splits begin with in common, told without reading tokens.

In: two stores, a split of both.  Out: a number of documents.
Promise: those documents have equal tokens (their shards have equal hashes), borders and masks.
There may be more: this is what comes for free, for instance after files were added to a store.
Not here: documents that are equal elsewhere (documents.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.inspect.document_match import (
    DocumentPlace,
    Hashes,
    Heaps,
    Matched,
    OrderBreak,
    SplitDocuments,
    Surplus,
    document_hashes,
    match,
    num_heaps,
)
from shardmill.records import BoolArray, OffsetArray
from shardmill.store import Store

Chunks = Iterator[tuple[Hashes, OffsetArray]]
LeaveOut = Callable[[int], None]
_LEAST, _MOST = 64, 2**18  # documents compared at a time


def align(
    streams: tuple[Chunks, Chunks], surplus: Surplus, leave_out: tuple[LeaveOut, LeaveOut]
) -> tuple[int, int] | None:
    """`leave_out` is called with the places that have no partner."""
    a, b = _Stream(streams[0]), _Stream(streams[1])
    left = _Left(surplus)
    found, window = None, _LEAST
    while a.fill() and b.fill():
        size = min(len(a.hashes), len(b.hashes), window)
        parts = np.flatnonzero(a.hashes[:size] != b.hashes[:size])
        step = int(parts[0]) if len(parts) else size
        a.skip(step)
        b.skip(step)
        if not len(parts):
            window = min(2 * window, _MOST)
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
        _pass_rest(stream, left, sign, leave)
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

    def __init__(self, surplus: Surplus) -> None:
        self._hashes, self._more = surplus.hashes, surplus.more.copy()

    def take(self, one: np.uint64, sign: int) -> bool:
        """Whether the side of this sign has one more of this document; it is passed over then."""
        at = int(np.searchsorted(self._hashes, one))
        known = at < len(self._hashes) and self._hashes[at] == one
        if not known or sign * self._more[at] <= 0:
            return False
        self._more[at] -= sign
        return True

    def among(self, hashes: Hashes) -> OffsetArray:
        """Which of these may be taken."""
        return np.flatnonzero(np.isin(hashes, self._hashes[self._more != 0]))


def _pass_rest(stream: _Stream, left: _Left, sign: int, leave: LeaveOut) -> None:
    """Behind the last common place: the first ones that are too many have no partner."""
    while stream.fill():
        for at in left.among(stream.hashes).tolist():
            if left.take(stream.hashes[at], sign):
                leave(int(stream.places[at]))
        stream.skip(len(stream.hashes))


_CHUNK_prefix = 2**20


def common_prefix(a: Store, b: Store, split: str, *, masks: bool) -> int:
    """Documents 0..n of the split that are surely equal."""
    num_tokens = _equal_tokens(a, b, split)
    if not num_tokens:
        return 0
    left, right = (store.document_starts(split) for store in (a, b))
    equal = _first_difference(left, right)
    if masks:
        bits = [store.chat_arrays(split).mask_bits for store in (a, b)]
        num_tokens = min(num_tokens, 8 * _first_difference(bits[0], bits[1], whole=True))
    ends = [_end(left, equal, a.num_tokens(split)), _end(right, equal, b.num_tokens(split))]
    if ends[0] == ends[1] <= num_tokens:
        return equal
    # the last of the equal starts may belong to documents that end at different places
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


def _end(starts: OffsetArray, documents: int, num_tokens: int) -> int:
    """Where the last of the first so many documents ends."""
    return int(starts[documents]) if documents < len(starts) else num_tokens


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any], *, whole: bool = False) -> int:
    """How many entries are equal from the front. `whole`: of arrays that are equal as a whole,
    one more than there are, since what lies behind both is nothing."""
    shorter = min(len(a), len(b))
    for low in range(0, shorter, _CHUNK_prefix):
        high = min(low + _CHUNK_prefix, shorter)
        differ = np.flatnonzero(a[low:high] != b[low:high])
        if len(differ):
            return low + int(differ[0])
    return shorter + int(whole and len(a) == len(b))


_SHOWN = 5  # numbers of documents
_CHUNK = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentComparison:
    """The documents of two stores."""

    splits: tuple[SplitDocuments, ...]
    moved: int  # to a split of another name


def compare_documents(a: Store, b: Store) -> DocumentComparison:
    """Reads what is not equal at the front of the splits, once."""
    names = list(dict.fromkeys([*a.splits, *b.splits]))
    masks = a.is_chat and b.is_chat
    skip = [
        common_prefix(a, b, name, masks=masks) if name in a.splits and name in b.splits else 0
        for name in names
    ]
    with tempfile.TemporaryDirectory(prefix="shardmill-diff-") as place, ExitStack() as stack:
        total = max(sum(map(store.num_documents, store.splits)) for store in (a, b))
        count = num_heaps(total - sum(skip))
        sides = []
        for number, store in enumerate((a, b)):
            folder = Path(place, str(number))
            folder.mkdir()
            side = _Side(store, names, skip, folder, count)
            stack.callback(side.close)
            side.read(masks=masks)
            sides.append(side)
        return _compare(sides[0], sides[1], count)


class _Side:
    """One store: its documents behind those that are skipped, as places 0..n through all splits."""

    def __init__(
        self, store: Store, names: list[str], skip: list[int], folder: Path, count: int
    ) -> None:
        self.store, self.names, self.skip = store, names, skip
        there = [store.num_documents(name) if name in store.splits else 0 for name in names]
        left = np.array(there, np.int64) - np.array(skip, np.int64)
        self.edges: OffsetArray = np.concatenate(([0], np.cumsum(left))).astype(np.int64)
        self.heaps = Heaps(folder, count)
        self._shared = np.zeros(-(-int(self.edges[-1]) // 8), np.uint8)  # a bit for each place
        self._sequence = (folder / "sequence").open("w+b")  # the first hash of every document

    def read(self, *, masks: bool) -> None:
        place = 0
        for name, skip in zip(self.names, self.skip, strict=True):
            if name not in self.store.splits:
                continue
            for hashes in document_hashes(self.store, name, skip, masks=masks):
                numbers = np.arange(place, place + len(hashes), dtype=np.uint64)
                full = np.zeros((len(hashes), 4), np.uint64)
                full[:, : hashes.shape[1]], full[:, 3] = hashes, numbers
                self.heaps.add(full)
                self._sequence.write(np.ascontiguousarray(hashes[:, 0]).data)
                place += len(hashes)
        self._sequence.flush()

    def share(self, places: OffsetArray) -> None:
        """Note places that are in both."""
        np.bitwise_or.at(self._shared, places >> 3, (1 << (places & 7)).astype(np.uint8))

    def leave_out(self, place: int) -> None:
        """A place that is not in both after all."""
        self._shared[place >> 3] &= np.uint8(~(1 << (place & 7)) & 0xFF)

    def only_here(self, split: int) -> list[int]:
        """Numbers of the first few documents of a split that are not in both."""
        found: list[int] = []
        for low, shared in self._chunks(split):
            found += (np.flatnonzero(~shared)[:_SHOWN] + low).tolist()
            if len(found) >= _SHOWN:
                break
        return [self._number(split, place) for place in found[:_SHOWN]]

    def in_both(self, split: int) -> Iterator[tuple[Hashes, OffsetArray]]:
        """(hashes, places) of the documents of a split that are in both, in order."""
        for low, shared in self._chunks(split):
            places = np.flatnonzero(shared) + low
            self._sequence.seek(8 * low)
            hashes = np.fromfile(self._sequence, np.uint64, len(shared))
            yield hashes[shared], places

    def where(self, split: int, place: int) -> DocumentPlace:
        name, number = self.names[split], self._number(split, place)
        token = int(self.store.document_starts(name)[number])
        return DocumentPlace(split=name, document=number, token=token)

    def _number(self, split: int, place: int) -> int:
        return int(place - self.edges[split]) + self.skip[split]

    def numbers(self, places: OffsetArray, split: int) -> list[int]:
        """Those of a split among some places, as numbers of documents."""
        low, high = self.edges[split : split + 2]
        mine = np.sort(places[(places >= low) & (places < high)])
        return [self._number(split, place) for place in mine[:_SHOWN].tolist()]

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


def _compare(a: _Side, b: _Side, count: int) -> DocumentComparison:
    both = np.array(a.skip, np.int64)
    other_mask, anywhere = np.zeros(len(a.names), np.int64), sum(a.skip)
    masked: list[OffsetArray] = []
    surpluses: list[tuple[Surplus, ...]] = []
    for at in range(count):
        found: Matched = match(a.heaps.heap(at), b.heaps.heap(at), (a.edges, b.edges))
        a.share(found.shared[0])
        b.share(found.shared[1])
        both += found.both
        other_mask += found.other_mask
        anywhere += found.both_anywhere
        surpluses.append(found.surplus)
        masked = [_first_few(np.concatenate([*masked, found.masked]), a.edges)]
    left, right = (np.diff(side.edges) + np.array(side.skip) for side in (a, b))
    breaks = [
        _order(a, b, at, Surplus.joined(parts))
        for at, parts in enumerate(zip(*surpluses, strict=True))
    ]
    splits = tuple(
        SplitDocuments(
            split=name,
            both=int(both[at]),
            only_a=int(left[at] - both[at]),
            only_b=int(right[at] - both[at]),
            other_mask=int(other_mask[at]),
            first_only_a=tuple(a.only_here(at)),
            first_only_b=tuple(b.only_here(at)),
            first_other_mask=tuple(a.numbers(masked[0], at)),
            order=breaks[at],
        )
        for at, name in enumerate(a.names)
    )
    return DocumentComparison(splits=splits, moved=anywhere - int(both.sum()))


def _first_few(places: OffsetArray, edges: OffsetArray) -> OffsetArray:
    """The first few places of every split."""
    ordered = np.sort(places)
    begins = np.searchsorted(ordered, edges[:-1])
    rank = np.arange(len(ordered)) - np.repeat(begins, np.diff(begins, append=len(ordered)))
    few: OffsetArray = ordered[rank < _SHOWN]
    return few


def _order(a: _Side, b: _Side, split: int, surplus: Surplus) -> OrderBreak | None:
    found = align((a.in_both(split), b.in_both(split)), surplus, (a.leave_out, b.leave_out))
    if found is None:
        return None
    return OrderBreak(a=a.where(split, found[0]), b=b.where(split, found[1]))
