"""The weights of a mixture from some sample on.

In: weights, a temperature, phases as people write them.  Out: one record, checked, and as JSON.
Promise: what JSON gives back mixes exactly as what was saved.
Not here: drawing samples.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.pytorch.states import State
from shardmill.records import JSON, OffsetArray

Weight: TypeAlias = "float | int | Fraction"
Weights: TypeAlias = Sequence[Weight]
Phases: TypeAlias = Sequence[tuple[SupportsIndex, Weights]]

_MOST_OWED = 64.0  # samples: far beyond what a mixture ever owes


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
        told: State = {
            "weights": [_plain(weight) for weight in self.weights],
            "temperature": float(self.temperature),
            "phases": [[start, [_plain(w) for w in each]] for start, each in self.phases],
        }
        if self.before:
            told |= {"start": self.start, "before": list(self.before), "owed": list(self.owed)}
        return told


def restored_weighting(state: JSON, num_sources: int) -> Weighting:
    """What `to_json` of a changed weighting gave."""
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
        f"MixtureSampler: changed={state!r:.300}; wanted weights, temperature, phases, start and, "
        f"for {num_sources} datasets, samples before it that sum to start, and what is owed"
    )


def checked_weighting(weights: Weights, temperature: float, phases: Phases) -> Weighting:
    """What a person gave, in the right form; `check` looks at the numbers."""
    return Weighting(
        weights=as_weights(weights, "weights"),
        temperature=temperature,
        phases=tuple(map(_as_phase, _listed(phases, "phases"))),
    )


def as_weights(weights: Weights, what: str) -> tuple[Weight, ...]:
    return tuple(_listed(weights, what))


def _as_phase(phase: Any) -> tuple[int, tuple[Weight, ...]]:
    pair = tuple(phase) if isinstance(phase, Sequence) else ()
    if len(pair) != 2:
        raise OptionError(f"phases hold {phase!r:.80}; wanted (first sample, weights)")
    start = whole_number(pair[0], "first sample of a phase")
    return start, as_weights(pair[1], f"phases: weights from sample {start:,} on")


def _listed(values: Any, what: str) -> Sequence[Any]:
    if isinstance(values, str | Mapping) or not (
        isinstance(values, Sequence) or hasattr(values, "__array__")
    ):
        raise OptionError(f"{what}={values!r:.80}: wanted a list")
    return values  # type: ignore[no-any-return]


def checked_edges(cumulative_sizes: Sequence[SupportsIndex]) -> OffsetArray:
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
        raise OptionError(f"{what} are empty; wanted {num_sources}, one a dataset")
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
            raise StateMismatchError(f"MixtureSampler: weight {value!r} in the state") from wrong
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise StateMismatchError(f"MixtureSampler: weight {value!r} in the state, wanted a number")


def _phase(value: JSON) -> tuple[int, tuple[Weight, ...]]:
    match value:
        case [int(start), list(weights)]:
            return start, tuple(map(_weight, weights))
    raise StateMismatchError(f"MixtureSampler: phase {value!r} in the state")
