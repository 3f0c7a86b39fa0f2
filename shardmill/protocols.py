"""What rooms ask of each other: the smallest shape that does the job.

A user's own class needs these names and nothing else: no base class, no registration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from shardmill.records import JSON, ConversationBatch, Cursor, IntArray, Ragged, TextBatch

if TYPE_CHECKING:
    import pyarrow as pa

Texts: TypeAlias = "Sequence[str] | pa.LargeStringArray | pa.StringArray"


@runtime_checkable
class Encoder(Protocol):
    """Text to ids, many texts at a time. Text never becomes a special id."""

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each text, in order."""


@runtime_checkable
class Tokenizer(Encoder, Protocol):
    """An encoder with a vocabulary, a way back, and an identity."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, specials included."""

    @property
    def fingerprint(self) -> str:
        """sha256 hex over the model's bytes and every option that changes ids."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text; a special id appears as its literal string."""

    def special_token_ids(self) -> dict[str, int]:
        """Name to id, for instance {"sys": 3, "usr": 4, "asst": 5, "eot": 6}; may be empty."""


@runtime_checkable
class Source(Protocol):
    """A named origin of documents that can stop and go on."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, JSON]:
        """What identifies the input and every option that changes it: equal descriptions give
        equal documents. No absolute path, time or host: it is stored in the manifest."""

    def size_hint(self) -> int | None:
        """About how many bytes of input lie ahead; None when nobody knows (a stream)."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Documents from the start, or exactly from `cursor` on.

        The batches after a cursor are the very batches that followed it the first time, borders
        included: a batch is a function of where it starts and of the input, nothing else.
        """


@runtime_checkable
class ConversationSource(Protocol):
    """A named origin of conversations that can stop and go on. As `Source`, but for chats."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, JSON]: ...

    def size_hint(self) -> int | None: ...

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]: ...


@runtime_checkable
class DividedSource(Source, Protocol):
    """A source made of pieces that can be read alone: in any order, on any machine."""

    def divide(self, at_least: int) -> Sequence[Source]:
        """Pieces which, one behind the other, give exactly the documents of this source.

        The coarsest kind of pieces (files, say) that makes `at_least` of them; the finest kind
        when none does. A function of the input and `at_least` alone.
        """
