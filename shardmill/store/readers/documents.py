"""Which document every token of a window belongs to, exactly and without a loop.

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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import IGNORE_INDEX, OffsetArray, next_token_pairs
from shardmill.store.readers.token_space import TokenSpace, as_positions

_MAX_TOKENS = 2**31 - 1  # cu_seqlens are int32 in every kernel that takes them
_CHECK_ALL = 2**22  # document starts: some 10 ms


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
