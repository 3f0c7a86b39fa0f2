"""The names and fixed bytes of a store: FORMAT.md as constants and small functions.

In: a split's name, a number.  Out: a relative path, a header, a dtype.
Promise: pure; the writer and every reader take names and headers from here only.
Not here: opening files.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from shardmill.errors import OptionError

FORMAT: Literal["shardmill-store"] = "shardmill-store"
VERSION: Literal[1] = 1
META = "meta.json"
DROPPED = "dropped.jsonl"
ORIGINS = "origins.table"
INDEX_HEADER_BYTES = 128
MAX_COUNT = 2**62

DtypeName: TypeAlias = Literal["uint16", "uint32"]
StoredDtype: TypeAlias = Literal["uint16-le", "uint32-le"]
DTYPES: dict[str, DtypeName] = {"uint16-le": "uint16", "uint32-le": "uint32"}
STORED: dict[str, StoredDtype] = {"uint16": "uint16-le", "uint32": "uint32-le"}
ITEMSIZE: dict[str, int] = {"uint16": 2, "uint32": 4}

_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_OWN = re.compile(
    rf"{_SPLIT.pattern}(/shard_[0-9]{{5,}}\.bin|_(tokens|mask|roles)\.bin|_(idx|turns)\.npy)"
    rf"|dropped\.jsonl|origins\.table|packs/{_SPLIT.pattern}-[A-Za-z0-9_.-]{{1,100}}\.plan",
    re.ASCII,
)
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_FILE = re.compile(rf"{_PART}(/{_PART})?", re.ASCII)


def is_split_name(name: str) -> bool:
    """Letters, digits, `_` and `-`, at most 64: a folder name on every system."""
    return _SPLIT.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """A path inside the store: one or two plain parts, so never absolute, `..` or hidden."""
    return _FILE.fullmatch(name) is not None


def shard_name(split: str, number: int) -> str:
    return f"{split}/shard_{number:05d}.bin"


def single_name(split: str) -> str:
    return f"{split}_tokens.bin"


def index_name(split: str) -> str:
    return f"{split}_idx.npy"


def mask_name(split: str) -> str:
    return f"{split}_mask.bin"


def turns_name(split: str) -> str:
    return f"{split}_turns.npy"


def roles_name(split: str) -> str:
    return f"{split}_roles.bin"


def mask_bytes(tokens: int) -> int:
    """The size of a loss mask: one bit per token, in whole bytes."""
    return -(-tokens // 8)


def is_own_name(file: str) -> bool:
    """Whether a relative path is one that a build of ours gives to a file of a store, or to a plan
    or table of it: that goes with the store it was made of."""
    return file == META or _OWN.fullmatch(file) is not None


def looks_like_data(name: str) -> bool:
    """Whether a reader that lists folders would take this file for data of a store."""
    return name.endswith((".bin", ".npy")) or name == DROPPED


def index_header(entries: int) -> bytes:
    """The first 128 bytes of an index: a version 1.0 .npy header for `entries` int64."""
    shape = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({entries},), }}"
    head = b"\x93NUMPY\x01\x00" + (INDEX_HEADER_BYTES - 10).to_bytes(2, "little")
    return head + shape.encode("ascii").ljust(INDEX_HEADER_BYTES - 11) + b"\n"


def check_dtype(dtype: str) -> None:
    if dtype not in ITEMSIZE:
        raise OptionError(f"dtype={dtype!r}: a store holds 'uint16' or 'uint32' tokens")


def check_shape(splits: tuple[str, ...], dtype: str, shard_bytes: int | None) -> None:
    """Refuse, in the caller's words, a store that could not be written."""
    check_dtype(dtype)
    for name in splits:
        if not is_split_name(name):
            raise OptionError(
                f"split {name!r}: a split's name is 1 to 64 letters, digits, '_' or '-', and "
                "begins with a letter or digit"
            )
    if not splits or len({name.lower() for name in splits}) < len(splits):
        raise OptionError(f"splits={list(splits)}: name at least one, each once (case ignored)")
    size = ITEMSIZE[dtype]
    if shard_bytes is not None and (not size <= shard_bytes <= MAX_COUNT or shard_bytes % size):
        raise OptionError(
            f"shard_bytes={shard_bytes:,} does not hold a whole number of {dtype} tokens; use a "
            f"positive multiple of {size}, for instance {max(size, shard_bytes // size * size):,}"
        )
