"""Whose turn it is: every prefix within one sample of every source's exact share.

In: whole-number shares `w` with sum D.  Out: the source of each sample, and how often each source
came before any sample.
Promise: with c(s, n) the samples of source s among the first n,

    floor(n w[s] / D) <= c(s, n) <= ceil(n w[s] / D)       for every n and s

so a count is never a whole sample away from its share. It is a pure function of (w, n).

The rule, and why it can always be kept. Let v = w[s] / D. The promise says that the j-th sample of
s (j = 1, 2, ...) lies in a slot of its window: slot floor((j-1)/v) at the earliest (before, the
count would be over its ceiling) and slot ceil(j/v) - 1 at the latest. Take any slots a..b: the
windows of s that lie inside number at most floor(b v) - ceil(a v) <= (b - a) v. Over all sources
that is at most b - a: no run of slots has more windows inside than slots, so by Hall's theorem
every sample gets a slot of its own window, and "of those whose window is open, the one that closes
first" finds such a schedule, because windows have whole borders and samples take one slot. No slot
stays empty: before slot n the counts sum to n.

Why nobody has to walk there (`counts_at`). The samples placed in the first n slots are a largest
set that fits there, and the rule prefers those that close first; sets that fit are the independent
sets of a matroid, so this set is what greedy choice finds. By the promise source s has its floor,
or one more. Those whose window is open (n v not whole) ask for the one more in the order in which
their windows close, and get it if the set still fits, until n are placed: for every L in 1..n, the
samples whose window opens in the last L slots must number at most L. With f the part of n v after
the point these are

    sum over s of max(0, floor(L v - f))  +  how many who got one more have L v >= f

and for L v >= f in all sources this is at most L by itself. So L goes up to max(f / v): work of
sources / smallest share, once, wherever n lies.
Not here: phases, epochs, what a source holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from shardmill.sampling.keys import Indices


def turns(weights: Sequence[int], counts: Sequence[int], start: int, num_turns: int) -> list[int]:
    """The sources of the samples `start..start + num_turns`, given the counts before `start`."""
    period = sum(weights)
    taken = list(counts)
    closed: list[tuple[int, int]] = []  # (opens, source): the source's next window is ahead
    opened: list[tuple[int, int]] = []  # (closes, source): it may come now
    for source, weight in enumerate(weights):
        if weight:
            closed.append((taken[source] * period // weight, source))
    heapq.heapify(closed)
    chosen = []
    for slot in range(start, start + num_turns):
        while closed and closed[0][0] <= slot:
            source = heapq.heappop(closed)[1]
            heapq.heappush(opened, (_closes(weights, period, source, taken[source] + 1), source))
        source = heapq.heappop(opened)[1]
        chosen.append(source)
        taken[source] += 1
        heapq.heappush(closed, (taken[source] * period // weights[source], source))
    return chosen


def counts_at(weights: Sequence[int], n: int) -> list[int]:
    """How many of the first n samples are of each source, without going through them."""
    period = sum(weights)
    laps, n = divmod(n, period)  # after a period every count is exact, and all begins again
    counts = [n * weight // period for weight in weights]
    rests = [n * weight % period for weight in weights]
    asking = [source for source, rest in enumerate(rests) if rest]
    asking.sort(key=lambda source: (_closes(weights, period, source, counts[source] + 1), source))
    missing = n - sum(counts)
    for source in _fitting(weights, rests, asking, n)[:missing]:
        counts[source] += 1
    assert sum(counts) == n
    return [laps * weight + count for weight, count in zip(weights, counts, strict=True)]


def _closes(weights: Sequence[int], period: int, source: int, number: int) -> int:
    """One past the last slot for the `number`-th sample of a source."""
    return -(-number * period // weights[source])


def _fitting(
    weights: Sequence[int], rests: Sequence[int], asking: Sequence[int], n: int
) -> list[int]:
    """Those of `asking`, in order, that still fit into the first n slots."""
    if not asking:
        return []
    opened = {source: -(-rests[source] // weights[source]) for source in asking}  # slots ago
    room = _room(weights, rests, min(n, max(opened.values())))
    borders = sorted(border for border in set(opened.values()) if border <= len(room))
    least = np.minimum.reduceat(room, np.array(borders) - 1) if borders else np.empty(0, np.int64)
    granted = []
    for source in asking:
        # one more takes a place of every L from `opened` on: room[i] belongs to L = i + 1
        later = least[np.searchsorted(borders, opened[source]) :]
        if not len(later) or later.min() >= 1:
            later -= 1
            granted.append(source)
    return granted


def _room(weights: Sequence[int], rests: Sequence[int], most: int) -> Indices:
    """For L = 1..most: L, less the samples within their floor whose window opens in L slots."""
    period = sum(weights)
    lengths = np.arange(1, most + 1, dtype=np.int64)
    room = lengths.copy()
    for weight, rest in zip(weights, rests, strict=True):
        if weight:
            # weights are at most 2**40 and L at most 2**20: int64 holds the product
            room -= np.maximum((lengths * weight - rest) // period, 0)
    return room
