"""What passes between packages: small frozen records over flat arrays.

These classes slice and count; they do not read, encode, split or write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import TypeVar

    # `Batch` alone means a batch of a store. Python 3.11 has no defaults at run time.
    IdType = TypeVar("IdType", bound=np.integer[Any], default=np.int64)
else:
    from typing import TypeVar

    IdType = TypeVar("IdType")

IGNORE_INDEX = -100
"""The label that a loss skips."""

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
OffsetArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Cursor: TypeAlias = dict[str, JSON]
"""Where a source continues: a small JSON object only that source understands."""


def next_token_pairs(
    ids: IntArray,
    trained: BoolArray | None = None,
    *,
    dtype: npt.DTypeLike = np.int64,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Inputs and labels of rows `(..., length)`, each `(..., length - 1)`, in fresh memory.

    The only place where tokens are shifted. A label is the token after its input; where that
    token is not `trained` it is `ignore_index`. Without `trained`, all tokens are.

        ids      1  4  9  2  5  9         inputs  1  4  9  2  5
        trained  .  .  .  .  x  x         labels  .  .  .  5  9
    """
    pairs = np.empty((2, *ids.shape[:-1], ids.shape[-1] - 1), dtype)
    write_next_token_pairs(ids, trained, pairs[0], pairs[1], ignore_index=ignore_index)
    return pairs[0], pairs[1]


def write_next_token_pairs(
    ids: IntArray,
    trained: BoolArray | None,
    inputs: IntArray,
    labels: IntArray,
    where: Any = ...,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> None:
    """`next_token_pairs`, written into `inputs[where]` and `labels[where]`."""
    inputs[where] = ids[..., :-1]
    following = ids[..., 1:]
    if trained is not None:
        following = following.astype(labels.dtype)  # a copy; copyto is five times as fast as where
        np.copyto(following, ignore_index, where=~trained[..., 1:])
    labels[where] = following


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Many sequences in one flat array: sequence `i` is `values[offsets[i]:offsets[i + 1]]`.

    `offsets[0]` is 0 and `offsets[-1]` is `len(values)`.
    """

    values: IntArray  # (total,) any integer dtype
    offsets: OffsetArray  # (n + 1,) int64, never decreasing

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> IntArray:
        """Sequence `index`, as a view."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.values, other.values
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def lengths(self) -> OffsetArray:
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Sequences `start..stop`, sharing the values."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def keep(self, chosen: npt.NDArray[np.bool_]) -> Ragged:
        """The sequences marked in `chosen`, in order, copied."""
        lengths = self.lengths
        return Ragged.from_lengths(self.values[np.repeat(chosen, lengths)], lengths[chosen])

    @classmethod
    def from_lengths(cls, values: IntArray, lengths: npt.ArrayLike) -> Ragged:
        offsets = np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64))))
        if offsets[-1] != len(values):
            raise ValueError(
                f"lengths sum to {offsets[-1]:,}, but there are {len(values):,} values"
            )
        return cls(values, offsets.astype(np.int64, copy=False))

    @classmethod
    def from_sequences(
        cls, sequences: Iterable[npt.ArrayLike], dtype: npt.DTypeLike = np.int64
    ) -> Ragged:
        """Copy sequences one after another. For tests and small input."""
        arrays = [np.asarray(sequence, dtype=dtype).reshape(-1) for sequence in sequences]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls.from_lengths(values, [len(array) for array in arrays])

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The sequences of all parts, in order. Needs at least one part."""
        values = np.concatenate([part.values for part in parts])
        return cls.from_lengths(values, np.concatenate([part.lengths for part in parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One input row that gave no document, so that nothing is lost silently."""

    id: str  # where it was: "file.jsonl:17", "part.parquet:row 40"; the file alone if `row` is set
    reason: str  # one of a source's reason codes, a key of the ledger's `dropped`
    row: int | None = None  # from 0, in a piece that does not know how many rows come before it

    def numbered(self, rows_before: int) -> Drop:
        """With its full id; `rows_before` rows of the file come before the piece."""
        if self.row is None:
            return self
        return Drop(id=f"{self.id}:{rows_before + self.row + 1}", reason=self.reason)


class _TextsOfBatch:
    """The field `texts`, which may be given as a function: it is called at the first look."""

    def __get__(self, batch: Any, _owner: object = None) -> Any:
        if batch is None:
            raise AttributeError("the field has no default")
        found = batch.__dict__["texts"]
        if callable(found):
            found = batch.__dict__["texts"] = found()
        return found

    def __set__(self, batch: Any, texts: object) -> None:
        batch.__dict__["texts"] = texts


_TEXTS: Any = _TextsOfBatch()


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """Some documents of a source, clean and non-empty, with the account of what was left out.

    `num_read == len(texts) + counts["empty"] + counts.get("filtered", 0) + len(drops)`.
    """

    texts: pa.LargeStringArray = _TEXTS  # no nulls, no empty strings
    strings: list[str] | None = None  # the same, where the reader made them: engines want these
    sizes: OffsetArray | None = None  # UTF-8 bytes of each of `strings`
    num_read: int  # input rows or files consumed by this batch
    counts: Mapping[str, int] = field(default_factory=dict)
    # "empty": documents with no text; "filtered": rows that a filter left out; "invalid_utf8": kept
    # documents in which bytes were replaced; "front_matter": without the front matter they had
    drops: tuple[Drop, ...] = ()
    num_rows: int = 0  # rows passed, blank lines too, where drops have a `row`; 0 elsewhere
    cursor: Cursor  # reading from here gives exactly what follows this batch

    def replaced(self, **changes: Any) -> TextBatch:
        """As `dataclasses.replace`, without making `texts`."""
        return TextBatch(**{**self.__dict__, **changes})


ROLES = ("system", "user", "assistant", "tool")
"""Who speaks in a turn; the number of a role in an array is its place here."""


PreferenceKind: TypeAlias = Literal["ranks", "labels"]
"""What the answers to a prompt have: ranks, 0 for the best, or labels, 1 for a good one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One answer to a prompt."""

    messages: Sequence[Mapping[str, Any]]  # the whole conversation, which the answer ends
    value: int  # its rank or label


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat as a source gives it. Nothing in it is checked or repaired; `chat` does that."""

    messages: Sequence[Mapping[str, Any]]
    # each {"role", "content"}, perhaps "reasoning_content", "tool_calls", "name", "train"
    tools: Sequence[Mapping[str, Any]] | None = None  # as the template wants them
    id: str = ""  # where it was, "chats.jsonl:17", or the id it came with; see `Drop` for `row`
    row: int | None = None
    group: str | None = None  # conversations of one group never part in a split
    part_of: Conversation | None = None  # the one that this is the beginning of, after a fan-out
    branches: tuple[Branch, ...] = ()  # of a record of preferences, best first; it is the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationBatch:
    """Some conversations of a source.

    `num_read == len(conversations) + counts.get("filtered", 0) + len(drops)`.
    """

    conversations: tuple[Conversation, ...]
    num_read: int
    counts: Mapping[str, int] = field(default_factory=dict)
    # "invalid_utf8": with a replacement; "filtered": rows that a filter left out
    drops: tuple[Drop, ...] = ()
    num_rows: int = 0  # as in `TextBatch`
    cursor: Cursor  # reading from here gives exactly what follows this batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatExamples:
    """Some rendered conversations: whole, not cut, not shifted."""

    ids: Ragged
    mask: BoolArray  # (total,) True where this very token is a training target
    turn_starts: OffsetArray  # (turns,) where each turn starts in `ids.values`, ascending
    # Tokens before an example's first turn (a BOS) belong to no turn.
    turn_roles: npt.NDArray[np.uint8]  # (turns,) who speaks: a place in ROLES

    def keep(self, chosen: BoolArray) -> ChatExamples:
        """The examples marked in `chosen`, in order, with their turns, copied."""
        if chosen.all():
            return self
        ids, offsets = self.ids.keep(chosen), self.ids.offsets
        owners = np.searchsorted(offsets, self.turn_starts, side="right") - 1
        turns = chosen[owners]
        moved = np.zeros(len(chosen), np.int64)
        moved[chosen] = offsets[:-1][chosen] - ids.offsets[:-1]  # how far an example goes left
        return ChatExamples(
            ids=ids,
            mask=self.mask[np.repeat(chosen, self.ids.lengths)],
            turn_starts=(self.turn_starts - moved[owners])[turns],
            turn_roles=self.turn_roles[turns],
        )

    def take(self, order: IntArray) -> ChatExamples:
        """The examples in another order, copied."""
        offsets = self.ids.offsets
        owners = np.searchsorted(offsets, self.turn_starts, side="right") - 1
        bounds = np.searchsorted(owners, np.arange(len(offsets)))
        parts = [
            ChatExamples(
                ids=self.ids.slice(at, at + 1),
                mask=self.mask[offsets[at] : offsets[at + 1]],
                turn_starts=self.turn_starts[bounds[at] : bounds[at + 1]] - offsets[at],
                turn_roles=self.turn_roles[bounds[at] : bounds[at + 1]],
            )
            for at in order.tolist()
        ]
        return ChatExamples.concatenate(parts)

    @classmethod
    def concatenate(cls, parts: Sequence[ChatExamples]) -> ChatExamples:
        """All examples of all parts, in order."""
        begins = np.cumsum([0, *(len(part.mask) for part in parts)])
        starts = (part.turn_starts + at for part, at in zip(parts, begins[:-1], strict=True))
        return cls(
            ids=Ragged.concatenate([part.ids for part in parts] or [Ragged.from_sequences([])]),
            mask=np.concatenate([np.empty(0, np.bool_), *(part.mask for part in parts)]),
            turn_starts=np.concatenate([np.empty(0, np.int64), *starts]),
            turn_roles=np.concatenate([np.empty(0, np.uint8), *(p.turn_roles for p in parts)]),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch(Generic[IdType]):
    """The rows of one step as numpy arrays: `(B, T)` from stores, `(A, B, T)` from streams.

    A batch that is held, whole or in part, never changes.
    """

    input_ids: npt.NDArray[IdType]  # int64 from stores, int32 from streams; contiguous
    labels: npt.NDArray[
        IdType
    ]  # the token after each input, or IGNORE_INDEX where it is not trained
    # streams
    attention_mask: BoolArray | None = None  # False: padding
    segment_ids: IntArray | None = None  # int32; 1, 2, ... for the documents of a row, 0: padding
    # stores that keep documents apart; without these, labels continue into the next document
    doc_ids: OffsetArray | None = None  # 0 for the first document of a row, then 1, 2, ...
    position_ids: OffsetArray | None = None  # 0 at the start of every document and row
    cu_seqlens: npt.NDArray[np.int32] | None = None  # edges of all documents, rows end to end
    max_seqlen: int | None = None  # tokens of the longest document in a row
    # where the rows of a store come from
    samples: range = range(0)  # the global sample numbers of the rows; empty from streams
    source: OffsetArray | None = None  # (B,) which source of the mixture
    epoch: OffsetArray | None = None  # (B,) which pass over that source, from 0
    item: OffsetArray | None = None  # (B,) which window or packed row of that source

    def __len__(self) -> int:
        """Rows of the batch, those of all microbatches."""
        return int(self.input_ids.size // self.input_ids.shape[-1])

    def trained(self) -> BoolArray:
        """Which labels are trained, in the shape of `labels`."""
        return np.asarray(self.labels != IGNORE_INDEX)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are set, by name."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One file of raw little-endian tokens, to its end, whose size has been checked."""

    path: Path
    num_tokens: int
    dtype: str  # "uint16" or "uint32"
    offset: int = 0  # bytes before the first token: the header of a file that has one

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * np.dtype(self.dtype).itemsize
