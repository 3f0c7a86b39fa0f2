"""Batches for one rank, from any position.

`Loader` is a position in the order of a stream. The ranks together read the stream in its order,
whatever their number, and all have the same number of steps. From a state the very next sample
follows, on any number of ranks with any batch size. `BatchMaker` makes the batch of a step: one
gather per source, into arrays that are used again when they are free.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypedDict, Unpack

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.fim import FimCounts, moved_borders, rearrange
from shardmill.loading.order import HORIZON, SampleStream, Step, Steps, StepShape
from shardmill.loading.rows import RowSource
from shardmill.loading.state import loader_state, read_loader_state
from shardmill.machine import check_memory
from shardmill.protocols import Closing
from shardmill.records import JSON, Batch, OffsetArray
from shardmill.sampling.order import by_value
from shardmill.store.readers.documents import Borders, Segments, cut_segments, mask_labels
from shardmill.threads import OneThread, Prefetcher

try:
    import resource
except ImportError:  # not on Windows: nothing is counted there
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    StepBatch = TypeVar("StepBatch", default=Batch)  # Python 3.11 has no defaults at run time
else:
    from typing import TypeVar

    StepBatch = TypeVar("StepBatch")

log = logging.getLogger(__name__)

_SPARE = 3  # buffers besides those made early: one in use, one about to be, one just released


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounters:
    """What was consumed of one source since sample 0, by all ranks together."""

    samples: int
    tokens: int  # inputs: samples * seq_len, of pairs twice that
    epochs: float  # samples / rows of the source


class WorkAhead(TypedDict, total=False):
    """What a loader does before a batch is asked for. The batches do not depend on it."""

    ahead: SupportsIndex  # batches made early in a thread, 2 if not given; 0: no thread
    ask_ahead: bool | None
    # whether the kernel is asked to read the rows of the next steps; None: once a batch had to wait
    # for the disk


class Loader(Closing, Generic[StepBatch]):
    """The steps of one rank. Its position, `samples`, counts the samples of all ranks.

    `batch_size`: rows of this rank; a step is `world * batch_size` samples. `num_samples`: where to
    stop; None: never. `documents=True` keeps documents apart (see `Batch`); None: as the stream
    says. `ahead` and `ask_ahead`: see `WorkAhead`. A pickled copy continues from the same position.
    For one thread: a second one that asks at the same time gets an OptionError.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        batch_size: SupportsIndex,
        rank: SupportsIndex = 0,
        world: SupportsIndex = 1,
        num_samples: SupportsIndex | None = None,
        documents: bool | None = None,
        **work_ahead: Unpack[WorkAhead],
    ) -> None:
        if not isinstance(stream, SampleStream):
            raise OptionError(f"stream is a {type(stream).__name__}; wanted a SampleStream")
        self.stream = stream
        self._shape = StepShape(
            batch_size=whole_number(batch_size, "batch_size"),
            rank=whole_number(rank, "rank", least=0),
            world=whole_number(world, "world"),
        )
        self.num_samples = (
            None if num_samples is None else whole_number(num_samples, "num_samples", least=0)
        )
        self._check_kind()
        self.documents = stream.documents if documents is None else bool(documents)
        self.ahead, self.ask_ahead = _work_ahead(**work_ahead)
        if self.documents:
            for source in stream.sources:
                source.borders(np.empty(0, np.int64))  # an error when it does not know them
        self._check_memory()
        self._samples = 0
        self._current: weakref.ref[_Batches[StepBatch]] | None = None
        self._warned = False  # of samples that do not fill a step
        self._reset()

    @property
    def samples(self) -> int:
        """Global samples consumed, by all ranks, up to the last batch given."""
        return self._samples

    def __iter__(self) -> Iterator[StepBatch]:
        """Continues from the position. A new iterator ends the previous one."""
        self.close()
        steps = Steps(self.stream, self._shape, start=self._samples, num_steps=self._steps_left())
        made = Prefetcher(self._maker(steps), num_items=steps.num_steps, depth=self.ahead)
        iterator = _Batches[StepBatch](self, steps, made)
        self._current = weakref.ref(iterator)  # weak: dropping it ends its thread
        return iterator

    def state_dict(self) -> dict[str, JSON]:
        """The position after the last batch given, whatever was made early: JSON, under 1 KB."""
        return loader_state(self.stream, self._samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same stream, saved on any number of ranks."""
        samples = read_loader_state(state, self.stream)
        if self.num_samples is not None and samples > self.num_samples:
            raise StateMismatchError(
                f"samples: the state has consumed {samples:,}, this loader ends at "
                f"{{num_samples}}; raise that to continue",
                num_samples=self.num_samples,
            )
        self.close()
        self._samples = samples

    def counters(self) -> dict[str, SourceCounters]:
        """What was consumed of each source since sample 0, by all ranks, across all resumes."""
        counts = self.stream.counts(self._samples).tolist()
        return {
            source.name: SourceCounters(
                samples=count,
                tokens=count * source.seq_len * (2 if source.kind == "ranks" else 1),
                epochs=count / len(source) if len(source) else 0.0,
            )
            for source, count in zip(self.stream.sources, counts, strict=True)
        }

    def fim_counts(self, *, since: SupportsIndex = 0) -> dict[str, FimCounts]:
        """Documents of each source that were rearranged to fill in the middle, and tokens that were
        cut for it, from sample `since` on, by all ranks, across all resumes.

        Looked up in the indexes of the stores, about a microsecond a sample: to add up a long run,
        pass the position of the last call.
        """
        return self.stream.fim_counts(since, self._samples)

    def close(self) -> None:
        """End the iterator and its thread; may be called again. The stream stays open."""
        current = None if self._current is None else self._current()
        if current is not None:
            current.close()

    def __repr__(self) -> str:
        shape = self._shape
        return (
            f"Loader({self.stream!r}, batch_size={shape.batch_size:,}, rank={shape.rank:,} of "
            f"{shape.world:,}, samples={self._samples:,})"
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_current", "_buffers")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        """What a copy does not share."""
        shape = (2, self._shape.batch_size, self.stream.seq_len)
        self._buffers = Buffers(shape, most=self.ahead + _SPARE)
        self._current = None

    def _maker(self, steps: Steps) -> Callable[[int], Any]:
        """What makes the batch of a step."""
        maker = BatchMaker(steps, self._buffers, documents=self.documents, ask_ahead=self.ask_ahead)
        return maker.make

    def _check_kind(self) -> None:
        if self.stream.kind != "rows":
            raise OptionError(
                f"{self.stream!r}: gives preferences; read it with shardmill.load, or a "
                "PreferenceLoader"
            )

    def _check_memory(self) -> None:
        """Refuse batches that do not fit: two arrays, with documents four."""
        size, seq_len = self._shape.batch_size, self.stream.seq_len
        one = size * seq_len * 8 * (4 if self.documents else 2)
        held = max(2, self.ahead + 1)  # one that was given, and those made early
        check_memory(
            held * one,
            f"batch_size={size:,}: a batch of {size:,} x {seq_len:,} tokens takes "
            f"{one / 1e9:,.1f} GB, and {held} are held at a time (ahead={self.ahead})",
            "lower batch_size, ahead or seq_len",
        )

    def _steps_left(self) -> int | None:
        if self.num_samples is None:
            return None
        steps, rest = divmod(self.num_samples - self._samples, self._shape.step_samples)
        if rest and not self._warned:
            self._warned = True
            log.warning(
                "the last %s of %s samples fill no step of %s (%s ranks x %s) and are left out",
                *(f"{rest:,}", f"{self.num_samples:,}", f"{self._shape.step_samples:,}"),
                *(f"{self._shape.world:,}", f"{self._shape.batch_size:,}"),
            )
        return steps


def _work_ahead(ahead: SupportsIndex = 2, ask_ahead: bool | None = None) -> tuple[int, bool | None]:
    asks = None if ask_ahead is None else bool(ask_ahead)
    return whole_number(ahead, "ahead", least=0), asks


class _Batches(Iterator[StepBatch]):
    """One iteration. The position is kept by the loader alone."""

    def __init__(self, loader: Loader[Any], steps: Steps, batches: Prefetcher[StepBatch]) -> None:
        self._loader, self._steps, self._batches = loader, steps, batches
        self._closed = False
        self._one_thread = OneThread("Loader")

    def __next__(self) -> StepBatch:
        with self._one_thread:
            if self._closed:
                raise OptionError(
                    "this iterator was ended by a newer one, by load_state_dict or by close; make "
                    "a new one with iter(loader), which continues from the loader's position"
                )
            steps = self._steps
            step_samples = steps.shape.step_samples
            step = (self._loader._samples - steps.start) // step_samples
            if step == steps.num_steps:
                self._batches.close()
                raise StopIteration
            batch = self._batches.get(step)
            self._loader._samples += step_samples
            return batch

    def close(self) -> None:
        self._closed = True
        self._batches.close()


# making a batch


def _counts_references() -> bool:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)
    return sys.implementation.name == "cpython" and bool(with_lock())


class Buffers:
    """int64 arrays of one shape, given out again when nothing refers to them any more.

    Every batch, view, slice, memoryview or tensor that shares the memory of an array holds a
    reference to it, and CPython counts references. An array that only this list refers to cannot
    gain another reference elsewhere. Where references are not counted so (PyPy, or threads without
    the interpreter's lock), every array is new. Not for two threads at a time.
    """

    def __init__(self, shape: tuple[int, ...], *, most: int) -> None:
        """At most `most` arrays are remembered, those in use included."""
        self._shape = shape
        self._most = most if _counts_references() else 0
        self._arrays: list[OffsetArray] = [np.empty(0, np.int64)]
        self._idle = self._references(0)  # the count when only the list has an array
        self._arrays.clear()

    def take(self) -> OffsetArray:
        """An array that is not in use; its contents are arbitrary."""
        for place in range(len(self._arrays)):
            if self._references(place) == self._idle:
                # to the end: the one that was given out longest ago is looked at first
                array = self._arrays.pop(place)
                self._arrays.append(array)
                return array
        array = np.empty(self._shape, np.int64)
        if self._most:
            if len(self._arrays) == self._most:
                del self._arrays[0]  # it belongs to its user now
            self._arrays.append(array)
        return array

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._arrays[place])


class BatchMaker:
    """Makes the batch of any step; in order is fastest. Not for two threads at a time."""

    def __init__(
        self, steps: Steps, buffers: Buffers, *, documents: bool, ask_ahead: bool | None
    ) -> None:
        self._steps, self._buffers = steps, buffers
        self._sources = steps.stream.sources
        self._documents = documents
        self._readahead = Readahead(steps, ask=ask_ahead)

    def make(self, number: int) -> Batch:
        step = self._steps.at(number)
        self._readahead.before(number)
        pair = self._buffers.take()
        input_ids, labels = pair[0], pair[1]
        if len(self._sources) == 1:  # the common case, without a look at each row's source
            self._sources[0].fill_unchecked(step.item, input_ids, labels)
        else:
            for source, rows in by_value(step.source):
                chosen = None if isinstance(rows, slice) else rows  # a slice: all of one source
                self._sources[source].fill_unchecked(step.item[rows], input_ids, labels, chosen)
        changes = self._steps.stream.fim_changes(step.samples, step.source, step.item)
        rearrange(step.samples, changes, input_ids, labels)
        apart: dict[str, Any] = {}
        if self._documents:
            borders = moved_borders(borders_of(self._sources, step), changes)
            mask_labels(labels, borders)
            segments = cut_segments(borders)
            apart = {name: getattr(segments, name) for name in Segments.__dataclass_fields__}
        self._readahead.after(number)
        return Batch(input_ids=input_ids, labels=labels, **apart, **step._asdict())


def borders_of(sources: Sequence[RowSource], step: Step) -> Borders:
    """Where documents begin in the rows of a step, whatever sources they come from."""
    found = []
    for number, rows in by_value(step.source):
        own = sources[number].borders(step.item[rows])
        if isinstance(rows, slice):
            return own
        # the third row of this source is row 7 of the batch: its borders move there
        row, column = np.divmod(own.positions, own.length)
        found.append(rows[row] * own.length + column)
    places = np.concatenate(found)
    places.sort()
    return Borders(len(step.item), sources[0].seq_len + 1, places)


# reading ahead

_WHOSE = 0 if resource is None else getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

LOOK_EVERY = 4
"""Steps between two looks at the counter."""

FIRST_SPELL, LONGEST_SPELL = 32, 4096
"""Steps of asking after a batch that waited."""


def disk_waits() -> int:
    """Page faults of this thread (outside Linux: of this process) that waited for the disk."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_majflt


def disk_reads() -> int:
    """Blocks that this thread read from disk: pread causes no page faults."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_inblock


class Readahead:
    """`ask` True: for every step. False: never. None: when batches wait for the disk.

    Not for two threads at a time.
    """

    def __init__(self, steps: Steps, *, ask: bool | None) -> None:
        self._steps = steps
        self._watch = ask is None
        preads = any(one.reader == "pread" for one in steps.stream.sources)
        self._counted = disk_reads if preads else disk_waits
        self._until = 0 if ask is not True else None  # the step at which to stop; None: never
        self._asked = 0  # steps before this one were asked for, or have been read
        self._spell = FIRST_SPELL
        self._waits = 0

    def before(self, step: int) -> None:
        """Call before `step` is read."""
        if self._until is None or step < self._until:
            self._ask(step)
        elif self._watch and not step % LOOK_EVERY:
            self._waits = self._counted()

    def after(self, step: int) -> None:
        """Call after `step` was read."""
        if not self._watch or step % LOOK_EVERY or self._until is None or step < self._until:
            return
        if self._counted() == self._waits:
            self._spell = FIRST_SPELL
            return
        self._until = step + 1 + self._spell
        self._spell = min(2 * self._spell, LONGEST_SPELL)
        self._ask(step)

    def _ask(self, step: int) -> None:
        """For each of the `HORIZON` steps after `step`, once."""
        stop = step + 1 + HORIZON
        if self._steps.num_steps is not None:
            stop = min(stop, self._steps.num_steps)
        sources = self._steps.stream.sources
        for ahead in range(max(self._asked, step + 1), stop):
            wanted = self._steps.at(ahead)
            for number, chosen in by_value(wanted.source):
                sources[number].prefetch(wanted.item[chosen])
        self._asked = max(self._asked, stop)
