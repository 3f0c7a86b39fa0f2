"""Where every shard lies in one address range.

In: tokens, bytes a token and header bytes of each shard.  Out: a `Layout`, numbers only.
Promise: shards begin on pages and never overlap. Shards of one dtype that fill whole pages lie
behind one another without a gap and form one segment, inside which a window may cross shards
as if there were no edge.
Not here: files, memory, reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.records import OffsetArray


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Token positions are those of the whole space; items count from the start of the range."""

    edges: OffsetArray  # (shards + 1,) shard k holds the tokens edges[k]..edges[k + 1]
    addresses: OffsetArray  # (shards,) where its map begins in the range, in bytes, on a page
    leads: OffsetArray  # (shards,) bytes from there to its first token: the end of a header
    num_bytes: int  # of the whole range, whole pages
    segment_edges: OffsetArray  # (segments + 1,) the same for segments
    segment_shifts: OffsetArray  # (segments,) token position + shift = item in the range
    segment_widths: OffsetArray  # (segments,) bytes of an item


def plan_layout(
    counts: OffsetArray,
    widths: OffsetArray,
    *,
    page: int,
    huge_page: int,
    leads: OffsetArray | None = None,
) -> Layout:
    """Lay non-empty shards behind one another, each on its own page.

    page = 8 bytes, width 2, counts [4, 3, 4]: addresses [0, 8, 16], segment edges [0, 7, 11],
    shifts [0, 1]: the three tokens of the second shard leave room for one that is not there.
    Behind the end of a segment of large shards the next begins on a huge page: addresses are free.
    `leads`: bytes mapped before the first token of each shard, less than a page; none unless told.
    """
    leads = np.zeros(len(counts), np.int64) if leads is None else leads
    if len(counts) == 0:
        none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        return Layout(zero, none, none, 0, zero, none, none)
    edges = running_edges(counts)
    sizes = leads + counts * widths
    gap = (sizes[:-1] % page != 0) | (leads[1:] != 0)
    closes = np.append(gap | (widths[:-1] != widths[1:]), True)
    grain = np.where(closes & (sizes >= huge_page), huge_page, page)
    addresses = running_edges(-(-sizes // grain) * grain)
    heads = np.append(0, np.flatnonzero(closes[:-1]) + 1)
    return Layout(
        edges=edges,
        addresses=addresses[:-1],
        leads=leads,
        num_bytes=int(addresses[-1]),
        segment_edges=np.append(edges[heads], edges[-1]),
        segment_shifts=(addresses[:-1] + leads)[heads] // widths[heads] - edges[heads],
        segment_widths=widths[heads],
    )


def running_edges(counts: OffsetArray) -> OffsetArray:
    """[3, 2] -> [0, 3, 5]."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def part_of(edges: OffsetArray, positions: OffsetArray) -> OffsetArray:
    """Which part each token position lies in. Parts are not empty, positions inside."""
    return edges.searchsorted(positions, side="right") - 1


def pieces(edges: OffsetArray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut `start..stop` at the edges: (part, start, stop) of each piece, in order."""
    part = int(part_of(edges, np.array([start], np.int64))[0])
    while start < stop:
        end = min(stop, int(edges[part + 1]))
        yield part, start, end
        part, start = part + 1, end
