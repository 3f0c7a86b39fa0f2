"""The row of input that a document of a store came from.

In: a store, the number of a document, the sources of the build.  Out: its text and where that was.
Promise: documents are counted as the build counted them; with the store's table of origins one
grain of input is read, without it all that lies before, and the answer is the same. It is proved by
the ids; where two orders of the splits could both be true, that is said.
Not here: conversations, the place of a token in the text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

import numpy as np

from shardmill.blame.proof import Proof
from shardmill.blame.records import FoundBy, FoundText
from shardmill.build.grains import grains_of
from shardmill.build.origins import mark_of
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source, continues
from shardmill.records import Cursor
from shardmill.shards import Origins, read_origins
from shardmill.shards.origins import COLUMNS, FEED, GRAIN, MARK, ROWS
from shardmill.sources import RowPlace, read_row
from shardmill.sources.filesource import FileSource

log = logging.getLogger(__name__)

_MOST_ORDERS = 4
"""Splits whose orders are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Some input, and which of its documents is meant."""

    source: Source
    index: int  # among the documents that it gave
    feed: int
    rows_before: int | None
    found_by: FoundBy
    cut: bool  # a token limit may have cut the document


@dataclass(frozen=True, slots=True)
class _Picked:
    """One text, and how to find it again."""

    text: str
    cursor: Cursor | None  # of the batch before it
    number: int  # behind that
    given: int  # texts of the source before it


class Documents:
    """The documents of a store and the sources that they came from."""

    def __init__(
        self, proof: Proof, sources: Sequence[Source], fill: Sequence[str] | None = None
    ) -> None:
        """`fill` is the order in which the build filled the splits, needed only where neither a
        table of origins nor the texts tell it."""
        self._proof, self._sources, self._fill = proof, sources, fill
        store = proof.store
        self._origins = read_origins(store.folder, store.manifest)
        if self._origins is None:
            log.warning("%s: has no table of origins: the input is counted", store.folder)
        self._grains: dict[int, Sequence[Source]] = {}

    def find(self, split: str, document: int) -> FoundText:
        """The text of a document."""
        proof = self._proof
        if self._origins is not None:
            region = self._by_table(self._origins, split, document)
        else:
            region = _by_counting(proof, split, document, self._sources, self._fill)
        (picked,) = _pick(region.source, [region.index], proof).values()
        if not proof.holds(split, document, picked.text, cut=region.cut):
            raise SourceError(
                f"{proof.store.folder}: document {document:,} of split {split!r} holds other "
                f"tokens than source {region.source.name!r} gives now at its place: the input "
                "changed where its fingerprint does not look, or the library of the tokenizer did"
            )
        place = _row(region, picked)
        return FoundText(text=picked.text, place=place, feed=region.feed, found_by=region.found_by)

    def _by_table(self, origins: Origins, split: str, document: int) -> _Region:
        """The grain of a document; the whole feed when the input is cut otherwise now."""
        table, entry = origins.table, int(origins.first(split).searchsorted(document, "right")) - 1
        feed, number, mark, rows = (int(table[entry, at]) for at in (FEED, GRAIN, MARK, ROWS))
        ends = [self._proof.store.num_documents(one) for one in origins.splits]
        edges = np.vstack((table[:, len(COLUMNS) :], ends))
        mine = np.flatnonzero(table[:, FEED] == feed)
        grain = self._grain(feed, number, mark)
        start, stop = (entry, entry + 1) if grain else (int(mine[0]), int(mine[-1]) + 1)
        counts = dict(zip(origins.splits, (edges[stop] - edges[start]).tolist(), strict=True))
        firsts = dict(zip(origins.splits, edges[start].tolist(), strict=True))
        order, column = origins.fill[feed], origins.splits.index(split)
        before = sum(counts[one] for one in order[: order.index(split)])
        return _Region(
            source=grain or self._sources[feed],
            index=before + document - firsts[split],
            feed=feed,
            rows_before=rows if grain and _counts_lines(grain) else None,
            found_by="origins" if grain else "counting",
            cut=document == int(edges[mine[-1] + 1, column]) - 1,
        )

    def _grain(self, feed: int, number: int, mark: int) -> Source | None:
        """The grain that a table means; None when the input is cut otherwise now."""
        if feed not in self._grains:
            self._grains[feed] = grains_of(self._sources[feed])
        grains = self._grains[feed]
        if number < len(grains) and mark_of(grains[number]) == mark:
            return grains[number]
        log.warning("%s: is cut otherwise now: it is counted", self._sources[feed].name)
        return None


def _counts_lines(grain: Source) -> bool:
    """Whether a build counts the lines that lie before such a part of a file."""
    return (
        continues(grain) and isinstance(grain, FileSource) and grain.manner.get("kind") == "jsonl"
    )


def _by_counting(
    proof: Proof, split: str, document: int, sources: Sequence[Source], fill: Sequence[str] | None
) -> _Region:
    """The number of a document among all of the one source, when no table tells."""
    store = proof.store
    if len(sources) > 1:
        raise OptionError(
            f"{store.folder}: was built from {len(sources)} sources and has no table of origins, "
            "so nobody knows how many documents each of them gave; build it again with this "
            "version"
        )
    counts = {one: store.num_documents(one) for one in store.splits if store.num_documents(one)}
    found = {order: _index(counts, order, split, document) for order in _orders(counts, fill)}
    if len(set(found.values())) > 1:
        found = _proved(proof, counts, found, sources[0], (split, document))
    if len(set(found.values())) > 1:
        orders = " or ".join(",".join(order) for order in found)
        raise OptionError(
            f"{store.folder}: equal texts, so that its splits may have been filled in the order "
            f"{orders}: say which with --fill (fill=)"
        )
    return _Region(
        source=sources[0],
        index=next(iter(found.values())),
        feed=0,
        rows_before=None,
        found_by="counting",
        cut=document == counts[split] - 1,
    )


def _orders(counts: dict[str, int], fill: Sequence[str] | None) -> Iterator[tuple[str, ...]]:
    """The orders in which splits with documents may have been filled."""
    if fill is not None:
        order = tuple(one for one in fill if one in counts)
        if set(order) != set(counts) or len(order) != len(counts):
            raise OptionError(f"fill={list(fill)}: wanted each of {sorted(counts)} once")
        yield order
    elif len(counts) > _MOST_ORDERS:
        raise OptionError(f"{len(counts)} splits: say their order with --fill (fill=)")
    else:
        yield from permutations(sorted(counts))


def _index(counts: dict[str, int], order: Sequence[str], split: str, document: int) -> int:
    before = accumulate((counts[one] for one in order), initial=0)
    return dict(zip(order, before, strict=False))[split] + document


def _proved(
    proof: Proof,
    counts: dict[str, int],
    found: dict[tuple[str, ...], int],
    source: Source,
    asked: tuple[str, int],
) -> dict[tuple[str, ...], int]:
    """The orders in which the first document of each split, and the one asked for, are the right
    texts; any one when none is, so that the error is that of the text."""
    probes = {*((one, 0) for one in counts), asked}
    places = {(order, probe): _index(counts, order, *probe) for order in found for probe in probes}
    picked = _pick(source, sorted({*places.values()}), proof)

    def is_right(order: tuple[str, ...], split: str, number: int) -> bool:
        text, cut = picked[places[order, (split, number)]].text, number == counts[split] - 1
        return proof.holds(split, number, text, cut=cut)

    right = [order for order in found if all(is_right(order, *probe) for probe in probes)]
    return {order: found[order] for order in right or list(found)[:1]}


def _pick(source: Source, indexes: Sequence[int], proof: Proof) -> dict[int, _Picked]:
    """The texts of the documents with these numbers, which rise."""
    wanted, picked = list(indexes), dict[int, _Picked]()
    seen = given = 0
    cursor: Cursor | None = None
    for batch in source.batches():
        numbers = np.flatnonzero(proof.filled(batch.texts))
        while wanted and wanted[0] < seen + len(numbers):
            number = int(numbers[wanted[0] - seen])
            text = str(batch.texts[number].as_py())
            picked[wanted.pop(0)] = _Picked(text, cursor, number, given + number)
        if not wanted:
            return picked
        seen, given, cursor = seen + len(numbers), given + len(batch.texts), batch.cursor
    raise SourceError(
        f"source {source.name!r} gives {seen:,} documents, but the store was built from more: the "
        "input is not the one of the build"
    )


def _row(region: _Region, picked: _Picked) -> RowPlace:
    found = read_row(region.source, picked.cursor, picked.number, rows_before=region.rows_before)
    if found is None:
        return RowPlace(id=f"{region.source.name}: document {picked.given}", row=picked.given)
    if found[0] != picked.text:
        raise SourceError(f"source {region.source.name!r} changed while it was read: try again")
    return found[1]
