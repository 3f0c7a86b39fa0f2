"""Tokenised sequences on their way into bins: written once, read in any order.

In: ids and masks, one sequence or many at a time.  Out: a folder of four files, and its reader.
Promise: `read_sequence(i)` gives what was appended; the manifest is written last, with the sha256
of every file; a crash leaves nothing that looks finished.
Not here: packing. The mask is per token: 1 where this very token is a training target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.atomic import HashedFile
from shardmill.closing import Closing
from shardmill.errors import DamagedStoreError, ManifestError, OptionError, StoreError
from shardmill.interop.packed.arrays import file_sha256
from shardmill.interop.packed.given import check_ids, given_array, given_path, path_to_read
from shardmill.interop.packed.layout import FileEntry, token_dtype
from shardmill.interop.packed.records import LossMask
from shardmill.interop.packed.seals import is_sealed, read_json, sealed, write_manifest
from shardmill.interop.packed.spans import spread
from shardmill.interop.packed.staging import MANIFEST, StagedFolder
from shardmill.records import JSON, IntArray, OffsetArray, Ragged

SPOOL = "sequence_spool_v1"
_FILES = ("tokens.bin", "masks.bin", "offsets.bin")


class SpoolManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """manifest.json of a spool."""

    format: Literal["sequence_spool_v1"]
    dtype: str  # of tokens.bin, little endian; masks.bin is one byte a token, offsets.bin int64
    num_sequences: int
    num_tokens: int
    trained_tokens: int
    files: dict[str, FileEntry]
    manifest_sha256: str


class SequenceSpoolWriter:
    """Append sequences, then `finalize`. Leaving a `with` block without error finalizes."""

    def __init__(self, folder: str | Path, *, dtype: npt.DTypeLike = np.int32) -> None:
        """`dtype`: uint16, int32, uint32 or int64, as the vocabulary needs."""
        self.dtype = token_dtype(dtype)
        instead = "write the spool to a local folder; shardmill.remote.push copies it"
        self._staged = StagedFolder(given_path(folder, "folder", instead=instead), "spool")
        self.folder = self._staged.target
        self._files = [HashedFile(self._staged.folder / name) for name in _FILES]
        self._num_sequences = self._num_tokens = self._num_trained = 0
        self._done = False
        self._files[2].write(np.zeros(1, "<i8").data)

    def append(self, ids: npt.ArrayLike, mask: npt.ArrayLike) -> None:
        """One sequence and which of its tokens are targets."""
        values = given_array(ids, "ids", str(self.folder))
        if values.ndim != 1:
            raise OptionError(f"{self.folder}: ids of shape {values.shape}, wanted one dimension")
        if not len(values):
            values = values.astype(self.dtype)  # an empty list is an array of floats
        self.extend(Ragged(values, np.array([0, len(values)])), mask)

    def extend(self, ids: Ragged, mask: npt.ArrayLike) -> None:
        """Many sequences; `mask` is flat, as long as `ids.values`."""
        if self._done:
            raise OptionError(f"{self.folder}: this spool is finished; make another one")
        flat = given_array(mask, "mask", str(self.folder))
        self._check(ids, flat)
        tokens, masks, offsets = self._files
        tokens.write(np.ascontiguousarray(ids.values, self.dtype).data.cast("B"))
        masks.write(np.ascontiguousarray(flat, np.uint8).data)
        ends = ids.offsets[1:] - ids.offsets[0] + self._num_tokens
        offsets.write(np.ascontiguousarray(ends, "<i8").data.cast("B"))
        self._num_sequences += len(ids)
        self._num_tokens += len(ids.values)
        self._num_trained += int(np.count_nonzero(flat))

    def finalize(self) -> dict[str, JSON]:
        """Publish the spool and return its manifest."""
        if self._done:
            raise OptionError(f"{self.folder}: this spool is finished; make another one")
        self._done = True
        hashes = [file.finish() for file in self._files]
        files: dict[str, JSON] = {
            file.path.name: {"bytes": file.path.stat().st_size, "sha256": digest}
            for file, digest in zip(self._files, hashes, strict=True)
        }
        manifest = sealed(
            {
                "format": SPOOL,
                "dtype": self.dtype.str,
                "num_sequences": self._num_sequences,
                "num_tokens": self._num_tokens,
                "trained_tokens": self._num_trained,
                "files": files,
            }
        )
        write_manifest(self._staged.folder, manifest)
        self._staged.publish()
        return manifest

    def abort(self) -> None:
        """Remove what was written; may be called again. A finished spool stays."""
        self._done = True
        for file in self._files:
            file.abort()
        self._staged.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and not self._done:
                self.finalize()
        finally:
            self.abort()

    def _check(self, ids: Ragged, mask: npt.NDArray[Any]) -> None:
        values, offsets = ids.values, ids.offsets
        where = f"{self.folder}, from sequence {self._num_sequences:,} on"
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
        self.manifest = _read_manifest(self.folder)
        sizes = (np.dtype(self.manifest.dtype).itemsize, 1, 8)
        counts = (self.manifest.num_tokens, self.manifest.num_tokens, len(self) + 1)
        maps = [
            _mapped(self.folder / name, count, size)
            for name, count, size in zip(_FILES, counts, sizes, strict=True)
        ]
        self._tokens: IntArray = maps[0].view(self.manifest.dtype)
        self._masks: LossMask = maps[1]
        self._offsets: OffsetArray = maps[2].view("<i8")
        self._closed = False

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def lengths(self) -> OffsetArray:
        """Tokens of every sequence: 8 bytes each."""
        self._check_open()
        lengths = np.diff(self._offsets)
        if len(lengths) and lengths.min() < 0:
            raise self._damaged("offsets.bin falls")
        return lengths

    def read_sequence(self, index: int) -> tuple[IntArray, LossMask]:
        """Ids and mask of one sequence, as views of the files."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index:,} of {len(self):,}")
        self._check_open()
        start, stop = (int(place) for place in self._offsets[index : index + 2])
        if not 0 <= start <= stop <= len(self._tokens):
            raise self._damaged(f"sequence {index:,} lies at {start:,}..{stop:,}")
        return self._tokens[start:stop], self._masks[start:stop]

    def read_pieces(
        self, sequences: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, LossMask]:
        """`start..stop` of each of these sequences, behind one another, in one gather."""
        self._check_open()
        first = self._offsets[sequences]
        begin, end = first + start, first + stop
        if len(begin) and (begin.min() < 0 or (end > self._offsets[sequences + 1]).any()):
            raise self._damaged("a piece lies outside its sequence")
        places, _ = spread(begin, end)
        return self._tokens[places], self._masks[places]

    def verify(self) -> list[str]:
        """Every file whose sha256 is not the one in the manifest."""
        return [
            f"{self.folder / name}: its sha256 is not the one in the manifest"
            for name, entry in self.manifest.files.items()
            if file_sha256(self.folder / name) != entry.sha256
        ]

    def close(self) -> None:
        """Let go of the maps; nothing can be read then. May be called again."""
        self._closed = True
        self._tokens, self._masks = np.empty(0, self._tokens.dtype), np.empty(0, np.uint8)
        self._offsets = np.zeros(1, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceSpoolReader, (self.folder,)

    def __repr__(self) -> str:
        return f"SequenceSpoolReader({self.folder.name!r}, sequences={len(self):,})"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.folder}: this reader was closed; open the spool again")

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"{self.folder}: {what}; write the spool again")


def _read_manifest(folder: Path) -> SpoolManifest:
    plain, _ = read_json(folder, "spool")
    try:
        manifest = msgspec.convert(plain, type=SpoolManifest)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{folder / MANIFEST}: no manifest of a spool: {error}") from error
    if not is_sealed(plain):
        raise ManifestError(f"{folder / MANIFEST}: was changed or damaged; write the spool again")
    token_dtype(manifest.dtype)
    return manifest


def _mapped(path: Path, count: int, size: int) -> npt.NDArray[np.uint8]:
    try:
        found = path.stat().st_size
        if found != count * size:
            raise DamagedStoreError(
                f"{path}: found {found:,} bytes, wanted {count * size:,}; write the spool again"
            )
        return np.asarray(np.memmap(path, np.uint8, "r")) if count else np.empty(0, np.uint8)
    except OSError as error:
        raise DamagedStoreError(
            f"{path}: cannot be read: {error.strerror}; write the spool again"
        ) from error
