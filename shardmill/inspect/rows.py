"""Rows that a training reads: of a pack plan, of a batch at a step, and the shares of a mixture.

Rows, labels and order are those of a `Loader` with the same numbers. Answers are bounded: one holds
at most MOST_TOKENS tokens and about MOST_CHARACTERS characters, so perhaps fewer rows than were
asked for; of a plan with many rows evenly spread ones are counted, and the answer says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from shardmill.errors import OptionError
from shardmill.inspect.documents import even_runs
from shardmill.inspect.stores import NO_TOKENIZER, NotThereError, OpenStore, Shelf, plan_line
from shardmill.inspect.tokens import MOST_CHARACTERS, MOST_VIEW, Reading, shown
from shardmill.loading import (
    PackSource,
    PlannedSample,
    RowSource,
    SampleStream,
    TokenSource,
    plan_step,
)
from shardmill.loading.fim import FimChange, moved_borders, rearrange
from shardmill.loading.order import Shuffle
from shardmill.loading.rows import Documents
from shardmill.records import IGNORE_INDEX, JSON, BoolArray, OffsetArray
from shardmill.store.readers import PackedRows, PackSpace, RowPieces
from shardmill.store.readers.documents import mask_labels

if TYPE_CHECKING:
    from shardmill.inspect.api import Desk, Query

LOOK_AT_ALL = 2**21
"""Rows of a plan that are all counted; of more, a part is."""
MOST_WASTE = 10_000
"""Rows that are listed from the emptiest on."""
MOST_TOKENS = 2**16
"""Of all rows of one answer."""
_BLOCK = 2**14  # rows at a time
_BINS = 32
_SHUFFLES: tuple[Shuffle, ...] = get_args(Shuffle)
_SAMPLES, _SOME_SAMPLES = 10_000, 1000  # of a mixture, without phases and at least with them
_POINTS = 200  # of a mixture, for all phases
_LEAST_SAMPLES = 25  # between two points, or a share would be of a few samples


# --- a pack plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fill:
    """How many tokens the rows of a plan hold."""

    looked_at: int
    edges: OffsetArray  # (bins + 1,) tokens of a row, half-open
    counts: OffsetArray  # (bins,) rows
    emptiest: OffsetArray  # (k,) numbers of rows, the emptiest first


def plan_facts(desk: Desk, query: Query) -> JSON:
    """A plan at a glance."""
    opened, name, space = desk.plan(query)
    fill = _fill(opened, name, space)
    bins = zip(pairwise(fill.edges.tolist()), fill.counts.tolist(), strict=True)
    return {
        **plan_line(name, space.plan),
        "room": space.plan.facts.options.capacity,
        "looked_at": fill.looked_at,
        "histogram": [{"from": low, "to": high, "count": count} for (low, high), count in bins],
    }


def row_page(desk: Desk, query: Query) -> JSON:
    """Some rows: in their order, or the emptiest first."""
    sort, (start, limit) = query.choice("sort", ("row", "waste"), "row"), query.page()
    opened, name, space = desk.plan(query)
    if sort == "waste":
        order = _fill(opened, name, space).emptiest
        total, rows = len(order), order[start : start + limit]
    else:
        total = len(space)
        rows = np.arange(min(start, total), min(start + limit, total))
    pieces = space.pieces(rows)
    numbers = enumerate(rows.tolist())
    return {"total": total, "rows": [_plan_row(space, pieces, at, row) for at, row in numbers]}


def _plan_row(space: PackSpace, pieces: RowPieces, at: int, number: int) -> dict[str, JSON]:
    """Row `number`, which is row `at` of `pieces`."""
    part = slice(*pieces.offsets[at : at + 2].tolist())
    columns = [array[part].tolist() for array in (pieces.examples, pieces.columns, pieces.lengths)]
    return {
        "row": number,
        "used": int(pieces.used[at]),
        "room": space.plan.facts.options.capacity,
        "pieces": [
            {"example": example, "place": start, "length": length}
            for example, start, length in zip(*columns, strict=True)
        ],
    }


def row_view(desk: Desk, query: Query) -> JSON:
    """A row token by token; a token of no piece has the piece -1."""
    number, (start, limit) = query.number("row"), query.page(MOST_VIEW, most=MOST_VIEW)
    opened, _, space = desk.plan(query)
    if number >= len(space):
        total = len(space)
        has = f"has {total:,}, numbered 0 to {total - 1:,}" if total else "is empty"
        raise NotThereError(f"there is no row {number:,}: the plan {has}")
    pieces, rows = space.pieces([number]), space.rows([number])
    start = min(start, space.row_len)
    stop = min(start + limit, space.row_len)
    starts, ends = pieces.columns, pieces.columns + pieces.lengths
    column = np.arange(start, stop)
    owner = np.searchsorted(starts, column, side="right") - 1
    owner[column >= ends[owner]] = -1
    edges, trained = [*starts.tolist(), *ends.tolist()], rows.trained[0, start:stop]
    span = start, stop
    view = shown(rows.ids[0], span, opened.reading, edges=edges, trained=trained, piece=owner)
    return {**_plan_row(space, pieces, 0, number), "view": view}


def _fill(opened: OpenStore, name: str, space: PackSpace) -> Fill:
    """Made once for each plan."""
    return opened.keep(("fill", name, space.plan.fingerprint), lambda: measure_fill(space))


def measure_fill(space: PackSpace) -> Fill:
    """Counted a block of rows at a time; of each block only the emptiest rows are kept."""
    capacity = space.plan.facts.options.capacity
    width = -(-(capacity + 1) // _BINS)
    edges = np.arange(0, capacity + 1 + width, width, dtype=np.int64)
    edges[-1] = capacity + 1
    counts = np.zeros(len(edges) - 1, np.int64)
    looked_at, numbers, used = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for first, last in even_runs(len(space), LOOK_AT_ALL, _BLOCK):
        rows = np.arange(first, last)
        own = space.pieces(rows).used
        counts += np.bincount(own // width, minlength=len(counts))
        looked_at += len(rows)
        numbers, used = np.append(numbers, rows), np.append(used, own)
        order = np.lexsort((numbers, used))[:MOST_WASTE]
        numbers, used = numbers[order], used[order]
    return Fill(looked_at=looked_at, edges=edges, counts=counts, emptiest=numbers)


# --- a batch of a training


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Which batch of which rank."""

    stream: SampleStream
    samples: int  # of all ranks, consumed before it
    rank: int
    world: int
    batch_size: int
    documents: bool  # labels across documents are ignored

    @property
    def stop(self) -> int:
        """Samples consumed after it."""
        return self.samples + self.world * self.batch_size

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
            **({} if self.stream.fim is None else {"fim": self.stream.fim.facts}),
        }

    def plan(self) -> list[PlannedSample]:
        return plan_step(
            self.stream,
            samples=self.samples,
            batch_size=self.batch_size,
            world=self.world,
            rank=self.rank,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """One sample as it is trained on."""

    plan: PlannedSample
    window: OffsetArray  # (seq_len + 1,) its tokens; the last one is only a label
    labels: OffsetArray  # (seq_len,) IGNORE_INDEX across documents, when they are kept apart
    columns: tuple[tuple[int, int], ...] | None  # of `window`: each document's; None: not known
    packed: bool  # a row of a pack plan: its documents are examples, and the rest is padding
    edges: OffsetArray  # columns at which a document or the padding starts, the first at 0
    rearranged: frozenset[int]  # first columns of documents that are filled in in the middle

    @property
    def trained(self) -> BoolArray:
        """(seq_len + 1,) which of them are labels; the first token is none."""
        return np.append(False, self.labels != IGNORE_INDEX)


def read_row(moment: Moment, plan: PlannedSample) -> Row:
    """The tokens of a planned sample."""
    source: RowSource = next(one for one in moment.stream.sources if one.name == plan.source)
    numbers, (input_ids, labels) = (
        np.array([plan.window]),
        np.empty((2, 1, source.seq_len), np.int64),
    )
    source.fill_unchecked(numbers, input_ids, labels)
    place = np.array([moment.stream.sources.index(source)])
    changes = moment.stream.fim_changes([plan.sample], place, numbers)
    rearrange([plan.sample], changes, input_ids, labels)
    window, columns = np.append(input_ids, labels[:, -1]), None
    if isinstance(source, PackSource):  # its labels lack the tokens that are not trained
        found = source.rows(numbers)
        window, columns = found.ids[0], pack_columns(found, plan.documents or ())
    elif plan.documents is not None:
        columns = _columns_of(plan, plan.documents, changes)
    edges: OffsetArray = np.zeros(1, np.int64)
    # of a store, or of a folder whose end token is known
    if source.split is not None or getattr(source, "eos_token_id", None) is not None:
        borders = moved_borders(source.borders(numbers), changes)
        edges = np.append(edges, borders.positions)
        if moment.documents:
            mask_labels(labels, borders)
    elif moment.documents:
        raise OptionError(
            f"--documents: it is not known where the documents of {source.path} start, since it "
            "is not a store; look at it with --no-documents"
        )
    starts = np.concatenate([np.empty(0, np.int64), *(one.plan.moved_starts for one in changes)])
    return Row(
        plan=plan,
        window=window,
        labels=labels[0],
        columns=columns,
        packed=isinstance(source, PackSource),
        edges=edges,
        rearranged=frozenset(starts.tolist()),
    )


def _columns_of(
    plan: PlannedSample, documents: Documents, changes: Sequence[FimChange]
) -> tuple[tuple[int, int], ...]:
    """Where the documents of a window are in its row; one that was cut has no columns."""
    length = plan.stop - plan.start
    starts = np.array([start - plan.start for _, start, _ in documents], np.int64)
    for one in changes:
        moved = one.plan.moved(starts)
        starts = np.where(moved < 0, length, moved)
    return tuple(pairwise([*starts.tolist(), length]))


def pack_columns(found: PackedRows, documents: Documents) -> tuple[tuple[int, int], ...]:
    """Where the examples of a single row are in it, without padding."""
    return tuple(
        (first, first + stop - start)
        for first, (_, start, stop) in zip(found.starts.values.tolist(), documents, strict=True)
    )


def step(desk: Desk, query: Query) -> JSON:
    """Some rows of a batch, and some of their tokens.

    At least one row, then as many as do not have too much text.
    """
    world = query.number("world", 1, least=1, most=2**20)
    batch_size = query.number("batch_size", least=1, most=2**16)
    rank = query.number("rank", 0, most=world - 1)
    number = query.number("step", most=2**40)
    start, limit = query.page(16, most=64)
    column = query.number("from", 0)
    num_tokens = query.number("tokens", 2048, least=1, most=MOST_VIEW)
    stream, apart = _stream(desk, query, world * batch_size)
    moment = Moment(
        stream=stream,
        samples=number * world * batch_size,
        rank=rank,
        world=world,
        batch_size=batch_size,
        documents=apart,
    )
    chosen = moment.plan()[start : start + limit]
    most = max(1, min(num_tokens, MOST_TOKENS // max(1, len(chosen))))
    found: list[JSON] = []
    characters = 0
    for plan in chosen:
        row = _step_row(read_row(moment, plan), desk.shelf, (column, most))
        found.append(row)
        characters += sum(map(len, row["view"]["texts"]))
        if characters > MOST_CHARACTERS:
            break
    return {**moment.facts(), "stop": moment.stop, "start": start, "rows": found}


def _stream(desk: Desk, query: Query, global_batch_size: int) -> tuple[SampleStream, bool]:
    """The order of the mixture, of windows of a split, or of rows of a plan; and whether labels
    across documents are ignored."""
    apart = query.optional("documents")
    if apart not in (None, "0", "1"):
        raise OptionError(f"documents={apart[:40]!r}: wanted 0 or 1")
    if query.optional("store") is None:
        stream = desk.mixture(*_order(query, None), global_batch_size)
        own = desk.config is not None and desk.config.pack_sequences
        return stream, own if apart is None else apart == "1"
    source: RowSource
    if query.optional("plan") is not None:
        opened, name, space = desk.plan(query)
        seq_len, seed, shuffle = _order(query, space.plan.facts.options.seq_len)
        source = opened.pack_source(name)
        if source.seq_len != seq_len:
            raise OptionError(
                f"seq_len={seq_len:,}: the rows of plan {name!r} have {source.seq_len:,}"
            )
    else:
        opened, split = desk.split(query)
        seq_len, seed, shuffle = _order(query, None)
        if opened.is_chat:
            raise OptionError(
                f"{opened.folder}: conversations are trained on in rows of a pack plan; wanted "
                f"plan=NAME, of its plans: {opened.plan_names()}"
            )
        source = TokenSource(opened, seq_len=seq_len, split=split)
    stream = SampleStream([source], seed=seed or 0, shuffle=shuffle or "global")
    return stream, apart == "1"


def _order(query: Query, seq_len: int | None) -> tuple[int, int | None, Shuffle | None]:
    """seq_len, seed and shuffle. None: as the config says, else 0 and "global"."""
    chosen = query.choice("shuffle", _SHUFFLES, "default")
    shuffle = next((one for one in _SHUFFLES if one == chosen), None)
    return query.number("seq_len", seq_len, least=1, most=2**24), query.whole("seed"), shuffle


def _step_row(row: Row, shelf: Shelf, part: tuple[int, int]) -> dict[str, Any]:
    plan, ids = row.plan, row.window
    start = min(part[0], len(ids))
    stop = min(start + part[1], len(ids))
    # columns of another document count as another piece
    piece = np.searchsorted(row.edges, np.arange(start, stop), side="right") - 1
    trained, edges = row.trained[start:stop], row.edges.tolist()
    number = None if plan.split is None else shelf.find(plan.path)
    if number is None:
        reading = Reading(texts=None, why=NO_TOKENIZER, markers=np.empty(0, np.int64))
    else:
        reading = shelf.store(number).reading
    documents: JSON = None
    if plan.documents is not None:
        documents = [
            {"document": number, "start": first, "stop": last}
            for number, first, last in plan.documents
        ]
    return {
        **asdict(plan),
        "path": str(plan.path),
        "documents": documents,
        "edges": edges,
        "view": shown(ids, (start, stop), reading, edges=edges, trained=trained, piece=piece),
    }


# --- a mixture


def mixture(desk: Desk, query: Query) -> JSON:
    """Shares of the sources over the first `samples` samples, in `points` parts.

    Without `samples` every phase is there; without `points` every phase has its own, so no share
    is of two phases.
    """
    samples = query.whole("samples", least=1, most=2**50)
    points = query.whole("points", least=1, most=2000)
    world = query.number("world", 1, least=1, most=2**20)
    batch = world * query.number("batch_size", 1, least=1, most=2**16)
    stream = desk.mixture(*_order(query, 1024), batch)
    phases = [start for start, _ in stream.shares()]
    if samples is None:
        samples = max(2 * phases[-1], _SOME_SAMPLES) if phases[-1] else _SAMPLES
    if points is None:
        inside = [start for start in phases if start < samples]
        each = max(1, _POINTS // len(inside))
        runs = [
            np.linspace(start, stop, min(each, max(1, (stop - start) // _LEAST_SAMPLES)) + 1)
            for start, stop in pairwise([*inside, samples])
        ]
        edges = np.concatenate(runs)
    else:
        edges = np.linspace(0, samples, points + 1)
    ends = np.unique(edges.astype(np.int64)).tolist()
    counts = np.array([stream.counts(end) for end in ends])
    new = np.diff(counts, axis=0)
    shares = new / new.sum(axis=1, keepdims=True)
    return {
        "samples": samples,
        "sources": [
            {
                "name": one.name,
                "path": str(one.path),
                "store": _store_name(one, desk.shelf),
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
            {"sample": last, "shares": part, "counts": total}
            for last, part, total in zip(
                ends[1:], shares.tolist(), counts[1:].tolist(), strict=True
            )
        ],
        "seq_len": stream.seq_len,
        "global_batch_size": batch,
        "seed": stream.seed,
    }


def _store_name(source: RowSource, shelf: Shelf) -> str | None:
    number = None if source.split is None else shelf.find(source.path)
    return None if number is None else shelf.names[number]
