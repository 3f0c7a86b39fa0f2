"""Where a schedule is entered when weights change.

In: the new shares, and what each source is owed: its exact share so far, less its samples.
Out: a place in the schedule of the new shares.
Promise: a pure function. Entered there, the schedule begins with nearly the deviations that are
owed, so it pays them back: deviations do not add up over many changes of weights, however short the
phases. (Entered at 0 after every few samples, it would round the same way each time, and a source
with a small share would never come.) With nothing owed the place is 0.
Not here: the schedule (quota).

How: before place p a source with share v has come c(p) times and is owed v p - c(p), which is what
the schedule makes up for behind p. Of some places, spread over a period, the one is taken whose
deviations lie nearest to what is owed. Two sources find theirs to a few hundredths; the more
sources, the less exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardmill.sampling.quota import counts_at

MOST_PLACES = 64
_WORK = 2**18  # slots looked at in all: `counts_at` costs about 1 / the smallest share
_GOLDEN = 0x9E3779B97F4A7C15


def best_entry(weights: Sequence[int], owed: Sequence[Fraction]) -> int:
    """The place in the schedule of `weights` whose deviations are nearest to `owed`."""
    if not any(owed):
        return 0
    period = sum(weights)
    dues = [float(due) for due in owed]

    def distance(place: int) -> float:
        counts = counts_at(weights, place)
        rows = zip(weights, counts, dues, strict=True)
        return max(abs(due - (place * w - count * period) / period) for w, count, due in rows)

    return min(_places(weights, period), key=distance)


def _places(weights: Sequence[int], period: int) -> list[int]:
    """0 first: it is taken when nothing is nearer."""
    rarest = period // min(weight for weight in weights if weight)
    count = max(4, min(MOST_PLACES, _WORK // (rarest * len(weights))))
    if period <= count:
        return list(range(period))
    return [0, *((number * _GOLDEN) % period for number in range(1, count))]
