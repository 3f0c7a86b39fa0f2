"""Is this a conversation? If not, why not: one reason code, for the ledger.

In: whatever a caller or a file holds.  Out: None, or one of `REASONS`.
Promise: what passes can be rendered, and trains at least the end of one assistant message.
Not here: repair. Nothing is trimmed, merged or invented.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardmill.records import Drop, IntArray, OffsetArray, Ragged

Message: TypeAlias = Mapping[str, str]
"""{"role": ..., "content": ...}; other keys are ignored."""
Conversation: TypeAlias = Sequence[Message]

ROLES = ("system", "user", "assistant")

REASONS = {
    "not_a_list": "the conversation is not a list of messages",
    "no_messages": "the list is empty",
    "bad_message": "a message is not an object with role and content",
    "unknown_role": "a role is none of system, user, assistant",
    "content_not_text": "a content is not a string",
    "invalid_unicode": "a content holds a lone surrogate, which has no bytes",
    "no_assistant": "no message is the assistant's, so nothing could be trained",
    "special_in_text": "the tokenizer made a special id out of text",
}
"""Reason code to sentence."""


def reason_to_drop(conversation: object) -> str | None:
    """The first thing wrong with a conversation, or None."""
    if isinstance(conversation, str | bytes) or not isinstance(conversation, Sequence):
        return "not_a_list"
    if not conversation:
        return "no_messages"
    for message in conversation:
        reason = _reason_of_message(message)
        if reason:
            return reason
    if not any(message["role"] == "assistant" for message in conversation):
        return "no_assistant"
    return None


def _reason_of_message(message: object) -> str | None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        return "bad_message"
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or role not in ROLES:
        return "unknown_role"
    if not isinstance(content, str):
        return "content_not_text"
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError:
            return "invalid_unicode"
    return None


def sift(
    conversations: Iterable[tuple[str, object]],
) -> tuple[list[Conversation], OffsetArray, tuple[Drop, ...]]:
    """Part (id, conversation) pairs: the good ones, their positions, and the drops."""
    good: list[Conversation] = []
    kept: list[int] = []
    drops: list[Drop] = []
    for position, (name, conversation) in enumerate(conversations):
        reason = reason_to_drop(conversation)
        if reason is None:
            assert isinstance(conversation, Sequence)
            good.append(conversation)
            kept.append(position)
        else:
            drops.append(Drop(id=name, reason=reason))
    return good, np.asarray(kept, np.int64), tuple(drops)


def special_in_text(texts: Ragged, special_ids: Iterable[int]) -> IntArray:
    """The numbers of the texts whose encoding holds a special id, ascending.

    A sound tokenizer never does that; a caller's own may. Such text would act as structure.
    """
    found = np.zeros(len(texts.values), np.bool_)
    for special in special_ids:
        found |= texts.values == special
    places = np.flatnonzero(found)
    return np.unique(np.searchsorted(texts.offsets, places, side="right") - 1)
