"""The header of a `.npy` file of tokens.

In: a path.  Out: a `TokenFile` that says where its tokens begin.
Promise: only what can be mapped as it lies is accepted: one dimension, uint16 or uint32, little
endian, complete and nothing behind it. No pickle is ever read.
Not here: tokens.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.records import TokenFile

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's own length, by version
_MAX_HEADER = 10_000  # numpy reads no longer ones either
_DTYPES = {"<u2": "uint16", "<u4": "uint32"}
_AGAIN = "copy the file again or write it again"


def read_npy_header(path: Path, num_bytes: int) -> TokenFile:
    """What the first bytes of `path`, a file of `num_bytes`, say about the rest."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    fields, offset = _parse(path, head)
    dtype, num_tokens = _checked_fields(path, fields)
    if num_tokens == 0:
        raise StoreError(f"{path}: holds no token (shape (0,)); remove it or write it again")
    found = TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, offset=offset)
    if num_bytes != offset + found.num_bytes:
        problem = "truncated" if num_bytes < offset + found.num_bytes else "too long"
        raise DamagedStoreError(
            f"{path}: {problem}: found {num_bytes:,} bytes, wanted {offset + found.num_bytes:,} "
            f"({num_tokens:,} {dtype} tokens behind a header of {offset}); {_AGAIN}"
        )
    if offset % (found.num_bytes // num_tokens):
        raise StoreError(
            f"{path}: its header has {offset} bytes, so the {dtype} tokens are not aligned; "
            f"np.save(path, np.load(path)) puts that right"
        )
    return found


def _parse(path: Path, head: bytes) -> tuple[dict[str, Any], int]:
    """The header's dictionary, and where the data begins."""
    size = _LENGTH_BYTES.get((head[6], head[7])) if len(head) > 7 else None
    if not head.startswith(_MAGIC) or size is None:
        raise DamagedStoreError(
            f"{path}: begins with {head[:8]!r}, so it is no .npy file of version 1, 2 or 3; "
            f"{_AGAIN}"
        )
    start = 8 + size
    stop = start + int.from_bytes(head[8:start], "little")
    if len(head) < stop:
        raise DamagedStoreError(
            f"{path}: truncated: its header ends at byte {stop:,}, but {len(head):,} were found "
            f"(at most {_MAX_HEADER:,} are looked at); {_AGAIN}"
        )
    try:
        fields = ast.literal_eval(head[start:stop].decode("utf-8"))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(
            f"{path}: its .npy header is damaged ({error}); {_AGAIN}"
        ) from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise DamagedStoreError(f"{path}: not the header of an array: {fields!r:.200}; {_AGAIN}")
    return fields, stop


def _checked_fields(path: Path, fields: dict[str, Any]) -> tuple[str, int]:
    """The dtype, and how many tokens there are."""
    shape, descr = fields["shape"], fields["descr"]
    dtype = _DTYPES.get(descr) if isinstance(descr, str) else None
    if dtype is None:
        raise StoreError(
            f"{path}: holds {descr!r:.100}, wanted '<u2' or '<u4' (uint16 or uint32, little "
            f"endian); {_advice(descr)}"
        )
    if not isinstance(shape, tuple) or len(shape) != 1:
        raise StoreError(
            f"{path}: an array of shape {shape!r:.100}, wanted one dimension; flatten it where it "
            f"is made"
        )
    num_tokens = shape[0]
    if type(num_tokens) is not int or num_tokens < 0:
        raise DamagedStoreError(f"{path}: an array of shape {shape!r:.100}; {_AGAIN}")
    return dtype, num_tokens


def _advice(descr: object) -> str:
    kind = descr[1:2] if isinstance(descr, str) else ""
    if kind == "O":
        return "it holds Python objects, which would have to be unpickled: that is never done"
    if kind in ("i", "u"):
        return "check that no id is negative or too large, then save it with .astype('<u4')"
    return "token ids are whole numbers: is this a file of tokens?"
