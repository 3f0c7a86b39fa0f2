"""Several sources, one stream.

In: sizes and weights of the sources, a seed; perhaps other weights from some sample on.
Out: for any global sample, its source, the source's epoch, and the item.
Promise: up to the first change of weights, every prefix holds of every source its exact share,
rounded down or up: never a whole sample more or less (the proof is in quota). A phase changes the
weights at exactly its first sample; what a source is owed then, or has had too much, is carried on
(carry), so it does not add up over many changes. A source goes through all of its items, in a new
order each epoch, before one comes again, and goes on where it was in every phase. All is a pure
function of the arguments and the sample's number.
Not here: reading, ranks, batches.

Where a schedule is entered when weights change.

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
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.sampling.order import Order, OrderFactory, by_value
from shardmill.sampling.permutation import Permutation
from shardmill.sampling.seeds import (
    MOST_ITEMS,
    Indices,
    as_words,
    checked_count,
    checked_seed,
    fingerprint_of,
)
from shardmill.sampling.shares import Schedule, Weight, counts_at, whole_shares

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


MOST_SOURCES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class MixedSamples:
    """Where samples of a mixture come from, one row each."""

    source: Indices  # which source, its place in `names`
    epoch: Indices  # which pass over the source, from 0
    item: Indices  # which item of the source


@dataclass(frozen=True, slots=True)
class _Phase:
    start: int  # the first global sample
    schedule: Schedule
    before: tuple[int, ...]  # samples of each source before `start`
    owed: tuple[Fraction, ...]  # exact shares of all samples before `start`, less `before`
    entry: int  # where the schedule is entered
    at_entry: tuple[int, ...]  # its counts there

    def counts(self, n: int) -> list[int]:
        """Samples of each source before global sample n, which lies in this phase or ends it."""
        own = self.schedule.counts(n - self.start + self.entry)
        rows = zip(self.before, own, self.at_entry, strict=True)
        return [before + count - skipped for before, count, skipped in rows]


class Mixture:
    """An endless stream out of several sources, by weight.

    `weights` may be any numbers of at least 0; a source of weight 0 does not come. With
    `temperature` t a weight w counts as `w ** (1 / t)`. `phases` are (first sample, weights), in
    order: from that sample on the weights are those. `order` makes the order of each epoch of each
    source, from its size, the seed and the path ("source", name, "epoch", number). `owed` is what
    `owed(n)` of another mixture told, when this one takes its place.
    """

    def __init__(
        self,
        sizes: Sequence[SupportsIndex],
        weights: Sequence[Weight],
        *,
        seed: SupportsIndex,
        names: Sequence[str] | None = None,
        temperature: float = 1.0,
        phases: Sequence[tuple[SupportsIndex, Sequence[Weight]]] = (),
        order: OrderFactory = Permutation,
        owed: Sequence[Weight] = (),
    ) -> None:
        self.names = _checked_names(names, len(sizes))
        self.sizes = tuple(
            checked_count(size, f"size of source {name!r}")
            for size, name in zip(sizes, self.names, strict=True)
        )
        self._seed = checked_seed(seed)
        self._order = order
        self._orders: dict[tuple[int, int], Order] = {}
        starts = [checked_count(start, "phase start", least=1) for start, _ in phases]
        if sorted(set(starts)) != starts:
            raise OptionError(f"phases start at {starts}: wanted rising numbers, each once")
        self._owed = _checked_owed(owed, len(sizes))
        self._phases: list[_Phase] = []
        for start, chosen in zip([0, *starts], [weights, *(w for _, w in phases)], strict=True):
            shares = whole_shares(chosen, self.names, temperature=temperature)
            self._check_sizes(shares)
            due = self.owed(start)
            entry = best_entry(shares, due)
            schedule = Schedule(shares)
            skipped = tuple(schedule.counts(entry))
            before = tuple(self._counts(start))
            self._phases.append(_Phase(start, schedule, before, due, entry, skipped))
        self._starts = np.array(self.phase_starts, np.int64)

    def take(self, indices: npt.ArrayLike) -> MixedSamples:
        """Source, epoch and item of these global samples."""
        source, place = self.locate(indices)
        epoch, item = np.empty_like(place), np.empty_like(place)
        for number, chosen in by_value(source):
            epoch[chosen], item[chosen] = self._through_epochs(number, place[chosen])
        return MixedSamples(source, epoch, item)

    def locate(self, indices: npt.ArrayLike) -> tuple[Indices, Indices]:
        """(source, which sample of that source since the beginning) of these global samples."""
        numbers = as_words(indices, MOST_ITEMS).view("i8")
        source, place = np.empty_like(numbers), np.empty_like(numbers)
        for at, chosen in by_value(np.searchsorted(self._starts, numbers, side="right") - 1):
            phase = self._phases[at]
            own, within = phase.schedule.locate(numbers[chosen] - phase.start + phase.entry)
            source[chosen] = own
            moved = np.array(phase.before, np.int64) - np.array(phase.at_entry, np.int64)
            place[chosen] = within + moved[own]
        return source, place

    def counts(self, n: SupportsIndex) -> Indices:
        """How many of the first n samples are of each source, wherever n lies."""
        return np.array(self._counts(checked_count(n, "n")), np.int64)

    def owed(self, n: SupportsIndex) -> tuple[Fraction, ...]:
        """What the exact shares of the first n samples are above the counts, for each source."""
        n = checked_count(n, "n")
        if not n:
            return self._owed
        phase = self._phase_of(n - 1)
        weights, length = phase.schedule.weights, n - phase.start
        rows = zip(phase.owed, weights, phase.counts(n), phase.before, strict=True)
        return tuple(
            due + Fraction(weight * length, sum(weights)) - (count - before)
            for due, weight, count, before in rows
        )

    def shares(self, index: SupportsIndex = 0) -> tuple[Fraction, ...]:
        """The exact share of each source in the phase of this sample, as used."""
        weights = self._phase_of(checked_count(index, "index")).schedule.weights
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    @property
    def phase_starts(self) -> tuple[int, ...]:
        """The first sample of each phase; the first phase starts at 0."""
        return tuple(phase.start for phase in self._phases)

    @property
    def fingerprint(self) -> str:
        """sha256 hex over all that decides which item comes when."""
        first = [self._order_of(s, 0).fingerprint if n else "" for s, n in enumerate(self.sizes)]
        return fingerprint_of(
            order="mixture",
            version=1,
            seed=self._seed,
            names=list(self.names),
            sizes=list(self.sizes),
            phases=[
                [phase.start, list(phase.schedule.weights), *([phase.entry] if phase.entry else [])]
                for phase in self._phases
            ],
            first_epochs=list(first),
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{name}: {float(share):.4g}"
            for name, share in zip(self.names, self.shares(), strict=True)
        )
        return f"Mixture({shares}; seed={self._seed}, phases={len(self._phases)})"

    def _phase_of(self, n: int) -> _Phase:
        return next(phase for phase in reversed(self._phases) if phase.start <= n)

    def _counts(self, n: int) -> list[int]:
        return self._phase_of(n - 1).counts(n) if n else [0] * len(self.sizes)

    def _through_epochs(self, source: int, places: Indices) -> tuple[Indices, Indices]:
        epoch, within = np.divmod(places, self.sizes[source])
        item = np.empty_like(places)
        for number, chosen in by_value(epoch):
            item[chosen] = self._order_of(source, number).take(within[chosen])
        return epoch, item

    def _order_of(self, source: int, epoch: int) -> Order:
        """The order of an epoch; the last few are kept, since neighbours ask for the same."""
        found = self._orders.get((source, epoch))
        if found is None:
            if len(self._orders) >= 4 * len(self.sizes):
                self._orders.clear()
            path = ("source", self.names[source], "epoch", epoch)
            found = self._orders[source, epoch] = self._order(self.sizes[source], self._seed, *path)
        return found

    def _check_sizes(self, shares: Sequence[int]) -> None:
        for name, size, share in zip(self.names, self.sizes, shares, strict=True):
            if share and not size:
                raise OptionError(
                    f"source {name!r} is empty, but has a weight above 0; "
                    f"give it weight 0 or leave it out"
                )


def _checked_owed(owed: Sequence[Weight], num_sources: int) -> tuple[Fraction, ...]:
    if not len(owed):
        return (Fraction(0),) * num_sources
    if len(owed) != num_sources:
        raise OptionError(f"{len(owed)} numbers owed for {num_sources} sources")
    return tuple(Fraction(due) for due in owed)


def _checked_names(names: Sequence[str] | None, num_sources: int) -> tuple[str, ...]:
    if not num_sources:
        raise OptionError("a mixture of no sources: wanted at least one size and weight")
    if num_sources > MOST_SOURCES:
        raise OptionError(f"{num_sources:,} sources: wanted at most {MOST_SOURCES:,}")
    if names is None:
        return tuple(str(number) for number in range(num_sources))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"names={names!r}: wanted one str a source")
    if len(names) != num_sources:
        raise OptionError(f"{len(names)} names for {num_sources} sizes: {', '.join(names)}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise OptionError(f"sources share the name {', '.join(map(repr, twice))}; rename them")
    return tuple(names)
