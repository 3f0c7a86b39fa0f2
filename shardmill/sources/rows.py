"""Whole rows of any input: to check the columns beside documents, and to show single rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from shardmill.errors import SourceError
from shardmill.protocols import ConversationSource, Source
from shardmill.sources.batches import DEFAULT_LIMITS
from shardmill.sources.conversations import ChatInput, ChatSource
from shardmill.sources.meaning import announce_unused, first_columns, refused_columns
from shardmill.sources.source import FileSource, InputRow, leaves
from shardmill.sources.turns import column_names
from shardmill.storage.hub import HubSplit

_MOST_ROWS = 20_000
_SNIPPET = 100  # characters


def row_inputs(source: Source | ConversationSource) -> list[ChatInput]:
    """The files of a source that have rows; none of texts, of a stream or of memory."""
    if isinstance(source, ChatSource):
        return [one for one in source.inputs if not isinstance(one.file, HubSplit)]
    found: list[ChatInput] = []
    for leaf in leaves(source):  # type: ignore[arg-type]
        if isinstance(leaf, FileSource) and leaf.row_format is not None:
            found += [ChatInput(file, leaf.row_format) for file in leaf.files]
    return found


def check_columns(source: Source, *, field: str | None, ignored: Sequence[str] = ()) -> None:
    """Refuse documents beside which a column changes what they mean, unless a field was named; list
    the columns that are not read."""
    settled = column_names(ignored)
    for leaf in leaves(source):
        inputs = row_inputs(leaf)
        if not inputs or not isinstance(leaf, FileSource):
            continue
        first = first_columns(inputs, limits=leaf.limits, settled=settled)
        read = str(leaf.settings.get("field"))
        every = (column for one in reversed(first) for column in one.found)
        found = {column.name: column for column in every if column.meaning.of_documents}
        if found and field is None:
            raise refused_columns(list(found.values()), field=read)
        announce_unused(leaf.name, first, {read, *settled})


def row_snippets(inputs: Sequence[ChatInput], ids: Iterable[str]) -> dict[str, str]:
    """How rows begin, by the ids of their drops; those that are far from the start of the input are
    not found."""
    wanted = {id.partition("#")[0]: id for id in ids}  # of a fan-out the conversation
    names = {one.file.name for one in inputs}
    of_file = {id: id.rpartition(":")[0] for id in wanted}
    anywhere = {id for id, name in of_file.items() if name not in names}  # a row's own id
    found: dict[str, str] = {}
    num_rows = 0
    for one in inputs:
        missing = {id for id, name in of_file.items() if name == one.file.name} | anywhere
        missing -= found.keys()
        with suppress(SourceError):  # the caller's message is about something else
            for row in one.rows(None, DEFAULT_LIMITS) if missing else ():
                for id in _ids_of(row) & missing:
                    found[id] = snippet_of(row.value)
                    missing.remove(id)
                num_rows += 1
                if not missing or num_rows > _MOST_ROWS:
                    break
    return {wanted[id]: snippet for id, snippet in found.items()}


def _ids_of(row: InputRow) -> set[str]:
    """What a drop of the row may be named by."""
    own = row.value.items() if isinstance(row.value, dict) else ()
    return {row.id, *(str(value) for key, value in own if key.endswith("id"))}


def snippet_of(value: object) -> str:
    """How a row begins, or what is wrong with it."""
    text = json.dumps(value, default=repr) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _SNIPPET else f"{text[:_SNIPPET]}..."
