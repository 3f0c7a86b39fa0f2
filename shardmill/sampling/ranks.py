"""Who reads what.

In: the samples of a global batch, a rank and how many ranks there are.  Out: the rank's samples.
Promise: the ranks are a disjoint cover; their numbers of samples differ by at most one. The number
of ranks and the size of a batch decide who reads a sample, never which sample comes next: a run's
position is one number, the samples consumed.
Not here: batches, padding, dropping.
"""

from __future__ import annotations

from typing import SupportsIndex

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.sampling.keys import checked_count


def rank_slice(
    start: SupportsIndex, stop: SupportsIndex, *, rank: SupportsIndex, world: SupportsIndex
) -> range:
    """The global samples that `rank` reads of the global batch `start..stop`.

    A run of neighbours, not every `world`-th: a mixture is periodic, and with two equal sources
    and two ranks every second sample would be one source for ever.
    """
    first = checked_count(start, "start")
    size = checked_count(stop, "stop") - first
    ranks, number = whole_number(world, "world"), whole_number(rank, "rank", least=0)
    if size < 0:
        raise OptionError(f"start={first:,}, stop={first + size:,}: wanted start <= stop")
    if number >= ranks:
        raise OptionError(f"rank={number:,}: wanted 0 to {ranks - 1:,}, for world={ranks:,}")
    return range(first + size * number // ranks, first + size * (number + 1) // ranks)
