"""Find and check the files that a dataset maps.

Next to the meta.json of a store only the files it lists are read, with the sizes it lists. Without
one the files are uint16, as prescribed, and the log says so. Nothing is guessed from sizes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.formats import META_FILE, SHARD_GLOB, TOKEN_DTYPE, TOKEN_DTYPE_STORED
from niels_gpt.cache.meta import read_meta, sha256_file
from shardmill.errors import DamagedStoreError, StoreError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.store import Store, open_store, refuse_excluded

log = logging.getLogger(__name__)

_DTYPES = {TOKEN_DTYPE_STORED: TOKEN_DTYPE, "uint32-le": "uint32"}


def meta_beside(folder: Path) -> dict[str, Any] | None:
    """The meta.json in `folder`, or None without one."""
    path = folder / META_FILE
    return read_meta(str(path)) if path.exists() or path.is_symlink() else None


def find_shards(shards_dir: Path) -> list[TokenFile]:
    """The shards of a split's folder: those its store lists, or all when it has no store."""
    if not shards_dir.is_dir():
        raise StoreNotFoundError(f"{shards_dir}: no such folder; build the cache first")
    folder = shards_dir.resolve()  # the store is where the folder is, not where a link to it is
    meta = meta_beside(folder.parent)
    if meta is not None and _is_ours(meta):
        store = open_store(folder.parent)
        files = store.token_files(folder.name)
        refuse_excluded(store, folder.name, "this reader")
    else:
        paths = sorted(folder.glob(SHARD_GLOB))
        dtype = _bare_dtype(shards_dir, meta)
        files = [bare_file(path, dtype) for path in paths]
    if not any(file.num_tokens for file in files):
        raise StoreNotFoundError(
            f"{shards_dir}: no shard files with tokens ({SHARD_GLOB}); build this split first"
        )
    return files


def find_examples(
    tokens_path: Path, idx_path: Path
) -> tuple[TokenFile, OffsetArray, dict[str, Any] | None]:
    """One token file, where its examples start, and the meta.json beside it."""
    tokens, idx = tokens_path.resolve(), idx_path.resolve()
    meta = meta_beside(tokens.parent)
    if meta is None or not _is_ours(meta):
        if not tokens.is_file():
            raise StoreNotFoundError(f"{tokens_path}: no such file; build the cache first")
        file = bare_file(tokens, _bare_dtype(tokens_path, meta))
        return file, find_starts(idx, file.num_tokens), meta
    store = open_store(tokens.parent)
    for split in store.splits:
        for file in store.token_files(split):
            if file.path.name == tokens.name:
                _check_index(store, split, idx)
                refuse_excluded(store, split, "this reader")
                return file, find_starts(idx, file.num_tokens), meta
    raise StoreError(
        f"{tokens_path}: the {META_FILE} beside it does not list this file, so it is not read; "
        "it may be left from an earlier build"
    )


def _check_index(store: Store, split: str, idx: Path) -> None:
    """The index of these very tokens, byte for byte: another one would shift every mask."""
    entry = store.manifest.splits[split].index
    if idx != (store.folder / entry.file).resolve():
        raise StoreError(
            f"{idx}: not the index of these tokens, which is {store.folder / entry.file}"
        )
    if sha256_file(str(idx)) != entry.sha256:
        raise DamagedStoreError(
            f"{idx}: its sha256 is not the one in {META_FILE}; copy the cache again or build it "
            "again"
        )


def _is_ours(meta: dict[str, Any]) -> bool:
    """Whether a meta.json is a store's, also a damaged one: opening that says what is wrong."""
    return bool({"format", "version", "splits", "manifest_sha256"} & meta.keys())


def bare_file(path: Path, dtype: str) -> TokenFile:
    if not path.is_file():
        raise DamagedStoreError(
            f"{path}: not a plain file, so no tokens: put the file itself there"
        )
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
        starts = np.lib.format.open_memmap(idx_path, mode="r")
    except FileNotFoundError as missing:
        raise StoreNotFoundError(f"{idx_path}: no such file; build the cache first") from missing
    except (ValueError, EOFError, OSError, OverflowError) as broken:
        raise DamagedStoreError(f"{idx_path}: not a plain .npy file ({broken})") from broken
    if starts.dtype != np.int64 or starts.ndim != 1:
        raise DamagedStoreError(
            f"{idx_path}: {starts.dtype} of shape {starts.shape}; wanted one row of int64 offsets"
        )
    if not len(starts):
        raise StoreError(f"{idx_path}: no examples; choose another split or build a larger one")
    if (
        starts[0] != 0
        or starts[-1] > num_tokens
        or any(bool((np.diff(part) < 0).any()) for part in _overlapping(starts))
    ):
        raise DamagedStoreError(
            f"{idx_path}: offsets {starts[0]:,}..{starts[-1]:,} must rise from 0 inside the "
            f"{num_tokens:,} tokens beside them; they belong to other tokens or are damaged"
        )
    return np.asarray(starts)


def _overlapping(starts: OffsetArray, size: int = 2**20) -> list[OffsetArray]:
    """Pieces that share their ends, so that every neighbouring pair is in one of them."""
    return [starts[at : at + size + 1] for at in range(0, len(starts), size)]


def _bare_dtype(where: Path, meta: dict[str, Any] | None) -> str:
    """uint16 as prescribed when nothing says otherwise; a meta.json that is there must say it."""
    if meta is None:
        log.warning("%s: no %s says otherwise, so its tokens are read as uint16", where, META_FILE)
        return TOKEN_DTYPE
    stored = meta.get("token_dtype")
    if not isinstance(stored, str) or stored not in _DTYPES:
        raise StoreError(
            f"{where}: the {META_FILE} beside it has token_dtype {stored!r}; wanted one of "
            f"{sorted(_DTYPES)}"
        )
    return _DTYPES[stored]


__all__ = ["bare_file", "find_examples", "find_shards", "find_starts", "meta_beside"]
