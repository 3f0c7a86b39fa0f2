"""What a packed Parquet file of ours says of itself, so that damage never becomes tokens.

In: bins of a row group, and the keys of a file's metadata.  Out: digests and a seal, or checked.
Promise: a file of ours gives the bins that were written, or an error. Page checksums leave out the
footer and the headers of pages (which column, which encoding, how many values), so the digest is
over the numbers as they come out of Parquet, and the seal over all that is said of them.
Not here: reading and writing Parquet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.errors import DamagedStoreError
from shardmill.records import Ragged

VERSION = "1"
COLUMNS = {"input_ids": "int32", "loss_mask": "uint8", "seq_start_id": "int32"}
"""The columns of lists, and the dtypes that we write."""

_PREFIX = b"shardmill_"
_SEAL = b"shardmill_seal"
_KEYS = tuple(
    _PREFIX + name for name in (b"packed", b"pack_size", b"loss_mask_alignment", b"num_bins")
)
_DIGESTS = b"shardmill_row_groups"
_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSays:
    """What a file's metadata says. None: the file is somebody else's."""

    pack_size: int | None = None
    loss_mask_alignment: str | None = None
    num_bins: int | None = None
    digests: tuple[str, ...] | None = None  # of each row group


def group_digest(columns: Sequence[Ragged]) -> str:
    """sha256 over the lists of a row group, as dtypes of `COLUMNS`."""
    digest = hashlib.sha256()
    for column, dtype in zip(columns, COLUMNS.values(), strict=True):
        for array, kind in ((column.offsets, "int64"), (column.values, dtype)):
            wanted = np.dtype(kind).newbyteorder("<")
            digest.update(np.ascontiguousarray(array, wanted).view(np.uint8).data)
    return digest.hexdigest()


def write_metadata(said: ParquetSays) -> dict[bytes, bytes]:
    """The keys of a file of ours, with their seal."""
    values = (VERSION, said.pack_size, said.loss_mask_alignment, said.num_bins)
    plain = {key: str(value).encode() for key, value in zip(_KEYS, values, strict=True)}
    plain[_DIGESTS] = "".join(said.digests or ()).encode()
    return {**plain, _SEAL: _seal(plain)}


def read_metadata(metadata: Mapping[bytes, bytes], path: Path) -> ParquetSays:
    """What a file says, checked against its seal."""
    ours = {key: value for key, value in metadata.items() if key.startswith(_PREFIX)}
    if not ours:
        return ParquetSays()
    if ours.keys() != {*_KEYS, _DIGESTS, _SEAL} or ours.pop(_SEAL) != _seal(ours):
        raise DamagedStoreError(
            f"{path}: its metadata is not as shardmill wrote it: damaged, changed, or of another "
            "version; copy it again, or write it again with this one"
        )
    version, pack_size, alignment, num_bins = (ours[key].decode() for key in _KEYS)
    if version != VERSION:
        raise DamagedStoreError(f"{path}: packed version {version!r}, wanted {VERSION!r}")
    digests = ours[_DIGESTS].decode()
    return ParquetSays(
        pack_size=int(pack_size),
        loss_mask_alignment=alignment,
        num_bins=int(num_bins),
        digests=tuple(digests[at : at + _DIGITS] for at in range(0, len(digests), _DIGITS)),
    )


def _seal(plain: Mapping[bytes, bytes]) -> bytes:
    """sha256 over keys and values, each with its length."""
    digest = hashlib.sha256()
    for key in sorted(plain):
        for part in (key, plain[key]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest().encode()
