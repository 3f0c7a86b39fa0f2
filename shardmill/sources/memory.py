"""Documents and conversations that are already in the program.

The cursor is the number of documents or conversations read. Input that can be read only once, such
as a generator, is refused at the second reading, never taken for empty. `describe` holds only the
name: the caller vouches that the same name means the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Self, TypeAlias, TypeVar

from shardmill.errors import SourceError
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of
from shardmill.sources.cleaning import clean, strings_to_arrow
from shardmill.sources.conversations import ChatCursor, ConversationGroup, batched
from shardmill.sources.formats.json_rows import repaired
from shardmill.sources.shapes import tidied
from shardmill.sources.source import RowLocation

Texts = Iterable[str] | Callable[[], Iterable[str]]
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


class MemorySource:
    """Texts from a list, a generator, or a function that gives a fresh iterable at each call."""

    def __init__(
        self, texts: Texts, *, name: str = "memory", limits: BatchLimits = DEFAULT_LIMITS
    ) -> None:
        if isinstance(texts, str | bytes):
            raise SourceError(f"{name}: one {type(texts).__name__} is not a list of texts: [text]")
        self._texts = texts
        self._name = name
        self._limits = limits
        self._used_up = False

    def __repr__(self) -> str:
        return f"MemorySource({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def limits(self) -> BatchLimits:
        return self._limits

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory", "name": self._name}

    def size_hint(self) -> int | None:
        return None

    def with_limits(self, limits: BatchLimits) -> Self:
        """The same documents in other batches."""
        source = copy(self)
        source._limits = limits
        return source

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        start = 0 if cursor is None else counts_of(cursor, ("documents",), self._name)[0]
        return self._read(self._fresh(start), start)

    def locate(
        self, _before: Cursor | None, after: Cursor, _rows_before: int | None, /
    ) -> RowLocation:
        """The document that ends at the cursor `after`."""
        row = counts_of(after, ("documents",), self._name)[0] - 1
        return RowLocation(id=f"{self._name}: document {row}", row=row)

    def _fresh(self, start: int) -> Iterator[str]:
        texts = self._texts() if callable(self._texts) else self._texts
        iterator = iter(texts)
        if iterator is texts and not callable(self._texts):
            if start or self._used_up:
                raise SourceError(
                    f"source {self._name!r} is a {type(texts).__name__} that can be read only "
                    f"once, and reading from document {start:,} was asked for"
                    f"{' after an earlier reading' if self._used_up else ''}; "
                    "pass a list, or a function that makes a new one"
                )
            self._used_up = True
        return _skipped(iterator, start, "documents", self._name)

    def _read(self, texts: Iterator[str], start: int) -> Iterator[TextBatch]:
        held: list[str] = []
        num_bytes = 0
        for number, text in enumerate(texts, start):
            if not isinstance(text, str):
                raise SourceError(
                    f"source {self._name!r}, document {number:,} (from 0): "
                    f"found {type(text).__name__} {text!r:.60}, wanted str"
                )
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            is_full = num_bytes + size > self._limits.num_bytes
            if held and (is_full or len(held) == self._limits.num_documents):
                yield _batch(held, number)
                held, num_bytes = [], 0
            held.append(text)
            num_bytes += size
            start = number + 1
        if held:
            yield _batch(held, start)


def _batch(texts: list[str], stop: int) -> TextBatch:
    """Documents of which the last has the number `stop - 1`."""
    array, repaired = strings_to_arrow(texts)
    cleaned = clean(array, repaired=repaired)
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(texts),
        counts=cleaned.counts,
        cursor={"documents": stop},
    )


class MemoryChats:
    """Conversations from a list, or from a function that gives a fresh iterable at each call.

    As in files, CR LF becomes LF and half a surrogate pair U+FFFD. A conversation without an id is
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
        start = 0 if cursor is None else counts_of(cursor, ("conversations",), self._name)[0]
        given = self._conversations
        chats = _skipped(
            iter(given() if callable(given) else given), start, "conversations", self._name
        )
        groups = (self._group(chat, number) for number, chat in enumerate(chats, start))
        return batched(
            groups,
            ChatCursor(0, start),
            self._limits,
            lambda cursor: {"conversations": cursor.position},  # type: ignore[dict-item]
        )

    def _group(self, chat: Chat, number: int) -> ConversationGroup:
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
        is_repaired = valid != [dict(message) for message in messages]
        return ConversationGroup((read,), ChatCursor(0, number + 1), is_repaired)
