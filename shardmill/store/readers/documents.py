"""Documents and conversations of a store: by number, and in windows of tokens.

`SplitView` is what `store["train"]` returns: a sequence for people and scripts. `ChatSpace` reads
many conversations in one gather. Both can be pickled; a copy refuses a store that was built again.

Which document every token of a window belongs to is found exactly and without a loop.
Starts out of order are refused: up to 4 million of them are all checked, otherwise those that a
window meets (`shardmill verify` checks all). Documents without tokens have no effect.

Everything follows from the borders: the columns of windows at which another document begins.

    tokens of a window    a a b b b c     borders: columns 2 and 5
    doc_ids of inputs     0 0 1 1 1       seq_len = 5: the sixth token is only a label
    position_ids          0 1 0 1 2
    cu_seqlens            0 2 5
    labels                a . b b .       `.` is IGNORE_INDEX: it is another document's token
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import (
    IGNORE_INDEX,
    ROLES,
    BoolArray,
    ChatExamples,
    IntArray,
    OffsetArray,
    Ragged,
    next_token_pairs,
)
from shardmill.store.readers.files import running_edges
from shardmill.store.readers.token_space import (
    ReaderName,
    TokenSpace,
    as_positions,
    held_by,
    item_numbers,
    open_tokens,
)
from shardmill.store.store import Store, document_spans

_MAX_TOKENS = 2**31 - 1  # cu_seqlens are int32 in every kernel that takes them
_CHECK_ALL = 2**22  # document starts: some 10 ms


class Example(NamedTuple):
    """One tokenised conversation, whole and not shifted."""

    ids: IntArray  # (n,) of the store's dtype
    loss_mask: BoolArray  # (n,) True where this token is a training target


class SplitView:
    """The documents of a split in stored order, read when they are asked for: `store["train"]`.

    An item is the ids of a document; in a chat store it is an `Example`. A slice is another view.
    Every document is here, also those that are excluded from training.
    """

    def __init__(self, store: Store, split: str, numbers: range | None = None) -> None:
        """`numbers`: those of the documents, in this order; None: all of them."""
        self.store, self.split = store, split
        self._numbers = range(store.num_documents(split)) if numbers is None else numbers
        self._chats = ChatSpace(store, split) if store.is_chat else None
        self._tokens = open_tokens(store, split)
        self._starts = store.document_starts(split)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: slice) -> Self: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Ids of a document (an `Example` in a chat store), or a view of a slice of them."""
        if isinstance(index, slice):
            view = copy.copy(self)
            view._numbers = self._numbers[index]
            return view
        try:
            number = self._numbers[index]
        except IndexError:
            raise IndexError(f"{self!r}: no item {index}") from None
        if self._chats is not None:
            found = self._chats.examples([number])
            return Example(ids=found.ids.values, loss_mask=found.mask)
        total = self._tokens.num_tokens
        (start,), (stop,) = document_spans(self._starts, np.array([number]), total)
        if not 0 <= start <= stop <= total:
            raise self.store.damaged(self.split, f"document {number:,} is at {start:,}..{stop:,}")
        return self._tokens.read(start, stop)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        kind = "documents" if self._chats is None else "examples"
        total = self.store.num_documents(self.split)
        of = "" if len(self) == total else f" of {total:,}"
        return f"SplitView({str(self.store.folder)!r}, {self.split!r}, {len(self):,}{of} {kind})"

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitView, (self.store, self.split, self._numbers)


class ChatSpace:
    """The conversations of a split, many in one gather."""

    def __init__(self, store: Store, split: str, *, reader: ReaderName = "auto") -> None:
        """`reader`: as in `TokenSpace`."""
        self.store, self.split = store, split
        self._reopen = partial(ChatSpace, reader=reader)
        self._tokens = open_tokens(store, split, reader=reader)
        self.reader = self._tokens.reader
        self._starts = held_by(self.reader, store.document_starts(split))
        chat = store.chat_arrays(split)
        self._mask_bits = held_by(self.reader, chat.mask_bits)
        self._turn_starts = held_by(self.reader, chat.turn_starts)
        self._turn_roles = held_by(self.reader, chat.turn_roles)

    def __len__(self) -> int:
        return len(self._starts)

    def examples(self, indices: npt.ArrayLike) -> ChatExamples:
        """The conversations of these numbers, in this order, repeats allowed."""
        starts, stops = self.spans(indices)
        positions, offsets = spread(starts, stops)
        turns, turn_offsets = spread(*self._turns(starts, stops))
        moved = np.repeat(offsets[:-1] - starts, np.diff(turn_offsets))
        roles = self._turn_roles[turns]
        if len(roles) and roles.max() >= len(ROLES):
            raise self.store.damaged(self.split, f"a turn has the role {roles.max()}")
        return ChatExamples(
            ids=Ragged(self._tokens.gather(positions, 1)[:, 0], offsets),
            mask=self._bits(positions),
            turn_starts=self._turn_starts[turns] + moved,
            turn_roles=roles,
        )

    def lengths(self) -> OffsetArray:
        """Tokens of every conversation of the split: 8 bytes each."""
        return np.diff(self._starts, append=self._tokens.num_tokens)

    def close(self) -> None:
        """Release the token files; may be called again."""
        self._tokens.close()

    def __repr__(self) -> str:
        return (
            f"ChatSpace({str(self.store.folder)!r}, {self.split!r}, examples={len(self):,}, "
            f"{self.reader})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, (self.store, self.split)

    def spans(self, indices: npt.ArrayLike) -> tuple[OffsetArray, OffsetArray]:
        """Where these conversations start and stop in the token space of the split."""
        array = item_numbers(indices, len(self), "example")
        starts, stops = document_spans(self._starts, array, self._tokens.num_tokens)
        sound = (starts >= 0) & (stops > starts) & (stops <= self._tokens.num_tokens)
        if not sound.all():
            number = int(array[np.flatnonzero(~sound)[0]])
            raise self.store.damaged(
                self.split, f"the index gives example {number:,} impossible positions"
            )
        return starts, stops

    def _turns(self, starts: OffsetArray, stops: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
        """The turns in these spans, as ranges."""
        first, last = np.searchsorted(self._turn_starts, np.stack((starts, stops)))
        if (last <= first).any():
            raise self.store.damaged(self.split, "an example has no turn")
        return first, last

    def _bits(self, positions: OffsetArray) -> BoolArray:
        packed = self._mask_bits[positions >> 3]
        trained: BoolArray = ((packed >> (positions & 7).astype(np.uint8)) & 1).view(np.bool_)
        return trained


def spread(starts: OffsetArray, stops: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
    """The numbers of all spans in one array, and where each span begins in it.

    starts [5 0], stops [7 3] -> [5 6 0 1 2], [0 2 5]
    """
    lengths = stops - starts
    offsets = running_edges(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


@dataclass(frozen=True, slots=True, eq=False)
class Borders:
    """Where documents begin inside windows, except at the first token of a window."""

    num_windows: int
    length: int  # tokens of a window
    positions: OffsetArray  # (k,) window * length + column, ascending, each once, column >= 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segments:
    """Every window cut into pieces of one document each, for the inputs."""

    doc_ids: OffsetArray  # (n, seq_len) 0 for the window's first document, then 1, 2, ...
    position_ids: OffsetArray  # (n, seq_len) 0 at the start of every piece
    cu_seqlens: npt.NDArray[np.int32]  # (pieces + 1,) edges of all pieces, windows end to end
    max_seqlen: int  # tokens of the longest piece; 0 when there is no window


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DocumentBatch:
    """Some windows, ready for a model that keeps documents apart. int64, (n, seq_len) each."""

    input_ids: OffsetArray
    labels: OffsetArray
    segments: Segments


def find_borders(document_starts: OffsetArray, starts: OffsetArray, length: int) -> Borders:
    """The borders in the windows of `length` tokens from `starts` on.

    `document_starts` ascends, equal neighbours being documents without tokens.
    """
    first = document_starts.searchsorted(starts, side="right")
    counts = document_starts.searchsorted(starts + length, side="left") - first
    window = np.repeat(np.arange(len(starts)), counts)
    # counts [2 0 1], first [5 7 9]: entries 5 6 9
    entries = np.arange(len(window)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    columns = document_starts[entries] - starts[window]
    positions = window * length + columns
    steps = np.diff(positions)
    if len(positions) and (columns.min() < 1 or columns.max() >= length or (steps < 0).any()):
        raise _disorder(int(entries.min()), int(entries.max()))
    return Borders(len(starts), length, positions[np.append(True, steps > 0)[: len(positions)]])


def borders_after(ids: npt.NDArray[Any], eos: int) -> Borders:
    """The borders in windows (n, length) when the token `eos` closes its document."""
    num_windows, length = ids.shape
    positions = np.flatnonzero(ids == eos) + 1
    return Borders(num_windows, length, positions[positions % length != 0])


def mask_labels(labels: npt.NDArray[Any], borders: Borders) -> None:
    """Ignore labels that belong to another document than their input: (n, length - 1), in place."""
    windows, columns = np.divmod(borders.positions, borders.length)
    labels[windows, columns - 1] = IGNORE_INDEX


def number_documents(borders: Borders) -> OffsetArray:
    """`doc_ids` of the inputs, alone: (n, length - 1)."""
    windows, columns = _inner_borders(borders)
    # borders at columns 2 and 4: [0 0 1 0 1 0] -> [0 0 1 1 2 2]
    begun = np.zeros((borders.num_windows, borders.length - 1), np.int64)
    begun[windows, columns] = 1
    return np.cumsum(begun, axis=1, out=begun)


def cut_segments(borders: Borders) -> Segments:
    """Documents and positions of the inputs: of all tokens but the last of each window."""
    seq_len, num_windows = borders.length - 1, borders.num_windows
    total = num_windows * seq_len
    if total > _MAX_TOKENS:
        raise OptionError(
            f"{num_windows:,} windows of {seq_len:,} inputs are {total:,} tokens; cu_seqlens are "
            f"int32, so a batch holds at most {_MAX_TOKENS:,}: ask for fewer windows"
        )
    windows, columns = _inner_borders(borders)
    # pieces begin at every window and every border
    heads = np.sort(np.append(np.arange(num_windows) * seq_len, windows * seq_len + columns))
    edges = np.append(heads, total)
    lengths = np.diff(edges)
    # lengths [2 3]: steps [0 1 -1 1 1] -> positions [0 1 0 1 2]. A sum is quicker than np.repeat,
    # which copies token by token.
    steps = np.ones(total, np.int64)
    steps[heads[1:]] = 1 - lengths[:-1]
    steps[:1] = 0
    return Segments(
        doc_ids=number_documents(borders),
        position_ids=np.cumsum(steps, out=steps).reshape(num_windows, seq_len),
        cu_seqlens=edges.astype(np.int32),
        max_seqlen=int(lengths.max(initial=0)),
    )


class DocumentWindows:
    """Windows of a space whose documents are known."""

    def __init__(self, space: TokenSpace, document_starts: OffsetArray) -> None:
        self.space = space
        self.document_starts = checked_starts(document_starts, space.num_tokens)

    def gather(
        self,
        starts: npt.ArrayLike,
        *,
        seq_len: int,
        mask_borders: bool = True,
        true_positions: bool = False,
    ) -> DocumentBatch:
        """Windows of `seq_len + 1` tokens from `starts` on, as inputs and labels.

        `mask_borders=False` keeps the labels that belong to the next document.
        `true_positions=True` counts from the start of the document, also in a window that begins
        in the middle of one, instead of from 0 there.
        """
        length = whole_number(seq_len, "seq_len") + 1
        positions = as_positions(starts)
        input_ids, labels = next_token_pairs(self.space.gather(positions, length))
        borders = find_borders(self.document_starts, positions, length)
        if mask_borders:
            mask_labels(labels, borders)
        segments = cut_segments(borders)
        if true_positions:
            before = self.document_starts.searchsorted(positions, side="right") - 1
            missed = positions - self.document_starts[before]
            segments.position_ids[...] += np.where(segments.doc_ids == 0, missed[:, None], 0)
        return DocumentBatch(input_ids=input_ids, labels=labels, segments=segments)


def _inner_borders(borders: Borders) -> tuple[OffsetArray, OffsetArray]:
    """Window and column of the borders at inputs: the last token of a window is none."""
    windows, columns = np.divmod(borders.positions, borders.length)
    inside = columns < borders.length - 1
    return windows[inside], columns[inside]


def checked_starts(starts: OffsetArray, num_tokens: int) -> OffsetArray:
    """`starts`, if documents can start there in a space of `num_tokens`."""
    if not isinstance(starts, np.ndarray) or starts.ndim != 1 or starts.dtype != np.int64:
        found = f"{starts.dtype} {starts.shape}" if isinstance(starts, np.ndarray) else type(starts)
        raise OptionError(f"document_starts: found {found}, wanted a 1-d array of int64")
    if len(starts) == 0 and num_tokens:
        raise OptionError(f"document_starts is empty, but there are {num_tokens:,} tokens")
    if len(starts) and not (starts[0] == 0 and starts[-1] <= num_tokens):
        raise OptionError(
            f"documents start at {starts[0]:,}..{starts[-1]:,}; wanted within 0..{num_tokens:,}, "
            f"the first at 0"
        )
    if len(starts) <= _CHECK_ALL and (starts[1:] < starts[:-1]).any():
        raise _disorder(0, len(starts) - 1)
    return starts


def _disorder(first: int, last: int) -> DamagedStoreError:
    return DamagedStoreError(
        f"the document starts {first:,}..{last:,} are not in ascending order; check the store with "
        "`shardmill verify`, then copy or build it again"
    )
