"""Find and check the files a dataset maps.

In: paths as a caller gives them.  Out: `TokenFile`s of known size and dtype, and example starts.
Promise: beside a store's meta.json only what it lists is read, with the size it lists; without
one the files are uint16, as prescribed, and the log says so. Nothing is guessed from sizes.
Not here: mapping itself (shardmill.mapped) and batches.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.formats import META_FILE, SHARD_GLOB, TOKEN_DTYPE, TOKEN_DTYPE_STORED
from niels_gpt.cache.meta import read_meta
from shardmill.errors import DamagedStoreError, StoreError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.shards import open_store

log = logging.getLogger(__name__)

_STORE_FORMAT = "shardmill-store"
_DTYPES = {TOKEN_DTYPE_STORED: TOKEN_DTYPE, "uint32-le": "uint32"}


def meta_beside(folder: Path) -> dict[str, Any] | None:
    """The meta.json in `folder`, or None without one."""
    path = folder / META_FILE
    return read_meta(str(path)) if path.is_file() else None


def find_shards(shards_dir: Path) -> list[TokenFile]:
    """The shards of a split's folder: those its store lists, or all when it has no store."""
    if not shards_dir.is_dir():
        raise StoreNotFoundError(f"{shards_dir}: no such folder; build the cache first")
    meta = meta_beside(shards_dir.parent)
    if meta is not None and meta.get("format") == _STORE_FORMAT:
        store = open_store(shards_dir.parent)
        files = store.token_files(shards_dir.name)
    else:
        paths = sorted(shards_dir.glob(SHARD_GLOB))
        dtype = _bare_dtype(shards_dir, meta)
        files = [bare_file(path, dtype) for path in paths]
    if not any(file.num_tokens for file in files):
        raise StoreNotFoundError(
            f"{shards_dir}: no shard files with tokens ({SHARD_GLOB}); build this split first"
        )
    return files


def find_tokens(tokens_path: Path) -> tuple[TokenFile, dict[str, Any] | None]:
    """One token file and the meta.json beside it."""
    meta = meta_beside(tokens_path.parent)
    if meta is None or meta.get("format") != _STORE_FORMAT:
        if not tokens_path.is_file():
            raise StoreNotFoundError(f"{tokens_path}: no such file; build the cache first")
        return bare_file(tokens_path, _bare_dtype(tokens_path, meta)), meta
    store = open_store(tokens_path.parent)
    for split in store.splits:
        for file in store.token_files(split):
            if file.path.name == tokens_path.name:
                return file, meta
    raise StoreError(
        f"{tokens_path}: the {META_FILE} beside it does not list this file, so it is not read; "
        "it may be left from an earlier build"
    )


def bare_file(path: Path, dtype: str) -> TokenFile:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise DamagedStoreError(
            f"{path}: {size:,} bytes are no whole number of {dtype} tokens; it was cut short or "
            "is no token file: build it again"
        )
    return TokenFile(path=path, num_tokens=size // width, dtype=dtype)


def find_starts(idx_path: Path, num_tokens: int) -> OffsetArray:
    """Where each example starts, mapped and checked: int64, rising, inside the token file."""
    try:
        starts = np.load(idx_path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as missing:
        raise StoreNotFoundError(f"{idx_path}: no such file; build the cache first") from missing
    except ValueError as broken:
        raise DamagedStoreError(f"{idx_path}: not a plain .npy file ({broken})") from broken
    if starts.dtype != np.int64 or starts.ndim != 1:
        raise DamagedStoreError(
            f"{idx_path}: {starts.dtype} of shape {starts.shape}; wanted one row of int64 offsets"
        )
    if not len(starts):
        raise StoreError(f"{idx_path}: no examples; choose another split or build a larger one")
    if (
        starts[0] < 0
        or starts[-1] > num_tokens
        or any(bool((np.diff(part) < 0).any()) for part in _overlapping(starts))
    ):
        raise DamagedStoreError(
            f"{idx_path}: offsets {starts[0]:,}..{starts[-1]:,} must rise inside the "
            f"{num_tokens:,} tokens beside them; they belong to other tokens or are damaged"
        )
    return np.asarray(starts)


def _overlapping(starts: OffsetArray, size: int = 2**20) -> list[OffsetArray]:
    """Pieces that share their ends, so that every neighbouring pair is in one of them."""
    return [starts[at : at + size + 1] for at in range(0, len(starts), size)]


def _bare_dtype(where: Path, meta: dict[str, Any] | None) -> str:
    stored = (meta or {}).get("token_dtype")
    if stored is None:
        log.info("%s: no meta.json says otherwise, so its tokens are read as uint16", where)
        return TOKEN_DTYPE
    if stored not in _DTYPES:
        raise StoreError(f"{where}: token_dtype {stored!r}; wanted one of {sorted(_DTYPES)}")
    return _DTYPES[stored]


__all__ = ["bare_file", "find_shards", "find_starts", "find_tokens", "meta_beside"]
