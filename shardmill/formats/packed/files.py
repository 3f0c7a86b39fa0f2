"""How packed shards get to disk: each appears complete or not at all, and never over another one.

A shard is written under a temporary name beside its target and renamed when it is complete. A
failure removes it. A kill leaves it, under a name that starts with a dot, ends in `.tmp` and is
never read. A sealed manifest carries the sha256 of its own keys, so a change is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypeVar

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
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.formats.packed.records import (
    MAX_PACK_SIZE,
    Check,
    PackedBlock,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
)
from shardmill.records import JSON, IntArray
from shardmill.storage.atomic import atomic_write, sync_folder, temporary_name

MANIFEST = "manifest.json"
SEAL = "manifest_sha256"
_MAX_MANIFEST = 2**24

Struct = TypeVar("Struct", bound=msgspec.Struct)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file that a manifest lists."""

    bytes: int
    sha256: str


class StagedWriter(ABC):
    """Writes a file or a folder under a temporary name; `finalize` publishes it.

    A context manager: leaving the block without `finalize` removes everything. Of two writers of
    one target the second is refused.
    """

    def __init__(self, target: Path) -> None:
        """`target` was checked by `given_path`; what is written is created at `_temporary`."""
        self.target = target
        self._refuse_existing()
        self._is_open = True
        self._temporary = temporary_name(target)
        self._remove = weakref.finalize(self, _remove, self._temporary, os.getpid())
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish what was written; the result says what it holds. `check` as in `Check`."""
        self._check_open()
        try:
            with writing(self.target):
                report = self._complete()
                if check is not None:
                    check(self._temporary)
                self._publish()
        finally:
            self.abort()
        return report

    def abort(self) -> None:
        """Remove what was written; may be called again. What was published stays."""
        self._is_open = False
        try:
            self._close()
        finally:
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        self.abort()

    def _check_open(self) -> None:
        if not self._is_open:
            raise OptionError(f"{self.target}: this writer is finished; make another one")

    def _publish(self) -> None:
        if self._temporary.is_dir():
            sync_folder(self._temporary)
        self._refuse_existing()
        try:
            self._temporary.rename(self.target)  # of folders it replaces an empty one only
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise StoreExistsError(
                f"{self.target}: another process put files there meanwhile; look, then write again "
                "to another folder"
            ) from error
        sync_folder(self.target.parent)

    @abstractmethod
    def _refuse_existing(self) -> None:
        """Raise if something is at the target."""

    @abstractmethod
    def _complete(self) -> dict[str, Any]:
        """Write what is left and make it durable; the result of `finalize`."""

    @abstractmethod
    def _close(self) -> None:
        """Close all files; may be called again."""


class FolderWriter(StagedWriter):
    """Writes a folder whose manifest says that it is finished."""

    kind: str  # for messages: "packed shard"

    def __init__(self, target: Path) -> None:
        super().__init__(target.resolve())
        with writing(target):
            self._temporary.mkdir()

    def _refuse_existing(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise StoreExistsError(f"{self.target}: a file is in the way; move it away first")
        names = sorted(entry.name for entry in self.target.iterdir())
        if MANIFEST in names:
            raise StoreExistsError(
                f"{self.target}: a finished {self.kind} is here and is never overwritten; remove "
                "it or choose another folder"
            )
        if names:
            raise StoreExistsError(
                f"{self.target}: holds {names[0]!r} and no {MANIFEST}, so it is no finished "
                f"{self.kind}; move it away or choose another folder"
            )


class FileShardWriter(StagedWriter):
    """Writes a packed shard that is a single file, whose bins come in order."""

    max_bin = MAX_PACK_SIZE  # the longest bin that readers of the format accept
    beside: tuple[str, ...] = ()  # suffixes of the files that belong to it

    def __init__(
        self, output_path: str | Path, pack_size: SupportsIndex | None, loss_mask_alignment: str
    ) -> None:
        target = given_path(output_path, "output_path")
        self.pack_size = None if pack_size is None else given_pack_size(pack_size)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        self.num_bins = 0
        super().__init__(target)

    def write_bin(
        self,
        bin_id: SupportsIndex,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        seq_start_id: npt.ArrayLike,
    ) -> None:
        """The next bin: its number must be the number of bins written so far."""
        number = whole_number(bin_id, "bin_id", least=0)
        longest = min(self.pack_size or self.max_bin, self.max_bin)
        given = (input_ids, loss_mask, seq_start_id)
        parts = given_bin(given, longest, np.int32, f"{self.target}, bin {number:,}")
        self._check_open()
        if number != self.num_bins:
            raise OptionError(
                f"{self.target}: bin {number:,}, but the next bin is {self.num_bins:,}; this "
                "format is written in order (memmap takes any order)"
            )
        with writing(self.target):
            self._add(*parts)
        self.num_bins += 1

    def write_block(self, first_bin: int, block: PackedBlock) -> None:
        """Bins `first_bin` and on."""
        for number, found in enumerate(block.bins(), first_bin):
            self.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)

    @abstractmethod
    def _add(self, ids: IntArray, mask: IntArray, starts: IntArray) -> None:
        """Write one bin, which was checked."""

    def _refuse_existing(self) -> None:
        for suffix in ("", *self.beside):
            path = self.target.with_name(self.target.name + suffix)
            if path.exists():
                raise StoreExistsError(f"{path}: is here already; remove it or choose another name")


class RowFile:
    """A two-dimensional `.npy` file, written row by row; rows that were not written are zero."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, int]) -> None:
        header = npy_header(dtype, shape)
        self._start = len(header)
        self._row_bytes = shape[1] * np.dtype(dtype).itemsize
        with writing(path):
            self._file = path.open("xb", buffering=0)
            self._put(memoryview(header), 0)
            self._file.truncate(self._start + shape[0] * self._row_bytes)

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """`values`, contiguous and of the file's dtype, from the start of `row` on."""
        self._put(values.reshape(-1).view(np.uint8).data, self._start + row * self._row_bytes)

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview, position: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, position)
            data, position = data[count:], position + count


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What comes before the data of a `.npy` file."""
    file = io.BytesIO()
    fields = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def write_array(path: Path, dtype: str, count: int, parts: Iterable[npt.NDArray[Any]]) -> None:
    """A new file with the `count` values of all parts, durable."""
    with path.open("xb") as file:
        file.write(npy_header(dtype, (count,)))
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of the disk as one of ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardmillError):
            raise
        raise BuildError(
            f"{path}: cannot write: {error.strerror}; nothing was published: free some space, or "
            "write to another disk"
        ) from error


def check_plain(path: Path) -> None:
    """Refuse what exists and is not a plain file: reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise DamagedStoreError(f"{path}: not a plain file; copy the data again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Check that this is a plain file, and raise an error of the disk as one of ours."""
    try:
        check_plain(path)
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(f"{path}: no such file; check the path") from error
    except OSError as error:
        if isinstance(error, ShardmillError):
            raise
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def map_whole(
    path: Path, dtype: str, shape: tuple[int, ...], offset: int = 0, *, again: str
) -> npt.NDArray[Any]:
    """The array that a file holds after `offset` bytes and nothing else, mapped, read-only."""
    try:
        found = path.stat().st_size
        wanted = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if found != wanted:
            raise DamagedStoreError(f"{path}: found {found:,} bytes, wanted {wanted:,}; {again}")
        if not wanted - offset:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(path, dtype, "r", offset, shape))
    except OSError as error:
        raise DamagedStoreError(f"{path}: cannot be read: {error.strerror}; {again}") from error


def file_sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wrong_hashes(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Every file of a manifest whose sha256 is another one, as a sentence."""
    return [
        f"{folder / name}: its sha256 is not the one in the manifest"
        for name, entry in files.items()
        if file_sha256(folder / name) != entry.sha256
    ]


def sealed(fields: dict[str, JSON]) -> dict[str, JSON]:
    """A manifest with its seal."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return {**rest, SEAL: digest}


def is_sealed(fields: dict[str, JSON]) -> bool:
    """Whether these are the keys that were sealed."""
    return fields.get(SEAL) == sealed(fields)[SEAL]


def file_entries(hashes: Mapping[Path, str]) -> dict[str, JSON]:
    """Files and their sha256, as a manifest lists them."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in hashes.items()
    }


def write_manifest(folder: Path, fields: dict[str, JSON]) -> dict[str, JSON]:
    """Seal and write the manifest of a folder; it is returned as written."""
    manifest = sealed(fields)
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=2).encode() + b"\n")
    return manifest


def read_json(folder: Path, what: str) -> tuple[dict[str, JSON], bytes]:
    """The keys of the manifest at `folder`, and its bytes. `what` is expected there."""
    path = folder / MANIFEST
    try:
        with reading(path):
            data = path.read_bytes() if path.stat().st_size <= _MAX_MANIFEST else b"(too large)"
    except StoreNotFoundError as error:
        raise StoreNotFoundError(f"{folder}: no {MANIFEST} here, so no finished {what}") from error
    try:
        fields: dict[str, JSON] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: no manifest of a {what}: {error}") from error
    return fields, data


def read_manifest_as(
    folder: Path, kind: type[Struct], what: str
) -> tuple[Struct, dict[str, JSON], bytes]:
    """The manifest at `folder` as a record of `kind`, its keys, and its bytes."""
    fields, data = read_json(folder, what)
    try:
        return msgspec.convert(fields, type=kind), fields, data
    except msgspec.ValidationError as error:
        raise ManifestError(f"{folder / MANIFEST}: no manifest of a {what}: {error}") from error


def _remove(path: Path, process: int) -> None:
    if os.getpid() != process:  # a forked copy must not take the files of its parent away
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
