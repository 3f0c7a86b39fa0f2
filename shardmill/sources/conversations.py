"""Files and hub datasets as conversations.

The shape is named by the caller, or is that of the first readable row, which is logged and stored
in `describe`. Every row fits the shape or is an error, or with on_bad="skip" a drop. A shape that
was found is strict: a later row that an earlier shape of the list would claim does not fit.
A turn that cannot become a message makes its conversation a drop, whatever on_bad says. `num_read`
counts conversations and drops, not rows: a tree of messages counts once per thread.
A source is cut as one of documents is, except that the rows of a tree stay together. Whether a
conversation makes sense is decided by the `chat` package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, NamedTuple, cast

from shardmill.arguments import choices, whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor, Drop
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    NamedSource,
    fields_of,
    grouped,
    runs,
    utf8_bytes,
)
from shardmill.sources.fan_out import fanned_out
from shardmill.sources.formats.jsonl import Object, OnBad, check_on_bad, kind_of
from shardmill.sources.formats.parquet import ParquetFormat, without_nulls
from shardmill.sources.hub import hub_rows, stored_rows
from shardmill.sources.mapping import FILTERED, RowMapping
from shardmill.sources.meaning import (
    announce_unused,
    first_columns,
    meanings_in,
    refused_columns,
)
from shardmill.sources.message_trees import TreeRow, threads
from shardmill.sources.shapes import (
    ConversationShape,
    check_best,
    columns_read,
    list_shapes,
    shape_named,
    shape_of,
)
from shardmill.sources.source import (
    BadRowError,
    InputRow,
    LeftOutError,
    RowFormat,
    SourcePieces,
    cut_inputs,
    each_input,
    name_row,
)
from shardmill.sources.turns import ReadRules, kinds_of, missing_options, renamed
from shardmill.storage.files import InputFile, check_unchanged, fingerprint_files, stamp_of_file
from shardmill.storage.hub import HubFile, HubSplit

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 512 * 2**20
"""Of text, when the rows of a tree are not together."""
_LOOK_ROWS, _LOOK_BYTES = 20, 2**16
"""Of the start of the input, to see which options are missing."""
_FILTERED_ROW = Drop(id="", reason=FILTERED)  # counted, never listed
_TURN_OPTIONS = dict.fromkeys(("messages_field", "role_field", "content_field", "role_map"), ...)


class HubRows(RowFormat):
    """Whole rows of a split of a hub dataset, whose client has no bound of a row."""

    def rows(self, split: HubSplit, position: JSON, _limits: BatchLimits) -> Iterator[InputRow]:
        for row in hub_rows(split, position):
            assert isinstance(row.value, dict)
            yield row._replace(value=without_nulls(row.value))

    def size_hint(self, _split: HubSplit) -> None:
        return None


class ChatInput(NamedTuple):
    """Whole rows of one file, or of one split of a hub dataset or a file of it."""

    file: InputFile | HubSplit | HubFile
    format: RowFormat

    def where(self, row: InputRow) -> str:
        """A row as a person finds it."""
        return name_row(self.format, self.file, Drop(id=row.id, reason="", row=row.row))

    def rows(self, position: JSON, limits: BatchLimits) -> Iterator[InputRow]:
        check_unchanged(self.file)
        yield from self.format.rows(self.file, position, limits)
        check_unchanged(self.file)


class ChatCursor(NamedTuple):
    """After a position of an input, and after the first `done` items of the group that follows."""

    input: int  # its number
    position: Any  # JSON, or a function that gives it; None: the input's start
    done: int = 0


class ConversationGroup(NamedTuple):
    """The items of one row or tree, and the cursor after them."""

    items: Iterable[Conversation | Drop | TreeRow]
    end: ChatCursor
    repaired: bool = False  # whether something in their input was not text and was replaced
    num_rows: int = 0  # see `InputRow`


def batched(
    groups: Iterable[ConversationGroup],
    start: ChatCursor,
    limits: BatchLimits,
    to_json: Callable[[ChatCursor], Cursor],
) -> Iterator[ConversationBatch]:
    """Batches from `start` on; `groups` begin with the one that `start` is in.

    A batch takes items while they fit, at least one. It may end inside a group, so that a tree of a
    million threads is not one batch.
    """
    found = _items_with_cursors(groups, start)
    sized = ((one, text_bytes(one.item), one.item is not None) for one in found)
    for held in grouped(sized, limits):
        conversations = [one for one in held if isinstance(one.item, Conversation)]
        drops = tuple(
            one.item for one in held if isinstance(one.item, Drop) and one.item is not _FILTERED_ROW
        )
        counts = {
            "invalid_utf8": sum(one.repaired for one in conversations),
            FILTERED: sum(one.item is _FILTERED_ROW for one in held),
        }
        yield ConversationBatch(
            conversations=tuple(cast(Conversation, one.item) for one in conversations),
            num_read=len(conversations) + len(drops) + counts[FILTERED],
            counts={name: count for name, count in counts.items() if count},
            drops=drops,
            num_rows=sum(one.num_rows for one in held),
            cursor=to_json(held[-1].end),
        )


def text_bytes(conversation: object) -> int:
    """UTF-8 bytes of every string in a conversation's messages and tools, without keys."""
    if not isinstance(conversation, Conversation):
        return 0
    total = 0
    stack: list[Any] = [conversation.tools or ()]
    shared = len(conversation.messages)
    own = (message for branch in conversation.branches for message in branch.messages[shared:])
    for message in chain(conversation.messages, own):
        for value in message.values():
            if type(value) is str:  # nearly always, so the quick way
                total += utf8_bytes(value)
            elif value is not None:
                stack.append(value)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += utf8_bytes(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return total


class _Item(NamedTuple):
    item: object  # None: rows that were passed, with nothing in them
    end: ChatCursor  # after it
    repaired: bool
    num_rows: int = 0  # those of a group come with its last item


def _items_with_cursors(groups: Iterable[ConversationGroup], start: ChatCursor) -> Iterator[_Item]:
    before, skip = start._replace(done=0), start.done
    for items, end, repaired, num_rows in groups:
        # One item is held back: the cursor after the last one is the end of the group.
        last: object = None
        number = 0
        for number, item in enumerate(items, 1):
            if last is not None:
                yield _Item(last, before._replace(done=number - 1), repaired)
            last = item if number > skip else None
        if number < skip:
            break
        if last is not None or num_rows:
            yield _Item(last, end, repaired, num_rows)
        before, skip = end, 0
    if skip:
        raise SourceError(
            f"the cursor is after {skip:,} conversations of one row or tree, which does not have "
            "that many; resume with the input the cursor came from"
        )


class _TreeOrder(NamedTuple):
    """How the rows of all trees lie in the inputs."""

    together: bool  # each tree's rows follow one another
    in_one_input: bool  # and none continues in the next input


def _order_of(trees: Iterable[tuple[int, str | None]]) -> _TreeOrder:
    """Of each row the number of its input and the name of its tree. Keeps the names."""
    closed: set[str] = set()
    last, crosses = None, False
    for (_, tree), _ in groupby(trees):
        if tree is None or (tree in closed and tree != last):
            return _TreeOrder(together=False, in_one_input=False)
        crosses = crosses or tree == last
        closed.add(tree)
        last = tree
    return _TreeOrder(together=True, in_one_input=not crosses)


def _groups_of_trees(
    rows: Iterable[ConversationGroup], *, together: bool, name: str
) -> Iterator[ConversationGroup]:
    """One tree each when the rows of every tree are together, so that memory is one tree's; else
    all rows in one group. Rows that do not fit go with the tree before them; before the first tree
    they are a group, as in a piece that begins with them."""
    held: list[ConversationGroup] = []
    tree: str | None = None
    num_bytes = 0
    for group in rows:
        (row,) = group.items
        if isinstance(row, TreeRow):
            if together and held and row.tree != tree:
                yield _tree_of(held)
                held, num_bytes = [], 0
            tree = row.tree
            num_bytes += len(row.message["content"])
            if not together and num_bytes > MAX_HELD_BYTES:
                raise SourceError(
                    f"source {name!r}: the rows of a tree are not together, and all rows are more "
                    f"than the {MAX_HELD_BYTES:,} bytes that are held; sort the rows by "
                    "message_tree_id"
                )
        held.append(group)
    if held:
        yield _tree_of(held)


def _tree_of(held: list[ConversationGroup]) -> ConversationGroup:
    """The threads, then the drops."""
    rows = [row for group in held for row in group.items]
    found = threads([row for row in rows if isinstance(row, TreeRow)])
    drops = (row for row in rows if isinstance(row, Drop))
    is_repaired = any(group.repaired for group in held)
    return ConversationGroup(chain(found, drops), held[-1].end, is_repaired)


class ChatSource(NamedSource):
    """Conversations of several inputs, read one after the other. Made by `open_chats`."""

    def __init__(
        self,
        inputs: Sequence[ChatInput],
        *,
        name: str,
        shape: str | None = None,
        rules: ReadRules | None = None,
        on_bad: OnBad = "error",
        limits: BatchLimits = DEFAULT_LIMITS,
        mapping: RowMapping | None = None,
    ) -> None:
        check_on_bad(on_bad)
        super().__init__(name, limits)
        self._inputs = tuple(inputs)
        self._mapping = mapping
        self._named = None if shape is None else shape_named(shape)
        self._rules = rules or ReadRules()
        self._is_renamed = bool(self._rules.names)
        if self._named is not None:
            self._check_rules(self._named)
        self._on_bad = on_bad
        self._found: ConversationShape | None = None
        self._has_looked = False
        self._description: dict[str, JSON] | None = None

    def describe(self) -> dict[str, JSON]:
        """Reads the files once (their ends, when large) and finds the shape; then remembers."""
        if self._description is None:
            shape = self._shape()
            files = [file for file, _ in self._inputs if isinstance(file, InputFile)]
            prints = iter(fingerprint_files(files))
            self._description = {
                "kind": "chats",
                "name": self.name,
                "shape": None if shape is None else shape.name,
                "shape_is_named": self._named is not None,  # a found shape is stricter
                "on_bad": self._on_bad,
                **self._rules.described(),
                **({} if self._mapping is None else self._mapping.described()),
                "inputs": [
                    _part(next(prints) if isinstance(file, InputFile) else file.describe(), format)
                    for file, format in self._inputs
                ],
            }
        return dict(self._description)

    def stamp(self) -> JSON:
        """When each file was written, on this machine; null for a hub, whose commit is pinned."""
        return [
            [file.name, stamp_of_file(file) if isinstance(file, InputFile) else None]
            for file, _ in self._inputs
        ]

    def size_hint(self) -> int | None:
        sizes = each_input(lambda file, format: format.size_hint(file), self._inputs)
        return None if None in sizes else sum(sizes)

    def of_files(self, files: Sequence[InputFile]) -> ChatSource:
        """The same source over files of other names, one for each input; all inputs are files."""
        source = copy(self)
        source._description = None
        pairs = zip(self._inputs, files, strict=True)
        source._inputs = tuple(entry._replace(file=file) for entry, file in pairs)
        return source

    def limited(self, num_bytes: int) -> ChatSource:
        """The same source, which refuses lines that hold more than `num_bytes` of text."""
        return self.with_limits(most_bytes=num_bytes)

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]:
        start = ChatCursor(0, None) if cursor is None else self._parse(cursor)
        found = batched(self._groups(start), start, self.limits, self._to_json)
        return map(fanned_out, found) if self._rules.fan_out else found

    def cut(self, num_bytes: int) -> Sequence[ChatSource]:
        """As sources of documents are cut. Where the rows of a tree are not in one file, the source
        is the only piece; to see that, all rows are read. Else only a look for the shape is taken,
        which all pieces use."""
        shape = self._shape()
        if shape is None or not shape.is_part_of_tree:
            empty = copy(self)
            empty._inputs = ()
            return SourcePieces(empty._piece, cut_inputs(self._by_files(), num_bytes))
        whole_number(num_bytes, "num_bytes")
        if not self._tree_order.in_one_input:
            return (self,)
        sizes = each_input(lambda file, format: format.size_hint(file), self._inputs)
        return [self._piece(self._inputs[start:stop]) for start, stop in runs(sizes, num_bytes)]

    def _by_files(self) -> list[tuple[Any, RowFormat]]:
        """The inputs; of a hub dataset its Parquet files, where they hold what the client gives."""
        found: list[tuple[Any, RowFormat]] = []
        for entry in self._inputs:
            files = stored_rows(entry.file) if isinstance(entry.file, HubSplit) else None
            found += [entry] if files is None else [(file, ParquetFormat()) for file in files]
        return found

    def _piece(self, inputs: Sequence[tuple[Any, Any]]) -> ChatSource:
        first, last = inputs[0][0].name, inputs[-1][0].name
        source = copy(self)
        source._description = None
        source._inputs = tuple(ChatInput(*one) for one in inputs)
        to = "" if len(inputs) == 1 else f" to {last}"
        source.name = f"{self.name}/{first}{to}{inputs[0][1].range_name}"
        return source

    @property
    def continues(self) -> bool:
        return self._inputs[0].format.continues

    @property
    def inputs(self) -> tuple[ChatInput, ...]:
        return self._inputs

    @property
    def files(self) -> tuple[InputFile | HubFile, ...]:
        """The inputs that are files."""
        return tuple(file for file, _ in self._inputs if not isinstance(file, HubSplit))

    def _to_json(self, cursor: ChatCursor) -> Cursor:
        position = cursor.position() if callable(cursor.position) else cursor.position
        name = self._inputs[cursor.input].file.name
        return {"input": cursor.input, "name": name, "position": position, "done": cursor.done}

    def _parse(self, cursor: Cursor) -> ChatCursor:
        keys = ("input", "name", "position", "done")
        number, name, position, done = fields_of(cursor, keys, self.name, counts=("input", "done"))
        if number >= len(self._inputs) or self._inputs[number].file.name != name:
            raise SourceError(
                f"source {self.name!r}: the cursor is in input {number}, {name!r:.80}, which is "
                f"not so among its {len(self._inputs):,}; resume with the input the cursor came "
                "from"
            )
        return ChatCursor(number, position, done)

    def _rows(self, start: ChatCursor) -> Iterator[tuple[int, InputRow]]:
        """Every row after a cursor, with the number of its input."""
        position = start.position
        mapping = self._mapping
        for number in range(start.input, len(self._inputs)):
            entry = self._inputs[number]
            rows = entry.rows(position, self.limits)
            if mapping is not None:
                rows = mapping.applied(rows, entry.where, dict)
            for row in rows:
                yield number, row
            position = None

    def _shape(self) -> ConversationShape | None:
        """The shape named, else found once; None when no row can be read."""
        if not self._has_looked:
            self._look()
            self._has_looked = True
        return self._named or self._found

    def first_row(self) -> Object | None:
        """The first row that can be read, as it is written."""
        rows = self._rows(ChatCursor(0, None))
        values = (row.value for _, row in rows)
        return next((value for value in values if isinstance(value, dict)), None)

    def _look(self) -> None:
        """Find the shape in the first row that can be read, and what the first rows lack."""
        if self._mapping is not None and self._mapping.filter is not None:
            found = (row for entry in self._inputs for row in entry.rows(None, self.limits))
            self._mapping.check_columns(None, found, f"source {self.name!r}")
        rows = self._rows(ChatCursor(0, None))
        first: list[tuple[int, InputRow]] = []
        if self._named is None:
            for number, row in rows:
                if isinstance(row.value, BadRowError):
                    self._drop(number, row, row.value)  # an error, or the next row
                if isinstance(row.value, dict):
                    self._found = self._shape_of(number, row)
                    first.append((number, row))
                    break
        elif any(isinstance(file, HubSplit) for file, _ in self._inputs):
            return  # to open a stream only for this takes too long
        shape = self._named or self._found
        if shape is None:
            return
        self._check_columns(shape)
        if shape.is_part_of_tree:
            return
        with suppress(SourceError):  # raised again when these rows are read
            self._warn(chain(first, islice(rows, _LOOK_ROWS)), shape)

    def _check_columns(self, shape: ConversationShape) -> None:
        """Refuse what would be ignored though it changes what is trained; list the rest."""
        first = first_columns(self._inputs, limits=self.limits, settled=self._settled)
        names = {name for one in first for name in one.names}
        for name in self._rules.ignore_columns:
            if names and name not in names:  # later rows may have it
                known = choices(name, sorted(names), verb="the columns are")
                logger.warning(
                    "%s: no first row has the column %.60r that is ignored; %s",
                    self.name,
                    name,
                    known,
                )
        found = {column.name: column for one in reversed(first) for column in one.found}
        if found:
            raise refused_columns(list(found.values()))
        read = columns_read(shape)
        if read is not None:
            announce_unused(self.name, first, {*read, *self._settled})

    @cached_property
    def _settled(self) -> frozenset[str]:
        """The columns that are read or ignored on purpose, and the shape, which reads its own."""
        shape, turns = self._named or self._found, self._rules.messages_field
        names = [*self._rules.ignore_columns, turns, shape.name if shape else None]
        return frozenset(name for name in names if name is not None)

    def _shape_of(self, number: int, row: InputRow) -> ConversationShape:
        """The shape of the first row."""
        assert isinstance(row.value, dict)
        where = self._inputs[number].where(row)
        problem, shape = "no known shape of conversations has these columns", None
        try:
            shape = shape_of(renamed(row.value, self._rules))
        except BadRowError as bad:
            problem = str(bad)
        if shape is None:
            for name, meaning in meanings_in(row.value, self._settled):
                if meaning.shape is not None:
                    problem += f"; {name!r:.60} usually says {meaning.says}: that is the shape "
                    problem += repr(meaning.shape)
                    break
            raise SourceError(
                f"{where}: {problem}; found {kinds_of(row.value)}; say which column holds the "
                "turns with {messages_field}, which of their keys say who speaks and what with "
                "{role_field} and {content_field}, which role a name means with {role_map}, or "
                f"rename the columns, or name one of these with {{shape}}:\n{list_shapes()}",
                shape=...,
                **_TURN_OPTIONS,
            )
        self._check_rules(shape)
        logger.info("%s: read as %r (%s)", where, shape.name, shape.keys)
        return shape

    def _warn(self, rows: Iterable[tuple[int, InputRow]], shape: ConversationShape) -> None:
        """Say once which options the first rows seem to need."""
        said: set[str] = set()
        num_bytes = 0
        for number, row in rows:
            if row.value is None:
                continue
            try:
                items = list(self._items(row, shape))
            except BadRowError:
                continue
            for chat in items:
                if isinstance(chat, Conversation):
                    num_bytes += text_bytes(chat)
                    said_last = [branch.messages[-1] for branch in chat.branches]
                    messages = [*chat.messages, *said_last]
                    for option, problem in missing_options(messages, self._rules):
                        if option not in said:
                            logger.warning("%s: %s", self._inputs[number].where(row), problem)
                            said.add(option)
            if num_bytes > _LOOK_BYTES:
                break

    def _items(
        self, row: InputRow, shape: ConversationShape
    ) -> Iterable[Conversation | Drop | TreeRow]:
        """What a row gives; BadRowError when it does not fit."""
        value = row.value
        if isinstance(value, BadRowError):
            raise value
        assert value is not None, "rows that were passed give nothing"
        found = meanings_in(value, self._settled)
        if found:
            name, meaning = found[0]
            raise BadRowError(
                "ignored_column",
                f"the column {name!r:.60} ({kind_of(value[name])}) would be ignored, and usually "
                f"says {meaning.says}",
            )
        if self._is_renamed:
            value = renamed(value, self._rules)
        if self._named is None:
            check_best(value, shape)
        return shape.read(value, row.id, self._rules, row.row)

    def _check_rules(self, shape: ConversationShape) -> None:
        rules, is_tree = self._rules, shape.name.startswith("oasst")
        if not is_tree and (rules.lang is not None or rules.skip_deleted):
            raise OptionError(
                f"source {self.name!r}: {{lang}} and {{skip_deleted}} are for the oasst shapes, "
                f"and this is {shape.name!r}, whose messages have neither; leave them out",
                lang=...,
                skip_deleted=...,
            )
        unused = [] if shape.has_roles else rules.names
        unused += ["split_think"] if is_tree and rules.split_think else []
        if unused:
            named = " and ".join(f"{{{name}}}" for name in unused)
            raise OptionError(
                f"source {self.name!r}: {named}: is not for the shape {shape.name!r}; leave it out",
                **dict.fromkeys(unused, ...),
            )

    def _groups(self, start: ChatCursor) -> Iterator[ConversationGroup]:
        shape = self._shape()
        groups = self._read(start, shape)
        if shape is not None and shape.is_part_of_tree:
            groups = _groups_of_trees(groups, together=self._tree_order.together, name=self.name)
        yield from groups

    def _read(
        self, start: ChatCursor, shape: ConversationShape | None
    ) -> Iterator[ConversationGroup]:
        """The items of each row."""
        for number, row in self._rows(start):
            end = ChatCursor(number, row.position)
            if row.value is None:
                yield ConversationGroup((), end, num_rows=row.num_rows)
                continue
            try:
                assert shape is not None or isinstance(row.value, BadRowError), "no row, no shape"
                items = self._items(row, cast(ConversationShape, shape))
            except BadRowError as bad:
                drop = self._drop(number, row, bad)
                yield ConversationGroup((drop,), end, num_rows=row.num_rows)
            else:
                yield ConversationGroup(items, end, row.repaired, row.num_rows)

    @cached_property
    def _tree_order(self) -> _TreeOrder:
        """Reads all input once, so that the answer does not depend on where reading starts."""
        found = _order_of(
            (group.end.input, row.tree)
            for group in self._read(ChatCursor(0, None), self._shape())
            for row in group.items
            if isinstance(row, TreeRow)
        )
        if not found.together:
            logger.info("%s: rows of a tree are not together; all rows are held", self.name)
        return found

    def _drop(self, number: int, row: InputRow, bad: BadRowError) -> Drop:
        if bad.reason == FILTERED:
            return _FILTERED_ROW
        if self._on_bad == "skip" or isinstance(bad, LeftOutError):
            return Drop(id=row.id, reason=bad.reason, row=row.row)
        where = self._inputs[number].where(row)
        keys = f"; its keys: {kinds_of(row.value)}" if isinstance(row.value, dict) else ""
        raise SourceError(
            f"{where}: {bad}{keys}; correct the row, name another {{shape}}, "
            f"{'name it with {ignore_columns}, ' if bad.reason == 'ignored_column' else ''}"
            "or leave such rows out with {on_bad}",
            shape=...,
            ignore_columns=...,
            on_bad="skip",
        ) from bad


def _part(description: JSON, format: RowFormat) -> JSON:
    """Of a file, with the range that is read of it."""
    name = format.range_name.removeprefix(":")
    return {**description, "part": name} if name and isinstance(description, dict) else description
