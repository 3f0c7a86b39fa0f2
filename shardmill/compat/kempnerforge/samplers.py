"""Samplers with a position: one global order of samples, divided among ranks.

Of every `num_replicas` neighbours in the global order each rank gets one. So what all ranks have
drawn after the same number of steps is a contiguous part of the global order, and the position of a
run is (epoch, samples of it consumed by all ranks together). That is the state, and it may be
loaded on any number of ranks. Memory does not grow with the epoch.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

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
from shardmill.sampling import InOrder, Order, Permutation
from shardmill.sampling.order import checked_seed

CHUNK = 2048  # samples whose order is computed at once
MOST_RANKS = 2**20  # bounds the padding of an epoch
_LONGEST = 160  # characters of JSON that a state holds as they are; longer ones are hashed


def check_state(state: object, own: State, *, free: tuple[str, ...], here: str) -> dict[str, Any]:
    """`state` if it equals `own` in kind, version, keys and values; values of `free` may differ."""
    found = read_envelope(state, str(own["kind"]), own.keys())
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
        """Begin the next iteration after so many samples of this rank."""
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch that is being read."""

    revision: int  # of the sampler's order when it was drawn
    stop: int  # samples of the epoch, of all ranks, consumed once it is given


class BatchDraws:
    """The batch sampler of a `DataLoader`, drawn ahead of what was given.

    It is its own iterator and begins where the sampler is. A batch that was drawn before the order
    changed (new weights) can be told from later ones, and its samples are drawn again; so it may
    continue after its end.
    """

    _ready: OffsetArray  # indices of this rank from `_at - used` on
    _used: int

    def __init__(self, sampler: RankedSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.under_way: deque[Drawn] = deque()  # in the order in which they will be given
        self._rewind()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._num_batches(0)

    @property
    def at_end(self) -> bool:
        """Whether no batch is left after the sampler's position."""
        return not self._num_batches(self._sampler.samples)

    def __iter__(self) -> BatchDraws:
        self.under_way.clear()
        self._rewind()
        return self

    def __next__(self) -> list[int]:
        if self._revision != self._sampler.revision:
            self._rewind()
        if not self._num_batches(self._at):
            raise StopIteration
        size = min(self._batch_size, self._sampler.remaining(self._at))
        if self._used + size > len(self._ready):
            # whole batches at once: thousands of samples cost little more than a few
            many = max(1, CHUNK // self._batch_size) * self._batch_size
            count = min(many, self._sampler.remaining(self._at))
            self._ready, self._used = self._sampler.draw(self._at, count), 0
        indices: list[int] = self._ready[self._used : self._used + size].tolist()
        self._used += size
        self._at += size * self._sampler.num_replicas
        self.under_way.append(Drawn(self._revision, self._at))
        return indices

    def _rewind(self) -> None:
        """To the sampler's position, by its current order."""
        self._revision = self._sampler.revision
        self._at = self._sampler.samples
        self._ready, self._used = np.empty(0, np.int64), 0

    def _num_batches(self, start: int) -> int:
        left = self._sampler.remaining(start)
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)
