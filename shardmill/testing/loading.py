"""Guarantees of loaders and streams as tests: one order on any ranks, exact resume, exclusions.

A loader is anything that iterates and has `state_dict` and `load_state_dict`; what is expected is
what one rank with batches of one gives. States and cursors go through JSON before they are loaded.
`UnitsSource` is a divided source in memory to try streams on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from shardmill.errors import missing_extra
from shardmill.loading import RowSource, SampleStream
from shardmill.loading.streaming.documents import Block, DocumentStream, StreamOrder
from shardmill.loading.streaming.state import ReadCounts, StreamCursor
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, Drop, TextBatch

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "MakeLoader",
    "REPAIRED",
    "RankShape",
    "Resumable",
    "Row",
    "Rows",
    "STATE_BYTES",
    "Spans",
    "UnitRow",
    "UnitSource",
    "UnitsSource",
    "assert_only_excluded_places_change",
    "assert_order_is_one",
    "assert_resume_is_elastic",
    "assert_resumes_exactly",
    "assert_stream_resumes",
    "contents",
    "counts_of",
    "epoch_texts",
    "has_token",
    "make_ranks",
    "orders",
    "read_steps",
    "rows_of",
    "rows_of_units",
    "saved",
]

STATE_BYTES = 1024
"""A state is smaller than this, as JSON."""

Row: TypeAlias = Any
"""What identifies a sample, compared with `==`."""
Rows: TypeAlias = Callable[[Any], Sequence[Row]]
"""The rows of a batch, in order."""


class Resumable(Protocol):
    """What a loader must have."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class MakeLoader(Protocol):
    """Makes the loader of one rank, always over the same stream, at its start."""

    def __call__(self, *, batch_size: int, rank: int, world: int) -> Resumable: ...


class RankShape(NamedTuple):
    """How many ranks read, and how much each reads at a step."""

    batch_size: int
    world: int

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.world


def rows_of(batch: Any) -> list[Row]:
    """Number, inputs and labels of each row of a `Batch`."""
    rows = zip(batch.samples, batch.input_ids, batch.labels, strict=True)
    return [(number, ids.tobytes(), labels.tobytes()) for number, ids, labels in rows]


def saved(loader: Resumable) -> dict[str, Any]:
    """The state as it comes back from a file; its size is checked."""
    text = json.dumps(loader.state_dict())
    assert len(text) < STATE_BYTES, f"a state of {len(text)} bytes"
    state: dict[str, Any] = json.loads(text)
    return state


def read_steps(loaders: Iterable[Resumable], num_steps: int, rows: Rows = rows_of) -> list[Row]:
    """The rows of `num_steps` steps of all ranks, step by step and rank by rank."""
    batches = [list(islice(loader, num_steps)) for loader in loaders]
    assert [len(own) for own in batches] == [num_steps] * len(batches), "a rank ended early"
    return [row for step in zip(*batches, strict=True) for own in step for row in rows(own)]


def make_ranks(
    make: MakeLoader, shape: RankShape, state: dict[str, Any] | None = None
) -> list[Resumable]:
    """The loaders of all ranks, from the start or from a state."""
    ranks = range(shape.world)
    found = [make(batch_size=shape.batch_size, rank=rank, world=shape.world) for rank in ranks]
    if state is not None:
        for loader in found:
            loader.load_state_dict(state)
    return found


def assert_order_is_one(
    make: MakeLoader, shapes: Sequence[RankShape], num_samples: int, rows: Rows = rows_of
) -> None:
    """Guarantees 5 and 7: whatever the number of ranks and the batch size, the steps of all ranks
    together are the same samples in the same order, each read once."""
    expected = read_steps(make_ranks(make, RankShape(1, 1)), num_samples, rows)
    for shape in shapes:
        num_steps = num_samples // shape.step_samples
        found = read_steps(make_ranks(make, shape), num_steps, rows)
        assert found == expected[: num_steps * shape.step_samples], f"another order with {shape}"


def assert_resumes_exactly(
    make: Callable[[], Resumable], num_steps: int, rows: Rows = rows_of
) -> None:
    """Guarantee 6: from the state before every step, a fresh loader gives the same remaining
    batches; and saving right after loading gives the same state."""
    first = make()
    states = [saved(first)]
    expected = []
    for batch in islice(first, num_steps):
        expected.append(list(rows(batch)))
        states.append(saved(first))
    assert len(expected) == num_steps, f"only {len(expected)} steps"
    for step, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        assert saved(again) == state, f"step {step}: saving after loading changes the state"
        found = [list(rows(batch)) for batch in islice(again, num_steps - step)]
        assert found == expected[step:], f"step {step}: other batches after a resume"
        assert saved(again) == states[-1]


def assert_resume_is_elastic(
    make: MakeLoader, runs: Sequence[tuple[RankShape, int]], rows: Rows = rows_of
) -> None:
    """Guarantee 6 on other ranks: runs of some steps, each on its own ranks and resumed from the
    state that all ranks of the previous run saved, together read what one rank reads at once."""
    total = sum(shape.step_samples * num_steps for shape, num_steps in runs)
    expected = read_steps(make_ranks(make, RankShape(1, 1)), total, rows)
    found: list[Row] = []
    state: dict[str, Any] | None = None
    for shape, num_steps in runs:
        ranks = make_ranks(make, shape, state)
        found += read_steps(ranks, num_steps, rows)
        states = [saved(loader) for loader in ranks]
        assert all(other == states[0] for other in states), "ranks save different states"
        state = states[0]
    assert found == expected, "a resumed run reads other samples"


Spans: TypeAlias = Sequence[tuple[int, int]]
"""Start and stop, in the token space of a split."""


def has_token(source: RowSource, item: int, spans: Spans) -> bool:
    """Whether a sample contains a token of these spans."""
    place = source.span(item)
    parts = [(place.start, place.stop)]
    if place.documents is not None:
        parts = [(start, stop) for _, start, stop in place.documents]
    return any(
        max(start, first) < min(stop, last) for start, stop in parts for first, last in spans
    )


def assert_only_excluded_places_change(
    before: SampleStream, after: SampleStream, spans: Mapping[str, Spans], num_samples: int
) -> int:
    """Of the first `num_samples` samples, those without a token of `spans` (by name of the source)
    are the same, at the same numbers; each other one is replaced by a sample of the same source and
    epoch without such a token. Returns how many are replaced."""
    assert before.names == after.names
    rows = [
        list(zip(found.source.tolist(), found.epoch.tolist(), found.item.tolist(), strict=True))
        for found in (before.take(range(num_samples)), after.take(range(num_samples)))
    ]
    replaced = 0
    for sample, (old, new) in enumerate(zip(*rows, strict=True)):
        source = after.sources[old[0]]
        excluded = spans.get(source.name, ())
        assert not has_token(source, new[2], excluded), f"sample {sample}: an excluded token"
        if has_token(source, old[2], excluded):
            replaced += 1
            assert new[:2] == old[:2], f"sample {sample}: replaced from another source or epoch"
        else:
            assert new == old, f"sample {sample}: was not excluded, but changed"
    return replaced


REPAIRED = "\ufffd"

UnitRow: TypeAlias = str | None
"""A text; "" is empty, None is dropped; one with U+FFFD in it counts as repaired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSource:
    """One unit: rows in batches of `batch_rows`; the cursor is the number of rows read."""

    name: str
    rows: tuple[UnitRow, ...]
    batch_rows: int
    opened: list[tuple[str, Cursor | None]] = field(default_factory=list, compare=False)
    # every reading that began: which unit, and from where

    def describe(self) -> dict[str, JSON]:
        return {"kind": "unit", "name": self.name}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        self.opened.append((self.name, cursor))
        first = 0 if cursor is None else cursor["row"]
        assert isinstance(first, int)
        for start in range(first, len(self.rows), self.batch_rows):
            yield self._batch(start, min(start + self.batch_rows, len(self.rows)))

    def _batch(self, start: int, stop: int) -> TextBatch:
        rows = self.rows[start:stop]
        texts = [row for row in rows if row]
        return TextBatch(
            texts=pa.array(texts, pa.large_string()),
            num_read=len(rows),
            counts={
                "empty": sum(row == "" for row in rows),
                "invalid_utf8": sum(REPAIRED in text for text in texts),
            },
            drops=tuple(
                Drop(id=f"{self.name}:row {start + number}", reason="no_text")
                for number, row in enumerate(rows)
                if row is None
            ),
            cursor={"row": stop},
        )


class UnitsSource:
    """A divided source: units in order, read as a whole or one by one."""

    def __init__(
        self, units: Sequence[Sequence[UnitRow]], *, batch_rows: int = 3, name: str = "units"
    ) -> None:
        self.opened: list[tuple[str, Cursor | None]] = []
        self.num_divided = 0
        self.name = name
        self._units = [
            UnitSource(
                name=f"{name}/{number}",
                rows=tuple(rows),
                batch_rows=batch_rows,
                opened=self.opened,
            )
            for number, rows in enumerate(units)
        ]

    @property
    def rows(self) -> list[UnitRow]:
        return [row for unit in self._units for row in unit.rows]

    @property
    def texts(self) -> list[str]:
        """Every document, in order."""
        return [row for row in self.rows if row]

    def describe(self) -> dict[str, JSON]:
        return {"kind": "units", "name": self.name}

    def size_hint(self) -> int | None:
        return None

    def divide(self, at_least: int) -> Sequence[Source]:  # noqa: ARG002 - there is one kind
        self.num_divided += 1
        return tuple(self._units)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        first, inner = (0, None) if cursor is None else (cursor["unit"], cursor["cursor"])
        assert isinstance(first, int)
        assert inner is None or isinstance(inner, dict)
        for number in range(first, len(self._units)):
            for batch in self._units[number].batches(inner):
                yield replace(batch, cursor={"unit": number, "cursor": batch.cursor})
            inner = None


def counts_of(rows: Sequence[UnitRow]) -> ReadCounts:
    """What a single stream must have counted at the end of these rows."""
    return ReadCounts(
        documents=sum(bool(row) for row in rows),
        empty=sum(row == "" for row in rows),
        dropped=sum(row is None for row in rows),
        repaired=sum(REPAIRED in row for row in rows if row),
    )


def rows_of_units(
    *, max_units: int = 6, max_rows: int = 12
) -> st.SearchStrategy[list[list[UnitRow]]]:
    """Units of distinct texts of various sizes, with empty and dropped rows between them.

    Every text occurs once and names its unit and row, so a test sees what is lost or repeated.
    """
    kinds = st.sampled_from(["text", "text", "text", "long", "repaired", "empty", "dropped"])
    units = st.lists(st.lists(kinds, max_size=max_rows), min_size=1, max_size=max_units)
    return units.map(_numbered)


def _numbered(units: list[list[str]]) -> list[list[UnitRow]]:
    made: list[list[UnitRow]] = []
    for unit, kinds in enumerate(units):
        rows: list[UnitRow] = []
        for number, kind in enumerate(kinds):
            text = f"{unit}.{number}"
            forms = {"long": text + "\u00e9" * 20, "repaired": text + REPAIRED, "empty": ""}
            rows.append(None if kind == "dropped" else forms.get(kind, text))
        made.append(rows)
    return made


def orders() -> st.SearchStrategy[StreamOrder]:
    """Orders for a few dozen small documents: limits that bind, and limits that do not."""
    return st.builds(
        StreamOrder,
        seed=st.integers(0, 2**64 - 1),
        shuffle=st.booleans(),
        buffer_documents=st.integers(1, 9) | st.just(10_000),
        buffer_bytes=st.integers(1, 60) | st.just(2**28),
        repeat=st.booleans(),
        max_documents=st.none() | st.integers(1, 40),
    )


def contents(blocks: Sequence[Block]) -> list[tuple[StreamCursor, list[str], StreamCursor]]:
    """Blocks as values that can be compared."""
    return [(block.start, block.texts.to_pylist(), block.end) for block in blocks]


def assert_stream_resumes(open_stream: Callable[[], DocumentStream], num_blocks: int) -> None:
    """From the start or end of any block, sent through JSON, a fresh stream gives the rest.

    Each block starts where the one before ended. The resumed stream is stopped and resumed again at
    its second block.
    """
    blocks = list(islice(open_stream().blocks(), num_blocks))
    for before, after in pairwise(blocks):
        assert before.end == after.start, f"a gap: {before.end} and then {after.start}"
    for number, block in enumerate(blocks):
        for cursor, rest in ((block.start, blocks[number:]), (block.end, blocks[number + 1 :])):
            sent = msgspec.json.decode(msgspec.json.encode(cursor), type=StreamCursor)
            assert sent == cursor, f"{cursor} does not survive JSON"
            again = list(islice(open_stream().blocks(sent), len(rest)))
            assert contents(again) == contents(rest), f"from {cursor}: other blocks than at first"
            for second in again[1:2]:
                twice = list(islice(open_stream().blocks(second.start), len(rest) - 1))
                assert contents(twice) == contents(rest[1:]), f"the second time, {second.start}"


def epoch_texts(stream: DocumentStream, epoch: int = 0) -> list[str]:
    """The documents of one epoch of a stream, in order."""
    texts: list[str] = []
    for block in stream.blocks(StreamCursor(epoch=epoch)):
        texts += block.texts.to_pylist()
        if block.end.epoch > epoch:
            break
    return texts
