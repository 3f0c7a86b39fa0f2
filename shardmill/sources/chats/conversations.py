"""Files and hubs as conversations.

In: files, folders, globs, hub datasets: `.jsonl` (plain, `.gz`, `.zst`), `.json`, `.parquet`.
Out: a `ConversationSource`.
Promise: the batches after a cursor are the very same batches. The shape is named, or that of the
first record that can be read, announced and stored in `describe`; every record fits it or is an
error, or with on_bad="skip" a drop. Found shapes are strict: a later record that an earlier shape
of the list would claim does not fit. In trees, a message on no way is a drop whatever on_bad says.
`num_read` counts conversations and drops, not records: a tree counts once for each thread.
Not here: whether a conversation makes sense (`chat`), tokens, splits.

Conversations in bounded batches that a cursor can cut anywhere.

In: units (one record, or all rows of a tree) and what each gave.  Out: `ConversationBatch`es.
Promise: a batch is a function of where it starts and of what follows: it takes items while they
fit, one at least. Its end is told as a spot: behind so many units, and so many items into the next,
so that a tree of a million threads needs no batch of its own.
`num_read` counts items: conversations made and drops, so it is their sum by construction. A record
that gives five threads counts five, also among those with a replacement if it has one.
Not here: reading, shapes.

Which rows make a tree, when each row is one message.

In: rows in order, each with the tree it names.  Out: units of rows whose trees are whole.
Promise: where all rows of a tree lie together, as the published sets have them, a unit is one tree
and memory is one tree's. Whether they do is found by reading the trees' names once, beforehand, so
that it does not depend on where reading starts. Where they do not, or a row names no tree, all rows
are one unit, held in memory up to `MAX_HELD_BYTES` of text, and joined by their ids alone.
Not here: the threads (see `shape_trees`). Rows that do not fit go with the tree before them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor, Drop
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, fields_of, limited
from shardmill.sources.chats.arrow_records import HubRecords
from shardmill.sources.chats.json_records import (
    FileInput,
    Misfit,
    Record,
    RecordAt,
    RecordInput,
    keys_of,
)
from shardmill.sources.chats.message_trees import Rules, TreeRow, read_row, threads
from shardmill.sources.chats.shapes import (
    ConversationShape,
    Item,
    check_best,
    listed_shapes,
    shape_named,
    shape_of,
)
from shardmill.sources.formats.jsonl import OnBad
from shardmill.storage.files import InputFile, fingerprint_files, stamp_of_file


class Spot(NamedTuple):
    """Behind a mark of an input, and behind the first `done` items of the unit that follows."""

    input: int  # its number
    mark: Any  # None: the input's start
    done: int = 0


class ConversationGroup(NamedTuple):
    """Items that only come together, and the spot behind them."""

    items: Iterable[Item]
    end: Spot
    repaired: bool = False  # something in their input was no text and was replaced


def batched(
    units: Iterable[ConversationGroup],
    start: Spot,
    limits: BatchLimits,
    cursor_at: Callable[[Spot], Cursor],
) -> Iterator[ConversationBatch]:
    """Batches from `start` on; `units` begin with the unit that `start` lies in."""
    held: list[Item] = []
    num_bytes = num_repaired = 0
    end = start
    for item, spot, repaired in _placed(units, start):
        size = text_bytes(item) if isinstance(item, Conversation) else 0
        is_full = num_bytes + size > limits.num_bytes or len(held) == limits.num_documents
        if held and is_full:
            yield _batch(held, num_repaired, cursor_at(end))
            held, num_bytes, num_repaired = [], 0, 0
        held.append(item)
        num_bytes += size
        num_repaired += repaired and isinstance(item, Conversation)
        end = spot
    if held:
        yield _batch(held, num_repaired, cursor_at(end))


def text_bytes(conversation: Conversation) -> int:
    """UTF-8 bytes of every string in a conversation's messages and tools, keys apart."""
    total = 0
    stack: list[Any] = [conversation.tools or ()]
    for message in conversation.messages:
        for value in message.values():
            if type(value) is str:  # nearly always, so the quick way
                total += len(value) if value.isascii() else _utf8_bytes(value)
            elif value is not None:
                stack.append(value)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += _utf8_bytes(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return total


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _placed(units: Iterable[ConversationGroup], start: Spot) -> Iterator[tuple[Item, Spot, bool]]:
    """Each item, the spot behind it, and whether its unit was repaired."""
    before, skip = start._replace(done=0), start.done
    for items, end, repaired in units:
        # One item is held back: the spot behind the last one is the end of the unit.
        last: Item | None = None
        done = skip
        rest = iter(items)
        if sum(1 for _ in islice(rest, skip)) < skip:
            raise SourceError(
                f"the cursor stands behind {skip:,} conversations of one record or tree, which has "
                "not so many; resume with the input the cursor came from"
            )
        for item in rest:
            if last is not None:
                done += 1
                yield last, before._replace(done=done), repaired
            last = item
        if last is not None:
            yield last, end, repaired
        before, skip = end, 0
    if skip:
        raise SourceError(
            f"the cursor stands behind {skip:,} conversations of a record or tree that is not "
            "there; resume with the input the cursor came from"
        )


def _batch(items: list[Item], num_repaired: int, cursor: Cursor) -> ConversationBatch:
    return ConversationBatch(
        conversations=tuple(item for item in items if isinstance(item, Conversation)),
        num_read=len(items),
        counts={"invalid_utf8": num_repaired} if num_repaired else {},
        drops=tuple(item for item in items if isinstance(item, Drop)),
        cursor=cursor,
    )


logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 512 * 2**20
"""Of text, when the rows of a tree do not lie together."""


class PlacedRow(NamedTuple):
    """One row, or the drop that became of it, and the spot behind it."""

    row: TreeRow | Drop
    end: Spot
    repaired: bool = False


def trees_lie_together(trees: Iterable[object]) -> bool:
    """Does each tree's name come in one run only, and on every row? Keeps 8 bytes per tree."""
    closed: set[bytes] = set()
    current: str | None = None
    for tree in trees:
        if not isinstance(tree, str):
            return False
        if tree == current:
            continue
        key = hashlib.blake2b(tree.encode("utf-8", "replace"), digest_size=8).digest()
        if key in closed:
            return False
        closed.add(key)
        current = tree
    return True


def units_of_trees(
    rows: Iterable[PlacedRow], *, together: bool, name: str
) -> Iterator[ConversationGroup]:
    """Units in order; `together` is what `trees_lie_together` found."""
    held: list[PlacedRow] = []
    tree: str | None = None
    num_bytes = 0
    for placed in rows:
        row = placed.row
        if isinstance(row, TreeRow):
            if together and tree is not None and row.tree != tree:
                yield _unit(held)
                held, num_bytes = [], 0
            tree = row.tree
            num_bytes += len(row.message["content"])
            if not together and num_bytes > MAX_HELD_BYTES:
                raise SourceError(
                    f"source {name!r}: the rows of a tree do not lie together, and all of them are "
                    f"more than the {MAX_HELD_BYTES:,} bytes that are held; sort the rows by "
                    "message_tree_id"
                )
        held.append(placed)
    if held:
        yield _unit(held)


def _unit(held: list[PlacedRow]) -> ConversationGroup:
    repaired = any(placed.repaired for placed in held)
    return ConversationGroup(_items([placed.row for placed in held]), held[-1].end, repaired)


def _items(rows: list[TreeRow | Drop]) -> Iterator[Item]:
    yield from threads([row for row in rows if isinstance(row, TreeRow)])
    yield from (row for row in rows if isinstance(row, Drop))


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
        self._found: ConversationShape | None = None
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

    def _records(self, start: Spot) -> Iterator[tuple[int, RecordAt]]:
        """Every record behind a spot, with the number of its input."""
        mark = start.mark
        for number in range(start.input, len(self._inputs)):
            for placed in self._inputs[number].records(mark):
                yield number, placed
            mark = None

    def _shape(self) -> ConversationShape | None:
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

    def _shape_found(self, record: Record, where: str) -> ConversationShape:
        shape = shape_of(record)
        if shape is None:
            raise SourceError(
                f"{where}: no shape of conversations is known with the keys {keys_of(record)}; "
                f"rename the columns, or name one of these with shape=:\n{listed_shapes()}"
            )
        self._refuse_idle_rules(shape)
        logger.info("%s: read as %r (%s)", where, shape.name, shape.keys)
        return shape

    def _refuse_idle_rules(self, shape: ConversationShape) -> None:
        if self._rules != Rules() and not shape.name.startswith("oasst"):
            raise OptionError(
                f"source {self._name!r}: lang and skip_deleted are for the oasst shapes, and this "
                f"is {shape.name!r}, whose messages have neither; leave them out"
            )

    def _units(self, start: Spot) -> Iterator[ConversationGroup]:
        shape = self._shape()
        if shape is None:  # no record that can be read: each is an error or a drop
            for number, placed in self._records(start):
                assert isinstance(placed.record, Misfit)
                drop = self._drop(number, placed, placed.record)
                yield ConversationGroup((drop,), Spot(number, placed.mark))
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
            yield ConversationGroup(items, Spot(number, placed.mark), placed.repaired)

    def _tree_rows(self, start: Spot, shape: ConversationShape) -> Iterator[PlacedRow]:
        for number, placed in self._records(start):
            try:
                row = read_row(self._fitting(placed, shape), placed.place, self._rules)
            except Misfit as misfit:
                yield PlacedRow(self._drop(number, placed, misfit), Spot(number, placed.mark))
            else:
                yield PlacedRow(row, Spot(number, placed.mark), placed.repaired)

    def _trees_together(self, shape: ConversationShape) -> bool:
        """Reads the whole input once."""
        if self._together is None:
            rows = (placed.row for placed in self._tree_rows(Spot(0, None), shape))
            trees = (row.tree for row in rows if isinstance(row, TreeRow))
            self._together = trees_lie_together(trees)
            if not self._together:
                logger.info("%s: rows of a tree do not lie together; all are held", self._name)
        return self._together

    def _fitting(self, placed: RecordAt, shape: ConversationShape) -> Record:
        if isinstance(placed.record, Misfit):
            raise placed.record
        if self._named is None:
            check_best(placed.record, shape)
        return placed.record

    def _drop(self, number: int, placed: RecordAt, misfit: Misfit) -> Drop:
        if self._on_bad == "skip":
            return Drop(id=placed.place, reason=misfit.reason)
        where = self._inputs[number].where(placed.place)
        keys = "" if isinstance(placed.record, Misfit) else f"; its keys: {keys_of(placed.record)}"
        raise SourceError(
            f"{where}: {misfit}{keys}; mend the record, name another shape=, or leave such "
            "records out with on_bad='skip'"
        ) from misfit
