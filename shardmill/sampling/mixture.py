"""Several sources, one endless stream by weight: whole shares, whose turn it is, and the mixture.

`Mixture`: a phase changes the weights at exactly its first sample; what a source is owed at that
point, or received too much, is carried over, so deviations do not add up over many changes. A
source goes through all of its items, in a new order each epoch, before one repeats, and continues
where it was in every phase. Everything is a pure function of the arguments and the sample's number.

`whole_shares` makes integers of weights, exactly where possible: 0.7, 0.2, 0.1 are 7 : 2 : 1, and
1/3, 2/3 are 1 : 2. Shares that need a common denominator over 2**40 are rounded to that; each is
off by less than 2**-40, which a run of 10**11 samples does not notice.

`Schedule` gives the source of every sample as a pure function of (w, n), where the shares w are
whole numbers with sum D. With c(s, n) the samples of source s among the first n,

    floor(n w[s] / D) <= c(s, n) <= ceil(n w[s] / D)       for every n and s

so a count is never a whole sample away from its share.

Why this rule can always be kept. Let v = w[s] / D. The rule says that the j-th sample of s (j = 1,
2, ...) is in a slot of its window: slot floor((j-1)/v) at the earliest (before that the count would
be over its ceiling) and slot ceil(j/v) - 1 at the latest. Take any slots a..b: the windows of s
inside them number at most floor(b v) - ceil(a v) <= (b - a) v. Over all sources that is at most
b - a: no run of slots has more windows inside than slots, so by Hall's theorem every sample gets a
slot in its window, and "of those whose window is open, the one that closes first" finds such a
schedule, because windows have integer bounds and samples take one slot. No slot stays empty: before
slot n the counts sum to n.

Why nothing has to walk there (`counts_at`). The samples placed in the first n slots are a largest
set that fits there, and the rule prefers those that close first; sets that fit are the independent
sets of a matroid, so this set is what greedy choice finds. By the rule source s has its floor, or
one more. Those whose window is open (n v is not whole) ask for the one more in the order in which
their windows close, and get it if the set still fits, until n are placed: for every L in 1..n, the
samples whose window opens in the last L slots must number at most L. With f the fractional part of
n v these are

    sum over s of max(0, floor(L v - f))  +  how many who got one more have L v >= f

and if L v >= f for all sources this is at most L by itself. So L goes up to max(f / v): the work is
sources / smallest share, once, for any n.
"""

from __future__ import annotations

import heapq
import math
import numbers
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial
from typing import NamedTuple, SupportsIndex, TypeAlias

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

Weight: TypeAlias = "float | int | Fraction"

FINEST = 2**40
"""The largest common denominator of the shares."""
LEAST_SHARE = Fraction(1, 2**20)


def whole_shares(
    weights: Sequence[Weight], names: Sequence[str], *, temperature: float = 1.0
) -> tuple[int, ...]:
    """One integer per source, without a common factor: source `s` has the share `w[s] / sum(w)`."""
    if len(weights) != len(names):
        raise OptionError(f"{len(weights)} weights for {len(names)} sources ({', '.join(names)})")
    exact = [_fraction(weight, name) for weight, name in zip(weights, names, strict=True)]
    if not any(exact):
        raise OptionError("weights sum to 0; wanted at least one above 0")
    is_number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not is_number or not math.isfinite(temperature) or temperature <= 0:
        raise OptionError("{temperature}: wanted a finite number above 0", temperature=temperature)
    heated = _heated(exact, _fraction(temperature, "temperature"))
    shares = [weight / sum(heated) for weight in heated]
    for share, asked, name in zip(shares, exact, names, strict=True):
        if asked and share < LEAST_SHARE:
            raise OptionError(
                f"source {name!r}: a share of {float(share):.2g}, wanted at least 1 in 2**20 "
                f"({float(LEAST_SHARE):.1g}); raise its weight, or set it to 0 to leave it out"
            )
    # Over their common denominator, or over FINEST: rounded down, largest remainders rounded up.
    common = math.lcm(*(share.denominator for share in shares))
    if common <= FINEST:
        return tuple(int(share * common) for share in shares)
    rounded = [math.floor(share * FINEST) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: rounded[s] - shares[s] * FINEST)
    for source in by_remainder[: FINEST - sum(rounded)]:
        rounded[source] += 1
    divisor = math.gcd(*rounded)
    return tuple(number // divisor for number in rounded)


def _fraction(weight: Weight, name: str) -> Fraction:
    """The weight as it is written: 0.1 is 1/10, not the binary number next to it."""
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise OptionError(f"source {name!r}: weight {weight!r}, wanted a number of at least 0")
    if isinstance(weight, numbers.Rational):
        exact = Fraction(int(weight.numerator), int(weight.denominator))
    elif math.isfinite(weight):
        exact = Fraction(repr(float(weight)))
    else:
        raise OptionError(f"source {name!r}: weight {weight}, wanted a finite number")
    if exact < 0:
        raise OptionError(f"source {name!r}: weight {weight} is negative, wanted at least 0")
    return exact


def _heated(weights: Sequence[Fraction], temperature: Fraction) -> list[Fraction]:
    """`w ** (1 / temperature)`, up to a factor, in decimals of 50 digits: the power function of
    processors is not the same everywhere."""
    if temperature == 1:
        return list(weights)
    context = Context(prec=50, Emin=-1000, Emax=1000, traps=[])
    most = max(weights)

    def decimal(value: Fraction) -> Decimal:
        return context.divide(Decimal(value.numerator), Decimal(value.denominator))

    def power(weight: Fraction) -> Fraction:
        if not weight:
            return Fraction(0)
        log = decimal(weight / most).ln(context)
        return Fraction(context.divide(log, decimal(temperature)).exp(context))

    return [power(weight) for weight in weights]


def turns(weights: Sequence[int], counts: Sequence[int], start: int, num_turns: int) -> list[int]:
    """The sources of the samples `start..start + num_turns`, given the counts before `start`."""
    period = sum(weights)
    taken = list(counts)
    opened: list[tuple[int, int]] = []  # heap of (closes, source): may come now
    closed = [  # heap of (opens, source): the next window of the source is ahead
        (taken[source] * period // weight, source)
        for source, weight in enumerate(weights)
        if weight
    ]
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
    laps, n = divmod(n, period)  # after a period every count is exact, and everything repeats
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
    # free[L - 1]: L, less the samples within their floor whose window opens in the last L slots.
    # Weights are at most 2**40 and L at most 2**20, so int64 holds the products.
    period = sum(weights)
    lengths = np.arange(1, min(n, max(opened.values())) + 1, dtype=np.int64)
    free = lengths.copy()
    for weight, rest in zip(weights, rests, strict=True):
        if weight:
            free -= np.maximum((lengths * weight - rest) // period, 0)
    edges = sorted(edge for edge in set(opened.values()) if edge <= len(free))
    least = np.minimum.reduceat(free, np.array(edges) - 1) if edges else np.empty(0, np.int64)
    granted = []
    for source in asking:
        later = least[np.searchsorted(edges, opened[source]) :]  # every L from `opened` on
        if not len(later) or later.min() >= 1:
            later -= 1
            granted.append(source)
    return granted


LONGEST_PERIOD = 2**16
"""A period up to this long is computed once and kept: 0.1 s, 640 KiB."""
_CHUNK = 2048  # longer ones are kept in chunks of this many samples, a few milliseconds each
_MAX_CHUNKS = 64


class _Chunk(NamedTuple):
    """Consecutive turns."""

    source: npt.NDArray[np.uint16]  # (n,) whose turn it is
    number: Indices  # (n,) which sample of that source
    after: tuple[int, ...]  # the counts after the last turn


class Schedule:
    """Whose turn it is, without end, by fixed shares. Answers never depend on earlier questions."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self._each = np.array(self.weights, np.int64)
        self._period = sum(self.weights)
        self._length = self._period if self._period <= LONGEST_PERIOD else _CHUNK
        self._kept: OrderedDict[int, _Chunk] = OrderedDict()

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """(source, which sample of that source) of each sample."""
        lap, within = np.divmod(samples, self._period)
        source = np.empty(len(samples), np.int64)
        number = np.empty(len(samples), np.int64)
        for at, chosen in by_value(within // self._length):
            chunk = self._kept.get(at)
            if chunk is None:
                chunk = self._kept[at] = self._compute(at)
                while len(self._kept) > _MAX_CHUNKS:
                    self._kept.popitem(last=False)
            offset = within[chosen] - at * self._length
            source[chosen] = chunk.source[offset]
            number[chosen] = chunk.number[offset]
        number += lap * self._each[source]
        return source, number

    def _compute(self, at: int) -> _Chunk:
        start = at * self._length
        before = self._kept.get(at - 1)
        counts = before.after if before else tuple(counts_at(self.weights, start))
        length = min(self._length, self._period - start)
        source = np.array(turns(self.weights, counts, start, length), np.uint16)
        number = np.empty(length, np.int64)
        after = list(counts)
        for one in range(len(counts)):
            own = np.flatnonzero(source == one)
            number[own] = np.arange(counts[one], counts[one] + len(own))
            after[one] += len(own)
        return _Chunk(source, number, tuple(after))


# the mixture

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
        own = counts_at(self.schedule.weights, n - self.start + self.entry)
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
        for name, size, *weighed in zip(self.names, self.sizes, *shares, strict=True):
            if not size and any(weighed):
                raise OptionError(
                    f"source {name!r} is empty, but has a weight above 0; set its weight to 0 or "
                    "leave it out"
                )
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
            skipped = tuple(counts_at(schedule.weights, entry))
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
