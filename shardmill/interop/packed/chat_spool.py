"""A split of a chat store, read as a spool.

In: the folder of a chat store and a split.  Out: the same reader as a spool's.
Promise: nothing is copied to disk; ids and masks are those of the store.
Not here: packing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.closing import Closing
from shardmill.errors import OptionError
from shardmill.interop.packed.given import path_to_read
from shardmill.interop.packed.records import LossMask
from shardmill.interop.packed.spans import spread
from shardmill.mapped import ChatSpace
from shardmill.records import IntArray, OffsetArray
from shardmill.shards import open_store, refuse_excluded


class ChatStoreSpool(Closing):
    """Every conversation of `split`, as (ids, mask per token)."""

    def __init__(self, folder: str | Path, split: str) -> None:
        store = open_store(path_to_read(folder, "store"))
        if not store.is_chat:
            raise OptionError(
                f"{folder}: a store of documents, which have no loss mask; wanted a chat store"
            )
        self._space = ChatSpace(store, split)
        refuse_excluded(store, split, "a packed shard")

    def __len__(self) -> int:
        return len(self._space)

    def lengths(self) -> OffsetArray:
        """Tokens of every conversation: 8 bytes each."""
        return self._space.lengths()

    def read_sequence(self, index: int) -> tuple[IntArray, LossMask]:
        """Ids and mask of one conversation."""
        found = self._space.examples([index])
        return found.ids.values, found.mask.view(np.uint8)

    def read_pieces(
        self, sequences: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, LossMask]:
        """`start..stop` of each of these conversations, behind one another."""
        found = self._space.examples(sequences)
        ids, mask = found.ids.values, found.mask.view(np.uint8)
        if len(ids) == int((stop - start).sum()):
            return ids, mask
        places, _ = spread(found.ids.offsets[:-1] + start, found.ids.offsets[:-1] + stop)
        return ids[places], mask[places]

    def close(self) -> None:
        self._space.close()

    def __repr__(self) -> str:
        return f"ChatStoreSpool({self._space!r})"
