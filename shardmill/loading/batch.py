"""Steps become batches: one gather per source, into arrays that are used again when they are free.

With documents, labels that belong to another document than their input are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from shardmill.loading.order import Step, Steps
from shardmill.loading.readahead import Readahead
from shardmill.loading.rows import RowSource
from shardmill.records import Batch, OffsetArray
from shardmill.sampling.order import by_value
from shardmill.store.readers.documents import Borders, cut_segments, mask_labels


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
                del self._arrays[0]  # whoever keeps it owns it now
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
        segments = None
        if self._documents:
            borders = borders_of(self._sources, step)
            mask_labels(labels, borders)
            segments = cut_segments(borders)
        self._readahead.after(number)
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
    return Borders(len(step.item), sources[0].seq_len + 1, places)
