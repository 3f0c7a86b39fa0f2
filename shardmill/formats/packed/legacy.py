"""Read legacy packed shards: a `.npy` that holds a pickle of dicts.

In: a path.  Out: `PackedBin`s in order, one at a time.
Promise: nothing is unpickled (unpickle.py interprets the file); every bin keeps the invariant of
packed formats or is refused by name; memory is that of one bin. What the file does not say - the
pack size, the alignment of its masks - is taken from the record beside it or from the caller.
Not here: writing (legacy_writer.py), conversion (legacy_convert.py).

Write a legacy packed shard, for programs that read nothing else.

In: bins, in order.  Out: `<name>.npy`, which `np.load(..., allow_pickle=True)` reads as an array of
dicts of lists, and `<name>.npy.json`, which says what the bins do not.
Promise: one bin in memory, whatever the file's size: the opcodes of the pickle are written as bins
come; the file appears whole or not at all, and never over another one.
Not here: reading (legacy_reader.py). Whoever can read memmap or Parquet should get that.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.formats.packed.files import check_plain
from shardmill.formats.packed.memmap import file_sha256
from shardmill.formats.packed.pickle_reader import read_bins
from shardmill.formats.packed.pickle_values import MOST_TOKENS, Bin, PickleBytes, encode_run
from shardmill.formats.packed.records import (
    WRITE_INSTEAD,
    Check,
    PackedBin,
    bin_problem,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
    path_to_read,
    without_end,
)
from shardmill.storage.atomic import atomic_write, cannot_write, sync_folder, temporary_name

FORMAT = "legacy_npy_pickle"
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([^']{1,8})',\s*'fortran_order':\s*(?:True|False),\s*"
    rb"'shape':\s*\(([0-9]{1,18}),\s*\),?\s*\}\s*"
)
_AGAIN = "copy it again"


class LegacyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands beside a legacy shard, in `<name>.npy.json`: what its bins do not say."""

    format: str
    pack_size: int | None
    loss_mask_alignment: str
    num_bins: int
    num_bytes: int  # of the .npy: another size, another file
    sha256: str


def iter_legacy_bins(path: str | Path) -> Iterator[PackedBin]:
    """The bins of a legacy shard, in order. Nothing in the file is run, whatever it holds."""
    path = path_to_read(path)
    check_plain(path)
    try:
        with path.open("rb") as file:
            yield from _bins(file, path)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def num_legacy_bins(path: str | Path) -> int:
    """How many bins the header promises; the bins themselves are not looked at."""
    path = Path(path)
    check_plain(path)
    try:
        with path.open("rb") as file:
            return _header(file, path)[1]
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def record_path(path: str | Path) -> Path:
    """Where the record of a legacy shard stands."""
    path = Path(path)
    return path.with_name(path.name + ".json")


def read_record(path: str | Path) -> LegacyRecord | None:
    """The record beside a legacy shard; None when there is none."""
    beside = record_path(path)
    try:
        found = msgspec.json.decode(beside.read_bytes(), type=LegacyRecord)
        num_bytes = Path(path).stat().st_size
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ManifestError(f"{beside}: cannot be read ({error}); remove or mend it") from error
    if found.format != FORMAT or found.num_bytes != num_bytes:
        raise ManifestError(
            f"{beside}: speaks of {found.format!r} and {found.num_bytes:,} bytes, but {path} has "
            f"{num_bytes:,}: it belongs to another file; remove it or copy both again"
        )
    return found


def check_record(path: str | Path) -> LegacyRecord | None:
    """The record beside a legacy shard, if the file is the very one that it knows."""
    record = read_record(path)
    if record is not None and file_sha256(Path(path)) != record.sha256:
        raise DamagedStoreError(f"{path}: its sha256 is not the one in its record; copy both again")
    return record


def record_bytes(record: LegacyRecord) -> bytes:
    return json.dumps(msgspec.to_builtins(record), indent=2, sort_keys=True).encode() + b"\n"


def _bins(file: BinaryIO, path: Path) -> Iterator[PackedBin]:
    is_object, num_bins = _header(file, path)
    size = path.stat().st_size - file.tell()
    if not is_object:
        if num_bins or size:
            raise StoreError(
                f"{path}: an array of numbers, not of packed bins; is this a file of tokens?"
            )
        return  # np.save of an empty list: no objects, and nothing in it
    count = 0
    for found in read_bins(PickleBytes(file, size, str(path))):
        count += 1
        yield _packed(found, f"{path}, bin {count - 1:,}")
    if count != num_bins:
        raise DamagedStoreError(
            f"{path}: {count:,} bins, but its header says {num_bins:,}; {_AGAIN}"
        )


def _packed(found: Bin, where: str) -> PackedBin:
    ids, mask, starts = (found.fields[key] for key in ("input_ids", "loss_mask", "seq_start_id"))
    starts = without_end(starts, len(ids))
    problem = bin_problem(ids, mask, starts, max(len(ids), 1))
    if problem is None and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        problem = f"token ids {ids.min():,}..{ids.max():,}, which no vocabulary has"
    if problem is not None:
        raise DamagedStoreError(f"{where}: {problem}; {_AGAIN} or pack it again")
    narrow = int(ids.max()) < 2**31
    return PackedBin(
        input_ids=ids.astype(np.int32 if narrow else np.int64, copy=False),
        loss_mask=mask.astype(np.uint8, copy=False),
        seq_starts=starts.astype(np.int64, copy=False),
    )


def _header(file: BinaryIO, path: Path) -> tuple[bool, int]:
    """Whether it is an array of objects, and how many; the file stands behind the header then."""
    head = file.read(12)
    if len(head) < 12 or head[:6] != _MAGIC or head[6] not in (1, 2, 3) or head[7] != 0:
        raise DamagedStoreError(f"{path}: begins with {head[:8]!r}, so it is no .npy; {_AGAIN}")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    file.seek(8 + width)
    text = file.read(length) if length < 2**16 else b""
    found = _HEADER.fullmatch(text)
    if found is None or len(text) != length:
        raise DamagedStoreError(
            f"{path}: its header is {text[:100]!r}, wanted one dimension of objects; {_AGAIN}"
        )
    return found[1] == b"|O", int(found[2])


_HEADER_BYTES = 128
_BATCH = 1000  # bins that wait on the stack of whoever loads the file


def _name(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode("ascii")


# numpy.core.multiarray is known to numpy 1 and numpy 2; memo 0 to 2 hold the keys
_ARRAY = _name("numpy.core.multiarray") + _name("_reconstruct") + b"\x93"
_ARRAY += _name("numpy") + _name("ndarray") + b"\x93K\x00\x85C\x01b\x87R"
_OBJECTS = _name("numpy") + _name("dtype") + b"\x93" + _name("O8") + b"\x89\x88\x87R"
_OBJECTS += b"(K\x03" + _name("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
_KEYS = ("input_ids", "loss_mask", "seq_start_id")


class LegacyPickleWriter:
    """Bins go to the file as they come; `finalize` gives it its name.

    `pack_size` and `loss_mask_alignment` are recorded beside the file, for whoever converts it.
    """

    def __init__(
        self,
        output_path: str | Path,
        *,
        pack_size: SupportsIndex | None = None,
        loss_mask_alignment: str = "label",
    ) -> None:
        self.output_path = given_path(output_path, "output_path", instead=WRITE_INSTEAD)
        self.pack_size = None if pack_size is None else given_pack_size(pack_size)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        if self.output_path.suffix != ".npy":
            raise OptionError(f"{self.output_path}: a legacy shard is called something.npy")
        self._refuse_existing()
        self.num_bins = 0
        self._open = True
        self._temporary = temporary_name(self.output_path)
        try:
            self.output_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.BufferedWriter(io.FileIO(self._temporary, "xb"), 2**20)
            self._file.write(bytes(_HEADER_BYTES) + self._prologue())
        except OSError as error:
            raise cannot_write(self.output_path, error) from error

    def write_bin(
        self,
        bin_id: SupportsIndex,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        seq_start_id: npt.ArrayLike,
    ) -> None:
        """The next bin: its number must be the number of bins written so far."""
        number = whole_number(bin_id, "bin_id", least=0)
        most = min(self.pack_size or MOST_TOKENS, MOST_TOKENS)  # a longer bin no reader takes
        parts = (input_ids, loss_mask, seq_start_id)
        where = f"{self.output_path}, bin {number:,}"
        ids, mask, starts = given_bin(parts, most, np.dtype(np.int32), where)
        if number != self.num_bins or not self._open:
            state = (
                f"the next bin is {self.num_bins:,}" if self._open else "this writer is finished"
            )
            raise OptionError(
                f"{self.output_path}: bin {number:,}, but {state}; a legacy shard is written in "
                "order (memmap takes any order)"
            )
        start = b"(" if number % _BATCH == 0 else b""
        end = b"e" if number % _BATCH == _BATCH - 1 else b""
        self._write(start + _dict([ids, mask, starts], first=number == 0) + end)
        self.num_bins += 1

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish the file and the record beside it; returns the record, with the plan's name of
        the format. `check` as in `Check`."""
        if not self._open:
            raise OptionError(f"{self.output_path}: this writer is finished; make another one")
        self._write((b"e" if self.num_bins % _BATCH else b"") + b"tb.")
        try:
            sha256 = self._finish()
            if check is not None:
                check(self._temporary)
            self._refuse_existing()
            self._temporary.rename(self.output_path)
            sync_folder(self.output_path.parent)
            record = LegacyRecord(
                format=FORMAT,
                pack_size=self.pack_size,
                loss_mask_alignment=self.loss_mask_alignment,
                num_bins=self.num_bins,
                num_bytes=self.output_path.stat().st_size,
                sha256=sha256,
            )
            with atomic_write(record_path(self.output_path)) as file:
                file.write(record_bytes(record))
        except OSError as error:
            raise cannot_write(self.output_path, error) from error
        finally:
            self.abort()
        found = {name: getattr(record, name) for name in record.__struct_fields__}
        return found | {"format": "legacy_pickle"}

    def abort(self) -> None:
        """Remove what was written; may be called again. A finished shard stays."""
        self._open = False
        self._file.raw.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> LegacyPickleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _prologue(self) -> bytes:
        """Up to the list of elements; the shape is four bytes that `_finish` fills in."""
        shape = b"J" + self._count(0) + b"\x85"
        return b"\x80\x04" + _ARRAY + b"(K\x01" + shape + _OBJECTS + b"\x89]"

    def _finish(self) -> str:
        """Write the number of bins into both headers, sync, and hash all of it."""
        self._file.flush()
        raw = self._file.raw
        header = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({self.num_bins},), }}"
        head = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
        os.pwrite(raw.fileno(), head + header.encode().ljust(_HEADER_BYTES - 11) + b"\n", 0)
        place = _HEADER_BYTES + 2 + len(_ARRAY) + len(b"(K\x01J")
        os.pwrite(raw.fileno(), self._count(self.num_bins), place)
        os.fsync(raw.fileno())
        raw.close()
        with self._temporary.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @staticmethod
    def _count(number: int) -> bytes:
        return number.to_bytes(4, "little")

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_write(self.output_path, error) from error

    def _refuse_existing(self) -> None:
        for path in (self.output_path, record_path(self.output_path)):
            if path.exists():
                raise StoreExistsError(f"{path}: is here already; remove it or choose another name")


def _dict(parts: list[npt.NDArray[Any]], *, first: bool) -> bytes:
    """One bin; the first one puts the keys into the memo."""
    pieces = [b"}("]
    for number, (key, values) in enumerate(zip(_KEYS, parts, strict=True)):
        memo = bytes([number])
        pieces.append(_name(key) + b"q" + memo if first else b"h" + memo)
        pieces.append(b"](" + encode_run(values) + b"e")
    return b"".join((*pieces, b"u"))
