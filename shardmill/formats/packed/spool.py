"""Tokenised sequences on their way into bins: spools, chat stores as spools, and blocks of bins.

A spool is a folder of four files, written once and read in any order; its mask is per token: 1
where this very token is a training target. `plan_blocks` makes the rows of a plan, many at a time,
with masks aligned to labels: with "label", `mask[j]` says whether `ids[j + 1]` is trained, and the
last position of a sequence is 0, so a bin trains exactly the labels of its sequences.
`materialize_bin_arrays` makes one bin, by the specified signature; only it cuts sequences, and it
says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, ManifestError, OptionError, StoreError
from shardmill.formats.packed.files import (
    MANIFEST,
    FileEntry,
    FolderWriter,
    file_entries,
    is_sealed,
    map_whole,
    read_manifest_as,
    write_manifest,
    wrong_hashes,
)
from shardmill.formats.packed.records import (
    Alignment,
    LossMask,
    PackedBlock,
    check_ids,
    checked_alignment,
    given_array,
    given_path,
    path_to_read,
    token_dtype,
)
from shardmill.packing import BinAssignment, PackPlan
from shardmill.protocols import Closing
from shardmill.records import JSON, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import HashedFile
from shardmill.store import open_store, refuse_excluded
from shardmill.store.branches import refuse_preferences
from shardmill.store.readers import ChatSpace
from shardmill.store.readers.documents import spread
from shardmill.store.readers.files import take
from shardmill.store.readers.packed_rows import fill_rows

logger = logging.getLogger(__name__)

SPOOL = "sequence_spool_v1"
_FILES = ("tokens.bin", "masks.bin", "offsets.bin")
_BLOCK = 2**20  # tokens of rows that are made together: 8 bytes each for indices, three times


class SpoolManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """manifest.json of a spool."""

    format: Literal["sequence_spool_v1"]
    dtype: str  # of tokens.bin, little endian; masks.bin is one byte a token, offsets.bin int64
    num_sequences: int
    num_tokens: int
    trained_tokens: int
    files: dict[str, FileEntry]
    manifest_sha256: str


class SequenceSpoolWriter(FolderWriter):
    """Append sequences, then `finalize`. Leaving a `with` block without error finalizes."""

    kind = "spool"

    def __init__(self, folder: str | Path, *, dtype: npt.DTypeLike = np.int32) -> None:
        """`dtype`: uint16, int32, uint32 or int64, as the vocabulary needs."""
        self.dtype = token_dtype(dtype)
        instead = "write the spool to a local folder; shardmill.remote.push copies it"
        self._num_sequences = self._num_tokens = self._num_trained = 0
        super().__init__(given_path(folder, "folder", instead=instead))
        self._files = [HashedFile(self._temporary / name) for name in _FILES]
        self._files[2].write(np.zeros(1, "<i8").data)

    def append(self, ids: npt.ArrayLike, mask: npt.ArrayLike) -> None:
        """One sequence, and which of its tokens are targets."""
        values = given_array(ids, "ids", str(self.target))
        if values.ndim != 1:
            raise OptionError(f"{self.target}: ids of shape {values.shape}, wanted one dimension")
        if not len(values):
            values = values.astype(self.dtype)  # an empty list is an array of floats
        self.extend(Ragged(values, np.array([0, len(values)])), mask)

    def extend(self, ids: Ragged, mask: npt.ArrayLike) -> None:
        """Many sequences; `mask` is flat, as long as `ids.values`."""
        self._check_open()
        flat = given_array(mask, "mask", str(self.target))
        self._check(ids, flat)
        tokens, masks, offsets = self._files
        tokens.write(np.ascontiguousarray(ids.values, self.dtype).data.cast("B"))
        masks.write(np.ascontiguousarray(flat, np.uint8).data)
        ends = ids.offsets[1:] - ids.offsets[0] + self._num_tokens
        offsets.write(np.ascontiguousarray(ends, "<i8").data.cast("B"))
        self._num_sequences += len(ids)
        self._num_tokens += len(ids.values)
        self._num_trained += int(np.count_nonzero(flat))

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        try:
            if kind is None and self._is_open:
                self.finalize()
        finally:
            self.abort()

    def _close(self) -> None:
        for file in self._files:
            file.abort()

    def _complete(self) -> dict[str, JSON]:
        hashes = {file.path: file.finish() for file in self._files}
        return write_manifest(
            self._temporary,
            {
                "format": SPOOL,
                "dtype": self.dtype.str,
                "num_sequences": self._num_sequences,
                "num_tokens": self._num_tokens,
                "trained_tokens": self._num_trained,
                "files": file_entries(hashes),
            },
        )

    def _check(self, ids: Ragged, mask: npt.NDArray[Any]) -> None:
        values, offsets = ids.values, ids.offsets
        where = f"{self.target}, from sequence {self._num_sequences:,} on"
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise OptionError(f"{where}: ids are {values.ndim}-d {values.dtype}, wanted 1-d ints")
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise OptionError(f"{where}: offsets must rise from 0 to {len(values):,}")
        if mask.shape != values.shape:
            raise OptionError(f"{where}: a mask of shape {mask.shape} for {len(values):,} ids")
        if not len(values):
            return
        if mask.dtype.kind not in "biu" or mask.min() < 0 or mask.max() > 1:
            raise OptionError(f"{where}: a mask with other values than 0 and 1")
        check_ids(values, self.dtype, where)


class SequenceSpoolReader(Closing):
    """A finished spool: a read-only sequence of (ids, mask). `verify` checks its hashes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = path_to_read(folder, "spool").absolute()
        self.manifest, fields, _ = read_manifest_as(self.folder, SpoolManifest, "spool")
        if not is_sealed(fields):
            raise ManifestError(
                f"{self.folder / MANIFEST}: was changed or damaged; write the spool again"
            )
        dtypes = (token_dtype(self.manifest.dtype).str, "|u1", "<i8")
        counts = (self.manifest.num_tokens, self.manifest.num_tokens, len(self) + 1)
        self._maps: list[npt.NDArray[Any]] | None = [
            map_whole(self.folder / name, dtype, (count,), again="write the spool again")
            for name, dtype, count in zip(_FILES, dtypes, counts, strict=True)
        ]

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def lengths(self) -> OffsetArray:
        """Tokens of every sequence: 8 bytes each."""
        lengths = np.diff(self._opened()[2])
        if len(lengths) and lengths.min() < 0:
            raise self._damaged("offsets.bin falls")
        return lengths

    def read_sequence(self, index: int) -> tuple[IntArray, LossMask]:
        """Ids and mask of one sequence, as views of the files."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index:,} of {len(self):,}")
        tokens, masks, offsets = self._opened()
        start, stop = map(int, offsets[index : index + 2])
        if not 0 <= start <= stop <= len(tokens):
            raise self._damaged(f"sequence {index:,} is at {start:,}..{stop:,}")
        return tokens[start:stop], masks[start:stop]

    def read_pieces(
        self, sequences: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, LossMask]:
        """`start..stop` of each of these sequences, one after another, in one gather."""
        tokens, masks, offsets = self._opened()
        first: OffsetArray = offsets[sequences]
        begin, end = first + start.astype(np.int64), first + stop.astype(np.int64)
        if len(begin) and (begin.min() < 0 or (end > offsets[sequences + 1]).any()):
            raise self._damaged("a piece is outside its sequence")
        places, _ = spread(begin, end)
        return tokens[places], masks[places]

    def verify(self) -> list[str]:
        """Every file whose sha256 is not the one in the manifest."""
        return wrong_hashes(self.folder, self.manifest.files)

    def close(self) -> None:
        """Release the maps; nothing can be read afterwards. May be called again."""
        self._maps = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceSpoolReader, (self.folder,)

    def __repr__(self) -> str:
        return f"SequenceSpoolReader({self.folder.name!r}, sequences={len(self):,})"

    def _opened(self) -> list[npt.NDArray[Any]]:
        """Tokens, masks and offsets."""
        if self._maps is None:
            raise StoreError(f"{self.folder}: this reader was closed; open the spool again")
        return self._maps

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"{self.folder}: {what}; write the spool again")


class ChatStoreSpool(Closing):
    """Every conversation of a split of a chat store, as (ids, mask per token), without a copy."""

    def __init__(self, folder: str | Path, split: str) -> None:
        store = open_store(path_to_read(folder, "store"))
        if not store.is_chat:
            raise OptionError(
                f"{folder}: a store of documents, which have no loss mask; wanted a chat store"
            )
        refuse_preferences(store, "a packed shard would part them")
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
        """`start..stop` of each of these conversations, one after another."""
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


class SequenceReader(Protocol):
    """Sequences by number; masks are per token."""

    def read_sequence(self, index: int, /) -> tuple[IntArray, LossMask]: ...


class Spool(SequenceReader, Protocol):
    """What a plan is made from and read through: a spool, or a chat store."""

    def __len__(self) -> int: ...

    def lengths(self) -> OffsetArray: ...

    def read_pieces(
        self, sequences: IntArray, start: IntArray, stop: IntArray, /
    ) -> tuple[IntArray, LossMask]: ...


def materialize_bin_arrays(
    spool_reader: SequenceReader,
    assignment: BinAssignment,
    bin_id: int,
    pack_size: SupportsIndex,
    scratch_input_ids: IntArray,
    scratch_loss_mask: LossMask,
    *,
    loss_mask_alignment: str = "label",
) -> tuple[int, npt.NDArray[np.uint32]]:
    """Fill the scratch arrays, (pack_size,) each, with bin `bin_id`; the rest becomes zero.

    Returns the number of tokens, and where sequences start: from 0, rising. A sequence without
    tokens has no start. Tokens over `pack_size` are cut off, with a warning: the end of the
    sequence that does not fit, and all sequences after it.
    """
    size, alignment = whole_number(pack_size, "pack_size"), checked_alignment(loss_mask_alignment)
    for name, scratch in (("input_ids", scratch_input_ids), ("loss_mask", scratch_loss_mask)):
        if scratch.shape != (size,):
            raise OptionError(f"scratch_{name} of shape {scratch.shape}, wanted ({size},)")
    scratch_input_ids[:] = 0
    scratch_loss_mask[:] = 0
    starts: list[int] = []
    stop = num_cut = 0
    for sequence in map(int, assignment.bin_indices(bin_id)):
        ids, mask = spool_reader.read_sequence(sequence)
        num_cut += max(len(ids) - (size - stop), 0)
        ids, mask = ids[: size - stop], mask[: size - stop]
        if not len(ids):
            continue
        start, stop = stop, stop + len(ids)
        starts.append(start)
        _check_fit(ids, scratch_input_ids.dtype, f"sequence {sequence:,}")
        scratch_input_ids[start:stop] = ids
        if alignment == "label":
            scratch_loss_mask[start : stop - 1] = mask[1:]
        else:
            scratch_loss_mask[start:stop] = mask
    if alignment == "roll_right":
        scratch_loss_mask[1:stop] = scratch_loss_mask[: max(stop - 1, 0)].copy()
        scratch_loss_mask[:1] = 0
    if num_cut:
        logger.warning(
            "bin %s: %s tokens were cut off, since its sequences are longer than pack_size=%s",
            *(f"{bin_id:,}", f"{num_cut:,}", f"{size:,}"),
        )
    return stop, np.array(starts, dtype=np.uint32)


def plan_blocks(
    spool: Spool, plan: PackPlan, dtype: npt.DTypeLike, loss_mask_alignment: Alignment
) -> Iterator[PackedBlock]:
    """All rows of a plan, some thousand at a time: one gather, one scatter each.

    A piece that was aligned owns the positions up to the next one; they hold id 0 and are not
    trained. Blocks are as wide as the capacity, or as the fullest row if the capacity is larger
    than any block: memory is that of the tokens, not of what a row could hold.
    """
    width, align_to = plan.metrics.capacity, plan.align_to
    positions = plan.positions()
    if width > _BLOCK:
        ends = positions + plan.pieces.lengths[plan.rows.indices]
        width = min(width, -(-int(ends.max(initial=1)) // align_to) * align_to)
    step = max(_BLOCK // width, 1)
    for first in range(0, len(plan), step):
        offsets = plan.rows.offsets[first : first + step + 1]
        items = slice(int(offsets[0]), int(offsets[-1]))
        pieces = plan.rows.indices[items]
        starts = Ragged(positions[items], offsets - offsets[0])
        lengths = (plan.pieces.stop[pieces] - plan.pieces.start[pieces]).astype(np.int64)
        last = starts.offsets[1:] - 1
        used = -(-(starts.values[last] + lengths[last]) // align_to) * align_to
        ids, mask = spool.read_pieces(
            plan.pieces.example[pieces], plan.pieces.start[pieces], plan.pieces.stop[pieces]
        )
        if len(ids) != lengths.sum():
            raise OptionError(
                f"{spool!r}: gave {len(ids):,} tokens for pieces of {lengths.sum():,}"
            )
        _check_fit(ids, np.dtype(dtype), repr(spool))
        ends = np.cumsum(lengths)
        if loss_mask_alignment == "label":
            trained = np.zeros_like(mask)
            trained[:-1] = mask[1:]
            trained[ends - 1] = 0
            mask = trained
        rows = np.zeros((len(starts), width), dtype)
        masks = np.zeros((len(starts), width), np.uint8)
        fill_rows(
            starts,
            lengths,
            (partial(take, ids.astype(dtype, copy=False)), ends - lengths, rows),
            (partial(take, mask), ends - lengths, masks),
        )
        if loss_mask_alignment == "roll_right":
            _roll_right(masks, used)
        starts = Ragged(starts.values.astype(np.uint32), starts.offsets)
        yield PackedBlock(input_ids=rows, loss_mask=masks, lengths=used, seq_starts=starts)


def _roll_right(masks: LossMask, used: OffsetArray) -> None:
    """Shift every row right by one within its used positions; the first becomes 0."""
    masks[:, 1:] = masks[:, :-1].copy()
    masks[:, 0] = 0
    full = np.flatnonzero(used < masks.shape[1])
    masks[full, used[full]] = 0


def _check_fit(ids: IntArray, dtype: np.dtype[Any], where: str) -> None:
    if not np.can_cast(ids.dtype, dtype):
        check_ids(ids, dtype, where)
