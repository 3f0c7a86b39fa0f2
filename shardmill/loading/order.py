"""A global order over sources.

In: sources, weights, a seed, a kind of shuffle.  Out: source, epoch and window of any sample.
Promise: a pure function of the arguments and the sample's number: not of ranks, batches, threads or
what was asked before. An excluded sample is never given: its place is taken by a stand-in of the
same source, and no other sample moves. A source gives all its windows before one comes again, but
for stand-ins; `phases` change the weights at exactly their first sample. Nothing grows with the
data. It pickles, forks and spawns; threads may share it.
Not here: reading (sources), ranks, batches and position (loader).

Which samples a rank reads at each step.

In: a stream, where the first step begins, batch size and rank.  Out: a `Step` for any step number.
Promise: step `k` is the global samples `start + k * world * batch_size` on, as many as all ranks
read together, cut by `rank_slice`; so every rank has exactly `batch_size` of them. The order is
asked for up to `CHUNK` samples at a time, which costs little more than for one batch.
Not here: reading. Not for two threads at a time.

What a rank gets at a step, told without reading a token.

In: a stream, the samples consumed before the step, batch size, rank and world.
Out: a `PlannedSample` for each row: window, tokens, documents.
Promise: exactly the rows that a `Loader` gives there, whatever it was resumed from.
Not here: reading or decoding the tokens (cli).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, Excluding, exclusion_facts
from shardmill.loading.rows import Documents, RowSource
from shardmill.machine import check_memory
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
    rank_slice,
)
from shardmill.sampling.order import by_value
from shardmill.sampling.seeds import fingerprint_of

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


FIRST_CHUNK, CHUNK = 64, 8192
"""Samples asked for at a time: few for a first batch without delay, then more. With twice as many
the arrays of the order would be fresh memory at every call."""

MOST_STEP_SAMPLES = 2**40

HORIZON = 8
"""Steps that may be looked at before their turn without asking for anything twice."""


class Step(NamedTuple):
    """The samples of one rank at one step."""

    samples: range  # global numbers
    source: OffsetArray  # (n,)
    epoch: OffsetArray  # (n,)
    item: OffsetArray  # (n,)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """The steps `first..stop`."""

    first: int
    stop: int
    table: OffsetArray  # (steps, 3, batch_size) source, epoch and item


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Who reads how much at a step."""

    batch_size: int  # samples of one rank
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.step_samples > MOST_STEP_SAMPLES:
            raise OptionError(
                f"{self.world:,} ranks x {self.batch_size:,} samples: a step has at most "
                f"{MOST_STEP_SAMPLES:,}"
            )

    @property
    def step_samples(self) -> int:
        """Of all ranks together."""
        return self.world * self.batch_size

    def samples_at(self, start: int) -> range:
        """The samples of this rank, of the step that begins with the global sample `start`."""
        return rank_slice(start, start + self.step_samples, rank=self.rank, world=self.world)


class Steps:
    """The steps of one rank from `start` on; `num_steps` None: endless."""

    def __init__(
        self, stream: SampleStream, shape: StepShape, *, start: int, num_steps: int | None
    ) -> None:
        self.stream, self.shape = stream, shape
        self.start, self.num_steps = start, num_steps
        self.step_samples = shape.step_samples
        self._batch_size = shape.batch_size
        self._begin = shape.samples_at(start).start  # of this rank; every step as much further on
        # Enough for a step and those behind it up to the horizon, also when a chunk is one step.
        self._kept: deque[_Chunk] = deque(maxlen=2 + HORIZON)
        self._last = _Chunk(0, 0, np.empty((0, 3, shape.batch_size), np.int64))  # the one in use

    def at(self, step: int) -> Step:
        """Step `step`; the next one is near at hand then."""
        chunk = self._last
        if not chunk.first <= step < chunk.stop:
            chunk = self._last = self._chunk_of(step)
        # copied: a batch that is kept must not keep the orders of a hundred others
        source, epoch, item = chunk.table[step - chunk.first].copy()
        begin = self._begin + step * self.step_samples
        return Step(range(begin, begin + self._batch_size), source, epoch, item)

    def _chunk_of(self, step: int) -> _Chunk:
        for chunk in reversed(self._kept):
            if chunk.first <= step < chunk.stop:
                return chunk
        self._kept.append(self._ask(step))
        return self._kept[-1]

    def _ask(self, first: int) -> _Chunk:
        """The steps from `first` on: few at first, then more and more of them."""
        last = self._kept[-1] if self._kept else None
        grown = last is not None and last.stop == first
        samples = min(CHUNK, 4 * last.table[:, 0].size) if last and grown else FIRST_CHUNK
        count = max(1, samples // self._batch_size)
        if self.num_steps is not None:
            count = min(count, self.num_steps - first)
        starts = self._begin + np.arange(first, first + count) * self.step_samples
        numbers = np.add.outer(starts, np.arange(self._batch_size))
        found = self.stream.take(numbers.reshape(-1))
        columns = [one.reshape(numbers.shape) for one in (found.source, found.epoch, found.item)]
        return _Chunk(first, first + count, np.stack(columns, axis=1))


_ROW_BYTES = 500  # of a row that is described, and of its order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One row, by numbers alone. Token positions are those of the split.

    A row of a pack plan has its pieces for documents, in their order; its start and stop are those
    of its first and its last piece, and its tokens need not lie between.
    """

    sample: int  # global number
    source: str  # its name
    path: Path  # the store's folder, or the folder of tokens
    split: str | None  # None: the folder is no store
    epoch: int  # which pass over the source, from 0
    window: int  # which window of the source, or which row of its plan
    start: int  # its first token
    stop: int  # behind its last: start + seq_len + 1
    documents: Documents | None
    # (number in the split, start, stop) of each document with tokens in this window, cut to the
    # window; None when nobody knows where documents begin
    instead_of: int | None = None  # the window whose place this is, when that is excluded


def plan_step(
    stream: SampleStream,
    *,
    samples: SupportsIndex,
    batch_size: SupportsIndex,
    world: SupportsIndex = 1,
    rank: SupportsIndex = 0,
) -> list[PlannedSample]:
    """The rows of `rank` at the step that begins after `samples` global samples."""
    shape = StepShape(
        batch_size=whole_number(batch_size, "batch_size"),
        rank=whole_number(rank, "rank", least=0),
        world=whole_number(world, "world"),
    )
    check_memory(
        _ROW_BYTES * shape.batch_size,
        f"batch_size={shape.batch_size:,}: the description of as many rows",
        "lower batch_size",
    )
    start = whole_number(samples, "samples", least=0)
    step = Steps(stream, shape, start=start, num_steps=1).at(0)
    meant = stream.take_all(step.samples).item
    columns = (step.source, step.epoch, meant, step.item)
    rows = zip(step.samples, *(column.tolist() for column in columns), strict=True)
    return [
        _planned(stream.sources[source], sample, epoch, (meant, item))
        for sample, source, epoch, meant, item in rows
    ]


def _planned(source: RowSource, sample: int, epoch: int, items: tuple[int, int]) -> PlannedSample:
    meant, item = items
    place = source.place(item)
    return PlannedSample(
        sample=sample,
        source=source.name,
        path=source.path,
        split=source.split,
        epoch=epoch,
        window=item,
        instead_of=None if meant == item else meant,
        start=place.start,
        stop=place.stop,
        documents=place.documents,
    )
