"""Packed rows: how they are filled, and the rows of a pack plan, many at a time.

`fill_rows` is the one place where packed rows are filled, for stores, streams and other formats.

Pieces are copied in chunks: 150 tokens are three chunks of 64, from 0, from 64 and from 86 on. One
copy moves 64 tokens and needs two positions, where token by token it would be 64 copies and 128
positions. Chunks that overlap carry the same values, so their order does not matter. A piece of
less than 64 is copied token by token.

Row `i` holds exactly the pieces that the plan puts there, and padding; a label is trained if its
example trains it. Work grows with the rows asked for; memory beside them is 8 bytes per row of the
plan. A plan of another store is refused, and a pickled copy refuses a plan or a store that was
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.records import BoolArray, IntArray, OffsetArray, Ragged
from shardmill.store import Store, StoredPlan, open_store, read_plan
from shardmill.store.branches import refuse_preferences
from shardmill.store.plans import NAMES, PlanArrays, check_plan
from shardmill.store.readers.documents import spread
from shardmill.store.readers.files import running_edges, take, view_windows
from shardmill.store.readers.token_space import ReaderName, held_by, item_numbers, open_tokens
from shardmill.store.store import document_spans

_CHUNK = 64  # tokens copied at a time
_PREFETCH = 2048  # tokens of a piece that are prefetched at a time

ReadChunks: TypeAlias = Callable[[OffsetArray, int], npt.NDArray[Any]]
"""`read(starts, size)` gives (n, size): the values from each start on, as `take` does."""


def fill_rows(
    columns: Ragged,
    lengths: OffsetArray,
    *copies: tuple[ReadChunks, OffsetArray, npt.NDArray[Any]],
) -> OffsetArray:
    """Copy pieces of examples into packed rows.

    `columns` holds for each row the columns at which its pieces begin; piece `i`, counted over all
    rows, has `lengths[i]` tokens. Each copy is (how to read, where the pieces begin there, the rows
    to fill); rows are contiguous and of the dtype that is read. What no piece covers stays as it
    is. Returns where pieces begin in the rows end to end.
    """
    targets = columns.values.astype(np.int64, copy=False)
    row = np.repeat(np.arange(len(columns)), columns.lengths)
    chunks = list(_chunks(lengths))
    for read, starts, rows in copies:
        targets = row * rows.shape[1] + columns.values
        out = rows.reshape(-1)
        for size, piece, offset in chunks:
            found = read(starts[piece] + offset, size)
            if size == 1:
                out[targets[piece] + offset] = found[:, 0]
            else:
                windows = view_windows(out, size)
                opaque = np.ascontiguousarray(found).view(windows.dtype)[:, 0]
                windows[targets[piece] + offset] = opaque
    return targets


def _chunks(lengths: OffsetArray) -> Iterator[tuple[int, OffsetArray, OffsetArray]]:
    """All pieces as chunks of at most two sizes: (size, of which piece, where in it)."""
    long = lengths >= _CHUNK
    for size, chosen in ((_CHUNK, np.flatnonzero(long)), (1, np.flatnonzero(~long))):
        if len(chosen):
            own = lengths[chosen]
            counts = -(-own // size)
            ends = np.cumsum(counts)
            offset = np.arange(ends[-1])
            offset -= np.repeat(ends - counts, counts)
            offset *= size
            np.minimum(offset, np.repeat(own - size, counts), out=offset)
            yield size, np.repeat(chosen, counts), offset


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPieces:
    """What some rows consist of, row after row."""

    offsets: OffsetArray  # (n + 1,) row `i` has the pieces offsets[i]..offsets[i + 1]
    examples: OffsetArray  # (k,) the example of each piece
    starts: OffsetArray  # (k,) its first token, in the token space of the split
    lengths: OffsetArray  # (k,) its tokens
    columns: OffsetArray  # (k,) the column of its row at which it begins
    used: OffsetArray  # (n,) columns of each row before the padding at its end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Some rows, not shifted."""

    ids: IntArray  # (n, row_len) of the store's dtype; `pad_id` where no piece is
    trained: BoolArray  # (n, row_len) True where this very token is a label that counts:
    # never the first token of a piece, which nothing in its row predicts, and never padding
    starts: Ragged  # where pieces begin in each row: from 0, rising
    used: OffsetArray  # (n,) columns of each row before the padding at its end
    # With align_to a piece owns the columns up to the next multiple, the last piece too.


class PackSpace:
    """The rows of a plan, many in one gather. Threads may share it."""

    def __init__(
        self, store: Store, plan: StoredPlan, *, pad_id: int = 0, reader: ReaderName = "auto"
    ) -> None:
        """`pad_id` must be an id of the store's dtype. `reader`: as in `TokenSpace`."""
        refuse_preferences(store, "a pack plan would part them")
        check_plan(plan, store)
        self.store, self.plan, self.split = store, plan, plan.facts.split
        self.row_len, self.pad_id = plan.facts.row_len, pad_id
        self._offsets = running_edges(plan.arrays.counts)
        self._tokens = open_tokens(store, self.split, reader=reader)
        self._reader, self.reader = reader, self._tokens.reader  # as asked for, as chosen
        self._mask_bits = held_by(self.reader, store.chat_arrays(self.split).mask_bits)
        self._documents = held_by(self.reader, store.document_starts(self.split))
        self._arrays = PlanArrays(
            **{name: held_by(self.reader, getattr(plan.arrays, name)) for name in NAMES}
        )
        self.dtype = self._tokens.dtype

    def __len__(self) -> int:
        return len(self.plan.arrays.counts)

    def rows(self, indices: npt.ArrayLike) -> PackedRows:
        """The rows with these numbers, in this order, repeats allowed."""
        pieces = self.pieces(indices)
        num_rows = len(pieces.used)
        ids = np.full((num_rows, self.row_len), self.pad_id, self.dtype)
        trained = np.zeros((num_rows, self.row_len), np.bool_)
        bits, first_bits = self._mask_of(pieces)
        starts = Ragged(pieces.columns, pieces.offsets)
        targets = fill_rows(
            starts,
            pieces.lengths,
            (self._tokens.gather_unchecked, pieces.starts, ids),
            (partial(take, bits), first_bits, trained),
        )
        trained.reshape(-1)[targets] = False  # nothing in its row predicts the first token
        return PackedRows(ids=ids, trained=trained, starts=starts, used=pieces.used)

    def pieces(self, indices: npt.ArrayLike) -> RowPieces:
        """What these rows consist of. Reads the plan and the index, no token."""
        rows = item_numbers(indices, len(self), "row")
        numbers, offsets = spread(self._offsets[rows], self._offsets[rows + 1])
        examples = self._arrays.examples[numbers].astype(np.int64)
        starts, lengths = self._spans(numbers, examples)
        step = self.plan.facts.options.align_to
        sizes = lengths if step == 1 else -(-lengths // step) * step
        ends = np.cumsum(sizes)
        before = ends - sizes
        columns = before - np.repeat(before[offsets[:-1]], np.diff(offsets))
        last = offsets[1:] - 1
        used = columns[last] + sizes[last]
        capacity = self.plan.facts.options.capacity
        if len(used) and used.max() > capacity:
            row = int(rows[used.argmax()])
            raise self._damaged(f"row {row:,} has {used.max():,} tokens, but holds {capacity:,}")
        return RowPieces(
            offsets=offsets,
            examples=examples,
            starts=starts,
            lengths=lengths,
            columns=columns,
            used=used,
        )

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read the tokens of these rows ahead; returns at once."""
        pieces = self.pieces(indices)
        counts = -(-pieces.lengths // _PREFETCH)
        first = np.cumsum(counts) - counts
        step = (np.arange(counts.sum()) - np.repeat(first, counts)) * _PREFETCH
        length = max(1, min(_PREFETCH, self._tokens.num_tokens))
        starts = np.repeat(pieces.starts, counts) + step
        self._tokens.prefetch(np.minimum(starts, self._tokens.num_tokens - length), length)

    def close(self) -> None:
        """Release the token files; may be called again."""
        self._tokens.close()

    def __repr__(self) -> str:
        return (
            f"PackSpace({str(self.plan.path)!r}, rows={len(self):,}, row_len={self.row_len:,}, "
            f"{self.reader})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        path, wanted = self.plan.path, self.plan.fingerprint
        return _reopen, (self.store, path, wanted, self.pad_id, self._reader)

    def _spans(
        self, numbers: OffsetArray, examples: OffsetArray
    ) -> tuple[OffsetArray, OffsetArray]:
        """Where these pieces begin in the token space, and how long they are."""
        arrays, num_tokens = self._arrays, self._tokens.num_tokens
        starts, stops = document_spans(self._documents, examples, num_tokens)
        sound = (starts >= 0) & (starts <= stops) & (stops <= num_tokens)
        cuts = arrays.cut_pieces
        if len(cuts):
            # in the dtype of the cuts, or all of them would be cast at every call
            cut = cuts.searchsorted(np.minimum(numbers, int(cuts[-1])).astype(cuts.dtype))
            chosen = np.flatnonzero(cuts[cut] == numbers)
            begins = starts[chosen]
            starts[chosen] = begins + arrays.cut_starts[cut[chosen]].astype(np.int64)
            wanted = begins + arrays.cut_stops[cut[chosen]].astype(np.int64)
            sound[chosen] &= (wanted <= stops[chosen]) & (starts[chosen] >= begins)
            stops[chosen] = wanted
        lengths = stops - starts
        sound &= lengths > 0
        if not sound.all():
            example = int(examples[np.flatnonzero(~sound)[0]])
            raise self._damaged(f"a piece of example {example:,} has impossible positions")
        return starts, lengths

    def _mask_of(self, pieces: RowPieces) -> tuple[BoolArray, OffsetArray]:
        """The whole bytes that hold mask bits of pieces, unpacked, and where each piece begins."""
        first_byte = pieces.starts >> 3
        positions, offsets = spread(first_byte, (pieces.starts + pieces.lengths + 7) >> 3)
        bits = np.unpackbits(self._mask_bits[positions], bitorder="little").view(np.bool_)
        return bits, 8 * offsets[:-1] + (pieces.starts & 7)

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.plan.path}: {what}; check the store with `shardmill verify`, then pack it again"
        )


def _reopen(
    store: Store, path: Path, fingerprint: str, pad_id: int, reader: ReaderName
) -> PackSpace:
    plan = read_plan(path)
    if plan.fingerprint != fingerprint:
        raise DamagedStoreError(
            f"{path}: another plan than when this one was pickled (sha256 {plan.fingerprint[:12]}, "
            f"wanted {fingerprint[:12]}); it was packed again meanwhile: open it again"
        )
    return PackSpace(store, plan, pad_id=pad_id, reader=reader)


def open_pack(path: str | Path, *, pad_id: int = 0, reader: ReaderName = "auto") -> PackSpace:
    """The rows of the plan at `path`, a file in the folder `packs` of its store."""
    plan = read_plan(Path(path))
    return PackSpace(open_store(plan.path.parent.parent), plan, pad_id=pad_id, reader=reader)
