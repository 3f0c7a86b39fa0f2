"""What a finished folder consists of, here or at a URL, according to its own manifest.

A manifest that is damaged, unfinished, lists no checksums or a name that could leave the folder is
refused. A file that is not listed is not part of the folder, with two exceptions that carry their
own checksum: the exclusions of a store, which change while the store stays the same, and its table
of origins.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from shardmill.errors import ManifestError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import is_sealed
from shardmill.remote.folder import Listing, RemoteFolder
from shardmill.store import Exclusions, Manifest
from shardmill.store.exclusions import MAX_EXCLUDE_BYTES, decode_exclusions
from shardmill.store.layout import EXCLUDE, FILE_NAME, META, ORIGINS
from shardmill.store.manifest import (
    MAX_META_BYTES,
    Count,
    Sha256,
    decode_manifest,
    listed_files,
    read_plain_file,
)
from shardmill.store.origins import MAX_ORIGINS_BYTES, decode_origins

log = logging.getLogger(__name__)

PACKED = "manifest.json"
LARGEST = {META: MAX_META_BYTES, PACKED: 2**24}
"""The files that finish a folder, and how large each may be."""

MARKER = ".shardmill-push.json"
"""What an unfinished push leaves: which folder these files belong to."""

ReadFile: TypeAlias = Callable[[str, int], bytes | None]
"""A file of the folder, by name, of at most so many bytes; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """One file that a manifest lists."""

    name: str  # relative, with "/", checked to stay inside the folder
    size: int | None  # bytes; None where the manifest does not fix them
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A finished folder: its manifest, byte for byte, and every file it lists."""

    manifest_name: str  # the file that makes the folder finished
    manifest: bytes
    manifest_sha256: str  # of those bytes
    store: Manifest | None  # those bytes, decoded; None: a packed folder
    files: tuple[FileFact, ...]  # all others, exclusions included
    exclusions: Exclusions | None = None  # of a store that has them; the manifest knows nothing

    @property
    def kind(self) -> str:
        return "packed folder" if self.store is None else "store"


class _Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes: Count
    sha256: Sha256


def local_contents(folder: Path) -> Contents:
    """The finished folder on this disk, with its table of origins."""

    def read(name: str, max_bytes: int) -> bytes | None:
        return read_plain_file(folder / name, max_bytes)

    contents = _read_folder(read, str(folder), "finish it, or check the path")
    return with_origins(contents, read, where=str(folder))


def remote_contents(remote: RemoteFolder, found: Listing) -> Contents:
    """The finished folder in `remote`, whose listing is `found`, without the table of origins."""
    advice = "a push to here is unfinished" if MARKER in found else "check the URL"
    return _read_folder(remote_reader(remote, found), remote.url, advice)


def remote_reader(remote: RemoteFolder, found: Listing) -> ReadFile:
    def read(name: str, max_bytes: int) -> bytes | None:
        if name not in found:
            return None
        size = found[name]["size"]
        if size > max_bytes:
            raise StoreError(
                f"{remote.url}/{name}: {size:,} bytes, wanted at most {max_bytes:,}; look there, "
                "or check the URL"
            )
        return remote.read(name, size)

    return read


def list_remote(remote: RemoteFolder) -> Listing:
    """The files of a remote folder.

    A web server cannot be listed: it is asked for each file that no manifest names.
    """
    if not remote.is_web:
        return remote.listing()
    most = {**LARGEST, EXCLUDE: MAX_EXCLUDE_BYTES, ORIGINS: MAX_ORIGINS_BYTES}
    found = {name: remote.web_size(name, bound) for name, bound in most.items()}
    return {name: {"size": size} for name, size in found.items() if size is not None}


def _read_folder(read: ReadFile, where: str, advice: str) -> Contents:
    manifests = {
        name: data for name, most in LARGEST.items() if (data := read(name, most)) is not None
    }
    if not manifests:
        raise StoreNotFoundError(
            f"{where}: no {' and no '.join(LARGEST)}, so not a finished folder: {advice}"
        )
    if len(manifests) > 1:
        raise ManifestError(f"{where}: has {' and '.join(manifests)}; keep one kind in a folder")
    ((name, manifest),) = manifests.items()
    contents = read_contents(name, manifest, where=f"{where}/{name}")
    data = None if contents.store is None else read(EXCLUDE, MAX_EXCLUDE_BYTES)
    if contents.store is None or data is None:
        return contents
    exclusions = decode_exclusions(data, contents.store, where=f"{where}/{EXCLUDE}")
    return replace(_with_file(contents, EXCLUDE, data), exclusions=exclusions)


def with_origins(contents: Contents, read: ReadFile, *, where: str) -> Contents:
    """The same store with the table of origins beside its manifest, if there is one.

    A table that is damaged, or of another store, is left out with a warning: a store works without.
    """
    path = f"{where}/{ORIGINS}"
    try:
        data = read(ORIGINS, MAX_ORIGINS_BYTES)
        if data is None:
            return contents
        if contents.store is None:
            raise ManifestError(f"{path}: not a table of origins of a store")
        decode_origins(data, contents.store, where=path)
    except StoreError as error:
        log.warning("%s; it is left out", error)
        return contents
    return _with_file(contents, ORIGINS, data)


def _with_file(contents: Contents, name: str, data: bytes) -> Contents:
    fact = FileFact(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact))


def read_contents(name: str, data: bytes, *, where: str) -> Contents:
    """What the manifest called `name` with these untrusted bytes lists."""
    store = None
    if name == META:
        store = decode_manifest(data, where=where)
        if not store.built:
            raise StoreNotFoundError(f'{where}: a placeholder ("built" is false); build it first')
    return Contents(
        manifest_name=name,
        manifest=data,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        store=store,
        files=tuple(_packed_files(data, where) if store is None else _store_files(store)),
    )


def _store_files(manifest: Manifest) -> Iterator[FileFact]:
    for entry, size in listed_files(manifest):
        yield FileFact(name=entry.file, size=size, sha256=entry.sha256)


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
