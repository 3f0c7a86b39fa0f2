"""memmap_padded_v1: five plain `.npy` arrays and a manifest, written and read in any order.

Opening reads the manifest and five headers, whatever the size of the shard; each array must have
exactly the dtype, shape and bytes that the manifest says. Every bin is checked as it is read.
`verify_memmap_shard` checks every byte in a few MiB of memory.

Nothing is written through a map, so a full disk is an error and never a signal. A writer's memory
is 16 bytes per bin and the bin at hand; starts wait on disk until their order is known.
"""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    ShardmillError,
    StoreError,
    StoreNotFoundError,
)
from shardmill.formats.packed.files import (
    MANIFEST,
    SEAL,
    FileEntry,
    FolderWriter,
    RowFile,
    file_entries,
    file_sha256,
    is_sealed,
    map_whole,
    read_manifest_as,
    reading,
    write_array,
    write_manifest,
    writing,
    wrong_hashes,
)
from shardmill.formats.packed.records import (
    MAX_PACK_SIZE,
    Alignment,
    Check,
    PackedBin,
    PackedBlock,
    PackedShard,
    check_bin,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
    path_to_read,
    token_dtype,
)
from shardmill.records import JSON, OffsetArray, Ragged
from shardmill.store.readers.documents import spread
from shardmill.store.readers.foreign import parse_npy

logger = logging.getLogger(__name__)

MapArray = Callable[[], npt.NDArray[Any]]
"""Maps an array, read-only, without reading it."""

ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
INDEX: Final = "<u4"
MASK = "|u1"
_MAX_HEADER = 10_000
_AGAIN = "copy the shard again or write it again"
_BLOCK = 2**20  # tokens that `verify_memmap_shard` reads at a time
_MAPPED = 2**23  # tokens that are read through one map: some 40 MB of ids and masks
_CHUNK = 2**16  # bins whose starts are moved at a time
_WAITING = "starts.waiting"
_INSTEAD = "shardmill.compat.nemotron.write_memmap_to_cloud writes a shard to a file system"


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. An old shard has none of the optional keys; any other has all of them."""

    version: Literal["1.0"]
    format: Literal["memmap_padded_v1"]
    num_bins: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    pack_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PACK_SIZE)]
    dtype: Literal["<u2", "<i4", "<u4", "<i8"]
    loss_mask_dtype: Literal["<u1", "|u1", "u1"]
    index_dtype: Literal["<u4"]
    bins_written: int
    seq_offsets_dtype: Literal["<u4", "<u8"] = INDEX
    loss_mask_alignment: Alignment | None = None
    num_sequences: int | None = None
    num_tokens: int | None = None
    trained_labels: int | None = None
    files: dict[str, FileEntry] | None = None
    manifest_sha256: str | None = None
    pack_size_rule: str | None = None  # "longest_bin": nothing stated the pack size

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape; the length of `seq_starts` of an old shard is -1: unknown."""
        num_starts = -1 if self.num_sequences is None else self.num_sequences
        rows = (self.num_bins, self.pack_size)
        return {
            "input_ids": (self.dtype, rows),
            "loss_mask": (MASK, rows),
            "packed_len": (INDEX, (self.num_bins,)),
            "seq_offsets": (self.seq_offsets_dtype, (self.num_bins + 1,)),
            "seq_starts": (INDEX, (num_starts,)),
        }


_KEYS = frozenset(ShardManifest.__struct_fields__) - {"pack_size_rule"}
_OLD_KEYS = frozenset(ShardManifest.__struct_fields__[:8])  # all that an old shard has


class MemmapShard(PackedShard):
    """A shard whose files are mapped when the first bin is read."""

    def _open(self) -> tuple[int, str | None]:
        self.manifest, self.fingerprint = _read_manifest(self.path)
        self._files = {name: _check_array(self.path, self.manifest, name) for name in ARRAYS}
        self._maps: dict[str, npt.NDArray[Any]] = {}
        return self.manifest.pack_size, self.manifest.loss_mask_alignment

    def _usual_alignment(self) -> Alignment:
        logger.warning(
            "%s: an old shard, without hashes, whose manifest does not say how its loss masks are "
            "aligned: taken as 'roll_right', which is what the code that writes such manifests "
            "does; else pass loss_mask_alignment='label'",
            self.path,
        )
        return "roll_right"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.manifest.dtype)

    def __len__(self) -> int:
        return self.manifest.num_bins

    def _read(self, number: int) -> PackedBin:
        """Ids and mask are views of the files."""
        if not self._maps:
            self._maps = {name: map_array() for name, map_array in self._files.items()}
        maps, where = self._maps, f"{self.path}, bin {number:,}"
        length = int(maps["packed_len"][number])
        if length > self.pack_size:  # a slice would hide it
            raise DamagedStoreError(
                f"{where}: {length:,} tokens, wanted at most pack_size={self.pack_size:,}; {_AGAIN}"
            )
        starts = maps["seq_starts"]
        first, last = map(int, maps["seq_offsets"][number : number + 2])
        if not first < last <= len(starts):
            raise DamagedStoreError(
                f"{where}: its starts are {first:,}..{last:,} of {len(starts):,}; {_AGAIN}"
            )
        found = PackedBin(
            input_ids=maps["input_ids"][number, :length],
            loss_mask=maps["loss_mask"][number, :length],
            seq_starts=starts[first:last].astype(np.int64),
        )
        check_bin(found, self.pack_size, where)
        return found

    def bins(self) -> Iterator[PackedBin]:
        """All bins, in order. Files are mapped again now and then: otherwise all pages that were
        read would stay resident."""
        every = max(_MAPPED // self.pack_size, 1)
        for number in range(len(self)):
            if number % every == 0:
                self.close()
            yield self._read(number)

    def close(self) -> None:
        """Release the maps; bins that were read stay valid. May be called again."""
        self._maps = {}


def open_memmap_shard(folder: str | Path, *, loss_mask_alignment: str | None = None) -> MemmapShard:
    """The finished shard at `folder`, or an error that says what is wrong with it."""
    return MemmapShard(folder, loss_mask_alignment=loss_mask_alignment)


def verify_memmap_shard(folder: str | Path) -> list[str]:
    """Everything that is wrong with the shard at `folder`, each problem with its file or bin.

    Damage is reported, never raised; a folder without a finished shard is an error.
    """
    folder = path_to_read(folder).absolute()
    try:
        manifest, _ = _read_manifest(folder)
    except StoreNotFoundError:
        raise
    except StoreError as error:
        return [str(error)]
    problems: list[str] = []
    files: dict[str, MapArray] = {}
    for name in ARRAYS:
        try:
            files[name] = _check_array(folder, manifest, name)
        except ShardmillError as error:
            problems.append(str(error))
    problems = problems or wrong_hashes(folder, manifest.files or {})
    return problems or _bin_problems(folder, manifest, files)


def _bin_problems(folder: Path, manifest: ShardManifest, files: dict[str, MapArray]) -> list[str]:
    offsets, num_starts = files["seq_offsets"](), len(files["seq_starts"]())
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] > num_starts:
        return [f"{folder / 'seq_offsets.npy'}: wanted to rise from 0 to {num_starts:,}"]
    step = max(_BLOCK // manifest.pack_size, 1)
    for first in range(0, manifest.num_bins, step):
        # mapped again for each block: pages of earlier blocks do not stay resident
        maps = {name: map_array() for name, map_array in files.items()}
        bins = slice(first, first + step)
        problem = _block_problem(maps, bins, offsets[first : first + step + 1].astype(np.int64))
        if problem is not None:
            last = min(first + step, manifest.num_bins) - 1
            return [f"{folder}, bins {first:,} to {last:,}: {problem}"]
    return []


def _block_problem(
    maps: dict[str, npt.NDArray[Any]], bins: slice, offsets: OffsetArray
) -> str | None:
    """How any of these bins breaks the invariant; `offsets`: their starts in `seq_starts`."""
    ids, mask = maps["input_ids"][bins], maps["loss_mask"][bins]
    lengths = maps["packed_len"][bins].astype(np.int64)
    if lengths.min() < 1 or lengths.max() > ids.shape[1]:
        return f"a bin outside 1 to pack_size={ids.shape[1]:,} tokens"
    if mask.max() > 1:
        return "a loss_mask with other values than 0 and 1"
    starts = maps["seq_starts"][offsets[0] : offsets[-1]].astype(np.int64)
    edges = offsets - offsets[0]
    if (starts[edges[:-1]] != 0).any():
        return "a bin whose first start is not 0"
    rises = np.diff(starts) > 0
    rises[edges[1:-1] - 1] = True  # from one bin to the next
    if not rises.all() or (starts[edges[1:] - 1] >= lengths).any():
        return "a bin whose starts do not rise, or end after its tokens"
    if ids.min() < 0 or ids.max() > 2**32 - 1:
        return "a token id that is negative or too large"
    padding = np.arange(ids.shape[1]) >= lengths[:, None]
    return "padding that is not zero" if ids[padding].any() or mask[padding].any() else None


def _read_manifest(folder: Path) -> tuple[ShardManifest, str]:
    """The manifest of a finished shard, and the sha256 of the file."""
    manifest, fields, data = read_manifest_as(folder, ShardManifest, "packed shard")
    problem = _manifest_problem(manifest, fields)
    if problem is not None:
        raise ManifestError(f"{folder / MANIFEST}: {problem}; {_AGAIN}")
    return manifest, hashlib.sha256(data).hexdigest()


def _manifest_problem(manifest: ShardManifest, fields: dict[str, JSON]) -> str | None:
    if set(fields) & (_KEYS - _OLD_KEYS):
        if not set(fields) >= _KEYS or not is_sealed(fields):
            return f"{SEAL} does not match: the manifest was changed or damaged"
        if set(manifest.files or ()) != {f"{name}.npy" for name in ARRAYS}:
            return f"lists the files {sorted(manifest.files or ())}"
    if manifest.bins_written != manifest.num_bins:
        return f"{manifest.bins_written:,} of {manifest.num_bins:,} bins were written"
    return None


def _check_array(folder: Path, manifest: ShardManifest, name: str) -> MapArray:
    """How to map one array, if its header and size are as the manifest says."""
    path, (dtype, shape) = folder / f"{name}.npy", manifest.arrays[name]
    try:
        with reading(path), path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except StoreError as error:
        raise DamagedStoreError(f"{error}; {_AGAIN}") from error
    fields, offset = parse_npy(path, head)
    found = fields["shape"]
    if shape == (-1,) and isinstance(found, tuple) and len(found) == 1:
        shape = found if type(found[0]) is int and found[0] >= 0 else (0,)
    wanted = {"descr": dtype, "fortran_order": False, "shape": shape}
    if fields != wanted:
        raise DamagedStoreError(f"{path}: found {fields!r:.200}, wanted {wanted}; {_AGAIN}")
    map_array = partial(map_whole, path, dtype, shape, offset, again=_AGAIN)
    map_array()  # its size is checked before anything is read
    return map_array


class MemmapShardWriter(FolderWriter):
    """Bins of up to `pack_size` tokens; `total_seq_starts` is the most starts there will be.

    Every bin must be written exactly once. A context manager: leaving the block with an error, or
    without `finalize`, removes everything.
    """

    kind = "packed shard"
    pack_size_rule: str | None = None
    """How the pack size was found, if nothing stated it; recorded in the manifest."""

    def __init__(
        self,
        output_dir: str | Path,
        num_bins: SupportsIndex,
        pack_size: SupportsIndex,
        total_seq_starts: SupportsIndex,
        dtype: npt.DTypeLike = np.int32,
        *,
        loss_mask_alignment: str = "label",
    ) -> None:
        """`loss_mask_alignment` says what the masks mean that will be written; see `Alignment`."""
        path = given_path(output_dir, "output_dir", instead=_INSTEAD)
        self.num_bins = whole_number(num_bins, "num_bins", least=0)
        self.pack_size = given_pack_size(pack_size)
        self.total_seq_starts = whole_number(total_seq_starts, "total_seq_starts", least=0)
        self.dtype = token_dtype(dtype)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        self._num_starts = self._num_trained = 0
        self._check_disk(path)
        try:  # of each bin: its tokens (0: not written), its number of starts, where they wait
            self._lengths, self._counts = np.zeros((2, self.num_bins), np.uint32)
            self._first = np.zeros(self.num_bins, np.int64)
        except (MemoryError, ValueError) as error:  # numpy raises either, by size
            raise OptionError(
                f"num_bins={self.num_bins:,}: a writer takes 16 bytes of memory per bin, more than "
                "there is; write several shards"
            ) from error
        super().__init__(path)
        self.output_dir = self.target
        rows = (self.num_bins, self.pack_size)
        self._ids = RowFile(self._temporary / "input_ids.npy", self.dtype.str, rows)
        self._masks = RowFile(self._temporary / "loss_mask.npy", MASK, rows)
        self._waiting = io.BufferedWriter(io.FileIO(self._temporary / _WAITING, "xb"), _CHUNK)

    def write_bin(
        self,
        bin_id: SupportsIndex,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        seq_start_id: npt.ArrayLike,
    ) -> None:
        """One bin: (L,) ids, (L,) mask of 0 and 1, (S,) starts from 0, rising, below L.

        A last start of L, an empty sequence, is left out.
        """
        number = whole_number(bin_id, "bin_id", least=0)
        where = f"{self.target}, bin {number:,}"
        given = (input_ids, loss_mask, seq_start_id)
        ids, mask, starts = given_bin(given, self.pack_size, self.dtype, where)
        self._write(
            number,
            PackedBlock(
                input_ids=ids[None],
                loss_mask=mask.astype(np.uint8, copy=False)[None],
                lengths=np.array([len(ids)]),
                seq_starts=Ragged(starts, np.array([0, len(starts)])),
            ),
        )

    def write_block(self, first_bin: int, block: PackedBlock) -> None:
        """Bins `first_bin` and on, which are sound; in two writes if they are as wide as a row."""
        if block.input_ids.shape[1] == self.pack_size:
            self._write(first_bin, block)
        else:
            for number, found in enumerate(block.bins(), first_bin):
                self.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish the shard and return its manifest. Every bin must have been written. `check` as
        in `Check`."""
        self._check_open()
        missing = np.flatnonzero(self._lengths == 0)
        if len(missing):
            raise OptionError(
                f"{self.target}: {len(missing):,} of {self.num_bins:,} bins were not written, the "
                f"first is {missing[0]:,}: write them, then finalize"
            )
        return super().finalize(check=check)

    def _check_disk(self, target: Path) -> None:
        """Refuse what the disk of `target` cannot hold, before anything is written."""
        path, num_bytes = target.resolve(), self.num_bins * self.pack_size
        num_bytes *= self.dtype.itemsize + 1
        existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free
        if num_bytes > free:
            raise BuildError(
                f"{path}: {self.num_bins:,} bins take {num_bytes:,} bytes there, but {free:,} are "
                "free; nothing was written: free some space, write to another disk, or check the "
                "numbers"
            )

    def _close(self) -> None:
        self._ids.close()
        self._masks.close()
        self._waiting.raw.close()

    def _write(self, first: int, block: PackedBlock) -> None:
        """Bins `first` and on: rows that are as wide as a row of the file, or one row."""
        self._check_open()
        bins, starts = slice(first, first + len(block)), block.seq_starts
        if bins.stop > self.num_bins:
            raise OptionError(
                f"{self.target}: bin {max(first, self.num_bins):,} of {self.num_bins:,} bins"
            )
        written = np.flatnonzero(self._lengths[bins])
        if len(written):
            raise OptionError(f"{self.target}: bin {first + written[0]:,} is written twice")
        num_starts = self._num_starts + len(starts.values)
        if num_starts > self.total_seq_starts:
            raise OptionError(
                f"{self.target}, bin {first:,}: {num_starts:,} starts of sequences, but "
                f"total_seq_starts={self.total_seq_starts:,}"
            )
        with writing(self.target):
            self._ids.write(first, np.ascontiguousarray(block.input_ids, self.dtype))
            self._masks.write(first, np.ascontiguousarray(block.loss_mask, np.uint8))
            self._waiting.write(np.ascontiguousarray(starts.values, INDEX).data)
        self._first[bins] = self._num_starts + starts.offsets[:-1]
        self._counts[bins] = starts.lengths
        self._lengths[bins] = block.lengths
        self._num_starts = num_starts
        self._num_trained += int(np.count_nonzero(block.loss_mask))

    def _complete(self) -> dict[str, JSON]:
        folder = self._temporary
        self._waiting.close()
        offsets = np.zeros(self.num_bins + 1, np.int64)
        np.cumsum(self._counts, out=offsets[1:])
        wide = offsets_dtype(self._num_starts)
        write_array(folder / "packed_len.npy", INDEX, len(self._lengths), [self._lengths])
        write_array(folder / "seq_offsets.npy", wide, len(offsets), [offsets])
        write_array(folder / "seq_starts.npy", INDEX, self._num_starts, self._starts())
        (folder / _WAITING).unlink()
        self._ids.finish()
        self._masks.finish()
        paths = sorted(folder.iterdir())
        with ThreadPoolExecutor(2) as pool:
            hashes = dict(zip(paths, pool.map(file_sha256, paths), strict=True))
        manifest: dict[str, JSON] = {
            "version": "1.0",
            "format": "memmap_padded_v1",
            "num_bins": self.num_bins,
            "pack_size": self.pack_size,
            "dtype": self.dtype.str,
            "loss_mask_dtype": "<u1",
            "index_dtype": INDEX,
            "bins_written": self.num_bins,
            "seq_offsets_dtype": wide,
            "loss_mask_alignment": self.loss_mask_alignment,
            "num_sequences": self._num_starts,
            "num_tokens": int(self._lengths.sum(dtype=np.int64)),
            "trained_labels": self._num_trained,
            "files": file_entries(hashes),
        }
        if self.pack_size_rule is not None:
            manifest["pack_size_rule"] = self.pack_size_rule
        return write_manifest(folder, manifest)

    def _starts(self) -> Iterator[npt.NDArray[Any]]:
        """The starts, which wait in the order of writing, in the order of the bins."""
        if not self._num_starts:
            return
        waiting = np.memmap(self._temporary / _WAITING, INDEX, "r")
        for start in range(0, self.num_bins, _CHUNK):
            first = self._first[start : start + _CHUNK]
            places, _ = spread(first, first + self._counts[start : start + _CHUNK])
            yield waiting[places]


def offsets_dtype(num_starts: int) -> str:
    """64 bits only when 32 do not suffice, since others read 32."""
    return INDEX if num_starts < 2**32 else "<u8"
