"""Files and hubs as conversations.

In: files, folders, globs, hub datasets: `.jsonl` (plain, `.gz`, `.zst`), `.json`, `.parquet`.
Out: a `ConversationSource`.
Promise: the batches after a cursor are the very same batches. The shape is named, or that of the
first record that can be read, announced and stored in `describe`; every record fits it or is an
error, or with on_bad="skip" a drop. Found shapes are strict: a later record that an earlier shape
of the list would claim does not fit. In trees, a message on no way is a drop whatever on_bad says.
`num_read` counts conversations and drops, not records: a tree counts once for each thread.
Not here: whether a conversation makes sense (`chat`), tokens, splits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, ConversationBatch, Cursor, Drop
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.chatbatches import Spot, Unit, batched
from shardmill.sources.cursors import counts_of, fields_of
from shardmill.sources.files import InputFile, fingerprint_files, stamp_of_file
from shardmill.sources.inputs import FileInput, Placed, RecordInput
from shardmill.sources.inputs_arrow import HubRecords
from shardmill.sources.jsonl import OnBad
from shardmill.sources.limited import limited
from shardmill.sources.record import Misfit, Record, keys_of
from shardmill.sources.rows_of_trees import PlacedRow, trees_lie_together, units_of_trees
from shardmill.sources.shape_trees import Rules, TreeRow, read_row
from shardmill.sources.shapes import Shape, check_best, listed_shapes, shape_named, shape_of

logger = logging.getLogger(__name__)


class ChatSource:
    """Inputs of records read one behind the other. Made by `open_chats`."""

    def __init__(
        self,
        inputs: Sequence[RecordInput],
        *,
        name: str,
        shape: str | None = None,
        rules: Rules | None = None,
        on_bad: OnBad = "error",
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if on_bad not in ("error", "skip"):
            raise OptionError(f"on_bad={on_bad!r}: wanted 'error' or 'skip'")
        self._inputs = tuple(inputs)
        self._name = name
        self._named = None if shape is None else shape_named(shape)
        self._rules = rules or Rules()
        if self._named is not None:
            self._refuse_idle_rules(self._named)
        self._on_bad = on_bad
        self._limits = limits
        self._found: Shape | None = None
        self._together: bool | None = None
        self._description: dict[str, JSON] | None = None

    def __repr__(self) -> str:
        return f"ChatSource({self._name!r}, inputs={len(self._inputs):,})"

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> dict[str, JSON]:
        """Reads the files once (their ends, when large) and finds the shape; then remembers."""
        if self._description is None:
            shape = self._shape()
            files = [entry.file for entry in self._inputs if isinstance(entry, FileInput)]
            prints = iter(fingerprint_files(files))
            self._description = {
                "kind": "chats",
                "name": self._name,
                "shape": None if shape is None else shape.name,
                "shape_is_named": self._named is not None,  # a found shape is stricter
                "on_bad": self._on_bad,
                **asdict(self._rules),
                "inputs": [
                    entry.describe() if isinstance(entry, HubRecords) else next(prints)
                    for entry in self._inputs
                ],
            }
        return dict(self._description)

    def stamp(self) -> JSON:
        """When each file was written, for one machine; null for a hub, whose commit is pinned."""
        return [
            [
                entry.name,
                stamp_of_file(entry.file) if isinstance(entry, FileInput) else None,
            ]
            for entry in self._inputs
        ]

    def size_hint(self) -> int | None:
        files = [entry.file for entry in self._inputs if isinstance(entry, FileInput)]
        return sum(file.num_bytes for file in files) if len(files) == len(self._inputs) else None

    def of_files(self, files: Sequence[InputFile]) -> ChatSource:
        """The same source over files by other names, one for each input; all inputs are files."""
        source = copy(self)
        source._description = None
        source._inputs = tuple(map(copy, self._inputs))
        for entry, file in zip(source._inputs, files, strict=True):
            assert isinstance(entry, FileInput), "a hub is no file"
            entry.file = file
        return source

    def limited(self, num_bytes: int) -> ChatSource:
        """The same source, which refuses lines that hold more than `num_bytes` of text."""
        source = copy(self)
        source._inputs = tuple(limited(entry, num_bytes) for entry in self._inputs)
        return source

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]:
        start = Spot(0, None) if cursor is None else self._spot_of(cursor)
        return batched(self._units(start), start, self._limits, self._cursor_at)

    def _cursor_at(self, spot: Spot) -> Cursor:
        entry = self._inputs[spot.input]
        position = None if spot.mark is None else entry.position_of(spot.mark)
        return {"input": spot.input, "name": entry.name, "position": position, "done": spot.done}

    def _spot_of(self, cursor: Cursor) -> Spot:
        number, name, position, done = fields_of(
            cursor, ("input", "name", "position", "done"), self._name
        )
        counts = counts_of({"input": number, "done": done}, ("input", "done"), self._name)
        if counts[0] >= len(self._inputs) or self._inputs[counts[0]].name != name:
            raise SourceError(
                f"source {self._name!r}: the cursor stands in input {counts[0]}, {name!r:.80}, "
                f"which is not so among its {len(self._inputs):,}; resume with the input the "
                "cursor came from"
            )
        entry = self._inputs[counts[0]]
        return Spot(counts[0], None if position is None else entry.mark_of(position), counts[1])

    def _records(self, start: Spot) -> Iterator[tuple[int, Placed]]:
        """Every record behind a spot, with the number of its input."""
        mark = start.mark
        for number in range(start.input, len(self._inputs)):
            for placed in self._inputs[number].records(mark):
                yield number, placed
            mark = None

    def _shape(self) -> Shape | None:
        """The shape named, else found once; None when there is no record at all."""
        if self._named is not None or self._found is not None:
            return self._named or self._found
        for number, placed in self._records(Spot(0, None)):
            if isinstance(placed.record, Misfit):
                self._drop(number, placed, placed.record)  # an error, or on to the next
                continue
            self._found = self._shape_found(placed.record, self._inputs[number].where(placed.place))
            break
        return self._found

    def _shape_found(self, record: Record, where: str) -> Shape:
        shape = shape_of(record)
        if shape is None:
            raise SourceError(
                f"{where}: no shape of conversations is known with the keys {keys_of(record)}; "
                f"rename the columns, or name one of these with shape=:\n{listed_shapes()}"
            )
        self._refuse_idle_rules(shape)
        logger.info("%s: read as %r (%s)", where, shape.name, shape.keys)
        return shape

    def _refuse_idle_rules(self, shape: Shape) -> None:
        if self._rules != Rules() and not shape.name.startswith("oasst"):
            raise OptionError(
                f"source {self._name!r}: lang and skip_deleted are for the oasst shapes, and this "
                f"is {shape.name!r}, whose messages have neither; leave them out"
            )

    def _units(self, start: Spot) -> Iterator[Unit]:
        shape = self._shape()
        if shape is None:  # no record that can be read: each is an error or a drop
            for number, placed in self._records(start):
                assert isinstance(placed.record, Misfit)
                drop = self._drop(number, placed, placed.record)
                yield Unit((drop,), Spot(number, placed.mark))
            return
        if shape.read is None:
            together = self._trees_together(shape)
            rows = self._tree_rows(start, shape)
            yield from units_of_trees(rows, together=together, name=self._name)
            return
        for number, placed in self._records(start):
            try:
                items = shape.read(self._fitting(placed, shape), placed.place, self._rules)
            except Misfit as misfit:
                items = (self._drop(number, placed, misfit),)
            yield Unit(items, Spot(number, placed.mark), placed.repaired)

    def _tree_rows(self, start: Spot, shape: Shape) -> Iterator[PlacedRow]:
        for number, placed in self._records(start):
            try:
                row = read_row(self._fitting(placed, shape), placed.place, self._rules)
            except Misfit as misfit:
                yield PlacedRow(self._drop(number, placed, misfit), Spot(number, placed.mark))
            else:
                yield PlacedRow(row, Spot(number, placed.mark), placed.repaired)

    def _trees_together(self, shape: Shape) -> bool:
        """Reads the whole input once."""
        if self._together is None:
            rows = (placed.row for placed in self._tree_rows(Spot(0, None), shape))
            trees = (row.tree for row in rows if isinstance(row, TreeRow))
            self._together = trees_lie_together(trees)
            if not self._together:
                logger.info("%s: rows of a tree do not lie together; all are held", self._name)
        return self._together

    def _fitting(self, placed: Placed, shape: Shape) -> Record:
        if isinstance(placed.record, Misfit):
            raise placed.record
        if self._named is None:
            check_best(placed.record, shape)
        return placed.record

    def _drop(self, number: int, placed: Placed, misfit: Misfit) -> Drop:
        if self._on_bad == "skip":
            return Drop(id=placed.place, reason=misfit.reason)
        where = self._inputs[number].where(placed.place)
        keys = "" if isinstance(placed.record, Misfit) else f"; its keys: {keys_of(placed.record)}"
        raise SourceError(
            f"{where}: {misfit}{keys}; mend the record, name another shape=, or leave such "
            "records out with on_bad='skip'"
        ) from misfit
