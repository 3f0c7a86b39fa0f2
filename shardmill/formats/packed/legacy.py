"""Legacy packed shards: a `.npy` that holds a pickle of dicts of lists.

Nothing is unpickled (pickle_reader interprets the file), and one bin is in memory at a time. What
the bins do not say, the pack size and the alignment of the masks, is in a record beside the file,
`<name>.npy.json`, or comes from the caller. The writer is for programs that read nothing else.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
import numpy as np

from shardmill.errors import DamagedStoreError, ManifestError, OptionError, StoreError
from shardmill.formats.packed.files import FileShardWriter, file_sha256, reading, writing
from shardmill.formats.packed.pickle_reader import FIELDS, MAX_TOKENS, read_bins
from shardmill.formats.packed.pickle_runs import encode_run
from shardmill.formats.packed.records import (
    Check,
    PackedBin,
    PackedShard,
    bin_problem,
    check_bin,
    path_to_read,
    without_end,
)
from shardmill.records import IntArray
from shardmill.storage.atomic import atomic_write
from shardmill.store.readers.foreign import parse_npy

logger = logging.getLogger(__name__)

FORMAT = "legacy_npy_pickle"
RECORD = ".json"  # the record of shard.npy is shard.npy.json


class LegacyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record beside a legacy shard."""

    format: str
    pack_size: int | None
    loss_mask_alignment: str
    num_bins: int
    num_bytes: int  # of the .npy: another size, another file
    sha256: str


def iter_legacy_bins(path: str | Path) -> Iterator[PackedBin]:
    """The bins of a legacy shard, in order. Nothing in the file is run, whatever it holds."""
    path = path_to_read(path)
    with reading(path), path.open("rb") as file:
        header, offset = parse_npy(path, file.read(10_000))
        shape, size = header["shape"], path.stat().st_size - offset
        if header["descr"] != "|O":
            if shape != (0,) or size:
                raise StoreError(
                    f"{path}: an array of numbers, not of packed bins; is this a file of tokens?"
                )
            return  # np.save of an empty list: no objects, and nothing in it
        file.seek(offset)
        count = 0
        for fields in read_bins(file, size, str(path)):
            yield _packed(fields, f"{path}, bin {count:,}")
            count += 1
        if shape != (count,):
            raise DamagedStoreError(
                f"{path}: {count:,} bins, but its header says {shape!r:.60}; copy it again"
            )


def check_record(path: str | Path) -> LegacyRecord | None:
    """The record beside a legacy shard, if there is one and the file is the one it describes."""
    path, beside = Path(path), Path(f"{path}{RECORD}")
    try:
        found = msgspec.json.decode(beside.read_bytes(), type=LegacyRecord)
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ManifestError(f"{beside}: cannot be read ({error}); remove or repair it") from error
    if found.format != FORMAT or found.num_bytes != num_bytes:
        raise ManifestError(
            f"{beside}: describes {found.format!r} and {found.num_bytes:,} bytes, but {path} has "
            f"{num_bytes:,}: it belongs to another file; remove it or copy both again"
        )
    if file_sha256(path) != found.sha256:
        raise DamagedStoreError(f"{path}: its sha256 is not the one in its record; copy both again")
    return found


class LegacyShard(PackedShard):
    """All bins of a legacy file, read into memory.

    If nothing states its pack size, it is the length of the longest bin.
    """

    def _open(self) -> tuple[int | None, str | None]:
        logger.warning(
            "%s: a legacy file is read into memory as a whole, in every process that opens it; "
            "convert_legacy_to_memmap makes a shard that is mapped",
            self.path,
        )
        record = check_record(self.path)
        self._bins = list(iter_legacy_bins(self.path))
        return (None, None) if record is None else (record.pack_size, record.loss_mask_alignment)

    def _usual_pack_size(self) -> int:
        return max(map(len, self._bins), default=1)

    def __len__(self) -> int:
        return len(self._bins)

    def _read(self, number: int) -> PackedBin:
        check_bin(self._bins[number], self.pack_size, f"{self.path}, bin {number:,}")
        return self._bins[number]

    def close(self) -> None:
        """Nothing is open."""


def _packed(fields: dict[str, IntArray], where: str) -> PackedBin:
    ids, mask, starts = (fields[key] for key in FIELDS)
    starts = without_end(starts, len(ids))
    problem = bin_problem(ids, mask, starts, max(len(ids), 1))
    if problem is None and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        problem = f"token ids {ids.min():,}..{ids.max():,}, which no vocabulary has"
    if problem is not None:
        raise DamagedStoreError(f"{where}: {problem}; copy it again or pack it again")
    return PackedBin(
        input_ids=ids.astype(np.int32 if int(ids.max()) < 2**31 else np.int64, copy=False),
        loss_mask=mask.astype(np.uint8, copy=False),
        seq_starts=starts.astype(np.int64, copy=False),
    )


_HEADER_BYTES = 128
_BATCH = 1000  # bins between two APPENDS: they wait on the stack of the program that loads the file


def _name(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode("ascii")


# numpy.core.multiarray is known to numpy 1 and numpy 2; memo 0 to 2 hold the keys
_ARRAY = _name("numpy.core.multiarray") + _name("_reconstruct") + b"\x93"
_ARRAY += _name("numpy") + _name("ndarray") + b"\x93K\x00\x85C\x01b\x87R"
_OBJECTS = _name("numpy") + _name("dtype") + b"\x93" + _name("O8") + b"\x89\x88\x87R"
_OBJECTS += b"(K\x03" + _name("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
_TO_COUNT = b"\x80\x04" + _ARRAY + b"(K\x01J"  # the shape follows, in four bytes


class LegacyPickleWriter(FileShardWriter):
    """Writes the opcodes of the pickle as bins come; `np.load(..., allow_pickle=True)` reads it.

    `pack_size` and `loss_mask_alignment` go into the record beside the file, for conversions.
    """

    max_bin = MAX_TOKENS
    beside = (RECORD,)

    def __init__(
        self,
        output_path: str | Path,
        *,
        pack_size: SupportsIndex | None = None,
        loss_mask_alignment: str = "label",
    ) -> None:
        if not str(output_path).endswith(".npy"):
            raise OptionError(f"{output_path}: a legacy shard is called something.npy")
        super().__init__(output_path, pack_size, loss_mask_alignment)
        self.output_path = self.target
        with writing(self.target):
            self._file = io.BufferedWriter(io.FileIO(self._temporary, "xb"), 2**20)
        # the header and the number of bins are filled in at the end
        self._file.write(
            bytes(_HEADER_BYTES) + _TO_COUNT + bytes(4) + b"\x85" + _OBJECTS + b"\x89]"
        )

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish the file, then its record, which is the result, with the specified name of the
        format. `check` as in `Check`."""
        record = super().finalize(check=check)
        with writing(self.target), atomic_write(Path(f"{self.target}{RECORD}")) as file:
            file.write(json.dumps(record, indent=2, sort_keys=True).encode() + b"\n")
        return record | {"format": "legacy_pickle"}

    def _add(self, ids: IntArray, mask: IntArray, starts: IntArray) -> None:
        pieces = [b"(}(" if self.num_bins % _BATCH == 0 else b"}("]
        for number, (key, values) in enumerate(zip(FIELDS, (ids, mask, starts), strict=True)):
            memo = bytes([number])
            pieces.append(b"h" + memo if self.num_bins else _name(key) + b"q" + memo)
            pieces.append(b"](" + encode_run(values) + b"e")
        pieces.append(b"ue" if self.num_bins % _BATCH == _BATCH - 1 else b"u")
        self._file.write(b"".join(pieces))

    def _complete(self) -> dict[str, Any]:
        """Write the end, and the number of bins into both headers; sync and hash the file."""
        self._file.write((b"e" if self.num_bins % _BATCH else b"") + b"tb.")
        self._file.flush()
        raw = self._file.raw
        header = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({self.num_bins},), }}"
        head = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
        os.pwrite(raw.fileno(), head + header.encode().ljust(_HEADER_BYTES - 11) + b"\n", 0)
        count = self.num_bins.to_bytes(4, "little")
        os.pwrite(raw.fileno(), count, _HEADER_BYTES + len(_TO_COUNT))
        os.fsync(raw.fileno())
        raw.close()
        record = LegacyRecord(
            format=FORMAT,
            pack_size=self.pack_size,
            loss_mask_alignment=self.loss_mask_alignment,
            num_bins=self.num_bins,
            num_bytes=self._temporary.stat().st_size,
            sha256=file_sha256(self._temporary),
        )
        fields: dict[str, Any] = msgspec.to_builtins(record)
        return fields

    def _close(self) -> None:
        self._file.raw.close()
