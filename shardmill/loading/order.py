"""The order of samples: which row of which source is sample `n`, and which samples a rank reads.

`SampleStream` maps a global sample number to (source, epoch, row). It is a pure function of its
arguments and that number, not of ranks, batches, threads or earlier calls. `Steps` cuts the global
order into steps and gives one rank its part. `plan_step` describes the rows of a step without
reading a token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, exclusion_facts
from shardmill.loading.fim import (
    Fim,
    FimChange,
    FimCounts,
    SourcesFim,
    count_change,
    fim_options,
)
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
from shardmill.sampling.mixture import whole_shares
from shardmill.sampling.order import by_value, fingerprint_of
from shardmill.threads import OneThread

log = logging.getLogger(__name__)

Shuffle: TypeAlias = Literal["global", "block", "none"]
SHUFFLES = ("global", "block", "none")


class SampleStream:
    """Endless samples from one or more sources. Threads may share it; it pickles.

    `weights` None: by number of rows. `phases`: (first sample, weights), ascending; the weights
    change at exactly that sample. `shuffle`: "global" shuffles all rows of a source, "block" reads
    4 MiB at a time, for data larger than memory (docs/sampling.md says what that costs in mixing),
    "none" keeps their order. A source gives all its rows before one is repeated; an excluded row is
    replaced by another of the same source, and no other sample moves. `fim`: the share of rows
    whose documents are rearranged to fill in the middle, one for each source by name, or
    `FimOptions`.
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
        fim: Fim = None,
    ) -> None:
        self.documents = False  # whether loaders keep documents apart by default
        self.sources = _checked_sources(sources)
        self.seq_len, self.kind = self.sources[0].seq_len, self.sources[0].kind
        self.shuffle: Shuffle = shuffle
        if weights is None:
            weights = [len(source) for source in self.sources]
            for one in self.sources:
                if not len(one):
                    log.warning("%s, less than one window: it is never read", _too_short(one))
        _check_lists(weights, phases)
        names = [source.name for source in self.sources]
        shares = partial(whole_shares, names=names, temperature=temperature)
        self._mixture = Mixture(
            [len(source) for source in self.sources],
            shares(weights),
            seed=seed,
            names=names,
            phases=[(start, shares(chosen)) for start, chosen in phases],
            order=_orders(self.sources, shuffle),
        )
        self.seed = int(seed)
        rates = fim_options(fim)
        self.fim = None if rates is None else SourcesFim(rates, self.sources, seed=self.seed)
        self._options: dict[str, Any] = {
            "weights": [*weights],
            "seed": seed,
            "shuffle": shuffle,
            "temperature": temperature,
            "phases": [(start, [*chosen]) for start, chosen in phases],
            "fim": rates,
        }
        self.names = self._mixture.names
        self.order_fingerprint = self._mixture.fingerprint
        self._excluded = self._find_excluded()
        # A fork while another thread is inside does no harm: the cache that it guards is only ever
        # replaced as a whole.
        self._one_thread = OneThread("SampleStream")

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch of a single source; None for a mixture."""
        return len(self.sources[0]) if len(self.sources) == 1 else None

    @property
    def fingerprint(self) -> str:
        """sha256 hex over everything that decides which tokens come when, except exclusions."""
        data = [source.fingerprint for source in self.sources]
        fim: dict[str, JSON] = {} if self.fim is None else {"fim": self.fim.facts}
        return fingerprint_of(
            order=self.order_fingerprint, data=[*data], seq_len=self.seq_len, **fim
        )

    @property
    def exclusions(self) -> JSON:
        """What identifies the exclusions of the sources; None: nothing is excluded."""
        return exclusion_facts({one.name: one for one in self._excluded.values()})

    def take(self, samples: npt.ArrayLike) -> MixedSamples:
        """Source, epoch and row of these global samples. Ask for a thousand at a time."""
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
        """The same as if nothing were excluded: what each sample replaces. Not for training."""
        with self._one_thread.waiting():
            return self._mixture.take(samples)

    def fim_changes(
        self, samples: npt.ArrayLike, source: OffsetArray, item: OffsetArray
    ) -> list[FimChange]:
        """What fill in the middle does to these samples, which `take` found."""
        if self.fim is None:
            return []
        numbers = np.asarray(samples)
        if len(self.sources) > 1:
            with self._one_thread.waiting():
                numbers = self._mixture.locate(numbers)[1]
        return self.fim.changes(source, numbers, item)

    def fim_counts(self, start: SupportsIndex, stop: SupportsIndex) -> dict[str, FimCounts]:
        """What fill in the middle does to the samples `start..stop`, by source.

        Looked up in the indexes of the stores, about a microsecond a sample.
        """
        first, end = (whole_number(one, "samples", least=0) for one in (start, stop))
        found = {source.name: FimCounts() for source in self.sources}
        for begin in range(first, end, COUNTED):
            samples = np.arange(begin, min(begin + COUNTED, end))
            taken = self.take(samples)
            for one in self.fim_changes(samples, taken.source, taken.item):
                name = self.sources[int(taken.source[one.rows[0]])].name
                found[name] += count_change(one)
        return found

    def counts(self, num_samples: SupportsIndex) -> OffsetArray:
        """How many of the first `num_samples` samples are of each source."""
        with self._one_thread.waiting():
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
        make = partial(SampleStream, **self._options)
        return make, (self.sources,), {"documents": self.documents}

    def _find_excluded(self) -> dict[int, ExcludedItems]:
        """By source. A source may be excluded as a whole only if it never has a weight."""
        shares = [share for _, phase in self.shares() for share in enumerate(phase)]
        used = {number for number, share in shares if share}
        found = {}
        for number, source in enumerate(self.sources):
            if source.excluded is not None:
                found[number] = source.excluded
                if number in used:
                    source.excluded.check_left()
        return found


def _orders(sources: Sequence[RowSource], shuffle: Shuffle) -> OrderFactory:
    if shuffle not in SHUFFLES:
        wanted = ", ".join(map(repr, SHUFFLES))
        raise OptionError(f"{{shuffle}}: wanted one of {wanted}", shuffle=shuffle)
    if shuffle == "none":
        return InOrder
    if shuffle == "global":
        return Permutation
    block_items = {one.name: items_per_block(one.window_bytes) for one in sources}

    def in_blocks(n: int, seed: int, /, *path: str | int) -> Order:
        # the path of an order is ("source", name, ...)
        return BlockShuffle(n, seed, *path, block_items=block_items[str(path[1])])

    return in_blocks


def _checked_sources(sources: Sequence[RowSource]) -> tuple[RowSource, ...]:
    if isinstance(sources, RowSource):
        raise OptionError("{sources}: wanted a list, also of one: [source]", sources=sources)
    found = tuple(sources)
    if not found:
        raise OptionError("sources is empty; wanted at least one TokenSource or PackSource")
    for one in found:
        if not isinstance(one, RowSource):
            raise OptionError(
                f"sources hold a {type(one).__name__}: {one!r:.80}; wanted TokenSource or "
                "PackSource"
            )
        if one.kind != found[0].kind:
            raise OptionError(
                f"source {one.name!r} gives {one.kind}, but {found[0].name!r} gives "
                f"{found[0].kind}: mix sources of one kind"
            )
        if one.seq_len != found[0].seq_len:
            raise OptionError(
                f"source {one.name!r} has {{seq_len}}, but {found[0].name!r} has "
                f"{found[0].seq_len:,}; open both with the same",
                seq_len=one.seq_len,
            )
    if not any(map(len, found)):
        raise OptionError(
            f"no source has a window: {', '.join(_too_short(one) for one in found[:8])}; choose a "
            "smaller {seq_len} or add tokens",
            seq_len=...,
        )
    return found


def _check_lists(weights: Any, phases: Any) -> None:
    """Checks the shape of both; the mixture checks the numbers."""
    if not isinstance(weights, Sequence) and not hasattr(weights, "__array__"):
        raise OptionError(f"weights={weights!r:.80}: wanted a list, one number per source")
    pairs = isinstance(phases, Sequence) and all(
        isinstance(phase, Sequence) and len(phase) == 2 for phase in phases
    )
    if not pairs:
        raise OptionError(f"phases={phases!r:.80}: wanted a list of (first sample, weights)")
    for start, chosen in phases:
        if not isinstance(chosen, Sequence) and not hasattr(chosen, "__array__"):
            raise OptionError(f"phases: from sample {start!r} on {chosen!r:.80}: wanted weights")


def _too_short(source: RowSource) -> str:
    return f"{source.name!r} has {source.num_tokens:,} tokens of {source.seq_len + 1:,} wanted"


COUNTED = 2**16
"""Samples looked at together when they are counted."""

FIRST_CHUNK, CHUNK = 64, 8192
"""Samples whose order is computed at once: few for a first batch without delay, then more. Twice as
many would take fresh memory at every call."""

MOST_STEP_SAMPLES = 2**40

HORIZON = 8
"""Steps that may be looked at ahead of their turn without computing an order twice."""


class Step(NamedTuple):
    """The samples of one rank at one step."""

    samples: range  # global numbers
    source: OffsetArray  # (n,)
    epoch: OffsetArray  # (n,)
    item: OffsetArray  # (n,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Which part of a step a rank reads."""

    batch_size: int  # samples of one rank
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.step_samples > MOST_STEP_SAMPLES:
            raise OptionError(
                f"{self.world:,} ranks x {self.batch_size:,} samples: a step has at most "
                f"{MOST_STEP_SAMPLES:,}"
            )
        self.samples_at(0)  # checks the rank

    @property
    def step_samples(self) -> int:
        """Samples of all ranks together."""
        return self.world * self.batch_size

    def samples_at(self, start: int) -> range:
        """The samples of this rank in the step that begins with the global sample `start`."""
        return rank_slice(start, start + self.step_samples, rank=self.rank, world=self.world)


class Steps:
    """The steps of one rank from global sample `start` on; `num_steps` None: endless.

    Not for two threads at a time.
    """

    def __init__(
        self, stream: SampleStream, shape: StepShape, *, start: int, num_steps: int | None
    ) -> None:
        self.stream, self.shape = stream, shape
        self.start, self.num_steps = start, num_steps
        self._first = shape.samples_at(start).start  # of this rank
        # (first step, (steps, 3, batch_size) source, epoch and item), newest first: enough for a
        # step and those up to the horizon, also when a table is one step
        self._kept: deque[tuple[int, OffsetArray]] = deque(maxlen=2 + HORIZON)

    def at(self, step: int) -> Step:
        for first, table in self._kept:
            if first <= step < first + len(table):
                break
        else:
            first, table = step, self._table(step)
            self._kept.appendleft((first, table))
        # copied: a batch that is kept must not keep the orders of a hundred others
        source, epoch, item = table[step - first].copy()
        begin = self._first + step * self.shape.step_samples
        return Step(range(begin, begin + self.shape.batch_size), source, epoch, item)

    def _table(self, step: int) -> OffsetArray:
        """The order from `step` on, of more steps than last time when those were just before."""
        size, samples = self.shape.batch_size, FIRST_CHUNK
        if self._kept:
            first, table = self._kept[0]
            if first + len(table) == step:
                samples = min(CHUNK, 4 * len(table) * size)
        count = max(1, samples // size)
        if self.num_steps is not None:
            count = min(count, self.num_steps - step)
        starts = self._first + np.arange(step, step + count) * self.shape.step_samples
        numbers = np.add.outer(starts, np.arange(size))
        found = self.stream.take(numbers.reshape(-1))
        columns = [one.reshape(numbers.shape) for one in (found.source, found.epoch, found.item)]
        return np.stack(columns, axis=1)


_ROW_BYTES = 500  # of the description of a row, and of its order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One row, by numbers alone. Token positions are those of the split.

    A row of a pack plan has its pieces as documents, in their order. Its start and stop are those
    of its first and last piece, and its tokens need not be between them.
    """

    sample: int  # global number
    source: str  # its name
    path: Path  # the store's folder, or the folder of tokens
    split: str | None  # None: the folder is not a store
    epoch: int  # which pass over the source, from 0
    window: int  # which window of the source, or which row of its plan
    start: int  # its first token
    stop: int  # start + seq_len + 1
    documents: Documents | None
    # (number in the split, start, stop) of each document with tokens in this window, cut to the
    # window; None when it is not known where documents begin
    instead_of: int | None = None  # the excluded window that this one replaces


def plan_step(
    stream: SampleStream,
    *,
    samples: SupportsIndex,
    batch_size: SupportsIndex,
    world: SupportsIndex = 1,
    rank: SupportsIndex = 0,
) -> list[PlannedSample]:
    """The rows that a `Loader` gives `rank` at the step after `samples` global samples."""
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
    columns = (step.source, step.epoch, stream.take_all(step.samples).item, step.item)
    planned = []
    for sample, number, epoch, replaced, item in zip(
        step.samples, *(column.tolist() for column in columns), strict=True
    ):
        source = stream.sources[number]
        planned.append(
            PlannedSample(
                sample=sample,
                source=source.name,
                path=source.path,
                split=source.split,
                epoch=epoch,
                window=item,
                instead_of=None if replaced == item else replaced,
                **source.span(item)._asdict(),
            )
        )
    return planned
