"""PyTorch's DataLoader with an exact position.

A state taken after batch k, loaded on any number of ranks with any batch size and any number of
workers, continues with the very next sample of the global order, whatever was read ahead. New
weights of a `MixtureSampler` hold from the next batch on. Torch's random state is left alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardmill.arguments import whole_number
from shardmill.compat.kempnerforge.datasets import collate
from shardmill.compat.kempnerforge.samplers import (
    CHUNK,
    DistributedSampler,
    RankedSampler,
    check_state,
    describe_data,
    describe_exclusions,
)
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.exclusion import warn_of_change
from shardmill.loading.state import State, read_count, write_envelope
from shardmill.threads import OneThread
from shardmill.trainers.torch import has_accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Worker processes of a loader; nothing here changes which samples are given."""

    num_workers: int = 0  # reading is fast: start with none; the rest is then not used
    pin_memory: bool = False  # ignored without an accelerator
    prefetch_factor: int = 2  # batches that each worker reads ahead
    persistent_workers: bool = True  # workers stay from epoch to epoch
    multiprocessing_context: str | None = None  # "fork", "spawn", "forkserver"; None: torch's

    def options(self) -> dict[str, Any]:
        """Arguments for `torch.utils.data.DataLoader`."""
        pins = {"pin_memory": self.pin_memory and has_accelerator()}
        if not self.num_workers:
            return pins
        return {**asdict(self), **pins}


def read_config(config: object) -> LoaderConfig:
    """The loader's part of a training config; what it lacks is as in `LoaderConfig`."""
    if config is None or isinstance(config, LoaderConfig):
        return config or LoaderConfig()
    names = [field.name for field in fields(LoaderConfig)]
    if isinstance(config, Mapping):
        given = {name: config[name] for name in names if name in config}
        for key in map(str, config):  # other keys of a training config are none of our business
            near = get_close_matches(key, names, n=1, cutoff=0.8)
            if near and key not in names:
                raise OptionError(f"config has {key!r}; did you mean {near[0]!r}?")
    else:
        given = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if not given:
            raise OptionError(
                f"config={config!r:.100}: wanted an object or mapping with one of {names}"
            )
    if given.get("prefetch_factor", 2) is None:  # torch's word for its default
        del given["prefetch_factor"]
    for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
        if name in given:
            given[name] = whole_number(given[name], name, least=least)
    for name in ("pin_memory", "persistent_workers"):
        if not isinstance(given.get(name, True), bool):
            raise OptionError(f"{{{name}}}: wanted True or False", **{name: given[name]})
    return LoaderConfig(**given)


class BatchDraws:
    """The batch sampler of a `DataLoader`, drawn ahead of what was given.

    A batch that was drawn before the order changed (new weights) has another revision, and its
    samples are drawn again.
    """

    def __init__(self, sampler: RankedSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.under_way: deque[tuple[int, int]] = deque()
        # of each batch that is being read, in the order in which they will be given: the revision
        # of the order, and the samples of the epoch, of all ranks, consumed once it is given

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.num_batches(0)

    def num_batches(self, start: int) -> int:
        """Batches that are left from global sample `start` on."""
        left = self._sampler.remaining(start)
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        self.under_way.clear()
        sampler, size = self._sampler, self._batch_size
        # whole batches at once: thousands of samples cost little more than a few
        many = max(1, CHUNK // size)
        revision, at = sampler.revision, sampler.samples
        while batches := min(many, self.num_batches(at)):
            drawn = sampler.draw(at, min(batches * size, sampler.remaining(at))).tolist()
            for first in range(0, len(drawn), size):
                indices = drawn[first : first + size]
                at += len(indices) * sampler.num_replicas
                self.under_way.append((revision, at))
                yield indices
                if revision != sampler.revision:
                    revision, at = sampler.revision, sampler.samples
                    break


_KIND = "shardmill.StatefulDataLoader"
_EXCLUSIONS = "exclusions"  # only present when something is excluded; may differ on resume


class StatefulDataLoader:
    """Batches of a dataset, resumable.

    Iterating gives the rest of the current epoch; at its end the loader moves to the next one.
    After a `break`, iterating continues after the last batch given. A new iterator ends the
    previous one.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: SupportsIndex,
        sampler: RankedSampler | None = None,
        config: object = None,
        *,
        collate_fn: Callable[[Any], Any] = collate,
        drop_last: bool = True,
    ) -> None:
        """`batch_size`: samples of this rank. `sampler`: a `DistributedSampler` (the default, over
        torch.distributed's ranks) or a `MixtureSampler`. `config`: see `LoaderConfig`.
        `drop_last`: leave out an incomplete last batch."""
        self.dataset = dataset
        self.batch_size = whole_number(batch_size, "batch_size")
        self.sampler = self._checked_sampler(sampler)
        self.config = read_config(config)
        self._draws = BatchDraws(self.sampler, self.batch_size, drop_last=bool(drop_last))
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._draws,
            collate_fn=collate_fn,
            # its own: every iteration draws a seed for workers, and torch's must not move
            generator=torch.Generator().manual_seed(self.sampler.seed % 2**63),
            **self.config.options(),
        )
        self._count(0)
        self._current: Callable[[], _EpochBatches | None] = lambda: None

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def batches_yielded(self) -> int:
        """Batches given in this epoch, also before a resume. After the sampler was moved: as many
        as it would have taken to get there."""
        epoch, samples, batches = self._counted
        if (epoch, samples) == (self.sampler.epoch, self.sampler.samples):
            return batches
        return self.sampler.samples // (self.batch_size * self.sampler.num_replicas)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._draws)

    def __iter__(self) -> Iterator[Any]:
        self._end_current()
        batches = _EpochBatches(self)
        self._current = weakref.ref(batches)  # weak: workers end when the iterator is dropped
        return batches

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Move to the start of another epoch; naming the current one changes nothing."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> State:
        """The position after the last batch given: JSON, the same on all ranks, under 1 KB."""
        excluded = describe_exclusions(self.dataset)
        return write_envelope(
            _KIND,
            **({} if excluded is None else {_EXCLUSIONS: excluded}),
            epoch=self.sampler.epoch,
            samples=self.sampler.samples,
            batches_yielded=self.batches_yielded,
            data=describe_data(self.dataset),
            sampler=self.sampler.state_dict(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that `state` followed. An iteration under way ends."""
        own = self.state_dict()
        excluded = own.pop(_EXCLUSIONS, None)
        free = ("epoch", "samples", "batches_yielded", "sampler")
        found = check_state(state, own, free=free, optional=(_EXCLUSIONS,), here="this loader")
        batches, inner = read_count(found, "batches_yielded"), found["sampler"]
        for name in ("epoch", "samples"):
            if not isinstance(inner, dict) or inner.get(name) != found[name]:
                raise StateMismatchError(
                    f"{name}: the state has {found[name]!r:.80}, but its sampler has "
                    f"{inner!r:.200}; it was changed since it was saved"
                )
        self.sampler.load_state_dict(inner)
        self._count(batches)
        warn_of_change(found.get(_EXCLUSIONS), excluded, "StatefulDataLoader")
        self._end_current()

    def __repr__(self) -> str:
        return (
            f"StatefulDataLoader({self.dataset!r}, batch_size={self.batch_size}, "
            f"sampler={self.sampler!r}, num_workers={self.config.num_workers})"
        )

    def _count(self, batches: int) -> None:
        """So many batches of this epoch were given up to the sampler's position."""
        self._counted = (self.sampler.epoch, self.sampler.samples, batches)

    def _end_current(self) -> None:
        current = self._current()
        if current is not None:
            current.end()

    def _checked_sampler(self, sampler: RankedSampler | None) -> RankedSampler:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise OptionError(
                f"{type(self.dataset).__name__} is not a map-style dataset (__len__, __getitem__), "
                f"so it has no order to resume"
            )
        if sampler is None:
            return DistributedSampler(self.dataset)
        if not isinstance(sampler, RankedSampler):
            raise OptionError(
                f"a sampler of type {type(sampler).__name__} has no exact position; use the "
                f"DistributedSampler or MixtureSampler of shardmill.compat.kempnerforge"
            )
        if sampler.epoch_samples != len(self.dataset):
            raise OptionError(
                f"the sampler is for {sampler.epoch_samples:,} samples, but the dataset has "
                f"{len(self.dataset):,}"
            )
        return sampler


class _EpochBatches(Iterator[Any]):
    """The rest of one epoch. The position is kept by the loader alone."""

    def __init__(self, owner: StatefulDataLoader) -> None:
        self._owner, self._sampler = owner, owner.sampler
        self._sampler.move_to(self._sampler.begins_at)
        self._inner: Iterator[Any] | None = iter(owner._loader)
        owner._count(owner.batches_yielded)
        self._done = False
        self._one_thread = OneThread("StatefulDataLoader")

    def __next__(self) -> Any:
        with self._one_thread:
            if self._done:
                raise StopIteration
            *position, batches = self._owner._counted
            self._check(tuple(position))
            batch = self._next_of_this_order()
            self._owner._count(batches + 1)
            return batch

    def end(self) -> None:
        """Release the workers (persistent ones stay with the loader)."""
        self._inner = None

    def _next_of_this_order(self) -> Any:
        """The next batch. Those that were read ahead by an earlier order are skipped."""
        inner, self._inner = self._inner, None  # put back when all went well
        assert inner is not None, "checked before"
        draws = self._owner._draws
        while True:
            try:
                batch = next(inner)
            except StopIteration:
                if draws.num_batches(self._sampler.samples):
                    inner = iter(self._owner._loader)  # new weights came after the last draw
                    continue
                self._done = True
                self._sampler.set_epoch(self._sampler.epoch + 1)
                self._owner._count(0)
                raise
            revision, stop = draws.under_way.popleft()
            if revision == self._sampler.revision:
                self._inner = inner
                self._sampler.move_to(stop)
                return batch

    def _check(self, position: tuple[int, ...]) -> None:
        if self._inner is None:
            raise OptionError(
                "this iterator has ended: the loader was iterated again, a state was loaded, or a "
                "batch could not be read; call iter(loader) to continue after the last batch given"
            )
        now = (self._sampler.epoch, self._sampler.samples)
        if now != position:
            raise OptionError(
                f"the sampler was moved from {position} to {now} (epoch, samples) while the loader "
                f"iterated; call iter(loader) again to continue from there"
            )
