"""A divided source in memory to try streams on, and what a stream of it must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TypeAlias

import msgspec
import pyarrow as pa
from hypothesis import strategies as st

from shardmill.loading.state import ReadCounts, StreamCursor
from shardmill.loading.streaming.documents import Block, DocumentStream, StreamOrder
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, Drop, TextBatch

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

    def divide(self, at_least: int) -> Sequence[Source]:
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
