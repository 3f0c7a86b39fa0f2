"""Write a legacy packed shard, for programs that read nothing else.

In: bins, in order.  Out: `<name>.npy`, which `np.load(..., allow_pickle=True)` reads as an array of
dicts of lists, and `<name>.npy.json`, which says what the bins do not.
Promise: one bin in memory, whatever the file's size: the opcodes of the pickle are written as bins
come; the file appears whole or not at all, and never over another one.
Not here: reading (legacy_reader.py). Whoever can read memmap or Parquet should get that.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.atomic import atomic_write, cannot_write, sync_folder, temporary_name
from shardmill.errors import OptionError, StoreExistsError
from shardmill.interop.packed.given import (
    WRITE_INSTEAD,
    given_bin,
    given_pack_size,
    given_path,
)
from shardmill.interop.packed.integer_runs import encode_run
from shardmill.interop.packed.legacy_reader import (
    FORMAT,
    LegacyRecord,
    record_bytes,
    record_path,
)
from shardmill.interop.packed.pickle_values import MOST_TOKENS
from shardmill.interop.packed.records import Check, checked_alignment

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
