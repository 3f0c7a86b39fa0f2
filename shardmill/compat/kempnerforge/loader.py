"""PyTorch's DataLoader with an exact position.

In: a map-style dataset, a sampler of this room.  Out: batches, and a state after each.
Promise: a state taken after batch k, loaded on any number of ranks with any batch size and any
number of workers, goes on with the very next sample of the global order, whatever was read ahead.
New weights of a `MixtureSampler` hold from the next batch on. The random state of torch is left
alone, so a resumed run can be equal to the bit.
Not here: the order (samplers), the loader without DataLoader (token_loader), which is quicker.

Iterating gives the rest of the present epoch; at its end the loader goes to the next one, so
iterating again gives that. After a `break` iterating goes on behind the last batch that was given.

How a loader's processes work: nothing of it changes which samples come.

In: an object or a mapping, as training configs have it.  Out: one checked record.
Not here: the loader.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardmill.arguments import whole_number
from shardmill.compat.kempnerforge.dataset import collate
from shardmill.compat.kempnerforge.samplers import (
    VERSION,
    BatchDraws,
    DistributedSampler,
    RankedSampler,
    State,
    check_state,
    describe_data,
    describe_exclusions,
    position,
)
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.exclusion import tell_change
from shardmill.loading.prefetch import OneThread
from shardmill.trainers.torch import has_accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Worker processes of a loader. With none of them the other numbers are not used."""

    num_workers: int = 0  # reading is quick: begin with none
    pin_memory: bool = False  # without an accelerator there is nothing to pin for
    prefetch_factor: int = 2  # batches that each worker reads ahead
    persistent_workers: bool = True  # workers stay from epoch to epoch
    multiprocessing_context: str | None = None  # "fork", "spawn", "forkserver"; None: torch's

    def options(self) -> dict[str, Any]:
        """Arguments for `torch.utils.data.DataLoader`."""
        told: dict[str, Any] = {"pin_memory": self.pin_memory and has_accelerator()}
        if self.num_workers:
            told |= {
                "num_workers": self.num_workers,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
            }
        return told


def read_config(config: object) -> LoaderConfig:
    """The loader's part of `config`; what is missing there is as `LoaderConfig` has it."""
    if config is None or isinstance(config, LoaderConfig):
        return config or LoaderConfig()
    names = [field.name for field in fields(LoaderConfig)]
    if isinstance(config, Mapping):
        given = {name: config[name] for name in names if name in config}
        _refuse_misspelt([str(key) for key in config], names)
    else:
        given = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if not given:
            raise OptionError(
                f"config={config!r:.100}: wanted an object or mapping with one of {names}"
            )
    return _checked(given)


def _checked(given: dict[str, Any]) -> LoaderConfig:
    least = {"num_workers": 0, "prefetch_factor": 1}
    for name, value in given.items():
        if name in least and (name, value) != ("prefetch_factor", None):
            given[name] = whole_number(value, name, least=least[name])
        elif name in ("pin_memory", "persistent_workers") and not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: wanted True or False")
    if given.get("prefetch_factor", 2) is None:  # torch's word for its default
        del given["prefetch_factor"]
    return LoaderConfig(**given)


def _refuse_misspelt(keys: list[str], names: list[str]) -> None:
    """Other keys of a training config are not ours to judge, but a slip of the pen is."""
    for key in keys:
        near = get_close_matches(key, names, n=1, cutoff=0.8)
        if near and key not in names:
            raise OptionError(f"config has {key!r}; did you mean {near[0]!r}?")


KIND = "shardmill.StatefulDataLoader"
_EXCLUSIONS = "exclusions"  # the one key that is there only when it says something


class StatefulDataLoader:
    """Batches of a dataset, resumable. One iteration at a time: a new one ends the one before."""

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
        `drop_last`: leave an incomplete last batch out."""
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
        self._counted = (self.sampler.epoch, self.sampler.samples, 0)  # epoch, samples, batches
        self._current: Callable[[], Batches | None] = lambda: None

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def batches_yielded(self) -> int:
        """Batches given in this epoch, also before a resume. After a jump of the sampler, as many
        as it would have taken."""
        epoch, samples, batches = self._counted
        if (epoch, samples) == (self.sampler.epoch, self.sampler.samples):
            return batches
        return self.sampler.samples // (self.batch_size * self.sampler.num_replicas)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._draws)

    def __iter__(self) -> Iterator[Any]:
        self._end_current()
        batches = Batches(self)
        self._current = weakref.ref(batches)  # not held: its workers end when nobody wants it
        return batches

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Go to the start of another epoch; naming the present one changes nothing."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> State:
        """Where the run is behind the last batch given: JSON, global, under 1 KB."""
        excluded = describe_exclusions(self.dataset)
        return {
            **({} if excluded is None else {_EXCLUSIONS: excluded}),
            "version": VERSION,
            "kind": KIND,
            "epoch": self.sampler.epoch,
            "samples": self.sampler.samples,
            "batches_yielded": self.batches_yielded,
            "data": describe_data(self.dataset),
            "sampler": dict(self.sampler.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that `state` followed. An iteration under way ends."""
        free = ("epoch", "samples", "batches_yielded", "sampler")
        before = state.get(_EXCLUSIONS) if isinstance(state, Mapping) else None
        found, own = (_without_exclusions(one) for one in (state, self.state_dict()))
        found = check_state(found, own, free=free, who="StatefulDataLoader")
        batches = position(found, "batches_yielded", "StatefulDataLoader")
        inner = found["sampler"]
        for name in ("epoch", "samples"):
            if not isinstance(inner, dict) or inner.get(name) != found[name]:
                raise StateMismatchError(
                    f"StatefulDataLoader: {name} of the state is {found[name]!r}, but its sampler "
                    f"has {inner!r:.200}; wanted what state_dict() gave"
                )
        assert isinstance(inner, dict)
        self.sampler.load_state_dict(inner)
        self._counted = (self.sampler.epoch, self.sampler.samples, batches)
        tell_change(before, describe_exclusions(self.dataset), "StatefulDataLoader")
        self._end_current()

    def __repr__(self) -> str:
        return (
            f"StatefulDataLoader({self.dataset!r}, batch_size={self.batch_size}, "
            f"sampler={self.sampler!r}, num_workers={self.config.num_workers})"
        )

    def _end_current(self) -> None:
        current = self._current()
        if current is not None:
            current.end()

    def _checked_sampler(self, sampler: RankedSampler | None) -> RankedSampler:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise OptionError(
                f"{type(self.dataset).__name__} is no map-style dataset (__len__, __getitem__), so "
                f"it has no order to go on in"
            )
        if sampler is None:
            return DistributedSampler(self.dataset)
        if not isinstance(sampler, RankedSampler):
            raise OptionError(
                f"a sampler of type {type(sampler).__name__} cannot say its exact position; use "
                f"shardmill.compat.kempnerforge.samplers.DistributedSampler or MixtureSampler"
            )
        if sampler.epoch_samples != len(self.dataset):
            raise OptionError(
                f"the sampler is for {sampler.epoch_samples:,} samples, but the dataset has "
                f"{len(self.dataset):,}"
            )
        return sampler


def _without_exclusions(state: Any) -> Any:
    """They may differ: they move no sample."""
    if not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if key != _EXCLUSIONS}


class Batches(Iterator[Any]):
    """The rest of one epoch."""

    def __init__(self, owner: StatefulDataLoader) -> None:
        self._owner = owner
        self._sampler, self._draws = owner.sampler, owner._draws
        self._sampler.move_to(self._sampler.begins_at)
        self._inner: Iterator[Any] | None = iter(owner._loader)
        self._batches = owner.batches_yielded
        self._place = self._where()
        self._done = False
        self._one_thread = OneThread("StatefulDataLoader")

    def __next__(self) -> Any:
        with self._one_thread:
            return self._next()

    def _next(self) -> Any:
        if self._done:
            raise StopIteration
        self._check()
        batch = self._next_of_this_order()
        self._batches += 1
        self._count()
        return batch

    def end(self) -> None:
        """Let go of the workers (persistent ones stay with the loader)."""
        self._inner = None

    def _next_of_this_order(self) -> Any:
        """Batches that were read ahead by an earlier order are passed over."""
        inner, self._inner = self._inner, None  # put back when all went well
        assert inner is not None, "checked before"
        while True:
            try:
                batch = next(inner)
            except StopIteration:
                if self._draws.at_end:
                    self._finish()
                    raise
                inner = iter(self._owner._loader)  # new weights came behind the last draw
                continue
            drawn = self._draws.under_way.popleft()
            if drawn.revision == self._sampler.revision:
                self._inner = inner
                self._sampler.move_to(drawn.stop)
                return batch

    def _finish(self) -> None:
        self._done, self._batches = True, 0
        self._sampler.set_epoch(self._sampler.epoch + 1)
        self._count()
        self.end()

    def _count(self) -> None:
        self._place = self._where()
        self._owner._counted = (*self._place, self._batches)

    def _where(self) -> tuple[int, int]:
        return self._sampler.epoch, self._sampler.samples

    def _check(self) -> None:
        if self._inner is None:
            raise OptionError(
                "this iterator has ended: the loader was iterated anew, a state was loaded, or a "
                "batch could not be read; call iter(loader) to go on behind the last batch given"
            )
        if self._where() != self._place:
            raise OptionError(
                f"the sampler was moved from {self._place} to {self._where()} (epoch, samples) "
                f"while the loader iterated; call iter(loader) again to go on from there"
            )
