"""Batches for one rank, from any position.

The ranks together read the stream in its order, whatever their number, and all have the same number
of steps. From a state the very next sample follows, on any number of ranks with any batch size.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.batch import BatchMaker, Buffers
from shardmill.loading.order import SampleStream, Steps, StepShape
from shardmill.loading.prefetch import Ahead, OneThread
from shardmill.loading.state import make_state, read_state
from shardmill.machine import check_memory
from shardmill.protocols import Closing
from shardmill.records import JSON, Batch

log = logging.getLogger(__name__)

_SPARE = 3  # buffers besides those made early: one in use, one about to be, one just released


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounters:
    """What was consumed of one source since sample 0, by all ranks together."""

    samples: int
    tokens: int  # inputs: samples * seq_len
    epochs: float  # samples / rows of the source


class Loader(Closing):
    """The steps of one rank. Its position, `samples`, counts the samples of all ranks.

    `batch_size`: rows of this rank; a step is `world * batch_size` samples. `num_samples`: where to
    stop; None: never. `documents=True` keeps documents apart (see `Batch`); None: as the stream
    says. `ahead`: batches made early in a thread; 0: no thread. `ask_ahead`: whether the kernel is
    asked to read the rows of the next steps; None: once a batch had to wait for the disk. A pickled
    copy continues from the same position. For one thread: a second one that asks at the same time
    gets an OptionError.
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
        ahead: SupportsIndex = 2,
        ask_ahead: bool | None = None,
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
        self.documents = stream.documents if documents is None else bool(documents)
        self.ask_ahead = None if ask_ahead is None else bool(ask_ahead)
        self.ahead = whole_number(ahead, "ahead", least=0)
        if self.documents:
            for source in stream.sources:
                source.borders(np.empty(0, np.int64))  # an error when it does not know them
        self._check_memory()
        self._samples = 0
        self._current: weakref.ref[_Batches] | None = None
        self._warned = False  # of samples that do not fill a step
        self._reset()

    @property
    def samples(self) -> int:
        """Global samples consumed, by all ranks, up to the last batch given."""
        return self._samples

    def __iter__(self) -> Iterator[Batch]:
        """Continues from the position. A new iterator ends the previous one."""
        self.close()
        steps = Steps(self.stream, self._shape, start=self._samples, num_steps=self._steps_left())
        maker = BatchMaker(steps, self._buffers, documents=self.documents, ask_ahead=self.ask_ahead)
        made = Ahead(maker.make, num_items=steps.num_steps, depth=self.ahead)
        iterator = _Batches(self, steps, made)
        self._current = weakref.ref(iterator)  # weak: dropping it ends its thread
        return iterator

    def state_dict(self) -> dict[str, JSON]:
        """The position after the last batch given, whatever was made early: JSON, under 1 KB."""
        return make_state(self.stream, self._samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same stream, saved on any number of ranks."""
        samples = read_state(state, self.stream)
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
                tokens=count * source.seq_len,
                epochs=count / len(source) if len(source) else 0.0,
            )
            for source, count in zip(self.stream.sources, counts, strict=True)
        }

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


class _Batches(Iterator[Batch]):
    """One iteration. The position is kept by the loader alone."""

    def __init__(self, loader: Loader, steps: Steps, batches: Ahead[Batch]) -> None:
        self._loader, self._steps, self._batches = loader, steps, batches
        self._closed = False
        self._one_thread = OneThread("Loader")

    def __next__(self) -> Batch:
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
