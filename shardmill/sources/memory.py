"""Documents that are already in the program.

In: strings, from anything that can be looped over or from a function that makes such a thing.
Out: `TextBatch`es; the cursor is the number of documents read.
Promise: what can be read twice resumes exactly; what cannot (a generator) is refused on the second
reading, never taken for empty.
Not here: an identity of the content. `describe` holds the name alone: the caller vouches that the
same name means the same documents.

Conversations that are already in the program.

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
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, cursor_count
from shardmill.sources.chats.conversations import ConversationGroup, Spot, batched
from shardmill.sources.chats.json_records import repaired
from shardmill.sources.chats.shape_readers import tidied
from shardmill.sources.cleaning import clean, strings_to_arrow

Texts = Iterable[str] | Callable[[], Iterable[str]]


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

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory", "name": self._name}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        start = cursor_count(cursor, "documents", self._name)
        return self._read(self._fresh(start), start)

    def _fresh(self, start: int) -> Iterator[str]:
        texts = self._texts() if callable(self._texts) else self._texts
        iterator = iter(texts)
        if iterator is texts and not callable(self._texts):
            if start or self._used_up:
                raise SourceError(
                    f"source {self._name!r} is a {type(texts).__name__} that can be read only "
                    f"once, and reading from document {start:,} was asked for"
                    f"{' after an earlier reading' if self._used_up else ''}; "
                    "pass a list, or a function that makes it anew"
                )
            self._used_up = True
        skipped = sum(1 for _ in islice(iterator, start))
        if skipped < start:
            raise SourceError(
                f"source {self._name!r}: the cursor stands after {start:,} documents, but there "
                f"are only {skipped:,}; resume with the texts the cursor came from"
            )
        return iterator

    def _read(self, iterator: Iterator[str], start: int) -> Iterator[TextBatch]:
        for chunk in self._chunks(iterator, start):
            start += len(chunk)
            array, repaired = strings_to_arrow(chunk)
            cleaned = clean(array, repaired=repaired)
            yield TextBatch(
                texts=cleaned.texts,
                num_read=len(chunk),
                counts=cleaned.counts,
                cursor={"documents": start},
            )

    def _chunks(self, iterator: Iterator[str], start: int) -> Iterator[list[str]]:
        """The texts of one batch after the other; one text is read ahead."""
        chunk: list[str] = []
        num_bytes = 0
        for number, text in enumerate(iterator, start):
            if not isinstance(text, str):
                raise SourceError(
                    f"source {self._name!r}, document {number:,} (from 0): "
                    f"found {type(text).__name__} {text!r:.60}, wanted str"
                )
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            is_full = num_bytes + size > self._limits.num_bytes
            if chunk and (is_full or len(chunk) == self._limits.num_documents):
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(text)
            num_bytes += size
        if chunk:
            yield chunk


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

    def _units(self, chats: Iterator[Chat], start: int) -> Iterator[ConversationGroup]:
        for number, chat in enumerate(chats, start):
            conversation, mended = self._read(chat, number)
            yield ConversationGroup((conversation,), Spot(0, number + 1), mended)

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
