"""What a rank trains on at a step, and how a mixture goes on.

In: a store that is open, or a config; numbers of a training.  Out: facts for JSON.
Promise: rows, labels and order are those of a `Loader` with the same numbers; an answer holds at
most MOST_TOKENS tokens and about MOST_CHARACTERS characters, so perhaps less rows than were asked
for, and says which part of a batch it is.
Not here: reading rows (batch), requests (api).

The rows of one batch, read as a training reads them.

In: a stream, and which batch of which rank.  Out: `Row`s.
Promise: the rows are those that a `Loader` gives there.
Not here: which batch is meant, showing it (cli, steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardmill.errors import OptionError
from shardmill.inspect.stores import NO_TOKENIZER, OpenStore, Shelf
from shardmill.inspect.tokens import MOST_CHARACTERS, Reading, shown, some_of
from shardmill.loading import (
    PackSource,
    PlannedSample,
    RowSource,
    SampleStream,
    TokenSource,
    plan_step,
)
from shardmill.loading.config import DataConfig, open_stream
from shardmill.loading.order import Shuffle
from shardmill.loading.rows import Documents
from shardmill.records import IGNORE_INDEX, JSON, BoolArray, OffsetArray
from shardmill.store.readers import PackedRows
from shardmill.store.readers.documents import mask_labels


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
    source.fill_unchecked(np.array([plan.window]), input_ids, labels)
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


_SAMPLES, _SOME_SAMPLES = 10_000, 1000  # of a mixture, without phases and at least with them
_POINTS = 200  # of a mixture, for all phases
_LEAST_SAMPLES = 25  # between two points, or a share would be of a few samples
MOST_TOKENS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """What decides which sample comes when. None: as the config says, else 0 and "global"."""

    seq_len: int
    seed: int | None
    shuffle: Shuffle | None


def store_stream(
    opened: OpenStore, split: str | None, plan: str | None, order: OrderOptions
) -> SampleStream:
    """The order of one store: windows of a split, or rows of a plan."""
    source: RowSource
    if plan is not None:
        source = opened.pack_source(plan, split)
        if source.seq_len != order.seq_len:
            raise OptionError(
                f"seq_len={order.seq_len:,}: the rows of plan {plan!r} have {source.seq_len:,}"
            )
    elif opened.is_chat:
        known = ", ".join(opened.plans()) or "none yet: make one with `shardmill pack`"
        raise OptionError(
            f"{opened.folder}: conversations are trained on in rows of a pack plan; wanted "
            f"plan=NAME, of its plans: {known}"
        )
    else:
        source = TokenSource(opened, seq_len=order.seq_len, split=split)
    return SampleStream([source], seed=order.seed or 0, shuffle=order.shuffle or "global")


def config_stream(config: DataConfig, order: OrderOptions, global_batch_size: int) -> SampleStream:
    """The mixture of a config."""
    return open_stream(
        replace(config, shuffle=order.shuffle or config.shuffle),
        seq_len=order.seq_len,
        global_batch_size=global_batch_size,
        seed=order.seed,
    )


def step_facts(
    moment: Moment, shelf: Shelf, rows: tuple[int, int], tokens: tuple[int, int]
) -> dict[str, JSON]:
    """The rows of a batch: which of them, and which of their tokens, as (start, limit)."""
    planned = moment.plan()
    chosen = planned[rows[0] : rows[0] + rows[1]]
    most = max(1, min(tokens[1], MOST_TOKENS // max(1, len(chosen))))
    return {
        **moment.facts(),
        "stop": moment.stop,
        "start": rows[0],
        "rows": _rows(moment, chosen, shelf, (tokens[0], most)),
    }


def _rows(
    moment: Moment, chosen: Sequence[PlannedSample], shelf: Shelf, part: tuple[int, int]
) -> list[JSON]:
    """Of these samples as many as have not too much text, at least one."""
    rows: list[JSON] = []
    characters = 0
    for plan in chosen:
        found, view = _row_facts(moment, plan, shelf, part)
        rows.append({**found, "view": view})
        characters += sum(map(len, view["texts"]))
        if characters > MOST_CHARACTERS:
            break
    return rows


def _row_facts(
    moment: Moment, plan: PlannedSample, shelf: Shelf, part: tuple[int, int]
) -> tuple[dict[str, JSON], dict[str, Any]]:
    """What a row is, and its tokens."""
    row = read_row(moment, plan)
    ids = row.window
    start = min(part[0], len(ids))
    stop = min(start + part[1], len(ids))
    edges = _edges(moment.source_of(plan), plan)
    # columns of another document count as another piece
    piece = np.searchsorted(edges, np.arange(start, stop), side="right") - 1
    tokens = some_of(ids, start, stop, edges)
    view = shown(tokens, _reading(plan, shelf), trained=row.trained[start:stop], piece=piece)
    documents: JSON = None
    if plan.documents is not None:
        documents = [
            {"document": number, "start": first, "stop": last}
            for number, first, last in plan.documents
        ]
    found: dict[str, JSON] = {
        "sample": plan.sample,
        "source": plan.source,
        "path": str(plan.path),
        "split": plan.split,
        "epoch": plan.epoch,
        "window": plan.window,
        "start": plan.start,
        "stop": plan.stop,
        "documents": documents,
        "edges": edges.tolist(),
    }
    return found, view


def _edges(source: RowSource, plan: PlannedSample) -> OffsetArray:
    """Columns of a row at which a document or the padding begins, the first at 0."""
    if not tells_documents(source):
        return np.zeros(1, np.int64)
    inner = source.borders(np.array([plan.window])).positions
    return np.append(0, inner)


def _reading(plan: PlannedSample, shelf: Shelf) -> Reading:
    """Of the store that a row comes from; tokens of a folder are shown as ids."""
    opened = None if plan.split is None else shelf.find(plan.path)
    if opened is not None:
        return opened.reading
    return Reading(words=None, why=NO_TOKENIZER, markers=np.empty(0, np.int64))


def mixture_facts(
    stream: SampleStream, shelf: Shelf, samples: int | None, points: int | None
) -> dict[str, JSON]:
    """Shares of the sources over the first `samples` samples, at `points` places.

    Without `samples` every phase is there; without `points` every phase has its own, so no share
    is of two phases.
    """
    borders = [start for start, _ in stream.shares()]
    if samples is None:
        samples = max(2 * borders[-1], _SOME_SAMPLES) if borders[-1] else _SAMPLES
    if points is None:
        inside = [start for start in borders if start < samples]
        each = max(1, _POINTS // len(inside))
        runs = [
            np.linspace(start, stop, min(each, max(1, (stop - start) // _LEAST_SAMPLES)) + 1)
            for start, stop in pairwise([*inside, samples])
        ]
        places = np.concatenate(runs)
    else:
        places = np.linspace(0, samples, points + 1)
    ends = np.unique(places.astype(np.int64)).tolist()
    counts = [stream.counts(end).tolist() for end in ends]
    return {
        "samples": samples,
        "sources": [
            {
                "name": one.name,
                "path": str(one.path),
                "store": shelf.name_of(one.path) if one.split is not None else None,
                "split": one.split,
                "rows": len(one),
            }
            for one in stream.sources
        ],
        "phases": [
            {"start": start, "shares": [float(share) for share in shares]}
            for start, shares in stream.shares()
        ],
        "points": [
            {"sample": last, "shares": _shares(before, now), "counts": [*now]}
            for last, (before, now) in zip(ends[1:], pairwise(counts), strict=True)
        ],
    }


def _shares(before: Sequence[int], now: Sequence[int]) -> list[JSON]:
    new = [after - first for first, after in zip(before, now, strict=True)]
    return [count / sum(new) for count in new]
