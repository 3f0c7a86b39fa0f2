"""The rows of one batch, read as a training reads them.

In: a stream, and which batch of which rank.  Out: `Row`s.
Promise: the rows are those that a `Loader` gives there.
Not here: which batch is meant, showing it (cli, steps).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.errors import OptionError
from shardmill.loading import PackSource, PlannedSample, RowSource, SampleStream, plan_step
from shardmill.loading.rows import Documents
from shardmill.mapped import PackedRows
from shardmill.mapped.documents import mask_labels
from shardmill.records import IGNORE_INDEX, JSON, BoolArray, OffsetArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Which batch."""

    stream: SampleStream
    samples: int  # of all ranks, consumed before it
    rank: int
    world: int
    batch_size: int
    documents: bool  # labels at borders are ignored

    @property
    def stop(self) -> int:
        """Samples consumed behind it."""
        return self.samples + self.world * self.batch_size

    def source_of(self, plan: PlannedSample) -> RowSource:
        return next(one for one in self.stream.sources if one.name == plan.source)

    def facts(self) -> dict[str, JSON]:
        """What decides which rows these are, for JSON."""
        return {
            "samples": self.samples,
            "rank": self.rank,
            "world": self.world,
            "batch_size": self.batch_size,
            "seq_len": self.stream.seq_len,
            "seed": self.stream.seed,
            "shuffle": self.stream.shuffle,
            "documents": self.documents,
        }

    def plan(self) -> list[PlannedSample]:
        return plan_step(
            self.stream,
            samples=self.samples,
            batch_size=self.batch_size,
            world=self.world,
            rank=self.rank,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sample as it is trained on."""

    plan: PlannedSample
    input_ids: OffsetArray  # (seq_len,)
    labels: OffsetArray  # (seq_len,) IGNORE_INDEX at borders, when documents are kept apart
    last: int  # the window's last token, which is only a label
    columns: tuple[tuple[int, int], ...] | None  # of `window`: each document's; None: not known
    packed: bool  # a row of a pack plan: its documents are examples, and the rest is padding

    @property
    def window(self) -> OffsetArray:
        """(seq_len + 1,) all its tokens."""
        return np.append(self.input_ids, self.last)

    @property
    def trained(self) -> BoolArray:
        """(seq_len + 1,) which of them are labels; the first token is nobody's."""
        return np.append(False, self.labels != IGNORE_INDEX)


def tells_documents(source: RowSource) -> bool:
    """Whether `borders` can answer: for a store, and for a folder whose end token is known."""
    return source.split is not None or getattr(source, "eos_token_id", None) is not None


def read_row(moment: Moment, plan: PlannedSample) -> Row:
    """The tokens of a planned sample."""
    source = moment.source_of(plan)
    input_ids, labels = np.empty((2, 1, source.seq_len), np.int64)
    source.fill([plan.window], input_ids, labels)
    packed = isinstance(source, PackSource)
    documents, first = plan.documents, plan.start
    columns: tuple[tuple[int, int], ...] | None = None
    if isinstance(source, PackSource):  # what is not trained is not in its labels
        found = source.rows([plan.window])
        last = int(found.ids[0, -1])
        columns = pack_columns(found, documents or ())
    else:
        last = int(labels[0, -1])
        if documents is not None:
            columns = tuple((start - first, stop - first) for _, start, stop in documents)
    if moment.documents:
        if not tells_documents(source):
            raise OptionError(
                f"--documents: nobody knows where the documents of {source.path} begin, since it "
                f"is no store; look at it with --no-documents"
            )
        mask_labels(labels, source.borders(np.array([plan.window])))
    return Row(plan, input_ids[0], labels[0], last, columns, packed)


def pack_columns(found: PackedRows, documents: Documents) -> tuple[tuple[int, int], ...]:
    """Where the examples of a single row lie in it, padding left out."""
    begins = found.starts.values.tolist()
    return tuple(
        (begin, begin + stop - start)
        for begin, (_, start, stop) in zip(begins, documents, strict=True)
    )
