"""Several sources, one endless stream by weight.

Until the first change of weights, every prefix holds exactly each source's share, rounded down or
up (shares.py has the proof). A phase changes the weights at exactly its first sample; what a source
is owed at that point, or received too much, is carried over, so deviations do not add up over many
changes. A source goes through all of its items, in a new order each epoch, before one repeats, and
continues where it was in every phase. Everything is a pure function of the arguments and the
sample's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.sampling.order import (
    MAX_ITEMS,
    Indices,
    Order,
    OrderFactory,
    Permutation,
    as_words,
    by_value,
    checked_count,
    checked_seed,
    fingerprint_of,
    items_of_epochs,
)
from shardmill.sampling.shares import Schedule, Weight, counts_at, whole_shares

_MAX_ENTRIES = 64
_WORK = 2**18  # slots looked at in all: `counts_at` costs about 1 / the smallest share
_GOLDEN = 0x9E3779B97F4A7C15


def best_entry(weights: Sequence[int], owed: Sequence[Fraction]) -> int:
    """Where to enter the schedule of new weights, given what each source is owed.

    Before entry p a source with share v has come c(p) times and is owed v p - c(p), which the
    schedule makes up for after p. Of some entries spread over a period, this is the one whose
    deviations are nearest to what is owed: with two sources to a few hundredths, with more sources
    less exactly. With nothing owed it is 0. (Entered at 0 after every few samples, a schedule would
    round the same way each time, and a source with a small share would never come.)
    """
    if not any(owed):
        return 0
    period = sum(weights)
    dues = [float(due) for due in owed]

    def distance(entry: int) -> float:
        rows = zip(weights, counts_at(weights, entry), dues, strict=True)
        return max(abs(due - (entry * w - count * period) / period) for w, count, due in rows)

    rarest = period // min(weight for weight in weights if weight)
    count = max(4, min(_MAX_ENTRIES, _WORK // (rarest * len(weights))))
    if period <= count:
        return min(range(period), key=distance)
    # 0 first: it is chosen if nothing is nearer.
    return min((number * _GOLDEN % period for number in range(count)), key=distance)


MAX_SOURCES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class MixedSamples:
    """Where samples of a mixture come from, one row each."""

    source: Indices  # which source, its position in `names`
    epoch: Indices  # which pass over the source, from 0
    item: Indices  # which item of the source


@dataclass(frozen=True, slots=True)
class _Phase:
    start: int  # the first global sample
    schedule: Schedule
    before: tuple[int, ...]  # samples of each source before `start`
    owed: tuple[Fraction, ...]  # exact shares of all samples before `start`, less `before`
    entry: int  # where the schedule is entered
    at_entry: tuple[int, ...]  # the counts of the schedule there

    def counts(self, n: int) -> list[int]:
        """Samples of each source before global sample n, which is in this phase or ends it."""
        own = self.schedule.counts(n - self.start + self.entry)
        rows = zip(self.before, own, self.at_entry, strict=True)
        return [before + count - skipped for before, count, skipped in rows]


class Mixture:
    """An endless stream from several sources, by weight.

    `weights` are any numbers of at least 0; a source of weight 0 never comes. `whole_shares` makes
    weights with a temperature. `phases` are (first sample, weights), in order: from that sample on
    these are the weights. `order` makes the order of each epoch of each source, from its size, the
    seed and the path ("source", name, "epoch", number).
    """

    def __init__(
        self,
        sizes: Sequence[SupportsIndex],
        weights: Sequence[Weight],
        *,
        seed: SupportsIndex,
        names: Sequence[str] | None = None,
        phases: Sequence[tuple[SupportsIndex, Sequence[Weight]]] = (),
        order: OrderFactory = Permutation,
    ) -> None:
        self.names = _checked_names(names, len(sizes))
        self.sizes = tuple(map(_checked_size, sizes, self.names))
        self._seed = checked_seed(seed)
        self._order = order
        self._orders: dict[tuple[int, int], Order] = {}
        starts = [checked_count(start, "phase_start", least=1) for start, _ in phases]
        if sorted(set(starts)) != starts:
            raise OptionError(f"phases start at {starts}: wanted ascending numbers, each once")
        shares = [whole_shares(chosen, self.names) for chosen in (weights, *(w for _, w in phases))]
        for chosen in shares:
            self._check_sizes(chosen)
        self._schedules = list(zip([0, *starts], map(Schedule, shares), strict=True))
        self.carry_over([0] * len(sizes))

    def carry_over(self, owed: Sequence[Weight], before: Sequence[int] = ()) -> None:
        """Continue a mixture that this one replaces, from its `owed(n)` and `counts(n)`.

        For a mixture of which nothing was taken yet.
        """
        if len(owed) != len(self.sizes):
            raise OptionError(f"{len(owed)} numbers owed for {len(self.sizes)} sources")
        self._owed = tuple(Fraction(due) for due in owed)
        self._before = list(before) or [0] * len(owed)
        self._phases: list[_Phase] = []
        for start, schedule in self._schedules:
            due = self.owed(start)
            entry = best_entry(schedule.weights, due)
            skipped = tuple(schedule.counts(entry))
            before = tuple(self._counts(start))
            self._phases.append(_Phase(start, schedule, before, due, entry, skipped))
        self._starts = np.array(self.phase_starts, np.int64)

    def take(self, indices: npt.ArrayLike) -> MixedSamples:
        """Source, epoch and item of these global samples."""
        source, number = self.locate(indices)
        epoch, item = np.empty_like(number), np.empty_like(number)
        for one, chosen in by_value(source):
            epoch[chosen], item[chosen] = items_of_epochs(
                partial(self._order_of, one), self.sizes[one], number[chosen]
            )
        return MixedSamples(source, epoch, item)

    def locate(self, indices: npt.ArrayLike) -> tuple[Indices, Indices]:
        """(source, which sample of that source since the beginning) of these global samples."""
        samples = as_words(indices, MAX_ITEMS).view("i8")
        source, number = np.empty_like(samples), np.empty_like(samples)
        for at, chosen in by_value(np.searchsorted(self._starts, samples, side="right") - 1):
            phase = self._phases[at]
            own, within = phase.schedule.locate(samples[chosen] - phase.start + phase.entry)
            source[chosen] = own
            moved = np.array(phase.before, np.int64) - np.array(phase.at_entry, np.int64)
            number[chosen] = within + moved[own]
        return source, number

    def counts(self, n: SupportsIndex) -> Indices:
        """How many of the first n samples are of each source; the cost does not depend on n."""
        return np.array(self._counts(checked_count(n, "n")), np.int64)

    def owed(self, n: SupportsIndex) -> tuple[Fraction, ...]:
        """How far each source is below its exact share after the first n samples."""
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
        """The exact share of each source in the phase of this sample."""
        weights = self._phase_of(checked_count(index, "index")).schedule.weights
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    @property
    def phase_starts(self) -> tuple[int, ...]:
        """The first sample of each phase; the first phase starts at 0."""
        return tuple(phase.start for phase in self._phases)

    @property
    def fingerprint(self) -> str:
        """sha256 hex over everything that decides which item comes when."""
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
        return self._phase_of(n - 1).counts(n) if n else self._before

    def _order_of(self, source: int, epoch: int) -> Order:
        """The order of an epoch. A few are kept, since neighbouring samples need the same."""
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
                    f"source {name!r} is empty, but has a weight above 0; set its weight to 0 or "
                    "leave it out"
                )


def _checked_size(size: SupportsIndex, name: str) -> int:
    try:
        return checked_count(size, "size")
    except OptionError as wrong:
        raise OptionError(f"source {name!r}: {wrong}") from wrong


def _checked_names(names: Sequence[str] | None, num_sources: int) -> tuple[str, ...]:
    if not num_sources:
        raise OptionError("a mixture of no sources: wanted at least one size and weight")
    if num_sources > MAX_SOURCES:
        raise OptionError(f"{num_sources:,} sources: wanted at most {MAX_SOURCES:,}")
    if names is None:
        return tuple(str(number) for number in range(num_sources))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise OptionError("{names}: wanted one str per source", names=names)
    if len(names) != num_sources:
        raise OptionError(f"{len(names)} names for {num_sources} sizes: {', '.join(names)}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise OptionError(f"sources share the name {', '.join(map(repr, twice))}; rename them")
    return tuple(names)
