"""One global order, dealt to ranks: what all samplers here have in common.

In: how many samples an epoch has, a rank and how many there are.  Out: this rank's samples.
Promise: of every `num_replicas` neighbours in the global order each rank gets one, so what all
ranks have drawn at the same count is a run of the global order, and a run's position is (epoch,
samples of it consumed by all ranks together). That is the state: it may be loaded with any number
of ranks. No array of the epoch's size.
Not here: the order (distributed, mixture_sampler), batches (drawing).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Sampler

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, ShardmillError, StateMismatchError
from shardmill.loading.state import MOST_SAMPLES
from shardmill.pytorch.states import VERSION, State, check_state, position
from shardmill.records import OffsetArray
from shardmill.sampling.keys import checked_seed

CHUNK = 2048  # samples whose order is computed at once
MOST_RANKS = 2**20  # nobody has more, so nobody pads an epoch by more


class RankedSampler(Sampler[int]):
    """The part of the samplers that knows ranks, epochs and positions."""

    kind: str  # names the class in states

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
        self.revision = 0  # goes up when samples to come are no longer what they were
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
        """Where the next iteration begins: where a state or a skip says, else at 0."""
        return self.samples if self._waits or self._skip else 0

    @property
    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.remaining(0)

    @property
    def total_size(self) -> int:
        """Samples of all ranks in a whole epoch: without the rest, or with padding."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Go to the start of another epoch. Naming the present one changes nothing, so a
        position that was loaded is kept."""
        number = whole_number(epoch, "epoch", least=0)
        self._check_epoch(number, OptionError)
        if number != self._epoch:
            self._epoch, self._samples, self._waits = number, 0, False

    def set_skip(self, skip: SupportsIndex) -> None:
        """Let the next iteration begin behind so many samples of this rank."""
        self._skip = whole_number(skip, "skip", least=0)
        self._samples, self._waits = 0, False

    def move_to(self, samples: int) -> None:
        """The next iteration begins here: a loader says so after every batch that it gave."""
        self._samples, self._skip, self._waits = samples, 0, True

    def remaining(self, start: int) -> int:
        """Samples that this rank, like every other, has left from global sample `start` on."""
        left = max(0, self.epoch_samples - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def draw(self, start: int, count: int) -> OffsetArray:
        """Dataset indices of this rank's next `count` samples from global sample `start` on."""
        firsts = start + self.num_replicas * np.arange(count, dtype=np.int64)
        return self._take(self._epoch, firsts + self._place(self._epoch, firsts))

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
        """Where the run is: equal on all ranks but for "rank", and good for any number of them."""
        return {
            "version": VERSION,
            "kind": self.kind,
            "epoch": self._epoch,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration gives the rest of its epoch."""
        who = type(self).__name__
        free = ("epoch", "samples", "num_replicas", "rank", *self._free)
        found = check_state(state, self.state_dict(), free=free, who=who)
        epoch, samples = position(found, "epoch", who), position(found, "samples", who)
        for name in ("num_replicas", "rank"):
            position(found, name, who)
        if samples > self.epoch_samples + MOST_RANKS:  # padding is less than one sample a rank
            raise StateMismatchError(
                f"{who}: samples={samples:,}, but an epoch has {self.epoch_samples:,}; wanted what "
                f"state_dict() gave"
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
                f"{type(self).__name__}: epoch={epoch:,} of {self.epoch_samples:,} samples: a run "
                f"has at most {MOST_SAMPLES:,} samples"
            )

    _free: tuple[str, ...] = ()  # keys of `_identity` that `_load` takes over

    @abstractmethod
    def _take(self, epoch: int, positions: OffsetArray) -> OffsetArray:
        """Dataset indices at these positions of an epoch; padding asks behind its end."""

    @abstractmethod
    def _identity(self) -> State:
        """What else decides the order, for the state."""

    def _place(self, epoch: int, firsts: OffsetArray) -> OffsetArray | int:  # noqa: ARG002
        """Which of the `num_replicas` neighbours from each of `firsts` on are this rank's."""
        return self.rank

    def _load(self, state: State) -> None:
        """Take over the keys in `_free`; refuse before changing anything."""


def _checked_ranks(
    num_replicas: SupportsIndex | None, rank: SupportsIndex | None
) -> tuple[int, int]:
    """As given, else those of torch.distributed when it runs, else one rank."""
    dist = torch.distributed
    running = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if running else 1
    if rank is None:
        rank = dist.get_rank() if running else 0
    world = whole_number(num_replicas, "num_replicas")
    number = whole_number(rank, "rank", least=0)
    if number >= world:
        raise OptionError(f"rank={number}: wanted 0 to {world - 1}, for num_replicas={world}")
    return world, number
