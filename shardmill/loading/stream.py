"""A global order over sources.

In: sources, weights, a seed, a kind of shuffle.  Out: source, epoch and window of any sample.
Promise: a pure function of the arguments and the sample's number: not of ranks, batches, threads or
what was asked before. An excluded sample is never given: its place is taken by a stand-in of the
same source, and no other sample moves. A source gives all its windows before one comes again, but
for stand-ins; `phases` change the weights at exactly their first sample. Nothing grows with the
data. It pickles, forks and spawns; threads may share it.
Not here: reading (sources), ranks, batches and position (loader).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, Excluding, exclusion_facts
from shardmill.loading.rows import RowSource
from shardmill.records import JSON, OffsetArray
from shardmill.sampling import (
    BlockShuffle,
    InOrder,
    MixedSamples,
    Mixture,
    Order,
    OrderFactory,
    Permutation,
    items_per_block,
)
from shardmill.sampling.keys import fingerprint_of
from shardmill.sampling.order import by_value

log = logging.getLogger(__name__)

Shuffle: TypeAlias = Literal["global", "block", "none"]
SHUFFLES = ("global", "block", "none")


@dataclass(frozen=True, slots=True)
class _BlockOrders:
    """Blocks of about 4 MiB of each source; the path of an order holds the source's name."""

    block_items: Mapping[str, int]

    def __call__(self, n: int, seed: int, /, *path: str | int) -> Order:
        return BlockShuffle(n, seed, *path, block_items=self.block_items[str(path[1])])


class SampleStream:
    """Endless samples out of one or more sources.

    `weights` None: by number of windows. `phases`: (first sample, weights), rising. `shuffle`:
    "global" shuffles all windows of a source, "block" reads 4 MiB at a time, for data larger than
    memory (docs/sampling.md tells what that costs in mixing), "none" keeps their order.
    `documents`: whether loaders of this stream keep documents apart unless told otherwise.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: Shuffle = "global",
        temperature: float = 1.0,
        phases: Sequence[tuple[int, Sequence[float]]] = (),
        documents: bool = False,
    ) -> None:
        self.documents = bool(documents)
        self.sources = _checked_sources(sources)
        self.seq_len = self.sources[0].seq_len
        self.shuffle: Shuffle = shuffle
        sizes = [len(source) for source in self.sources]
        if weights is None:
            weights = _by_size(self.sources)
        _check_lists(weights, phases)
        self._mixture = Mixture(
            sizes,
            weights,
            seed=seed,
            names=[source.name for source in self.sources],
            temperature=temperature,
            phases=phases,
            order=_orders(self.sources, shuffle),
        )
        self.seed = int(seed)
        self._options: dict[str, Any] = {
            "weights": [*weights],
            "seed": seed,
            "shuffle": shuffle,
            "temperature": temperature,
            "phases": [(start, [*chosen]) for start, chosen in phases],
            "documents": self.documents,
        }
        self.order_fingerprint = self._mixture.fingerprint
        self._excluded = self._find_excluded()
        self._lock = _process_lock()

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch, with one source; a mixture has no epoch in common."""
        return len(self.sources[0]) if len(self.sources) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources, in their order."""
        return self._mixture.names

    @property
    def fingerprint(self) -> str:
        """sha256 hex over all that decides which tokens come when, but for exclusions."""
        data = [source.fingerprint for source in self.sources]
        return fingerprint_of(order=self.order_fingerprint, data=[*data], seq_len=self.seq_len)

    @property
    def exclusions(self) -> JSON:
        """What tells exclusions of the sources from others; None: nothing is excluded."""
        return exclusion_facts({one.name: one for one in self._excluded.values()})

    def take(self, samples: npt.ArrayLike) -> MixedSamples:
        """Source, epoch and window of these global samples. Ask for a thousand at a time."""
        found = self.take_all(samples)
        if not self._excluded:
            return found
        item = found.item.copy()
        for number, chosen in by_value(found.source):
            excluded = self._excluded.get(number)
            if excluded is not None:
                own = item[chosen], found.epoch[chosen]
                item[chosen] = excluded.replace(*own, seed=self.seed)
        return MixedSamples(found.source, found.epoch, item)

    def take_all(self, samples: npt.ArrayLike) -> MixedSamples:
        """The same as if nothing were excluded: whose place each sample has. Not for training."""
        with self._locked():
            return self._mixture.take(samples)

    def counts(self, num_samples: SupportsIndex) -> OffsetArray:
        """How many of the first `num_samples` samples are of each source."""
        with self._locked():
            return self._mixture.counts(num_samples)

    def shares(self) -> tuple[tuple[int, tuple[Fraction, ...]], ...]:
        """Each phase: its first sample and the exact share of every source."""
        starts = self._mixture.phase_starts
        return tuple((start, self._mixture.shares(start)) for start in starts)

    def close(self) -> None:
        """Close all sources; may be called again."""
        for source in self.sources:
            source.close()

    def __repr__(self) -> str:
        return f"SampleStream({self._mixture!r}, seq_len={self.seq_len:,}, {self.shuffle!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """By its arguments: what was remembered of the order is found again where it is needed."""
        return partial(SampleStream, **self._options), (self.sources,)

    def _find_excluded(self) -> dict[int, ExcludedItems]:
        """By source. One of which nothing is left may be there, if it never comes."""
        shares = [share for _, phase in self.shares() for share in enumerate(phase)]
        coming = {number for number, share in shares if share}
        found = {}
        for number, source in enumerate(self.sources):
            if isinstance(source, Excluding) and source.excluded is not None:
                found[number] = source.excluded
                if number in coming:
                    source.excluded.check_left()
        return found

    def _locked(self) -> threading.Lock:
        """The lock of this process. A child forked while another thread held it takes a new one:
        what it guards is remembered turns and orders, each put in its place whole."""
        if self._lock[0] != os.getpid():
            self._lock = _process_lock()
        return self._lock[1]


def _process_lock() -> tuple[int, threading.Lock]:
    return os.getpid(), threading.Lock()


def _orders(sources: Sequence[RowSource], shuffle: Shuffle) -> OrderFactory:
    if shuffle not in SHUFFLES:
        raise OptionError(f"shuffle={shuffle!r}: wanted one of {', '.join(map(repr, SHUFFLES))}")
    if shuffle == "none":
        return InOrder
    if shuffle == "global":
        return Permutation
    return _BlockOrders({one.name: items_per_block(one.window_bytes) for one in sources})


def _checked_sources(sources: Sequence[RowSource]) -> tuple[RowSource, ...]:
    if isinstance(sources, RowSource):
        raise OptionError(f"sources={sources!r}: wanted a list, also of one: [source]")
    found = tuple(sources)
    if not found:
        raise OptionError("sources is empty; wanted at least one TokenSource or PackSource")
    for one in found:
        if not isinstance(one, RowSource):
            raise OptionError(
                f"sources hold a {type(one).__name__}: {one!r:.80}; wanted TokenSource or "
                "PackSource"
            )
        if one.seq_len != found[0].seq_len:
            raise OptionError(
                f"source {one.name!r} has seq_len={one.seq_len:,}, but {found[0].name!r} has "
                f"{found[0].seq_len:,}; open both with the same"
            )
    if not any(map(len, found)):
        raise OptionError(
            f"no source has a window: {', '.join(_too_short(one) for one in found[:8])}; take a "
            f"smaller seq_len or more tokens"
        )
    return found


def _check_lists(weights: Any, phases: Any) -> None:
    """The shape of both; what is in them is for the mixture to judge."""
    if not isinstance(weights, Sequence) and not hasattr(weights, "__array__"):
        raise OptionError(f"weights={weights!r:.80}: wanted a list, one number a source")
    pairs = isinstance(phases, Sequence) and all(
        isinstance(phase, Sequence) and len(phase) == 2 for phase in phases
    )
    if not pairs:
        raise OptionError(f"phases={phases!r:.80}: wanted a list of (first sample, weights)")
    for start, chosen in phases:
        if not isinstance(chosen, Sequence) and not hasattr(chosen, "__array__"):
            raise OptionError(f"phases: from sample {start!r} on {chosen!r:.80}: wanted weights")


def _by_size(sources: Sequence[RowSource]) -> list[int]:
    for one in sources:
        if not len(one):
            log.warning("%s, which is less than one window: it never comes", _too_short(one))
    return [len(one) for one in sources]


def _too_short(source: RowSource) -> str:
    return f"{source.name!r} has {source.num_tokens:,} tokens of {source.seq_len + 1:,} wanted"
