"""One global order, dealt to ranks: what all samplers here have in common.

In: how many samples an epoch has, a rank and how many there are.  Out: this rank's samples.
Promise: of every `num_replicas` neighbours in the global order each rank gets one, so what all
ranks have drawn at the same count is a run of the global order, and a run's position is (epoch,
samples of it consumed by all ranks together). That is the state: it may be loaded with any number
of ranks. No array of the epoch's size.
Not here: the order (distributed, mixture_sampler), batches (drawing).

The samples of a dataset, each rank its share, in a new order every epoch.

In: a dataset, a rank, a seed.  Out: dataset indices.
Promise: epoch e is `sampling.Permutation(n, seed, "epoch", e)`, strided by rank: rank r has
positions r, r + num_replicas, ...; the ranks are a disjoint cover of the epoch but for its rest
(`drop_last`), or with the first samples of the epoch once more (padding). 10**9 samples take no
more memory than ten.
Not here: mixtures.

Batches of indices, drawn ahead of what was given.

In: a sampler with a position.  Out: lists of indices, and for each where the run is behind it.
Promise: a batch that was drawn before the sampler's order changed (new weights) is told apart from
those after, and what it held is drawn again by the new order.
Not here: reading (stateful).

States that are refused when they belong to something else.

In: a saved state and what this object would save.  Out: nothing, or an error that names every
difference.
Promise: what passes here was saved by the same kind of object, over the same data, in the same
order; numbers are whole numbers.
Not here: what the numbers mean.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Sampler

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, ShardmillError, StateMismatchError
from shardmill.loading.exclusion import ExcludedItems, exclusion_facts
from shardmill.loading.state import MOST_SAMPLES
from shardmill.records import JSON, OffsetArray
from shardmill.sampling import InOrder, Order, Permutation
from shardmill.sampling.seeds import checked_seed

State = dict[str, JSON]

VERSION = 1
_LONGEST = 160  # characters of JSON that a state holds in clear; longer ones are hashed


def check_state(state: object, own: Mapping[str, JSON], *, free: Sequence[str], who: str) -> State:
    """`state` if it has the keys of `own` and the same values, but for those in `free`."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"{who}: a state of type {type(state).__name__}; wanted what state_dict() gave"
        )
    found = dict(state)
    if found.get("kind") != own["kind"]:
        raise StateMismatchError(
            f"{who}: this state is of kind {found.get('kind')!r}, wanted {own['kind']!r}"
        )
    if found.get("version") != own["version"]:
        raise StateMismatchError(
            f"{who}: the state has version {found.get('version')!r}, but this shardmill reads "
            f"version {own['version']}; use the shardmill that wrote it, or a later one"
        )
    wrong = list(_differences(found, own, free))
    if wrong:
        raise StateMismatchError(f"{who}: not the state of this run. " + "; ".join(wrong))
    return found


def position(state: Mapping[str, JSON], name: str, who: str) -> int:
    """A whole number of at least 0 from a state."""
    value = state[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateMismatchError(f"{who}: {name}={value!r}, wanted a whole number of at least 0")
    return value


def compact(value: JSON) -> JSON:
    """`value`, or its sha256 when it is long: a state stays under 1 KB with 200 sources."""
    text = json.dumps(value)
    if len(text) <= _LONGEST:
        return value
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def describe_data(dataset: Any) -> State:
    """What tells a dataset from others: its length, and these attributes if it has them."""
    told: State = {"samples": len(dataset)}
    for name in ("fingerprint", "seq_len", "pack_sequences"):
        value = getattr(dataset, name, None)
        if isinstance(value, str | int):
            told[name] = value
    return told


def describe_exclusions(dataset: Any) -> JSON:
    """What tells the exclusions of a dataset, and of those it consists of, from others."""
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


def _differences(
    found: Mapping[str, JSON], own: Mapping[str, JSON], free: Sequence[str]
) -> list[str]:
    wrong = []
    for name in sorted(found.keys() | own.keys()):
        if name not in found:
            wrong.append(f"{name}: missing in the state")
        elif name not in own:
            wrong.append(f"{name}: the state has it, this shardmill does not know it")
        elif name not in free:
            wrong += _compare(name, found[name], own[name])
    return wrong


def _compare(name: str, found: JSON, own: JSON) -> list[str]:
    if isinstance(found, dict) and isinstance(own, dict):
        told = sorted(found.keys() | own.keys())
        return [
            line for key in told for line in _compare(f"{name}.{key}", found.get(key), own.get(key))
        ]
    if type(found) is type(own) and found == own:
        return []
    return [f"{name}: the state has {found!r}, here it is {own!r}"]


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch that is being read."""

    revision: int  # of the sampler's order when it was drawn
    stop: int  # samples of the epoch, of all ranks, consumed once it is given


class BatchDraws:
    """The batch sampler of a `DataLoader`. It is its own iterator, begins where the sampler is,
    and may go on after its end when new weights put it back."""

    def __init__(self, sampler: RankedSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.under_way: deque[Drawn] = deque()  # in the order in which they will be given
        self._go_back()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._num_batches(0)

    @property
    def at_end(self) -> bool:
        """No batch is left behind the sampler's position."""
        return not self._num_batches(self._sampler.samples)

    def __iter__(self) -> BatchDraws:
        self.under_way.clear()
        self._go_back()
        return self

    def __next__(self) -> list[int]:
        if self._revision != self._sampler.revision:
            self._go_back()
        if not self._num_batches(self._at):
            raise StopIteration
        size = min(self._batch_size, self._sampler.remaining(self._at))
        if self._used + size > len(self._ready):
            self._fill()
        indices: list[int] = self._ready[self._used : self._used + size].tolist()
        self._used += size
        self._at += size * self._sampler.num_replicas
        self.under_way.append(Drawn(self._revision, self._at))
        return indices

    def _go_back(self) -> None:
        self._revision = self._sampler.revision
        self._at = self._sampler.samples
        self._ready = np.empty(0, np.int64)  # indices of this rank from `_at - used` on
        self._used = 0

    def _fill(self) -> None:
        """Whole batches at once: an order costs less by the thousand."""
        many = max(1, CHUNK // self._batch_size) * self._batch_size
        count = min(many, self._sampler.remaining(self._at))
        self._ready, self._used = self._sampler.draw(self._at, count), 0

    def _num_batches(self, start: int) -> int:
        left = self._sampler.remaining(start)
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)
