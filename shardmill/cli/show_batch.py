"""The rows of one batch as something to look at.

In: a stream, and which batch of which rank.  Out: headings and spans, or facts for JSON.
Promise: the rows are those that a `Loader` gives there; every token is shown or counted as left
out; every document and every border between two of them is told.
Not here: which batch is meant (show_step), printing (show_print).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from shardmill.cli.show_text import Decode, Heading, Span, spans, visible
from shardmill.errors import OptionError
from shardmill.loading import PlannedSample, SampleStream, plan_step
from shardmill.mapped.documents import mask_labels
from shardmill.records import IGNORE_INDEX, JSON, BoolArray, IntArray, OffsetArray


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

    @property
    def window(self) -> OffsetArray:
        """(seq_len + 1,) all its tokens."""
        return np.append(self.input_ids, self.last)


def read_row(moment: Moment, plan: PlannedSample) -> Row:
    """The tokens of a planned sample."""
    source = next(one for one in moment.stream.sources if one.name == plan.source)
    input_ids, labels = np.empty((2, 1, source.seq_len), np.int64)
    source.fill([plan.window], input_ids, labels)
    last = int(labels[0, -1])
    if moment.documents:
        if plan.documents is None:
            raise OptionError(
                f"--documents: nobody knows where the documents of {source.path} begin, since it "
                f"is no store; look at it with --no-documents"
            )
        mask_labels(labels, source.borders(np.array([plan.window])))
    return Row(plan, input_ids[0], labels[0], last)


def row_pieces(
    row: Row, decode: Decode, markers: IntArray, max_tokens: int
) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    plan, ids = row.plan, row.window
    split = "" if plan.split is None else f", split {plan.split!r}"
    yield Heading(
        f"sample {plan.sample:,}: {visible(plan.source)} ({visible(str(plan.path))}{split}), "
        f"epoch {plan.epoch:,}, window {plan.window:,}, tokens {plan.start:,}..{plan.stop:,}"
        + ("" if plan.instead_of is None else f"; window {plan.instead_of:,} is excluded here")
    )
    trained = np.append(False, row.labels != IGNORE_INDEX)  # the first token is nobody's label
    kept = np.arange(len(ids)) < max_tokens
    if plan.documents is None:
        yield Heading("nobody knows where its documents begin")
        yield from spans(ids, trained, kept, markers, decode)
        return
    for number, start, stop in plan.documents:
        part = slice(start - plan.start, stop - plan.start)
        yield Heading(f"document {number:,}, tokens {start:,}..{stop:,}{_border(trained, part)}")
        yield from spans(ids[part], trained[part], kept[part], markers, decode)


def _border(trained: BoolArray, part: slice) -> str:
    """What is trained between the document before and this one."""
    if part.start == 0:
        return ""
    if trained[part.start]:
        return "; its first token is the label of the document before"
    return "; border: its first token is no label"


def batch_facts(moment: Moment, rows: list[Row], decode: Decode) -> dict[str, JSON]:
    """All numbers."""
    stream = moment.stream
    return {
        "samples": moment.samples,
        "rank": moment.rank,
        "world": moment.world,
        "batch_size": moment.batch_size,
        "seq_len": stream.seq_len,
        "seed": stream.seed,
        "shuffle": stream.shuffle,
        "documents": moment.documents,
        "fingerprint": stream.fingerprint,
        "rows": [_row_facts(row, decode) for row in rows],
    }


def _row_facts(row: Row, decode: Decode) -> dict[str, JSON]:
    plan, ids = row.plan, row.window
    facts: dict[str, JSON] = {one.name: getattr(plan, one.name) for one in fields(plan)}
    facts |= {
        "path": str(plan.path),
        "input_ids": row.input_ids.tolist(),
        "labels": row.labels.tolist(),
        "text": decode(ids),
        "documents": None,
    }
    if plan.documents is not None:
        facts["documents"] = [
            {
                "document": number,
                "start": start,
                "stop": stop,
                "text": decode(ids[start - plan.start : stop - plan.start]),
            }
            for number, start, stop in plan.documents
        ]
    return facts
