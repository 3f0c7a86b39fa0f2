"""The shapes a conversation comes in, and which one a record has.

In: a record (a dict).  Out: its shape; through that, its conversations.
Promise: a shape reads each record alone. Where keys of several shapes are there, the first in
`SHAPES` wins: those that hold whole turns come before those that hold columns, because a prompt
beside messages is nearly always an extract of them. The rule looks at the record alone.
Not here: files, and what to do about a record that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardmill.arguments import nearest
from shardmill.errors import OptionError
from shardmill.records import Conversation, Drop
from shardmill.sources.chats.json_records import Misfit, Record
from shardmill.sources.chats.message_trees import (
    OASST_REASONS,
    Rules,
    is_oasst_message,
    is_oasst_tree,
    read_tree,
)
from shardmill.sources.chats.shape_readers import (
    ANSWERS,
    MESSAGES_KEYS,
    SHAREGPT_KEYS,
    is_alpaca,
    is_history,
    is_messages,
    is_prompt_response,
    is_sharegpt,
    read_alpaca,
    read_history,
    read_messages,
    read_prompt_response,
    read_sharegpt,
)

CHAT_REASONS = OASST_REASONS | {
    "bad_json": "no JSON object, or nested too deep",
    "other_shape": "the keys are not those of the shape",
    "bad_message": "a turn or message is not built as the shape says",
    "not_a_string": "something that should be a text is none",
    "bad_tools": "the tools are no list of objects",
    "two_systems": "a system column beside a system turn",
    "two_columns": "two columns that mean the same both hold text",
}
"""Every reason of a conversation source's drops."""

Item = Conversation | Drop
"""What becomes of input: one of these each."""

ID_KEYS = ("id", "conversation_id", "dialogue_id", "dialog_id", "chat_id", "uuid")
_MAX_ID = 200


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """One way to write conversations down."""

    name: str
    keys: str  # for the reader of an error
    signs: tuple[str, ...]  # a record with none of these keys is of another shape
    claims: Callable[[Record], bool]  # does a record look like it?
    read: Callable[[Record, str, Rules], Iterable[Item]] | None  # None: rows make trees together


def _alone(read: Callable[[Record, str], Conversation]) -> Callable[..., Iterable[Item]]:
    def read_one(record: Record, place: str, _: Rules) -> Iterable[Item]:
        return (read(record, id_of(record, place)),)

    return read_one


_SHAPES = (
    ConversationShape(
        "oasst-messages",
        "message_id, parent_id, role, text",
        ("message_id",),
        is_oasst_message,
        None,
    ),
    ConversationShape(
        "oasst-tree",
        "prompt: {role, text, replies: [...]}",
        ("prompt",),
        is_oasst_tree,
        read_tree,
    ),
    ConversationShape(
        "messages",
        "messages: [{role, content}, ...][, tools]",
        MESSAGES_KEYS,
        is_messages,
        _alone(read_messages),
    ),
    ConversationShape(
        "sharegpt",
        "conversations: [{from, value}, ...][, system, tools]",
        SHAREGPT_KEYS,
        is_sharegpt,
        _alone(read_sharegpt),
    ),
    ConversationShape(
        "history",
        "history: [[user, bot], ...][, and the columns of prompt-response]",
        ("history",),
        is_history,
        _alone(read_history),
    ),
    ConversationShape(
        "alpaca",
        "instruction[, input], output[, system]",
        ("output",),
        is_alpaca,
        _alone(read_alpaca),
    ),
    ConversationShape(
        "prompt-response",
        "prompt|question|instruction|query[, context|input], "
        "response|answer|output|completion[, system]",
        ANSWERS,
        is_prompt_response,
        _alone(read_prompt_response),
    ),
)
SHAPES = {shape.name: shape for shape in _SHAPES}
"""The shapes by name, in the order in which they claim a record."""


def shape_named(name: str) -> ConversationShape:
    if name not in SHAPES:
        near = nearest(name, SHAPES)
        guess = f"did you mean {near!r}? " if near else ""
        raise OptionError(f"shape={name!r}: {guess}wanted one of\n{listed_shapes()}")
    return SHAPES[name]


def shape_of(record: Record) -> ConversationShape | None:
    """The first shape that claims a record; None when none does."""
    return next((shape for shape in _SHAPES if shape.claims(record)), None)


def check_best(record: Record, shape: ConversationShape) -> None:
    """Refuse a record that an earlier shape claims: read as `shape` it would lose turns."""
    for earlier in _SHAPES:
        if earlier is shape:
            return
        if not record.keys().isdisjoint(earlier.signs) and earlier.claims(record):
            raise Misfit(
                "other_shape", f"this record is {earlier.name!r}, the first {shape.name!r}"
            )


def listed_shapes() -> str:
    return "\n".join(f"  {shape.name}: {shape.keys}" for shape in _SHAPES)


def id_of(record: Record, place: str) -> str:
    """The record's own id when it is a short string or a number, else where it lies."""
    for key in ID_KEYS:
        found = record.get(key)
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found) if abs(found) < 10**_MAX_ID else place
        if isinstance(found, str) and 0 < len(found) <= _MAX_ID:
            return found
    return place
