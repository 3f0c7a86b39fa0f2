"""Several datasets behind one another, mixed by weight.

In: where each dataset begins, weights, a rank, a seed.  Out: indices of a `MixtureDataset`.
Promise: position i of epoch e is sample e * N + i of one endless `sampling.Mixture`, N being the
number of all items: shares are exact at every prefix, and no dataset repeats an item before all of
its items came, also across epochs. New weights hold from the very next sample on; every dataset
goes on where it was. Ranks take turns in an order of chance, or two equal datasets on two ranks
would give one rank one dataset for ever. Padding (`drop_last=False`) gives samples of the next
epoch, which come again there.
Not here: reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import SupportsIndex

import numpy as np

from shardmill.errors import OptionError, StateMismatchError
from shardmill.pytorch.mixture_weights import (
    Phases,
    Weighting,
    Weights,
    as_weights,
    checked_edges,
    checked_weighting,
    restored_weighting,
)
from shardmill.pytorch.ranked import RankedSampler
from shardmill.pytorch.states import State, compact
from shardmill.records import JSON, OffsetArray
from shardmill.sampling import InOrder, Mixture, Order, Permutation, epochs
from shardmill.sampling.order import by_value


class MixtureSampler(RankedSampler):
    """Samples of several datasets by weight; `cumulative_sizes` as `MixtureDataset` has them.

    `phases` are (first sample, weights): from that sample on, counted over all ranks and epochs,
    the weights are those. `names` decide the order inside a dataset with the seed: give
    `dataset_names`, and leaving one dataset out later changes nothing in the others.
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
        self._edges = checked_edges(cumulative_sizes)
        sizes = np.diff(self._edges).tolist()
        given = checked_weighting(weights, temperature, phases)
        super().__init__(
            sum(sizes), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._given = self._now = given
        self._mixture = self._mix(given, sizes, names)
        # Whose turn it is among neighbours: see `_place`.
        self._turns = Permutation(2**62, self.seed, "ranks")

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each dataset in the next sample."""
        at = self.epoch * self.epoch_samples + self.samples - self._now.start
        return tuple(float(share) for share in self._mixture.shares(max(0, at)))

    def update_weights(self, weights: Weights, temperature: float | None = None) -> None:
        """Other weights from the next sample on, until the next phase if there is one.

        A new temperature holds for the rest of the run. The next sample is the one behind the last
        batch that `StatefulDataLoader` gave, whatever its workers read ahead; in another loader it
        is the next one to be drawn. Call it on all ranks at the same step. The weights of the
        moment change nothing: setting them again after a resume is no harm.
        """
        at = self.epoch * self.epoch_samples + self.samples
        before = self._counts(at)
        new = Weighting(
            weights=as_weights(weights, "weights"),
            temperature=self._now.temperature if temperature is None else temperature,
            phases=tuple(phase for phase in self._now.phases if phase[0] > at),
            start=at,
            before=before,
            owed=tuple(float(due) for due in self._mixture.owed(at - self._now.start)),
        )
        mixture = self._mix(new, self._mixture.sizes, self._mixture.names)
        same = mixture.shares() == self._mixture.shares(at - self._now.start)
        if same and new.temperature == self._now.temperature:
            return
        self._now, self._mixture = new, mixture
        self.revision += 1

    def counts(self) -> dict[str, int]:
        """Samples of each dataset since the beginning of the run, by name, over all ranks."""
        told = self._counts(self.epoch * self.epoch_samples + self.samples)
        return dict(zip(self._mixture.names, told, strict=True))

    def __repr__(self) -> str:
        return (
            f"MixtureSampler({self._mixture!r}, samples={self.epoch_samples:,}, "
            f"rank={self.rank} of {self.num_replicas}, epoch={self.epoch})"
        )

    def _mix(
        self, weighting: Weighting, sizes: Sequence[int], names: Sequence[str] | None
    ) -> Mixture:
        weighting.check(len(sizes))
        return Mixture(
            sizes,
            weighting.weights,
            seed=self.seed,
            names=names,
            temperature=weighting.temperature,
            phases=[(start - weighting.start, chosen) for start, chosen in weighting.phases],
            owed=weighting.owed,
        )

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

    def _place(self, epoch: int, firsts: OffsetArray) -> OffsetArray | int:
        if self.num_replicas == 1:
            return 0
        numbers = epoch * self.epoch_samples + firsts
        return (self._turns.take(numbers) + self.rank) % self.num_replicas

    def _check_known(self, at: int) -> None:
        if at < self._now.start:
            raise OptionError(
                f"sample {at:,} comes before sample {self._now.start:,}, where update_weights was "
                f"called, and weights of the past are not kept. Go on: set_epoch({self.epoch + 1})"
            )

    def _identity(self) -> State:
        mixture: State = {
            "names": compact(list(self._mixture.names)),
            "sizes": compact(list(self._mixture.sizes)),
            **{name: compact(value) for name, value in self._given.to_json().items()},
        }
        changed: JSON = None if self._now is self._given else self._now.to_json()
        return {"mixture": mixture, "changed": changed}

    def _load(self, state: State) -> None:
        changed = state["changed"]
        new = self._given
        if changed is not None:
            new = restored_weighting(changed, len(self._mixture.sizes))
        try:
            mixture = self._mix(new, self._mixture.sizes, self._mixture.names)
        except OptionError as wrong:
            raise StateMismatchError(f"MixtureSampler: changed weights: {wrong}") from wrong
        self._now, self._mixture = new, mixture
