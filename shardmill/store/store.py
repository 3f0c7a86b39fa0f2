"""A finished store: open it without reading a token, and publish it atomically.

Nothing unfinished, truncated or foreign is opened. Opening costs the manifest and one directory
listing per folder, so 100,000 shards take well under a second. A store pickles as its path and
fingerprint. Contents are checked by `verify`.

While a store is published, its target holds the old store, nothing (only if nothing was there) or
the whole new one. A finished store is replaced only on request. A file that no build of ours makes
is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import choices
from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.records import OffsetArray, PreferenceKind, TokenFile
from shardmill.storage.atomic import exchange, is_temporary, sync_folder, temporary_name
from shardmill.store.branches import num_records, problems_of
from shardmill.store.layout import DTYPES, EXCLUDE, META, index_header, is_own_name, looks_like_data
from shardmill.store.manifest import (
    Manifest,
    SplitEntry,
    fingerprint,
    listed_files,
    read_manifest,
    refuse_remote,
)

if TYPE_CHECKING:
    from shardmill.store.readers.documents import SplitView

Listing = dict[str, os.DirEntry[str]]
_CHUNK = 2**22  # a multiple of every item size
_NEXT_STEP = "copy the store again or build it again; `shardmill verify` lists all damage"


def open_store(folder: str | Path) -> Store:
    """The store at `folder`, after the cheap checks: manifest, and every file's name and size."""
    folder, manifest = read_built_manifest(folder)
    found = list_files(folder, manifest)
    problems = list(damage(folder, wanted_sizes(manifest), found))
    if problems:
        more = f" (and {len(problems) - 1:,} more damaged files)" if len(problems) > 1 else ""
        raise DamagedStoreError(f"{folder}: {problems[0]}{more}; {_NEXT_STEP}")
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
            from shardmill.store.readers.documents import (
                SplitView,  # the readers import this module
            )

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

    @property
    def preference(self) -> PreferenceKind | None:
        """Whether the answers of a preference store have ranks or labels; None: another store."""
        chats = (split.chat for split in self.manifest.splits.values())
        found = (chat.preference for chat in chats if chat is not None)
        return next((one.kind for one in found if one is not None), None)

    def branches(self, split: str) -> OffsetArray:
        """(branches, 4) example, prefix, record and value of each branch, mapped, checked."""
        entry = self.entry(split)
        found = entry.chat.preference if entry.chat else None
        if found is None:
            raise OptionError(f"{self.folder}: holds no preferences, so no branches")
        path = self.folder / found.branches.file
        links = _map(path, np.dtype("<i8"), 4 * found.branches.entries).reshape(-1, 4)
        for problem in problems_of(links, found.kind, entry.documents):
            raise damaged(path, problem)
        if num_records(links) != found.records:
            raise damaged(path, f"{num_records(links):,} records, wanted {found.records:,}")
        return links

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
            wanted = f"wanted within 0..{entry.tokens:,}, the first at 0"
            raise damaged(path, f"documents start at {starts[0]:,}..{starts[-1]:,}, {wanted}")
        return starts

    def chat_arrays(self, split: str) -> ChatArrays:
        """Loss mask and turns of a split of conversations, mapped."""
        entry = self.entry(split)
        if entry.chat is None:
            raise OptionError(f"{self.folder}: holds documents, so no loss mask and no turns")
        mask = self.folder / entry.chat.mask.file
        bits = _map(mask, np.dtype(np.uint8), -(-entry.tokens // 8))
        if entry.tokens % 8 and bits[-1] >> entry.tokens % 8:
            raise damaged(mask, "has bits after its last token")
        turns = self.folder / entry.chat.turns.file
        starts = map_index(turns, entry.chat.num_turns)
        if len(starts) and not 0 <= starts[0] <= starts[-1] < entry.tokens:
            wanted = f"wanted within 0..{entry.tokens:,}"
            raise damaged(turns, f"turns start at {starts[0]:,}..{starts[-1]:,}, {wanted}")
        roles = self.folder / entry.chat.roles.file
        numbers = _map(roles, np.dtype(np.uint8), entry.chat.num_turns)
        return ChatArrays(mask_bits=bits, turn_starts=starts, turn_roles=numbers)

    def damaged(self, split: str, what: str) -> DamagedStoreError:
        """The error for a split that contradicts itself."""
        return DamagedStoreError(
            f"{self.folder}, split {split!r}: {what}; check it with `shardmill verify`, then copy "
            "or build it again"
        )

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


def damaged(path: Path, what: str) -> DamagedStoreError:
    """The error for a file of a store that is not as it was built."""
    return DamagedStoreError(f"{path}: {what}; {_NEXT_STEP}")


def document_spans(
    document_starts: OffsetArray, numbers: OffsetArray, num_tokens: int
) -> tuple[OffsetArray, OffsetArray]:
    """Where these documents start and stop; the last one stops at the end of the split."""
    stops = np.full(len(numbers), num_tokens, np.int64)
    inner = numbers < len(document_starts) - 1
    stops[inner] = document_starts[numbers[inner] + 1]
    return document_starts[numbers], stops


def map_index(path: Path, entries: int) -> OffsetArray:
    """The int64 of an index file, mapped; its header must be exactly the one we write."""
    return _map(path, np.dtype("<i8"), entries, header=index_header(entries))


def _map(
    path: Path, dtype: np.dtype[Any], entries: int, *, header: bytes = b""
) -> npt.NDArray[Any]:
    """The array in a file that has exactly this header and size."""
    wanted = len(header) + entries * dtype.itemsize
    try:
        with path.open("rb") as file:
            found, size = file.read(len(header)), os.fstat(file.fileno()).st_size
            if found == header and size == wanted and entries:  # nothing can be mapped of nothing
                shape = (entries,)
                return np.asarray(np.memmap(file, dtype, "r", offset=len(header), shape=shape))
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be mapped ({error})") from error
    if found != header:
        raise damaged(path, f"its .npy header is not that of {entries:,} int64")
    if size != wanted:
        raise damaged(path, f"{size:,} bytes, wanted {wanted:,}")
    return np.frombuffer(b"", dtype)


def read_chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, 4 MiB at a time, in a buffer that is used again."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            yield buffer[:size]


Span: TypeAlias = tuple[int, int] | tuple[None, None]
"""The first and the last document with a token in a shard; none of a shard without tokens."""


class ShardDocuments:
    """Which documents have tokens in each of some shards that follow one another.

    The document of token `t` is the number of starts <= t, minus one, and such counts add up over
    chunks of starts: so neither a build nor a check holds all of them.
    """

    def __init__(
        self, shard_tokens: Sequence[int], *, first_token: int = 0, first_document: int = 0
    ) -> None:
        """`first_token`, `first_document`: how many the split has before these shards."""
        edges = np.cumsum([first_token, *shard_tokens], dtype=np.int64)
        self._begins, self._ends = edges[:-1], edges[1:]
        self._firsts = np.full(len(shard_tokens), first_document - 1, np.int64)
        self._lasts = self._firsts.copy()

    def add(self, starts: OffsetArray) -> None:
        """Count the next starts, which do not decrease."""
        self._firsts += starts.searchsorted(self._begins, side="right")
        self._lasts += starts.searchsorted(self._ends - 1, side="right")

    def spans(self) -> list[Span]:
        return [
            (first, last) if begin < end else (None, None)
            for first, last, begin, end in zip(
                *(part.tolist() for part in (self._firsts, self._lasts, self._begins, self._ends)),
                strict=True,
            )
        ]


def documents_started(spans: Sequence[Span], documents: int) -> list[int]:
    """How many of the documents of a split start in each of its shards.

    One that starts where two shards meet starts in the second; after the last token there is no
    second, so what starts there starts in the last shard.
    """
    before = [0, *(last + 1 for _, last in spans[:-1] if last is not None), documents]
    return [stop - start for start, stop in pairwise(before)][: len(spans)]


def wanted_sizes(manifest: Manifest) -> dict[str, int | None]:
    """Relative path -> bytes of every listed file; None where the manifest does not fix it."""
    return {entry.file: size for entry, size in listed_files(manifest)}


def list_files(folder: Path, manifest: Manifest) -> Listing:
    """Relative path -> entry, for the folder itself and the folders of its splits and shards."""
    found = {entry.name: entry for entry in _entries(folder)}
    parts = {file.partition("/")[0] for file in wanted_sizes(manifest)}
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


def publish_folder(staged: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the finished store `staged` to `target`, on the same disk.

    `target` may be missing, an empty folder or a placeholder, and with `overwrite` a finished
    store. Anything else is refused by name and left as it is.
    """
    staged, target = Path(staged).absolute(), Path(target).absolute()
    open_store(staged)  # never publish what could not be opened afterwards
    target.parent.mkdir(parents=True, exist_ok=True)
    if check_target(target, overwrite=overwrite):
        _replace(staged, target)
    else:
        _rename(staged, target)
    sync_folder(target.parent)
    if staged.parent != target.parent:
        sync_folder(staged.parent)


def check_target(target: Path, *, overwrite: bool) -> bool:
    """Raise if a store may not be published at `target`.

    Returns whether there is a store or a placeholder that has to be replaced.
    """
    target = Path(target)
    names = names_in(target)
    if not names:
        return False
    if META not in names:
        raise StoreExistsError(
            f"{target}: holds {names[0]!r} and no {META}, so it is no finished store; move it "
            "away or choose another folder"
        )
    manifest = _readable(target)
    if not overwrite and (manifest is None or manifest.built):
        raise StoreExistsError(
            f"{target}: already holds a {'finished' if manifest else 'damaged or foreign'} store; "
            "pass {overwrite} to replace it, or choose another folder",
            overwrite=True,
        )
    for file in _foreign_files(target, set(wanted_sizes(manifest)) if manifest else set()):
        if file == EXCLUDE:
            raise StoreExistsError(
                f"{target / file}: lists what was excluded from training, by positions in tokens "
                "that would be replaced; move it away first, and exclude again after the build"
            )
        raise StoreExistsError(
            f"{target / file}: no build of ours makes such a file, so it will not be deleted with "
            "the store around it; move it away first"
        )
    return True


def names_in(target: Path) -> list[str]:
    """What is in the folder where a store is to be; nothing if it is missing."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreExistsError(f"{target}: a file or link is in the way; move it away first")
    return sorted(entry.name for entry in target.iterdir()) if target.exists() else []


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds a manifest that can be read and says "built"."""
    manifest = _readable(Path(folder))
    return manifest is not None and manifest.built


def _readable(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (ManifestError, StoreNotFoundError):
        return None


def _foreign_files(target: Path, listed: set[str]) -> list[str]:
    """Files in a store's folder that neither its manifest lists nor any build of ours makes."""
    walk = os.walk(target)
    paths = [Path(top, name) for top, folders, names in walk for name in (*folders, *names)]
    plain = [path for path in paths if path.is_symlink() or not path.is_dir()]
    files = [(path.relative_to(target).as_posix(), path.name) for path in plain]
    return sorted(
        file
        for file, name in files
        if not (file in listed or is_own_name(file) or is_temporary(name))
    )


def _rename(staged: Path, target: Path) -> None:
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise StoreExistsError(
                f"{target}: another process put files there meanwhile; check them, then build again"
            ) from error
        raise _cannot_move(staged, target, error) from error


def _replace(staged: Path, target: Path) -> None:
    """Swap old and new, then delete the old one. In between the new store has a name that no build
    resumes from, so that after a crash no later build publishes the old store again."""
    aside = temporary_name(target)
    try:
        staged.rename(aside)
        if not exchange(aside, target):
            _two_renames(aside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.rename(staged)
        raise _cannot_move(staged, target, error) from error
    sync_folder(target.parent)
    shutil.rmtree(aside)


def _two_renames(aside: Path, target: Path) -> None:
    """Without an atomic exchange: `target` is missing for an instant, but nothing is lost."""
    old = temporary_name(target)
    target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        old.rename(target)
        raise
    old.rename(aside)


def _cannot_move(staged: Path, target: Path, error: OSError) -> BuildError:
    hint = "stage it beside the target" if error.errno == errno.EXDEV else "nothing was published"
    return BuildError(f"cannot move {staged} to {target}: {error.strerror}; {hint}")
