"""Samplers with a position: one global order of samples, divided among ranks.

Of every `num_replicas` neighbours in the global order each rank gets one. So what all ranks have
drawn after the same number of steps is a contiguous part of the global order, and the position of a
run is (epoch, samples of it consumed by all ranks together). That is the state, and it may be
loaded on any number of ranks. Memory does not grow with the epoch.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, SupportsIndex, TypeAlias

import msgspec
import numpy as np
import torch
from torch.utils.data import Sampler

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, ShardmillError, StateMismatchError
from shardmill.loading.exclusion import ExcludedItems, exclusion_facts
from shardmill.loading.state import (
    MOST_SAMPLES,
    State,
    differences,
    read_count,
    read_envelope,
    refuse_differences,
    write_envelope,
)
from shardmill.records import JSON, OffsetArray
from shardmill.sampling import InOrder, Mixture, Order, Permutation
from shardmill.sampling.mixture import whole_shares
from shardmill.sampling.order import checked_seed

CHUNK = 2048  # samples whose order is computed at once
MOST_RANKS = 2**20  # bounds the padding of an epoch
_LONGEST = 160  # characters of JSON that a state holds as they are; longer ones are hashed


def check_state(
    state: object, own: State, *, free: tuple[str, ...], optional: tuple[str, ...] = (), here: str
) -> dict[str, Any]:
    """`state` if it equals `own` in kind, version, keys and values.

    Values of `free` may differ, and it may have the keys `optional`.
    """
    found = read_envelope(state, str(own["kind"]), own.keys(), optional=optional)
    compared = own.keys() - {*free, "version", "kind"}
    refuse_differences(
        differences(
            {key: found[key] for key in compared}, {key: own[key] for key in compared}, here=here
        )
    )
    return found


def compact(value: JSON) -> JSON:
    """`value`, or its sha256 when it is long: a state stays under 1 KB with 200 sources."""
    text = json.dumps(value)
    if len(text) <= _LONGEST:
        return value
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def describe_data(dataset: Any) -> State:
    """What identifies a dataset: its length, and these attributes if it has them."""
    described: State = {"samples": len(dataset)}
    for name in ("fingerprint", "seq_len", "pack_sequences"):
        value = getattr(dataset, name, None)
        if isinstance(value, str | int):
            described[name] = value
    return described


def describe_exclusions(dataset: Any) -> JSON:
    """What identifies the exclusions of a dataset and of the datasets it consists of."""
    return exclusion_facts(_excluded(dataset, ""))


def _excluded(dataset: Any, name: str) -> dict[str, ExcludedItems]:
    found: dict[str, ExcludedItems] = {}
    own = getattr(dataset, "excluded", None)
    if isinstance(own, ExcludedItems):
        found[name] = own
    elif isinstance(own, Mapping):
        found |= {f"{name}/{at}": one for at, one in own.items()}
    for at, part in enumerate(getattr(dataset, "datasets", ())):
        found |= _excluded(part, f"{name}/{at}")
    return found


class RankedSampler(Sampler[int]):
    """What all samplers share: ranks, epochs and positions."""

    kind: str  # names the class in states
    _free: tuple[str, ...] = ()  # keys of `_identity` whose values `_load` takes over

    def __init__(
        self,
        epoch_samples: int,
        num_replicas: SupportsIndex | None,
        rank: SupportsIndex | None,
        *,
        shuffle: bool,
        seed: SupportsIndex,
        drop_last: bool,
    ) -> None:
        self.num_replicas, self.rank = _checked_ranks(num_replicas, rank)
        self.shuffle = bool(shuffle)
        self.seed = checked_seed(seed)
        self.drop_last = bool(drop_last)
        self.epoch_samples = epoch_samples  # of all ranks together, without padding
        self.revision = 0  # increases when samples to come change
        self._epoch = 0
        self._samples = 0  # of this epoch, drawn by all ranks together
        self._waits = False  # the next iteration begins at `_samples`, not at 0
        self._skip = 0
        self._turn = object()  # the iteration that moves `_samples`

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def samples(self) -> int:
        """Samples of this epoch consumed so far, by all ranks together."""
        return self._skip * self.num_replicas or self._samples

    @property
    def begins_at(self) -> int:
        """Where the next iteration begins: after a loaded state or a skip, else at 0."""
        return self.samples if self._waits or self._skip else 0

    @property
    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.remaining(0)

    @property
    def total_size(self) -> int:
        """Samples of all ranks in a whole epoch: without the remainder, or with padding."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Move to the start of another epoch. Naming the current one keeps the position."""
        number = whole_number(epoch, "epoch", least=0)
        self._check_epoch(number, OptionError)
        if number != self._epoch:
            self._epoch, self._samples, self._waits = number, 0, False

    def set_skip(self, skip: SupportsIndex) -> None:
        """Begin the next iteration after `skip` samples of this rank, once."""
        self._skip = whole_number(skip, "skip", least=0)
        self._samples, self._waits = 0, False

    def move_to(self, samples: int) -> None:
        """Begin the next iteration here. A loader calls this after every batch it gave."""
        self._samples, self._skip, self._waits = samples, 0, True

    def remaining(self, start: int) -> int:
        """Samples that each rank has left from global sample `start` on."""
        left = max(0, self.epoch_samples - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def draw(self, start: int, count: int) -> OffsetArray:
        """Dataset indices of this rank's next `count` samples from global sample `start` on."""
        firsts = start + self.num_replicas * np.arange(count, dtype=np.int64)
        return self._take(self._epoch, firsts + self._turn_of(self._epoch, firsts))

    def __iter__(self) -> Iterator[int]:
        start = self.begins_at
        self._samples, self._skip, self._waits = start, 0, False
        self._turn = turn = object()
        return self._walk(start, turn)

    def _walk(self, start: int, turn: object) -> Iterator[int]:
        epoch, at = self._epoch, start
        while count := min(CHUNK, self.remaining(at)):
            revision = self.revision
            for index in self.draw(at, count).tolist():
                if revision != self.revision:
                    break
                if turn is not self._turn or epoch != self._epoch:
                    raise OptionError(
                        "this iterator of the sampler has ended: a newer one was made, or "
                        "set_epoch or load_state_dict moved the sampler; iterate again"
                    )
                at += self.num_replicas
                self._samples = at
                yield index

    def state_dict(self) -> State:
        """The position: equal on all ranks except for "rank", for any number of ranks."""
        return write_envelope(
            self.kind,
            epoch=self._epoch,
            samples=self.samples,
            seed=self.seed,
            shuffle=self.shuffle,
            num_replicas=self.num_replicas,
            rank=self.rank,
            **self._identity(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: the next iteration gives the rest of its epoch."""
        counts = ("epoch", "samples", "num_replicas", "rank")
        free = (*counts, *self._free)
        found = check_state(state, self.state_dict(), free=free, here="this sampler")
        epoch, samples, _, _ = (read_count(found, name) for name in counts)
        if samples > self.epoch_samples + MOST_RANKS:  # padding is less than one sample per rank
            raise StateMismatchError(
                f"samples: the state has {samples:,}, but an epoch has {self.epoch_samples:,}; it "
                f"was changed since it was saved"
            )
        self._check_epoch(epoch, StateMismatchError)
        self._load(found)
        self._epoch = epoch
        self.move_to(samples)
        self._turn = object()
        self.revision += 1

    def _check_epoch(self, epoch: int, error: type[ShardmillError]) -> None:
        """Refuse an epoch whose samples cannot be numbered."""
        if (epoch + 1) * self.epoch_samples > MOST_SAMPLES:
            raise error(
                f"{{epoch}} of {self.epoch_samples:,} samples: a run has at most "
                f"{MOST_SAMPLES:,} samples",
                epoch=epoch,
            )

    @abstractmethod
    def _take(self, epoch: int, positions: OffsetArray) -> OffsetArray:
        """Dataset indices at these positions of an epoch; padding asks for positions past it."""

    @abstractmethod
    def _identity(self) -> State:
        """What else decides the order, for the state."""

    def _turn_of(self, epoch: int, firsts: OffsetArray) -> OffsetArray | int:  # noqa: ARG002
        """Which of the `num_replicas` neighbours from each of `firsts` on is this rank's."""
        return self.rank

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over the keys in `_free`; refuse before changing anything."""


def _checked_ranks(
    num_replicas: SupportsIndex | None, rank: SupportsIndex | None
) -> tuple[int, int]:
    """As given, else those of torch.distributed when it is initialised, else one rank."""
    dist = torch.distributed
    running = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if running else 1
    if rank is None:
        rank = dist.get_rank() if running else 0
    world = whole_number(num_replicas, "num_replicas")
    number = whole_number(rank, "rank", least=0)
    if number >= world:
        raise OptionError(
            f"{{rank}}: wanted 0 to {world - 1}, for {{num_replicas}}",
            rank=number,
            num_replicas=world,
        )
    return world, number


class DistributedSampler(RankedSampler):
    """Like torch's, with an exact position that any number of ranks can continue from.

    Epoch `e` is `Permutation(n, seed, "epoch", e)`, strided by rank. The ranks are a disjoint cover
    of the epoch except for its remainder (`drop_last`), or with its first samples repeated as
    padding.
    """

    kind = "shardmill.DistributedSampler"

    def __init__(
        self,
        dataset: Any,
        num_replicas: SupportsIndex | None = None,
        rank: SupportsIndex | None = None,
        shuffle: bool = True,
        seed: SupportsIndex = 0,
        drop_last: bool = True,
    ) -> None:
        """`dataset` needs `__len__`; its `fingerprint`, if it has one, is kept in the state.
        `num_replicas` and `rank`: None takes those of torch.distributed, or 1 and 0."""
        super().__init__(
            len(dataset), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self.dataset = dataset
        self._kept: tuple[int, Order] | None = None  # an epoch and its order

    def __repr__(self) -> str:
        return (
            f"DistributedSampler(samples={self.epoch_samples:,}, rank={self.rank} of "
            f"{self.num_replicas}, epoch={self.epoch}, seed={self.seed})"
        )

    def _take(self, epoch: int, positions: OffsetArray) -> OffsetArray:
        if self._kept is None or self._kept[0] != epoch:
            make = Permutation if self.shuffle else InOrder
            self._kept = (epoch, make(self.epoch_samples, self.seed, "epoch", epoch))
        return self._kept[1].take(positions % self.epoch_samples)

    def _identity(self) -> State:
        return {"data": describe_data(self.dataset)}


Weight: TypeAlias = "float | int | Fraction"
Weights: TypeAlias = Sequence[Weight]
Phases: TypeAlias = Sequence[tuple[SupportsIndex, Weights]]
StoredWeight: TypeAlias = int | float | str  # "1/3": a fraction that no number of JSON is

_MOST_OWED = 64.0  # samples: far more than a mixture ever owes


class Weighting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How datasets are mixed from global sample `start` on, as a state holds it."""

    weights: list[StoredWeight]
    temperature: float
    phases: list[tuple[int, list[StoredWeight]]]  # (first global sample, weights)
    start: int = 0
    before: list[int] = []  # samples of each dataset before `start`; empty: none
    owed: list[float] = []  # exact shares before `start`, less `before`

    def to_json(self) -> State:
        described: State = {
            "weights": [*self.weights],
            "temperature": self.temperature,
            "phases": [[start, [*weights]] for start, weights in self.phases],
        }
        if self.before:
            described |= {"start": self.start, "before": [*self.before], "owed": [*self.owed]}
        return described


def _restored(state: JSON, num_sources: int) -> Weighting:
    """The inverse of `to_json`, for weights that were changed during the run."""
    try:
        found = msgspec.convert(state, Weighting)
        sound = len(found.before) == len(found.owed) == num_sources and min(found.before) >= 0
        sound = sound and sum(found.before) == found.start and found.to_json() == state
        if sound and all(abs(due) < _MOST_OWED for due in found.owed):
            return found
        wrong = f"wanted {num_sources} datasets, with samples before it that sum to start"
    except msgspec.ValidationError as problem:
        wrong = str(problem)
    raise StateMismatchError(f"changed: the state has {state!r:.300}: {wrong}")


def _stored_weights(weights: Any, num_sources: int, what: str) -> list[StoredWeight]:
    """The weights of all datasets, checked."""
    _check_list(weights, what)
    if len(weights) != num_sources:
        raise OptionError(
            f"{what} and datasets must have the same length: {len(weights) or 'empty, no'} weights "
            f"for {num_sources} datasets"
        )
    for number, weight in enumerate(weights):
        real = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not real or not math.isfinite(weight) or weight < 0:
            raise OptionError(
                f"{what} must be non-negative finite numbers: dataset {number} has {weight!r}"
            )
    if not any(weights):
        raise OptionError(f"{what} must sum to > 0, but all are 0")
    return [_stored(weight) for weight in weights]


def _stored(weight: Weight) -> StoredWeight:
    if not isinstance(weight, numbers.Rational):
        return float(weight)
    numerator, denominator = int(weight.numerator), int(weight.denominator)
    return numerator if denominator == 1 else f"{numerator}/{denominator}"


def _stored_phase(phase: Any, num_sources: int) -> tuple[int, list[StoredWeight]]:
    pair = tuple(phase) if isinstance(phase, Sequence) else ()
    if len(pair) != 2:
        raise OptionError(
            f"{{phases}} hold {phase!r:.80}; wanted (first sample, weights)", phases=...
        )
    start = whole_number(pair[0], "phase_start")
    what = f"phases: weights from sample {start:,} on"
    return start, _stored_weights(pair[1], num_sources, what)


def _check_list(values: Any, what: str) -> None:
    is_list = isinstance(values, Sequence) or hasattr(values, "__array__")
    if not is_list or isinstance(values, str):
        raise OptionError(f"{what}={values!r:.80}: wanted a list")


def _checked_temperature(heat: Any) -> float:
    real = isinstance(heat, numbers.Real) and not isinstance(heat, bool)
    if not real or not 0 < heat < math.inf:
        raise OptionError(f"temperature={heat!r}: must be positive and finite")
    return float(heat)


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


class MixtureSampler(RankedSampler):
    """Samples of several datasets by weight; `cumulative_sizes` as `MixtureDataset` has them.

    Position `i` of epoch `e` is sample `e * N + i` of one endless `sampling.Mixture`, where N is
    the number of all items. So shares are exact at every prefix, and no dataset repeats an item
    before all of its items were given, also across epochs.

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
        _check_list(phases, "phases")
        self._given = self._now = Weighting(
            weights=_stored_weights(weights, len(sizes), "weights"),
            temperature=_checked_temperature(temperature),
            phases=[_stored_phase(phase, len(sizes)) for phase in phases],
        )
        super().__init__(
            sum(sizes), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._mixture = self._mix(self._given, sizes, names)
        # Ranks take neighbours in a random order: with a fixed one, two equal datasets on two ranks
        # would give each rank one dataset for ever.
        self._turns = Permutation(2**62, self.seed, "ranks")

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each dataset in the next sample."""
        at = self._run_samples - self._now.start
        return tuple(float(share) for share in self._mixture.shares(max(0, at)))

    def update_weights(self, weights: Weights, temperature: float | None = None) -> None:
        """Other weights from the next sample on, until the next phase if there is one.

        A new temperature holds for the rest of the run. The next sample is the one after the last
        batch that `StatefulDataLoader` gave, whatever its workers read ahead; in another loader it
        is the next one to be drawn. Call it on all ranks at the same step. Setting the current
        weights again, for instance after a resume, changes nothing.
        """
        at, now = self._run_samples, self._now
        heat = now.temperature if temperature is None else _checked_temperature(temperature)
        new = Weighting(
            weights=_stored_weights(weights, len(self._mixture.sizes), "weights"),
            temperature=heat,
            phases=[phase for phase in now.phases if phase[0] > at],
            start=at,
            before=self._counts(at),
            owed=[float(due) for due in self._mixture.owed(at - now.start)],
        )
        mixture = self._mix(new, self._mixture.sizes, self._mixture.names)
        same = mixture.shares() == self._mixture.shares(at - now.start)
        if same and new.temperature == now.temperature:
            return
        self._now, self._mixture = new, mixture
        self.revision += 1

    def counts(self) -> dict[str, int]:
        """Samples of each dataset since the start of the run, by name, over all ranks."""
        return dict(zip(self._mixture.names, self._counts(self._run_samples), strict=True))

    def __repr__(self) -> str:
        return (
            f"MixtureSampler({self._mixture!r}, samples={self.epoch_samples:,}, "
            f"rank={self.rank} of {self.num_replicas}, epoch={self.epoch})"
        )

    @property
    def _run_samples(self) -> int:
        """Samples since the start of the run, by all ranks together."""
        return self.epoch * self.epoch_samples + self.samples

    def _mix(
        self, weighting: Weighting, sizes: Sequence[int], names: Sequence[str] | None
    ) -> Mixture:
        numbers = [str(number) for number in range(len(sizes))]

        def shares(weights: Sequence[StoredWeight]) -> Sequence[int]:
            exact = [Fraction(weight) if isinstance(weight, str) else weight for weight in weights]
            return whole_shares(exact, names or numbers, temperature=weighting.temperature)

        mixture = Mixture(
            sizes,
            shares(weighting.weights),
            seed=self.seed,
            names=names,
            phases=[(start - weighting.start, shares(each)) for start, each in weighting.phases],
            order=Permutation if self.shuffle else InOrder,
        )
        if weighting.before:
            mixture.carry_over(weighting.owed, weighting.before)
        return mixture

    def _counts(self, at: int) -> list[int]:
        """Samples of each dataset before global sample `at`."""
        self._check_known(at)
        counts: list[int] = self._mixture.counts(at - self._now.start).tolist()
        return counts

    def _take(self, epoch: int, positions: OffsetArray) -> OffsetArray:
        numbers = epoch * self.epoch_samples + positions
        self._check_known(int(numbers.min(initial=MOST_SAMPLES)))
        found = self._mixture.take(numbers - self._now.start)
        return self._edges[found.source] + found.item

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
        changed, sizes = state["changed"], self._mixture.sizes
        new = self._given if changed is None else _restored(changed, len(sizes))
        try:
            mixture = self._mix(new, sizes, self._mixture.names)
        except (ValueError, ZeroDivisionError) as wrong:  # also a text that is no fraction
            raise StateMismatchError(
                f"changed: the state has weights that cannot be mixed: {wrong}"
            ) from wrong
        self._now, self._mixture = new, mixture
