"""Which documents two stores have in common, and in which order.

In: two stores.  Out: `SplitDocuments` for each split, and how many documents changed their split.
Promise: documents are compared by the hashes of `hashes.py`; memory is a bit for each document, a
heap (spill.py), and 16 bytes for each text that both hold unequally often; the rest, 40 bytes a
document, lies in a temporary folder; what is equal at the front of two splits is not read.
Not here: facts of the manifests (facts.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.compare.hashes import Hashes, document_hashes
from shardmill.compare.match import Matched, Surplus, match
from shardmill.compare.order import align
from shardmill.compare.prefix import common_prefix
from shardmill.compare.records import DocumentPlace, OrderBreak, SplitDocuments
from shardmill.compare.spill import Heaps, num_heaps
from shardmill.records import BoolArray, OffsetArray
from shardmill.shards import Store

_SHOWN = 5  # numbers of documents
_CHUNK = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of two stores."""

    splits: tuple[SplitDocuments, ...]
    moved: int  # to a split of another name


def compare_documents(a: Store, b: Store) -> Documents:
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


def _compare(a: _Side, b: _Side, count: int) -> Documents:
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
    return Documents(splits=splits, moved=anywhere - int(both.sum()))


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
