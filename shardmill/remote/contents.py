"""What a finished folder consists of, according to its own manifest.

A manifest that is damaged, unfinished, lists no checksums or a name that could leave the folder is
refused. A file that is not listed is not part of the folder, with two exceptions that carry their
own checksum: the exclusions of a store, which change while the store stays the same, and its table
of origins.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shardmill.errors import ManifestError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import is_sealed
from shardmill.records import JSON
from shardmill.store import Exclusions, Manifest
from shardmill.store.exclusions import MAX_EXCLUDE_BYTES, decode_exclusions
from shardmill.store.layout import EXCLUDE, FILE_NAME, META, ORIGINS
from shardmill.store.manifest import MAX_META_BYTES, Count, Sha256, decode_manifest, read_plain_file
from shardmill.store.origins import MAX_ORIGINS_BYTES, decode_origins
from shardmill.store.store import wanted_sizes

log = logging.getLogger(__name__)

PACKED = "manifest.json"
LARGEST = {META: MAX_META_BYTES, PACKED: 2**24}
"""The files that finish a folder, and how large each may be."""

OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all; from any thread, one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """One file that a manifest lists."""

    name: str  # relative, with "/", checked to stay inside the folder
    size: int | None  # bytes; None where the manifest does not fix them
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A finished folder: its manifest, byte for byte, and every file it lists."""

    kind: str  # "store" or "packed folder"
    manifest_name: str  # the file that makes the folder finished
    manifest: bytes
    manifest_sha256: str  # of those bytes
    files: tuple[FileFact, ...]  # all others, exclusions included
    exclusions: Exclusions | None = None  # of a store that has them; the manifest knows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReceipt:
    """What a push or a pull did. Files and bytes include the manifest."""

    folder: Path
    url: str  # without secrets
    kind: str
    manifest_sha256: str
    files: int
    bytes: int
    moved_files: int  # sent or fetched now
    moved_bytes: int
    kept_files: int  # there already, with the right sha256
    seconds: float

    def to_json(self) -> dict[str, JSON]:
        return {**asdict(self), "folder": str(self.folder), "seconds": round(self.seconds, 3)}


def transfer_receipt(
    folder: Path,
    url: str,
    contents: Contents,
    sizes: Mapping[str, int],
    moved: Sequence[str],
    *,
    with_manifest: bool,
    began: float,
) -> TransferReceipt:
    """The receipt of a transfer that moved the files `moved`, and perhaps the manifest."""
    manifest_bytes = len(contents.manifest)
    return TransferReceipt(
        folder=folder,
        url=url,
        kind=contents.kind,
        manifest_sha256=contents.manifest_sha256,
        files=len(sizes) + 1,
        bytes=sum(sizes.values()) + manifest_bytes,
        moved_files=len(moved) + with_manifest,
        moved_bytes=sum(sizes[name] for name in moved) + with_manifest * manifest_bytes,
        kept_files=len(sizes) - len(moved) + 1 - with_manifest,
        seconds=time.monotonic() - began,
    )


class TransferMeter:
    """Bytes of many files, counted by many threads; a file that is restarted counts once."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._total, self._progress = total, progress
        self._done: dict[str, int] = {}
        self._sum = 0
        self._lock = threading.Lock()

    def set(self, name: str, num_bytes: int) -> None:
        """So many bytes of this file are done."""
        with self._lock:
            self._sum += num_bytes - self._done.get(name, 0)
            self._done[name] = num_bytes
            if self._progress is not None:
                self._progress(self._sum, self._total)


class _Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes: Count
    sha256: Sha256


def local_contents(folder: Path) -> Contents:
    """The finished folder on this disk."""
    found = [name for name in LARGEST if (folder / name).is_file()]
    if not found:
        raise StoreNotFoundError(
            f"{folder}: holds no {' and no '.join(LARGEST)}, so it is not a finished folder; "
            "finish it, or check the path"
        )
    check_one(found, str(folder))
    path = folder / found[0]
    if path.is_symlink() or path.stat().st_size > LARGEST[found[0]]:
        raise ManifestError(f"{path}: a link, or too large for a manifest; put the file itself")
    contents = read_contents(found[0], path.read_bytes(), where=str(path))
    excluded = (
        read_plain_file(folder / EXCLUDE, MAX_EXCLUDE_BYTES) if contents.kind == "store" else None
    )
    contents = with_exclusions(contents, excluded, where=str(folder / EXCLUDE))
    table = folder / ORIGINS
    if table.is_symlink() or not table.is_file():
        if os.path.lexists(table):
            log.warning("%s: a link, a pipe or a folder, not a file; it is left out", table)
        return contents
    return with_origins(contents, table.stat().st_size, table.read_bytes, where=str(table))


def with_exclusions(contents: Contents, data: bytes | None, *, where: str) -> Contents:
    """The same store with the exclusions in these untrusted bytes; None: without any."""
    if data is None:
        return contents
    manifest = decode_manifest(contents.manifest, where=contents.manifest_name)
    exclusions = decode_exclusions(data, manifest, where=where)
    fact = FileFact(name=EXCLUDE, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact), exclusions=exclusions)


def with_origins(
    contents: Contents, size: int, read: Callable[[], bytes], *, where: str
) -> Contents:
    """The same store with the table of origins beside its manifest.

    A table that is damaged, or of another store, is left out with a warning: a store works without.
    """
    try:
        if contents.manifest_name != META or size > MAX_ORIGINS_BYTES:
            raise ManifestError(f"{where}: not a table of origins of a store")
        data = read()
        decode_origins(data, decode_manifest(contents.manifest, where=where), where=where)
    except StoreError as error:
        log.warning("%s; it is left out", error)
        return contents
    fact = FileFact(name=ORIGINS, size=size, sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact))


def check_one(found: list[str], where: str) -> None:
    """Refuse a folder with two manifests, which could be either kind."""
    if len(found) > 1:
        raise ManifestError(f"{where}: has {' and '.join(found)}; keep one kind in a folder")


def read_contents(name: str, data: bytes, *, where: str) -> Contents:
    """What the manifest called `name` with these untrusted bytes lists."""
    if name == META:
        manifest = decode_manifest(data, where=where)
        if not manifest.built:
            raise StoreNotFoundError(f'{where}: a placeholder ("built" is false); build it first')
        kind, files = "store", tuple(_store_files(manifest))
    else:
        kind, files = "packed folder", tuple(_packed_files(data, where))
    return Contents(
        kind=kind,
        manifest_name=name,
        manifest=data,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        files=files,
    )


def _store_files(manifest: Manifest) -> Iterator[FileFact]:
    sizes = wanted_sizes(manifest)
    for split in manifest.splits.values():
        chat = split.chat
        entries = [split.index, *((chat.mask, chat.turns, chat.roles) if chat else ())]
        for entry in (*entries, *split.shards):
            yield FileFact(name=entry.file, size=sizes[entry.file], sha256=entry.sha256)
    if manifest.dropped:
        yield FileFact(name=manifest.dropped.file, size=None, sha256=manifest.dropped.sha256)


def _packed_files(data: bytes, where: str) -> list[FileFact]:
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        if "files" not in fields:
            raise ManifestError(
                f"{where}: lists no checksums, so a copy could not be checked; write the folder "
                "again with this version"
            )
        listed = msgspec.convert(fields["files"], type=dict[str, _Listed])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: not a manifest of a packed folder: {error}") from error
    if not is_sealed(fields):
        raise ManifestError(f"{where}: its own checksum does not match; it was changed or damaged")
    names = [PACKED, *(name.lower() for name in listed)]
    for name in listed:
        if not FILE_NAME.fullmatch(name) or names.count(name.lower()) > 1:
            raise ManifestError(f"{where}: lists {name!r:.200}, which is not a unique plain name")
    return [FileFact(name=k, size=v.bytes, sha256=v.sha256) for k, v in listed.items()]
