"""What a finished folder consists of, told by its own manifest; with it goes its table of origins.

In: a folder, or the bytes of a manifest from anywhere.  Out: `Contents`.
Promise: a manifest that is damaged, unfinished, lists no checksums or a name that could leave the
folder is refused; what is not listed is no part of the folder, but for what carries its own seal:
the exclusions of a store, which come and go while the store stays as it is, and its table of
origins.
Not here: whether the listed files are there and right (send.py, receive.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shardmill.errors import ManifestError, StoreError, StoreNotFoundError
from shardmill.interop.packed.seals import is_sealed
from shardmill.remote.records import Contents, FileFact
from shardmill.shards import Manifest
from shardmill.shards.entries import Count, Sha256
from shardmill.shards.exclude_file import EXCLUDE, decode_exclusions, read_bytes
from shardmill.shards.layout import META, ORIGINS, is_file_name
from shardmill.shards.manifest import MAX_META_BYTES, decode_manifest
from shardmill.shards.origins import MAX_ORIGINS_BYTES, decode_origins
from shardmill.shards.scan import wanted_sizes

log = logging.getLogger(__name__)

PACKED = "manifest.json"
LARGEST = {META: MAX_META_BYTES, PACKED: 2**24}
"""The files that finish a folder, and how large each may be."""


class _Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes: Count
    sha256: Sha256


def local_contents(folder: Path) -> Contents:
    """The finished folder on this disk."""
    found = [name for name in LARGEST if (folder / name).is_file()]
    if not found:
        raise StoreNotFoundError(
            f"{folder}: holds no {' and no '.join(LARGEST)}, so it is no finished folder; "
            "finish it, or check the path"
        )
    check_one(found, str(folder))
    path = folder / found[0]
    if path.is_symlink() or path.stat().st_size > LARGEST[found[0]]:
        raise ManifestError(f"{path}: a link, or too large for a manifest; put the file itself")
    contents = read_contents(found[0], path.read_bytes(), where=str(path))
    excluded = read_bytes(folder / EXCLUDE) if contents.kind == "store" else None
    contents = with_exclusions(contents, excluded, where=str(folder / EXCLUDE))
    table = folder / ORIGINS
    if table.is_symlink() or not table.is_file():
        if os.path.lexists(table):
            log.warning("%s: a link, a pipe or a folder, not a file; the store goes without", table)
        return contents
    size = table.stat().st_size
    return with_origins(contents, size, lambda: table.read_bytes(), where=str(table))


def with_exclusions(contents: Contents, data: bytes | None, *, where: str) -> Contents:
    """The same store with the exclusions in these bytes, which are not trusted; None: with none."""
    if data is None:
        return contents
    manifest = decode_manifest(contents.manifest, where=contents.manifest_name)
    exclusions = decode_exclusions(data, manifest, where=where)
    fact = FileFact(name=EXCLUDE, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact), exclusions=exclusions)


def with_origins(
    contents: Contents, size: int, read: Callable[[], bytes], *, where: str
) -> Contents:
    """The same with the table of origins that lies beside the manifest; one that is damaged, or of
    another store, stays where it is, which is announced: a store does without."""
    try:
        if contents.manifest_name != META or size > MAX_ORIGINS_BYTES:
            raise ManifestError(f"{where}: no table of origins of a store")
        data = read()
        decode_origins(data, decode_manifest(contents.manifest, where=where), where=where)
    except StoreError as error:
        log.warning("%s; it is left out", error)
        return contents
    fact = FileFact(name=ORIGINS, size=size, sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact))


def check_one(found: list[str], where: str) -> None:
    """Two manifests in one folder: nobody can say what it is."""
    if len(found) > 1:
        raise ManifestError(f"{where}: has {' and '.join(found)}; keep one kind in a folder")


def read_contents(name: str, data: bytes, *, where: str) -> Contents:
    """What the manifest called `name` with these bytes lists. The bytes are not trusted."""
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
        raise ManifestError(f"{where}: no manifest of a packed folder: {error}") from error
    if not is_sealed(fields):
        raise ManifestError(f"{where}: its own checksum does not match; it was changed or damaged")
    names = [PACKED, *(name.lower() for name in listed)]
    for name in listed:
        if not is_file_name(name) or names.count(name.lower()) > 1:
            raise ManifestError(f"{where}: lists {name!r:.200}, which is no plain name of its own")
    return [FileFact(name=k, size=v.bytes, sha256=v.sha256) for k, v in listed.items()]
