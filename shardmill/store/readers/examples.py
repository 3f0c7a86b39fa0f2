"""Documents and conversations of a store by number.

`SplitView` is what `store["train"]` returns: a sequence for people and scripts. `ChatSpace` reads
many conversations in one gather. Both can be pickled; a copy refuses a store that was built again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from shardmill.records import ROLES, BoolArray, ChatExamples, IntArray, OffsetArray, Ragged
from shardmill.store.readers.files import running_edges
from shardmill.store.readers.token_space import ReaderName, held_by, item_numbers, open_tokens
from shardmill.store.store import Store, document_spans


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
