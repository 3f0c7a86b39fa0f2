"""Open a finished store: what is in it and where, without reading a token.

In: a folder.  Out: a `Store`: manifest, token files with known sizes, document starts.
Promise: nothing unfinished, placeholder, truncated, swollen or foreign is ever opened; opening
costs the manifest and one directory listing per folder; a store pickles as its path.
Not here: contents of shards (verify.py), reading windows (the mapped room).

Compare the files of a folder with what a manifest lists: names, kinds and sizes only.

In: a folder, a manifest.  Out: sentences about what is missing, truncated, swollen or foreign.
Promise: reads no file; one directory listing per folder, so 100,000 shards take well under a
second; a link that leads out of the folder is a problem, not a file.
Not here: contents (verify.py).

Map the small files of a store: indexes, masks, roles.

In: a path and how many entries it must have.  Out: a read-only array on disk.
Promise: a file of another size or header is refused with the way out; nothing is read but headers.
Not here: tokens (the mapped room), contents (verify.py).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import choices
from shardmill.errors import DamagedStoreError, OptionError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.storage.atomic import is_temporary
from shardmill.store.entries import Manifest, SplitEntry, file_names
from shardmill.store.layout import (
    DTYPES,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    META,
    index_header,
    looks_like_data,
    mask_bytes,
)
from shardmill.store.manifest import read_manifest, refuse_remote

if TYPE_CHECKING:
    from shardmill.store.readers.examples import SplitView

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


NEXT_STEP = "copy the store again or build it again; `shardmill verify` lists all damage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatArrays:
    """The chat files of a split, mapped and read-only."""

    mask_bits: npt.NDArray[np.uint8]  # (ceil(tokens / 8),) token p is bit p % 8 of byte p // 8
    turn_starts: OffsetArray  # (turns,) in the token space of the split, never decreasing
    turn_roles: npt.NDArray[np.uint8]  # (turns,) places in ROLES


def map_index(path: Path, entries: int) -> OffsetArray:
    """The int64 of an index file; its header must be exactly the one we write."""
    try:
        with path.open("rb") as file:
            header = file.read(INDEX_HEADER_BYTES)
        if header != index_header(entries):
            raise DamagedStoreError(
                f"{path}: its .npy header is not that of {entries:,} int64; {NEXT_STEP}"
            )
        if entries == 0:  # an empty file part cannot be mapped
            starts = np.empty(0, np.int64)
            starts.flags.writeable = False
            return starts
        mapped = np.memmap(path, "<i8", mode="r", offset=INDEX_HEADER_BYTES, shape=(entries,))
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedStoreError):
            raise
        raise DamagedStoreError(f"{path}: cannot be mapped ({error}); {NEXT_STEP}") from error
    return np.asarray(mapped)


def map_bytes(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file that must have exactly this size."""
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedStoreError(f"{path}: {found:,} bytes, wanted {size:,}; {NEXT_STEP}")
        if size == 0:
            return np.frombuffer(b"", np.uint8)
        mapped = np.memmap(path, np.uint8, mode="r", shape=(size,))
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedStoreError):
            raise
        raise DamagedStoreError(f"{path}: cannot be mapped ({error}); {NEXT_STEP}") from error
    return np.asarray(mapped)


def open_store(folder: str | Path) -> Store:
    """The store at `folder`, after the cheap checks: manifest, and every file's name and size."""
    refuse_remote(folder)
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    if not manifest.built:
        raise not_built(folder)
    wanted, found = wanted_sizes(manifest), list_files(folder, manifest)
    problems = list(damage(folder, wanted, found))
    if problems:
        more = f" (and {len(problems) - 1:,} more damaged files)" if len(problems) > 1 else ""
        raise DamagedStoreError(f"{folder}: {problems[0]}{more}; {NEXT_STEP}")
    modified = {
        name: modification_times(found, [shard.file for shard in split.shards])
        for name, split in manifest.splits.items()
    }
    return Store(folder, manifest, modified)


class ShardTable(NamedTuple):
    """The shards of a split as columns: 100,000 of them are soon made."""

    paths: list[str]
    num_tokens: OffsetArray
    modified: OffsetArray  # when each was written, in ns, as seen when the store was opened


class Store:
    """A finished folder of shards, as `open_store` returns it.

    `store["train"]` is a sequence of the documents of a split; `for name in store` and
    `name in store` are about the names of the splits.
    """

    def __init__(self, folder: Path, manifest: Manifest, modified: dict[str, OffsetArray]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._modified = modified  # by split: when each shard was written
        self.splits: tuple[str, ...] = tuple(manifest.splits)
        self.dtype: str = DTYPES[manifest.token_dtype]
        self.fingerprint = fingerprint(manifest)
        self._views: dict[str, SplitView] = {}

    def __getitem__(self, split: str) -> SplitView:
        """The documents of a split, or the examples of a chat store; see `SplitView`."""
        if split not in self._views:
            from shardmill.store.readers.examples import SplitView  # the readers import this module

            self._entry(split)
            self._views[split] = SplitView(self, split)
        return self._views[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits)

    def __contains__(self, split: object) -> bool:
        return split in self.manifest.splits

    def num_tokens(self, split: str) -> int:
        return self._entry(split).tokens

    def num_documents(self, split: str) -> int:
        return self._entry(split).documents

    @property
    def is_chat(self) -> bool:
        """Whether it holds conversations: then every split has `chat_arrays`."""
        return any(split.chat is not None for split in self.manifest.splits.values())

    def token_files(self, split: str) -> list[TokenFile]:
        """The shards of a split, in the order of its token space."""
        return [
            TokenFile(path=self.folder / shard.file, num_tokens=shard.tokens, dtype=self.dtype)
            for shard in self._entry(split).shards
        ]

    def shard_table(self, split: str) -> ShardTable:
        """The same as columns, with the times by which a shard is known again."""
        shards = self._entry(split).shards
        root = f"{self.folder}/"
        return ShardTable(
            paths=[root + shard.file for shard in shards],
            num_tokens=np.array([shard.tokens for shard in shards], np.int64),
            modified=self._modified[split],
        )

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, read-only, on disk: document `i` ends where `i + 1` starts, the
        last one where the split ends."""
        entry = self._entry(split)
        path = self.folder / entry.index.file
        starts = map_index(path, entry.documents)
        if len(starts) and not (starts[0] == 0 and 0 <= starts[-1] <= entry.tokens):
            raise DamagedStoreError(
                f"{path}: documents start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}, the first at 0; {NEXT_STEP}"
            )
        return starts

    def chat_arrays(self, split: str) -> ChatArrays:
        """Loss mask and turns of a split of conversations, on disk."""
        entry = self._entry(split)
        if entry.chat is None:
            raise OptionError(f"{self.folder}: holds documents, so no loss mask and no turns")
        mask = self.folder / entry.chat.mask.file
        bits = map_bytes(mask, mask_bytes(entry.tokens))
        if entry.tokens % 8 and bits[-1] >> entry.tokens % 8:
            raise DamagedStoreError(f"{mask}: has bits behind its last token; {NEXT_STEP}")
        turns = self.folder / entry.chat.turns.file
        starts = map_index(turns, entry.chat.num_turns)
        if len(starts) and not 0 <= starts[0] <= starts[-1] < entry.tokens:
            raise DamagedStoreError(
                f"{turns}: turns start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}; {NEXT_STEP}"
            )
        roles = map_bytes(self.folder / entry.chat.roles.file, entry.chat.num_turns)
        return ChatArrays(mask_bits=bits, turn_starts=starts, turn_roles=roles)

    def _entry(self, name: str) -> SplitEntry:
        if name not in self.manifest.splits:
            known = choices(name, self.splits, verb="its splits are")
            raise OptionError(f"{self.folder}: no split {name!r}; {known}")
        return self.manifest.splits[name]

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _reopen, (str(self.folder), self.fingerprint)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v.tokens:,}" for k, v in self.manifest.splits.items())
        return f"Store({str(self.folder)!r}, {self.dtype}, tokens: {sizes or 'none'})"


def fingerprint(manifest: Manifest) -> str:
    """sha256 over what the tokens are: equal fingerprints, equal splits, documents and ids.

    The facts that do not change the tokens (names, ledger, engine) are left out on purpose.
    """
    identity = {
        "format": manifest.format,
        "version": manifest.version,
        "token_dtype": manifest.token_dtype,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "splits": manifest.splits,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def not_built(folder: Path) -> StoreNotFoundError:
    """The one wording for a placeholder."""
    return StoreNotFoundError(
        f'{folder}: a placeholder, not built: {META} says "built": false; build it first'
    )


def _reopen(folder: str, wanted: str) -> Store:
    store = open_store(folder)
    if store.fingerprint != wanted:
        raise DamagedStoreError(
            f"{folder}: other tokens than when this store was pickled (fingerprint "
            f"{store.fingerprint[:12]}, wanted {wanted[:12]}); it was rebuilt meanwhile: reopen it"
        )
    return store
