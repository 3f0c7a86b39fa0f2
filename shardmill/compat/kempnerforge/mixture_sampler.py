"""A sampler that mixes the datasets of a `MixtureDataset` by weight.

Position `i` of epoch `e` is sample `e * N + i` of one endless `sampling.Mixture`, where N is the
number of all items. So shares are exact at every prefix, and no dataset repeats an item before all
of its items were given, also across epochs. New weights hold from the very next sample on, and
every dataset continues where it was.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from shardmill.arguments import whole_number
from shardmill.compat.kempnerforge.samplers import RankedSampler, compact
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.state import State
from shardmill.records import JSON, OffsetArray
from shardmill.sampling import InOrder, Mixture, Order, Permutation, epochs
from shardmill.sampling.order import by_value
from shardmill.sampling.shares import whole_shares

Weight: TypeAlias = "float | int | Fraction"
Weights: TypeAlias = Sequence[Weight]
Phases: TypeAlias = Sequence[tuple[SupportsIndex, Weights]]

_MOST_OWED = 64.0  # samples: far more than a mixture ever owes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How datasets are mixed from global sample `start` on."""

    weights: tuple[Weight, ...]
    temperature: float
    phases: tuple[tuple[int, Weights], ...] = ()  # (first global sample, weights)
    start: int = 0
    before: tuple[int, ...] = ()  # samples of each dataset before `start`; empty: none
    owed: tuple[float, ...] = ()  # exact shares before `start`, less `before`

    def check(self, num_sources: int) -> None:
        """Refuse what cannot be mixed."""
        _check_weights(self.weights, num_sources, "weights")
        for start, chosen in self.phases:
            _check_weights(chosen, num_sources, f"weights of the phase from sample {start!r} on")
        heat = self.temperature
        if isinstance(heat, bool) or not isinstance(heat, numbers.Real) or not 0 < heat < math.inf:
            raise OptionError(f"temperature={heat!r}: must be positive and finite")

    def to_json(self) -> State:
        described: State = {
            "weights": [_plain(weight) for weight in self.weights],
            "temperature": float(self.temperature),
            "phases": [[start, [_plain(w) for w in each]] for start, each in self.phases],
        }
        if self.before:
            described |= {"start": self.start, "before": list(self.before), "owed": list(self.owed)}
        return described


def restored_weighting(state: JSON, num_sources: int) -> Weighting:
    """The inverse of `to_json`, for weights that were changed during the run."""
    match state:
        case {
            "weights": list(weights),
            "temperature": float(temperature),
            "phases": list(phases),
            "start": int(start),
            "before": list(before),
            "owed": list(owed),
        } if len(before) == num_sources and all(type(count) is int for count in before):
            counts = tuple(count for count in before if isinstance(count, int))
            dues = tuple(due for due in owed if isinstance(due, float) and abs(due) < _MOST_OWED)
            if min(counts) >= 0 and sum(counts) == start and len(dues) == len(owed) == num_sources:
                return Weighting(
                    weights=tuple(map(_weight, weights)),
                    temperature=temperature,
                    phases=tuple(map(_phase, phases)),
                    start=start,
                    before=counts,
                    owed=dues,
                )
    raise StateMismatchError(
        f"changed: the state has {state!r:.300}, wanted weights, temperature, phases, start and, "
        f"for {num_sources} datasets, samples before it that sum to start, and what is owed"
    )


def _as_weights(weights: Any, what: str) -> tuple[Weight, ...]:
    return tuple(_listed(weights, what))


def _as_phase(phase: Any) -> tuple[int, tuple[Weight, ...]]:
    pair = tuple(phase) if isinstance(phase, Sequence) else ()
    if len(pair) != 2:
        raise OptionError(
            f"{{phases}} hold {phase!r:.80}; wanted (first sample, weights)", phases=...
        )
    start = whole_number(pair[0], "phase_start")
    return start, _as_weights(pair[1], f"phases: weights from sample {start:,} on")


def _listed(values: Any, what: str) -> Sequence[Any]:
    if isinstance(values, str | Mapping) or not (
        isinstance(values, Sequence) or hasattr(values, "__array__")
    ):
        raise OptionError(f"{what}={values!r:.80}: wanted a list")
    return values  # type: ignore[no-any-return]


def _checked_edges(cumulative_sizes: Sequence[SupportsIndex]) -> OffsetArray:
    """`cumulative_sizes` as an array: 0, then where each dataset ends."""
    edges = [whole_number(size, "cumulative_sizes", least=0) for size in cumulative_sizes]
    if len(edges) < 2:
        raise OptionError(f"cumulative_sizes={edges}: At least one dataset is needed, as [0, size]")
    if edges[0] != 0 or edges != sorted(edges):
        raise OptionError(
            f"cumulative_sizes={edges!r:.200}: wanted 0 first and then where each dataset ends, "
            f"as MixtureDataset.cumulative_sizes"
        )
    if edges[-1] == 0:
        raise OptionError("cumulative_sizes: all datasets are empty")
    return np.array(edges, np.int64)


def _check_weights(weights: Weights, num_sources: int, what: str) -> None:
    if not len(weights):
        raise OptionError(f"{what} are empty; wanted {num_sources}, one per dataset")
    if len(weights) != num_sources:
        raise OptionError(
            f"{what} and datasets must have the same length: {len(weights)} weights for "
            f"{num_sources} datasets"
        )
    for place, weight in enumerate(weights):
        number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise OptionError(
                f"{what} must be non-negative finite numbers: dataset {place} has {weight!r}"
            )
    if not any(weights):
        raise OptionError(f"{what} must sum to > 0, but all are 0")


def _plain(weight: Weight) -> JSON:
    """A number of JSON, or "1/3" for a fraction that is none."""
    if isinstance(weight, numbers.Rational):
        whole = weight.denominator == 1
        return int(weight) if whole else f"{int(weight.numerator)}/{int(weight.denominator)}"
    return float(weight)


def _weight(value: JSON) -> Weight:
    if isinstance(value, str):
        try:
            return Fraction(value)
        except ValueError as wrong:
            raise StateMismatchError(f"changed: the state has the weight {value!r:.80}") from wrong
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise StateMismatchError(f"changed: the state has the weight {value!r:.80}, wanted a number")


def _phase(value: JSON) -> tuple[int, tuple[Weight, ...]]:
    match value:
        case [int(start), list(weights)]:
            return start, tuple(map(_weight, weights))
    raise StateMismatchError(f"changed: the state has the phase {value!r:.80}")


class MixtureSampler(RankedSampler):
    """Samples of several datasets by weight; `cumulative_sizes` as `MixtureDataset` has them.

    `phases` are (first sample, weights): from that sample on, counted over all ranks and epochs,
    these weights hold. `names` and the seed decide the order inside a dataset: pass
    `dataset_names`, and leaving one dataset out later changes nothing in the others. Padding
    (`drop_last=False`) repeats samples of the next epoch.
    """

    kind = "shardmill.MixtureSampler"
    _free = ("changed",)

    def __init__(
        self,
        cumulative_sizes: Sequence[SupportsIndex],
        weights: Weights,
        num_replicas: SupportsIndex | None = None,
        rank: SupportsIndex | None = None,
        shuffle: bool = True,
        seed: SupportsIndex = 0,
        drop_last: bool = True,
        temperature: float = 1.0,
        *,
        names: Sequence[str] | None = None,
        phases: Phases = (),
    ) -> None:
        self._edges = _checked_edges(cumulative_sizes)
        sizes = np.diff(self._edges).tolist()
        given = Weighting(
            weights=_as_weights(weights, "weights"),
            temperature=temperature,
            phases=tuple(map(_as_phase, _listed(phases, "phases"))),
        )
        super().__init__(
            sum(sizes), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._given = self._now = given
        self._mixture = self._mix(given, sizes, names)
        # Ranks take neighbours in a random order: with a fixed one, two equal datasets on two ranks
        # would give each rank one dataset for ever.
        self._turns = Permutation(2**62, self.seed, "ranks")

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each dataset in the next sample."""
        at = self.epoch * self.epoch_samples + self.samples - self._now.start
        return tuple(float(share) for share in self._mixture.shares(max(0, at)))

    def update_weights(self, weights: Weights, temperature: float | None = None) -> None:
        """Other weights from the next sample on, until the next phase if there is one.

        A new temperature holds for the rest of the run. The next sample is the one after the last
        batch that `StatefulDataLoader` gave, whatever its workers read ahead; in another loader it
        is the next one to be drawn. Call it on all ranks at the same step. Setting the current
        weights again, for instance after a resume, changes nothing.
        """
        at = self.epoch * self.epoch_samples + self.samples
        new = Weighting(
            weights=_as_weights(weights, "weights"),
            temperature=self._now.temperature if temperature is None else temperature,
            phases=tuple(phase for phase in self._now.phases if phase[0] > at),
            start=at,
            before=self._counts(at),
            owed=tuple(float(due) for due in self._mixture.owed(at - self._now.start)),
        )
        mixture = self._mix(new, self._mixture.sizes, self._mixture.names)
        same = mixture.shares() == self._mixture.shares(at - self._now.start)
        if same and new.temperature == self._now.temperature:
            return
        self._now, self._mixture = new, mixture
        self.revision += 1

    def counts(self) -> dict[str, int]:
        """Samples of each dataset since the start of the run, by name, over all ranks."""
        counts = self._counts(self.epoch * self.epoch_samples + self.samples)
        return dict(zip(self._mixture.names, counts, strict=True))

    def __repr__(self) -> str:
        return (
            f"MixtureSampler({self._mixture!r}, samples={self.epoch_samples:,}, "
            f"rank={self.rank} of {self.num_replicas}, epoch={self.epoch})"
        )

    def _mix(
        self, weighting: Weighting, sizes: Sequence[int], names: Sequence[str] | None
    ) -> Mixture:
        weighting.check(len(sizes))
        numbers = [str(number) for number in range(len(sizes))]

        def shares(weights: Sequence[Weight]) -> Sequence[int]:
            return whole_shares(weights, names or numbers, temperature=weighting.temperature)

        mixture = Mixture(
            sizes,
            shares(weighting.weights),
            seed=self.seed,
            names=names,
            phases=[(at - weighting.start, shares(chosen)) for at, chosen in weighting.phases],
        )
        if weighting.owed:
            mixture.carry_over(weighting.owed)
        return mixture

    def _counts(self, at: int) -> tuple[int, ...]:
        """Samples of each dataset before global sample `at`."""
        self._check_known(at)
        own = self._mixture.counts(at - self._now.start).tolist()
        before = self._now.before or (0,) * len(own)
        return tuple(map(sum, zip(own, before, strict=True)))

    def _take(self, epoch: int, positions: OffsetArray) -> OffsetArray:
        numbers = epoch * self.epoch_samples + positions
        if not len(numbers):
            return numbers
        self._check_known(int(numbers.min()))
        source, place = self._mixture.locate(numbers - self._now.start)
        if self._now.before:
            place = place + np.array(self._now.before, np.int64)[source]
        for number, chosen in by_value(source):
            _, items = epochs(partial(self._order, number), place[chosen])
            place[chosen] = items
        return self._edges[source] + place

    def _order(self, source: int, epoch: int) -> Order:
        make = Permutation if self.shuffle else InOrder
        name, size = self._mixture.names[source], self._mixture.sizes[source]
        return make(size, self.seed, "source", name, "epoch", epoch)

    def _turn_of(self, epoch: int, firsts: OffsetArray) -> OffsetArray | int:
        if self.num_replicas == 1:
            return 0
        numbers = epoch * self.epoch_samples + firsts
        return (self._turns.take(numbers) + self.rank) % self.num_replicas

    def _check_known(self, at: int) -> None:
        if at < self._now.start:
            raise OptionError(
                f"sample {at:,} comes before sample {self._now.start:,}, where update_weights was "
                f"called, and earlier weights are not kept; move to set_epoch({self.epoch + 1})"
            )

    def _identity(self) -> State:
        mixture: State = {
            "names": compact(list(self._mixture.names)),
            "sizes": compact(list(self._mixture.sizes)),
            **{name: compact(value) for name, value in self._given.to_json().items()},
        }
        changed: JSON = None if self._now is self._given else self._now.to_json()
        return {"mixture": mixture, "changed": changed}

    def _load(self, state: Mapping[str, Any]) -> None:
        changed = state["changed"]
        new = self._given
        if changed is not None:
            new = restored_weighting(changed, len(self._mixture.sizes))
        try:
            mixture = self._mix(new, self._mixture.sizes, self._mixture.names)
        except OptionError as wrong:
            raise StateMismatchError(
                f"changed: the state has weights that cannot be mixed: {wrong}"
            ) from wrong
        self._now, self._mixture = new, mixture
