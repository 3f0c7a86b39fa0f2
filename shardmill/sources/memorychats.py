"""Conversations that are already in the program.

In: `Conversation`s or plain lists of messages, in a list or from a function that makes them anew.
Out: `ConversationBatch`es; the cursor is the number of conversations read.
Promise: CR LF becomes LF and half a surrogate pair U+FFFD, as in files; one without an id is named
by its number, "memory:3". What can be read only once (a generator) is refused at once.
Not here: an identity of the content. `describe` holds the name alone: the caller vouches that the
same name means the same conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from shardmill.errors import SourceError
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.chatbatches import Spot, Unit, batched
from shardmill.sources.cursors import cursor_count
from shardmill.sources.record import repaired
from shardmill.sources.shape_turns import tidied

Chat: TypeAlias = Conversation | Sequence[Mapping[str, Any]]


class MemoryChats:
    """Conversations from a list, or from a function that gives a fresh iterable at each call."""

    def __init__(
        self,
        conversations: Iterable[Chat] | Callable[[], Iterable[Chat]],
        *,
        name: str = "memory",
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if isinstance(conversations, Iterator):
            raise SourceError(
                f"{name}: a {type(conversations).__name__} can be read only once, so nothing could "
                "resume; pass a list, or a function that makes it anew"
            )
        self._conversations = conversations
        self._name = name
        self._limits = limits

    def __repr__(self) -> str:
        return f"MemoryChats({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory-chats", "name": self._name}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]:
        start = cursor_count(cursor, "conversations", self._name)
        units = self._units(self._fresh(start), start)
        return batched(
            units, Spot(0, start), self._limits, lambda spot: {"conversations": spot.mark}
        )

    def _fresh(self, start: int) -> Iterator[Chat]:
        found = self._conversations
        iterator = iter(found() if callable(found) else found)
        skipped = sum(1 for _ in islice(iterator, start))
        if skipped < start:
            raise SourceError(
                f"source {self._name!r}: the cursor stands after {start:,} conversations, but "
                f"there are only {skipped:,}; resume with those the cursor came from"
            )
        return iterator

    def _units(self, chats: Iterator[Chat], start: int) -> Iterator[Unit]:
        for number, chat in enumerate(chats, start):
            conversation, mended = self._read(chat, number)
            yield Unit((conversation,), Spot(0, number + 1), mended)

    def _read(self, chat: Chat, number: int) -> tuple[Conversation, bool]:
        """The conversation, and whether something in it was replaced."""
        found = chat if isinstance(chat, Conversation) else Conversation(messages=chat)
        messages = found.messages
        if not isinstance(messages, list | tuple) or not all(
            isinstance(message, Mapping) for message in messages
        ):
            raise SourceError(
                f"source {self._name!r}, conversation {number:,} (from 0): found {chat!r:.60}, "
                "wanted a Conversation or a list of messages"
            )
        valid = [repaired(dict(message)) for message in messages]
        read = replace(
            found,
            messages=[tidied(message) for message in valid],
            id=found.id or f"{self._name}:{number}",
        )
        return read, valid != [dict(message) for message in messages]
