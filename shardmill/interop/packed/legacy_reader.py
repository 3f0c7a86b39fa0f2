"""Read legacy packed shards: a `.npy` that holds a pickle of dicts.

In: a path.  Out: `PackedBin`s in order, one at a time.
Promise: nothing is unpickled (unpickle.py interprets the file); every bin keeps the invariant of
packed formats or is refused by name; memory is that of one bin. What the file does not say - the
pack size, the alignment of its masks - is taken from the record beside it or from the caller.
Not here: writing (legacy_writer.py), conversion (legacy_convert.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from shardmill.errors import DamagedStoreError, ManifestError, StoreError, StoreNotFoundError
from shardmill.interop.packed.arrays import file_sha256
from shardmill.interop.packed.given import path_to_read
from shardmill.interop.packed.pickle_bytes import PickleBytes
from shardmill.interop.packed.pickle_values import Bin
from shardmill.interop.packed.records import PackedBin, bin_problem, without_end
from shardmill.interop.packed.seals import check_plain
from shardmill.interop.packed.unpickle import read_bins

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
