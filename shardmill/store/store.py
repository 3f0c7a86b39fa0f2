"""Open a finished store: what is in it and where, without reading a token.

Nothing unfinished, truncated or foreign is opened. Opening costs the manifest and one directory
listing per folder, so 100,000 shards take well under a second. A store pickles as its path and
fingerprint. Contents are checked by `verify`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardmill.arguments import choices
from shardmill.errors import DamagedStoreError, OptionError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.storage.atomic import is_temporary
from shardmill.store.layout import (
    DTYPES,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    META,
    index_header,
    looks_like_data,
    mask_bytes,
)
from shardmill.store.manifest import (
    Manifest,
    SplitEntry,
    file_names,
    fingerprint,
    read_manifest,
    refuse_remote,
)

if TYPE_CHECKING:
    from shardmill.store.readers.examples import SplitView

Listing = dict[str, os.DirEntry[str]]
_CHUNK = 2**22  # a multiple of every item size
NEXT_STEP = "copy the store again or build it again; `shardmill verify` lists all damage"


def open_store(folder: str | Path) -> Store:
    """The store at `folder`, after the cheap checks: manifest, and every file's name and size."""
    folder, manifest = read_built_manifest(folder)
    found = list_files(folder, manifest)
    problems = list(damage(folder, wanted_sizes(manifest), found))
    if problems:
        more = f" (and {len(problems) - 1:,} more damaged files)" if len(problems) > 1 else ""
        raise DamagedStoreError(f"{folder}: {problems[0]}{more}; {NEXT_STEP}")
    # the listing has these times already, so this asks the disk nothing
    modified = {
        name: np.array([found[s.file].stat().st_mtime_ns for s in split.shards], np.int64)
        for name, split in manifest.splits.items()
    }
    return Store(folder, manifest, modified)


def read_built_manifest(folder: str | Path) -> tuple[Path, Manifest]:
    """The absolute path and the manifest of a store that is not a placeholder."""
    refuse_remote(folder)
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    if not manifest.built:
        raise StoreNotFoundError(
            f'{folder}: a placeholder, not built: {META} says "built": false; build it first'
        )
    return folder, manifest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatArrays:
    """The chat files of a split, mapped and read-only."""

    mask_bits: npt.NDArray[np.uint8]  # (ceil(tokens / 8),) token p is bit p % 8 of byte p // 8
    turn_starts: OffsetArray  # (turns,) in the token space of the split, never decreasing
    turn_roles: npt.NDArray[np.uint8]  # (turns,) indices into ROLES


class Store:
    """A finished folder of shards, as `open_store` returns it.

    `store["train"]` is a sequence of the documents of a split; `for name in store` and
    `name in store` are about the names of the splits.
    """

    def __init__(self, folder: Path, manifest: Manifest, modified: dict[str, OffsetArray]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.modified = modified  # by split: when each shard was written, in ns, at opening
        self.splits: tuple[str, ...] = tuple(manifest.splits)
        self.dtype: str = DTYPES[manifest.token_dtype]
        self.fingerprint = fingerprint(manifest)
        self._views: dict[str, SplitView] = {}

    def __getitem__(self, split: str) -> SplitView:
        """The documents of a split, or the examples of a chat store; see `SplitView`."""
        if split not in self._views:
            from shardmill.store.readers.examples import SplitView  # the readers import this module

            self.entry(split)
            self._views[split] = SplitView(self, split)
        return self._views[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits)

    def __contains__(self, split: object) -> bool:
        return split in self.manifest.splits

    def entry(self, split: str) -> SplitEntry:
        """What the manifest says of a split; an unknown name is refused with the known ones."""
        if split not in self.manifest.splits:
            known = choices(split, self.splits, verb="its splits are")
            raise OptionError(f"{self.folder}: no split {split!r}; {known}")
        return self.manifest.splits[split]

    def num_tokens(self, split: str) -> int:
        return self.entry(split).tokens

    def num_documents(self, split: str) -> int:
        return self.entry(split).documents

    @property
    def is_chat(self) -> bool:
        """Whether it holds conversations: then every split has `chat_arrays`."""
        return any(split.chat is not None for split in self.manifest.splits.values())

    def token_files(self, split: str) -> list[TokenFile]:
        """The shards of a split, in the order of its token space."""
        return [
            TokenFile(path=self.folder / shard.file, num_tokens=shard.tokens, dtype=self.dtype)
            for shard in self.entry(split).shards
        ]

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, mapped and read-only: document `i` ends where `i + 1` starts, the
        last one where the split ends."""
        entry = self.entry(split)
        path = self.folder / entry.index.file
        starts = map_index(path, entry.documents)
        if len(starts) and not (starts[0] == 0 and 0 <= starts[-1] <= entry.tokens):
            raise DamagedStoreError(
                f"{path}: documents start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}, the first at 0; {NEXT_STEP}"
            )
        return starts

    def chat_arrays(self, split: str) -> ChatArrays:
        """Loss mask and turns of a split of conversations, mapped."""
        entry = self.entry(split)
        if entry.chat is None:
            raise OptionError(f"{self.folder}: holds documents, so no loss mask and no turns")
        mask = self.folder / entry.chat.mask.file
        bits = _map_bytes(mask, mask_bytes(entry.tokens))
        if entry.tokens % 8 and bits[-1] >> entry.tokens % 8:
            raise DamagedStoreError(f"{mask}: has bits after its last token; {NEXT_STEP}")
        turns = self.folder / entry.chat.turns.file
        starts = map_index(turns, entry.chat.num_turns)
        if len(starts) and not 0 <= starts[0] <= starts[-1] < entry.tokens:
            raise DamagedStoreError(
                f"{turns}: turns start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}; {NEXT_STEP}"
            )
        roles = _map_bytes(self.folder / entry.chat.roles.file, entry.chat.num_turns)
        return ChatArrays(mask_bits=bits, turn_starts=starts, turn_roles=roles)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _reopen, (str(self.folder), self.fingerprint)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v.tokens:,}" for k, v in self.manifest.splits.items())
        return f"Store({str(self.folder)!r}, {self.dtype}, tokens: {sizes or 'none'})"


def _reopen(folder: str, wanted: str) -> Store:
    store = open_store(folder)
    if store.fingerprint != wanted:
        raise DamagedStoreError(
            f"{folder}: other tokens than when this store was pickled (fingerprint "
            f"{store.fingerprint[:12]}, wanted {wanted[:12]}); it was rebuilt meanwhile: reopen it"
        )
    return store


def map_index(path: Path, entries: int) -> OffsetArray:
    """The int64 of an index file; its header must be exactly the one we write."""
    try:
        with path.open("rb") as file:
            header = file.read(INDEX_HEADER_BYTES)
    except OSError as error:
        raise _cannot_map(path, error) from error
    if header != index_header(entries):
        raise DamagedStoreError(
            f"{path}: its .npy header is not that of {entries:,} int64; {NEXT_STEP}"
        )
    return _map(path, np.dtype("<i8"), entries, offset=INDEX_HEADER_BYTES)


def _map_bytes(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file that must have exactly this size."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _cannot_map(path, error) from error
    if found != size:
        raise DamagedStoreError(f"{path}: {found:,} bytes, wanted {size:,}; {NEXT_STEP}")
    return _map(path, np.dtype(np.uint8), size, offset=0)


def _map(path: Path, dtype: np.dtype[Any], entries: int, *, offset: int) -> npt.NDArray[Any]:
    if entries == 0:  # nothing to map
        return np.frombuffer(b"", dtype)
    try:
        return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(entries,)))
    except (OSError, ValueError) as error:
        raise _cannot_map(path, error) from error


def _cannot_map(path: Path, error: Exception) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: cannot be mapped ({error}); {NEXT_STEP}")


def read_chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, 4 MiB at a time, in a buffer that is used again."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            yield buffer[:size]


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


def foreign(wanted: Mapping[str, int | None], found: Mapping[str, object]) -> Iterator[str]:
    """One sentence per file that looks like data of a store, but is not listed."""
    for file in sorted(found.keys() - wanted.keys() - {META}):
        name = file.rpartition("/")[2]
        if looks_like_data(name):
            yield f"{file}: foreign: not in {META}, never read; delete it"
        elif is_temporary(name):
            yield f"{file}: left by a killed writer; delete it"


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
    kind = "truncated" if found.st_size < size else "too long"
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
