"""Documents and conversations that are already in the program.

The cursor is the number of documents or conversations read. Input that can be read only once, such
as a generator, is refused at the second reading, never taken for empty. `describe` holds only the
name: the caller vouches that the same name means the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from shardmill.errors import SourceError
from shardmill.messages import Dropped
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor, Drop, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    NamedSource,
    counts_of,
    grouped,
    make_batch,
    strings_to_arrow,
    utf8_bytes,
)
from shardmill.sources.conversations import ChatCursor, ConversationGroup, batched
from shardmill.sources.formats.jsonl import repaired
from shardmill.sources.source import RowLocation
from shardmill.sources.turns import tidied

Chat: TypeAlias = Conversation | Sequence[Mapping[str, Any]]

_T = TypeVar("_T")


def _skipped(iterator: Iterator[_T], start: int, what: str, name: str) -> Iterator[_T]:
    """The rest after the first `start`."""
    found = sum(1 for _ in islice(iterator, start))
    if found < start:
        raise SourceError(
            f"source {name!r}: the cursor is after {start:,} {what}, but there are only {found:,}; "
            "resume with the input the cursor came from"
        )
    return iterator


class MemorySource(NamedSource):
    """Texts from a list, a generator, or a function that gives a fresh iterable at each call."""

    def __init__(
        self,
        texts: Iterable[str] | Callable[[], Iterable[str]],
        *,
        name: str = "memory",
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if isinstance(texts, str | bytes):
            raise SourceError(f"{name}: one {type(texts).__name__} is not a list of texts: [text]")
        super().__init__(name, limits)
        self._texts = texts
        self._used_up = False

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory", "name": self.name}

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        start = 0 if cursor is None else counts_of(cursor, ("documents",), self.name)[0]
        return self._read(self._fresh(start), start)

    def locate(
        self, _before: Cursor | None, after: Cursor, _rows_before: int | None, /
    ) -> RowLocation:
        """The document that ends at the cursor `after`."""
        row = counts_of(after, ("documents",), self.name)[0] - 1
        return RowLocation(id=f"{self.name}: document {row}", row=row)

    def _fresh(self, start: int) -> Iterator[str]:
        texts = self._texts() if callable(self._texts) else self._texts
        iterator = iter(texts)
        if iterator is texts and not callable(self._texts):
            if start or self._used_up:
                raise SourceError(
                    f"source {self.name!r} is a {type(texts).__name__} that can be read only "
                    f"once, and reading from document {start:,} was asked for"
                    f"{' after an earlier reading' if self._used_up else ''}; "
                    "pass a list, or a function that makes a new one"
                )
            self._used_up = True
        return _skipped(iterator, start, "documents", self.name)

    def _read(self, texts: Iterator[str], start: int) -> Iterator[TextBatch]:
        for held in grouped(self._sized(texts, start), self.limits):
            start += len(held)
            array, repaired = strings_to_arrow(held)
            yield make_batch(array, {"documents": start}, repaired=repaired)

    def _sized(self, texts: Iterator[str], start: int) -> Iterator[tuple[str, int, int]]:
        for number, text in enumerate(texts, start):
            if not isinstance(text, str):
                raise SourceError(
                    f"source {self.name!r}, document {number:,} (from 0): "
                    f"found {type(text).__name__} {text!r:.60}, wanted str"
                )
            yield text, utf8_bytes(text), 1


class MemoryChats(NamedSource):
    """Conversations from a list, or from a function that gives a fresh iterable at each call.

    As in files, a message gets the one form that templates take, CR LF becomes LF and half a
    surrogate pair U+FFFD. A conversation without an id is
    named by its number, "memory:3".
    """

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
                "resume; pass a list, or a function that makes a new one"
            )
        super().__init__(name, limits)
        self._conversations = conversations

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory-chats", "name": self.name}

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]:
        start = 0 if cursor is None else counts_of(cursor, ("conversations",), self.name)[0]
        found = self._conversations
        chats = iter(found() if callable(found) else found)
        rest = _skipped(chats, start, "conversations", self.name)
        return batched(
            (self._group(chat, number) for number, chat in enumerate(rest, start)),
            ChatCursor(0, start),
            self.limits,
            lambda cursor: {"conversations": cursor.position},
        )

    def _group(self, chat: Chat, number: int) -> ConversationGroup:
        """The conversation, and whether something in it was replaced."""
        found = chat if isinstance(chat, Conversation) else Conversation(messages=chat)
        messages = found.messages
        if not isinstance(messages, list | tuple) or not all(
            isinstance(message, Mapping) for message in messages
        ):
            raise SourceError(
                f"source {self.name!r}, conversation {number:,} (from 0): found {chat!r:.60}, "
                "wanted a Conversation or a list of messages"
            )
        valid = [repaired(dict(message)) for message in messages]
        id = found.id or f"{self.name}:{number}"
        end = ChatCursor(0, number + 1)
        try:
            read = replace(found, messages=[tidied(message) for message in valid], id=id)
        except Dropped as why:
            return ConversationGroup((Drop(id=id, reason=str(why), row=found.row),), end)
        is_repaired = valid != [dict(message) for message in messages]
        return ConversationGroup((read,), end, is_repaired)
