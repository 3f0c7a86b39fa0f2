"""What a user may implement: tokenizers, and sources of documents or conversations.

A class needs these methods and nothing else: no base class, no registration.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, runtime_checkable

from shardmill.records import JSON, ConversationBatch, Cursor, IntArray, Ragged, TextBatch

if TYPE_CHECKING:
    import pyarrow as pa


class Closing:
    """A class with `close`, as a context manager."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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
    """A named origin of documents that can stop and resume."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, JSON]:
        """What identifies the input and every option that changes it: equal descriptions give
        equal documents. No absolute path, time or host: it is stored in the manifest."""

    def size_hint(self) -> int | None:
        """Approximate bytes of the input; None when unknown, as of a stream."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Documents from the start, or from exactly `cursor` on.

        The batches after a cursor are those that followed it the first time, with the same borders:
        a batch depends on where it starts and on the input, and on nothing else.
        """


@runtime_checkable
class ConversationSource(Protocol):
    """A `Source` of conversations."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, JSON]: ...

    def size_hint(self) -> int | None: ...

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]: ...


@runtime_checkable
class DividedSource(Source, Protocol):
    """A source of pieces that can be read separately, in any order, on any machine."""

    def divide(self, at_least: int) -> Sequence[Source]:
        """Pieces which, one after another, give exactly the documents of this source.

        The coarsest kind of pieces (files, say) that makes `at_least` of them; the finest kind
        when none does. Depends on the input and `at_least` alone.
        """


@runtime_checkable
class CuttableSource(Source, Protocol):
    """A source that can be cut into pieces of about one size: the units of a build."""

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """Pieces which, one after another, give exactly the documents, counts and drops of this
        source, each of about `num_bytes` of input; what has no finer parts is one piece.

        Depends on the input and `num_bytes` alone. Cheap: sizes and footers, no pass over the data.
        A piece is small when pickled, and can be read in another process.

        Row numbers: a piece that begins inside a file does not know how many rows come before it.
        Its drops have a `row`, its batches a `num_rows` (a last batch may hold nothing else), and
        its attribute `continues` is True: its rows continue those of the piece before it. The rows
        are numbered when the pieces are joined, in their order:

            if not continues(piece):
                before = 0
            drops = [drop.numbered(before) for drop in drops_of_all_its_batches]
            before += num_rows_of_all_its_batches
        """


@runtime_checkable
class CuttableChats(ConversationSource, Protocol):
    """A `CuttableSource` of conversations, which may have a `row` too: a template that drops one
    gives it to the drop."""

    def cut(self, num_bytes: int) -> Sequence[ConversationSource]: ...


def continues(piece: Source | ConversationSource) -> bool:
    """Whether the rows of a piece continue those of the piece before it."""
    return bool(getattr(piece, "continues", False))
