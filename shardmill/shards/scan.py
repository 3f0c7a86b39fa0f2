"""Compare the files of a folder with what a manifest lists: names, kinds and sizes only.

In: a folder, a manifest.  Out: sentences about what is missing, truncated, swollen or foreign.
Promise: reads no file; one directory listing per folder, so 100,000 shards take well under a
second; a link that leads out of the folder is a problem, not a file.
Not here: contents (verify.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shardmill.atomic import is_temporary
from shardmill.records import OffsetArray
from shardmill.shards.checks import file_names
from shardmill.shards.entries import Manifest
from shardmill.shards.layout import (
    DTYPES,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    META,
    looks_like_data,
    mask_bytes,
)

Listing = dict[str, os.DirEntry[str]]


def wanted_sizes(manifest: Manifest) -> dict[str, int | None]:
    """Relative path -> bytes of every listed file; None where the manifest does not fix it."""
    size = ITEMSIZE[DTYPES[manifest.token_dtype]]
    wanted: dict[str, int | None] = {}
    for split in manifest.splits.values():
        wanted[split.index.file] = INDEX_HEADER_BYTES + 8 * split.index.entries
        if split.chat:
            chat = split.chat
            wanted[chat.mask.file] = mask_bytes(split.tokens)
            wanted[chat.turns.file] = INDEX_HEADER_BYTES + 8 * chat.turns.entries
            wanted[chat.roles.file] = chat.roles.entries
        wanted.update([(shard.file, shard.tokens * size) for shard in split.shards])
    if manifest.dropped:
        wanted[manifest.dropped.file] = None
    return wanted


def list_files(folder: Path, manifest: Manifest) -> Listing:
    """Relative path -> entry, for the folder itself and the folders of its splits and shards."""
    found = {entry.name: entry for entry in _entries(folder)}
    parts = {file.partition("/")[0] for file in file_names(manifest)}
    for part in sorted(parts | manifest.splits.keys()):
        if part in found and _is_folder(found[part], folder):
            found.update([(f"{part}/{entry.name}", entry) for entry in _entries(folder / part)])
    return found


def damage(folder: Path, wanted: Mapping[str, int | None], found: Listing) -> Iterator[str]:
    """One sentence per listed file that is not there with the right size."""
    for file, size in wanted.items():
        entry = found.get(file)
        problem = "missing" if entry is None else _file_problem(entry, size, folder)
        if problem:
            yield f"{file}: {problem}"


def modification_times(found: Listing, files: Sequence[str]) -> OffsetArray:
    """Of files that are there, in ns. They were looked at before, so this asks the disk nothing."""
    return np.fromiter((found[file].stat().st_mtime_ns for file in files), np.int64, len(files))


def foreign(wanted: Mapping[str, int | None], found: Mapping[str, object]) -> Iterator[str]:
    """One sentence per file that looks like data of a store, but is not listed."""
    for file in sorted(found.keys() - wanted.keys() - {META}):
        name = file.rpartition("/")[2]
        if looks_like_data(name):
            yield f"{file}: foreign: not in {META}, never read; delete it"
        elif is_temporary(name):
            yield f"{file}: left behind by a killed writer; delete it"


def _file_problem(entry: os.DirEntry[str], size: int | None, folder: Path) -> str | None:
    if not _inside(entry, folder):
        return "a link that leads out of the store; put the file itself there"
    try:
        found = entry.stat()
    except OSError as error:
        return f"cannot be examined ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "not a plain file"
    if size is None or found.st_size == size:
        return None
    kind = "truncated" if found.st_size < size else "swollen"
    return f"{kind}: found {found.st_size:,} bytes, wanted {size:,}"


def _is_folder(entry: os.DirEntry[str], folder: Path) -> bool:
    try:
        return _inside(entry, folder) and entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inside(entry: os.DirEntry[str], folder: Path) -> bool:
    if not entry.is_symlink():
        return True
    return Path(os.path.realpath(entry.path)).is_relative_to(os.path.realpath(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
