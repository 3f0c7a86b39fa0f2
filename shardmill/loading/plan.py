"""What a rank gets at a step, told without reading a token.

In: a stream, the samples consumed before the step, batch size, rank and world.
Out: a `PlannedSample` for each row: window, tokens, documents.
Promise: exactly the rows that a `Loader` gives there, whatever it was resumed from.
Not here: reading or decoding the tokens (cli).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

from shardmill.arguments import check_memory, whole_number
from shardmill.loading.rows import Documents, RowSource
from shardmill.loading.steps import Shape, Steps
from shardmill.loading.stream import SampleStream

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
    shape = Shape(
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
