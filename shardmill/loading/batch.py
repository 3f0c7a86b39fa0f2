"""What a rank gets for one step.

In: nothing; these are records.  Out: plain numpy arrays.
Promise: a batch that somebody holds, whole or in part, never changes.
Not here: how it is made (make), tensors.

Arrays that are used again when nobody looks at them any more.

In: a shape.  Out: an int64 array of it, its contents anything.
Promise: an array that is given out again is referred to by nobody else: not by a batch, a view, a
slice, a memoryview or a tensor that shares its memory. Whoever keeps a batch, in whole or in part,
keeps its array, and another one takes its place here.
Not here: filling. Not for two threads at a time.

How: all of these hold a reference to the array that owns the memory, and CPython counts references.
A count that is the one of an array in this list alone cannot rise by anybody else's doing. Where
references are not counted so (PyPy, or threads without the interpreter's lock) every array is new.

Steps become batches.

In: steps of one rank.  Out: a `Batch` for any step number.
Promise: rows come in the order of their samples; one gather a source; the arrays are those of
`Buffers`. With documents, labels that belong to another document are ignored, exactly at borders.
Not here: order (steps), threads (ahead), position (loader). Not for two threads at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.loading.order import Step, Steps
from shardmill.loading.readahead import Asker
from shardmill.loading.rows import RowSource
from shardmill.records import Batch, OffsetArray
from shardmill.sampling.order import by_value
from shardmill.store.readers.documents import Borders, cut_segments, mask_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounters:
    """What was consumed of one source since sample 0, by all ranks together."""

    samples: int
    tokens: int  # inputs: samples * seq_len
    epochs: float  # samples / windows of the source


def _counts_references() -> bool:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)
    return sys.implementation.name == "cpython" and bool(with_lock())


class Buffers:
    """At most `most` arrays of one shape are remembered, those given out included."""

    def __init__(self, shape: tuple[int, ...], *, most: int) -> None:
        self._shape = shape
        self._most = most if _counts_references() else 0
        self._arrays: list[OffsetArray] = [np.empty(0, np.int64)]
        self._idle = self._references(0)  # what is counted when only the list has an array
        self._arrays.clear()

    def take(self) -> OffsetArray:
        """An array that nobody refers to: a used one, or a new one."""
        for place in range(len(self._arrays)):
            if self._references(place) == self._idle:
                # to the end: the one that was given out longest ago is looked at first
                array = self._arrays.pop(place)
                self._arrays.append(array)
                return array
        array = np.empty(self._shape, np.int64)
        if self._most:
            if len(self._arrays) == self._most:
                del self._arrays[0]  # somebody keeps it; it is his now
            self._arrays.append(array)
        return array

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._arrays[place])


class BatchMaker:
    """Makes the batches of `steps`, in any order, though one after the other is meant."""

    def __init__(
        self, steps: Steps, buffers: Buffers, *, documents: bool, ask_ahead: bool | None
    ) -> None:
        self._steps, self._buffers = steps, buffers
        self._sources = steps.stream.sources
        self._documents = documents
        self._asker = Asker(steps, ask=ask_ahead)

    def make(self, number: int) -> Batch:
        step = self._steps.at(number)
        self._asker.before(number)
        pair = self._buffers.take()
        input_ids, labels = pair[0], pair[1]
        self._fill(step, input_ids, labels)
        batch = self._batch(step, input_ids, labels)
        self._asker.after(number)
        return batch

    def _fill(self, step: Step, input_ids: OffsetArray, labels: OffsetArray) -> None:
        if len(self._sources) == 1:
            self._sources[0].fill_unchecked(step.item, input_ids, labels)
            return
        for number, rows in by_value(step.source):
            chosen = None if isinstance(rows, slice) else rows  # a slice: all are of one source
            self._sources[number].fill_unchecked(step.item[rows], input_ids, labels, chosen)

    def _batch(self, step: Step, input_ids: OffsetArray, labels: OffsetArray) -> Batch:
        segments = None
        if self._documents:
            borders = borders_of(self._sources, step)
            mask_labels(labels, borders)
            segments = cut_segments(borders)
        return Batch(
            input_ids=input_ids,
            labels=labels,
            doc_ids=None if segments is None else segments.doc_ids,
            position_ids=None if segments is None else segments.position_ids,
            cu_seqlens=None if segments is None else segments.cu_seqlens,
            max_seqlen=None if segments is None else segments.max_seqlen,
            samples=step.samples,
            source=step.source,
            epoch=step.epoch,
            item=step.item,
        )


def borders_of(sources: Sequence[RowSource], step: Step) -> Borders:
    """Where documents begin in the rows of a step, whatever sources they come from."""
    seq_len = sources[0].seq_len
    found = []
    for number, rows in by_value(step.source):
        own = sources[number].borders(step.item[rows])
        if isinstance(rows, slice):
            return own
        # the third row of this source is row 7 of the batch: its borders move there
        row, column = np.divmod(own.places, own.length)
        found.append(rows[row] * own.length + column)
    places = np.concatenate(found)
    places.sort()
    return Borders(len(step.item), seq_len + 1, places)
