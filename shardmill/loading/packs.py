"""One named origin of packed rows: a pack plan over a chat store.

In: a store and one of its plans; then row numbers.  Out: inputs and labels in int64 rows.
Promise: row `i` is row `i` of the plan: inputs are all its tokens but the last, labels all but the
first, IGNORE_INDEX where they are not trained, at the first token of a piece and in padding; every
row trains at least one token, and all rows train each label of the plan once an epoch. Nothing is
packed or copied here. It pickles by path, forks and spawns; threads may share it. `excluded` says
which rows a stream must not give, as it was when the source was opened.
Not here: making plans (build, `shardmill pack`), which rows and when (stream), what is given in
place of excluded rows (exclusion); `fill` and `batch` give any row.

With `documents=True` a document is a piece. Padding behind the last piece of a row is one more, so
that nothing attends to it but itself. What `align_to` put between two pieces belongs to the one
before it: there it comes behind all its tokens, which causal attention does not see.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.loading.chats import checked_pad_id
from shardmill.loading.exclusion import ExcludedItems, excluded_rows
from shardmill.loading.rows import Place, check_fill, checked_name, row_blocks
from shardmill.mapped import PackedRows, PackSpace
from shardmill.mapped.documents import Borders
from shardmill.mapped.space import ReaderName, as_positions
from shardmill.records import IGNORE_INDEX, BoolArray, OffsetArray
from shardmill.shards import find_plan, open_store, read_exclusions, read_plan


class PackBatch(TypedDict):
    """Inputs and labels of n rows of a plan."""

    input_ids: OffsetArray  # (n, seq_len)
    labels: OffsetArray  # (n, seq_len) the next token, or IGNORE_INDEX where it is not trained
    loss_mask: BoolArray  # (n, seq_len) where labels count
    rows: OffsetArray  # (n,) the number of each row in the plan


class PackSource:
    """Every row of a plan: a read-only sequence without a state.

    `plan`: its name ("train-8192", as `shardmill pack --list` prints it), its path, or its
    `seq_len` when the store has one plan of that length. `name` is part of the order, as in
    `TokenSource`; without one it is the name of the folder. `pad_id` None: the end of a turn, as
    the store's template has it. `reader`: as in `TokenSource`.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: str | Path | int,
        *,
        name: str | None = None,
        pad_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        store = open_store(folder)
        found = read_plan(find_plan(store.folder, plan))
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        if self.pad_id > np.iinfo(store.dtype).max:
            raise OptionError(f"pad_id={self.pad_id:,}: tokens of {store.folder} are {store.dtype}")
        self._space = PackSpace(store, found, pad_id=self.pad_id, reader=reader)
        self.reader = self._space.reader
        self.path = store.folder
        self.split: str | None = found.facts.split  # never None: a plan is of a store
        self.plan = found.path
        self.seq_len = found.facts.options.seq_len
        self.name = checked_name(self.path.name if name is None else name)
        self.fingerprint = found.fingerprint
        self.num_tokens = found.facts.metrics.num_tokens
        self.window_bytes = found.facts.row_len * self._space.dtype.itemsize
        self.excluded: ExcludedItems | None = excluded_rows(
            read_exclusions(store).spans(found.facts.split), self._space, name=self.name
        )

    def __len__(self) -> int:
        return len(self._space)

    def rows(self, indices: npt.ArrayLike) -> PackedRows:
        """Rows of these numbers as they are packed, not shifted."""
        return self._space.rows(indices)

    def batch(self, indices: npt.ArrayLike) -> PackBatch:
        """Inputs and labels of these rows."""
        rows = as_positions(indices)
        input_ids, labels = np.empty((2, len(rows), self.seq_len), np.int64)
        self.fill(rows, input_ids, labels)
        return PackBatch(
            input_ids=input_ids, labels=labels, loss_mask=labels != IGNORE_INDEX, rows=rows
        )

    def fill(
        self,
        items: npt.ArrayLike,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """Row `items[i]` becomes row `i`, or row `rows[i]`, of both: (n, seq_len), int64."""
        numbers = check_fill(self, items, input_ids, labels, unit="row")
        self.fill_unchecked(numbers, input_ids, labels, rows)

    def fill_unchecked(
        self,
        items: OffsetArray,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """`fill` for items that an order gave, into fitting rows."""
        for part in row_blocks(len(items), self.window_bytes):
            found = self._space.rows(items[part])
            where = part if rows is None else rows[part]
            input_ids[where] = found.ids[:, :-1]
            own = found.ids[:, 1:].astype(np.int64)
            np.copyto(own, IGNORE_INDEX, where=~found.trained[:, 1:])
            labels[where] = own

    def borders(self, items: OffsetArray) -> Borders:
        """Where pieces begin in these rows, and where the padding behind the last one does."""
        pieces, length = self._space.pieces(items), self.seq_len + 1
        row = np.repeat(np.arange(len(items)), np.diff(pieces.offsets))
        inner = np.flatnonzero(pieces.places)
        padded = np.flatnonzero(pieces.used < length)
        places = np.concatenate(
            (row[inner] * length + pieces.places[inner], padded * length + pieces.used[padded])
        )
        places.sort()
        return Borders(len(items), length, places)

    def place(self, item: int) -> Place:
        """From the first token of its first piece to the last of its last; documents are pieces."""
        pieces = self._space.pieces([item])
        starts, stops = pieces.starts, pieces.starts + pieces.lengths
        told = zip(pieces.examples.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return Place(int(starts[0]), int(stops[-1]), tuple(told))

    def prefetch(self, items: npt.ArrayLike) -> None:
        """Ask the kernel to read these rows ahead: a system call a piece; returns at once."""
        self._space.prefetch(items)

    def close(self) -> None:
        """Let go of the token files; may be called again."""
        self._space.close()

    def __repr__(self) -> str:
        return (
            f"PackSource({str(self.path)!r}, {self.plan.stem!r}, name={self.name!r}, "
            f"seq_len={self.seq_len:,}, rows={len(self):,}, reader={self.reader!r})"
        )
