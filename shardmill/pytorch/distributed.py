"""The samples of a dataset, each rank its share, in a new order every epoch.

In: a dataset, a rank, a seed.  Out: dataset indices.
Promise: epoch e is `sampling.Permutation(n, seed, "epoch", e)`, strided by rank: rank r has
positions r, r + num_replicas, ...; the ranks are a disjoint cover of the epoch but for its rest
(`drop_last`), or with the first samples of the epoch once more (padding). 10**9 samples take no
more memory than ten.
Not here: mixtures.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from shardmill.pytorch.ranked import RankedSampler
from shardmill.pytorch.states import State, describe_data
from shardmill.records import OffsetArray
from shardmill.sampling import InOrder, Order, Permutation


class DistributedSampler(RankedSampler):
    """As torch's, with an exact position that any number of ranks can go on from.

    `num_replicas` and `rank` are those of torch.distributed when it is initialised, else 1 and 0.
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
        """`dataset` needs `__len__`; a `fingerprint`, if it has one, is kept in the state."""
        super().__init__(
            len(dataset), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self.dataset = dataset
        self._kept: tuple[int, Order] | None = None  # the order of an epoch

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
