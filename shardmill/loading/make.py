"""Steps become batches.

In: steps of one rank.  Out: a `Batch` for any step number.
Promise: rows come in the order of their samples; one gather a source; the arrays are those of
`Buffers`. With documents, labels that belong to another document are ignored, exactly at borders.
Not here: order (steps), threads (ahead), position (loader). Not for two threads at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardmill.loading.ask import Asker
from shardmill.loading.batch import Batch
from shardmill.loading.buffers import Buffers
from shardmill.loading.rows import RowSource
from shardmill.loading.steps import Step, Steps
from shardmill.mapped.documents import Borders, cut_segments, mask_labels
from shardmill.records import OffsetArray
from shardmill.sampling.order import by_value


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
