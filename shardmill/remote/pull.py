"""Pull a finished folder from a place.

In: a URL, a folder that does not exist or is empty.  Out: the folder, whole, and a receipt.
Promise: until everything is here and checked nothing is at the folder; interrupted, the same call
goes on; of two pulls of one folder the second is refused; no name of a manifest leaves the folder.
A store that is here already gets the exclusions of the URL, unless that would lift some of its own.
Not here: reading without a whole copy (store.py).
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.arguments import refuse_url, whole_number
from shardmill.errors import (
    BuildLockedError,
    DamagedStoreError,
    ManifestError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.formats.packed.memmap import open_memmap_shard
from shardmill.remote.contents import (
    LARGEST,
    Contents,
    FileFact,
    OnProgress,
    TransferMeter,
    TransferReceipt,
    check_one,
    local_contents,
    read_contents,
    with_exclusions,
    with_origins,
)
from shardmill.remote.push import MARK
from shardmill.remote.transfer import check_local, check_size, fetch, in_parallel
from shardmill.storage.atomic import atomic_write, sync_folder
from shardmill.storage.object_store import Listing, RemoteFolder, open_place
from shardmill.store import (
    Exclusions,
    Manifest,
    VerifyReport,
    open_store,
    read_exclusions,
    write_exclusions,
)
from shardmill.store.exclusions import EXCLUDE, MAX_EXCLUDE_BYTES
from shardmill.store.layout import META, ORIGINS
from shardmill.store.manifest import decode_manifest, fingerprint
from shardmill.store.origins import MAX_ORIGINS_BYTES, decode_origins
from shardmill.store.store import foreign

_PART = ".part"


def pull(
    url: str,
    folder: str | Path,
    *,
    workers: int = 8,
    progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReceipt:
    """Copy the finished folder at `url` to `folder`. Interrupted, do the same again."""
    began = time.monotonic()
    workers = whole_number(workers, "workers")
    refuse_url(folder, "folder", instead="name a folder of this machine")
    place, target = open_place(url, storage_options), Path(folder).absolute()
    found = files_at(place)
    contents = _with_origins(place, found, remote_contents(place, found), target)
    sizes = {
        fact.name: check_size(place, fact, _size(place, fact, found)) for fact in contents.files
    }
    meter = TransferMeter(sum(sizes.values()) + len(contents.manifest), progress)
    if _is_here(target, contents):
        fetched, own = _take_exclusions(target, contents), 0
        in_parallel(workers, lambda fact: check_local(target / fact.name, fact), contents.files)
    else:
        fetched, own = _fetch_all(place, target, contents, (sizes, meter, workers)), 1
    return TransferReceipt(
        folder=target,
        url=place.url,
        kind=contents.kind,
        manifest_sha256=contents.manifest_sha256,
        files=len(sizes) + 1,
        bytes=sum(sizes.values()) + len(contents.manifest),
        moved_files=len(fetched) + own,
        moved_bytes=sum(sizes[name] for name in fetched) + own * len(contents.manifest),
        kept_files=len(sizes) - len(fetched) + 1 - own,
        seconds=time.monotonic() - began,
    )


def verify_remote(
    url: str,
    *,
    workers: int = 8,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read the whole store at `url` once and compare it with its manifest; nothing is kept here.

    As `verify`: what is wrong is a problem in the report, no finished store an error.
    """
    place = open_place(url, storage_options)
    found = files_at(place)
    try:
        contents = remote_contents(place, found)
        if contents.kind != "store":
            raise StoreNotFoundError(f"{place.url}: a {contents.kind}, not a store: pull it")
        manifest = decode_manifest(contents.manifest, where=place.url)
    except ManifestError as error:
        return VerifyReport(problems=[str(error)], files=1, tokens=0, documents=0)
    sizes = {fact.name: _size(place, fact, found) for fact in contents.files}
    meter = TransferMeter(sum(size or 0 for size in sizes.values()), on_progress)

    def problem(fact: FileFact) -> str | None:
        try:
            size = check_size(place, fact, sizes[fact.name])
        except DamagedStoreError as error:
            return str(error).removeprefix(f"{place.url}/")
        sha256 = place.sha256(fact.name, size)
        meter.set(fact.name, size)
        if sha256 != fact.sha256:
            return f"{fact.name}: its sha256 is {sha256 or 'unknown'}, wanted {fact.sha256}"
        return None

    problems = [text for text in in_parallel(workers, problem, contents.files) if text]
    if ORIGINS in found:
        problems += _origin_problems(place, found, contents)
    listed = dict.fromkeys((*sizes, EXCLUDE, ORIGINS), 0)
    problems += foreign(listed, dict.fromkeys(found))
    sound = len(sizes) - len(problems)
    return VerifyReport(
        problems=problems,
        files=1 + max(sound, 0) + (ORIGINS in found),
        tokens=sum(split.tokens for split in manifest.splits.values()),
        documents=sum(split.documents for split in manifest.splits.values()),
    )


def _origin_problems(place: RemoteFolder, found: Listing, contents: Contents) -> list[str]:
    size = found[ORIGINS]["size"]
    if size > MAX_ORIGINS_BYTES:
        return [f"{ORIGINS}: {size:,} bytes, wanted at most {MAX_ORIGINS_BYTES:,}"]
    manifest = decode_manifest(contents.manifest, where=place.url)
    try:
        decode_origins(place.read(ORIGINS, size), manifest, where=ORIGINS)
    except StoreError as error:
        return [str(error)]
    return []


def remote_manifest(
    url: str, *, storage_options: Mapping[str, Any] | None = None
) -> tuple[Manifest, Exclusions]:
    """What the store at `url` says of itself, and what is excluded there. Reads nothing else."""
    place = open_place(url, storage_options)
    contents = remote_contents(place, files_at(place))
    if contents.kind != "store":
        raise StoreNotFoundError(f"{place.url}: a {contents.kind}, not a store: pull it")
    manifest = decode_manifest(contents.manifest, where=place.url)
    nothing = Exclusions(store=fingerprint(manifest), entries=(), sha256=None)
    return manifest, contents.exclusions or nothing


def files_at(place: RemoteFolder) -> Listing:
    """What is at a place, to find a finished folder there. A web server is not listed: it is asked
    for the files that only a listing would tell of."""
    if not place.is_web:
        return place.listing()
    most = {**LARGEST, EXCLUDE: MAX_EXCLUDE_BYTES, ORIGINS: MAX_ORIGINS_BYTES}
    found = {name: place.web_size(name, bound) for name, bound in most.items()}
    return {name: {"size": size} for name, size in found.items() if size is not None}


def _size(place: RemoteFolder, fact: FileFact, found: Listing) -> int | None:
    """Bytes of a file at a place; a web server is asked only for what the manifest does not say."""
    if not place.is_web:
        return found.get(fact.name, {}).get("size")
    return place.web_size(fact.name, sys.maxsize) if fact.size is None else fact.size


def remote_contents(place: RemoteFolder, found: Mapping[str, Mapping[str, Any]]) -> Contents:
    """The finished folder at `place`, whose listing is `found`."""
    names = [name for name in LARGEST if name in found]
    if not names:
        why = "a push to here is unfinished" if MARK in found else "check the URL"
        raise StoreNotFoundError(f"{place.url}: no {' and no '.join(LARGEST)} there: {why}")
    check_one(names, place.url)
    where, size = f"{place.url}/{names[0]}", found[names[0]]["size"]
    if size > LARGEST[names[0]]:
        raise StoreError(f"{where}: {size:,} bytes, so no manifest of ours; check the URL")
    contents = read_contents(names[0], place.read(names[0], size), where=where)
    if contents.kind != "store" or EXCLUDE not in found:
        return contents
    where, size = f"{place.url}/{EXCLUDE}", found[EXCLUDE]["size"]
    if size > MAX_EXCLUDE_BYTES:
        raise StoreError(
            f"{where}: {size:,} bytes, wanted at most {MAX_EXCLUDE_BYTES:,}; look there"
        )
    return with_exclusions(contents, place.read(EXCLUDE, size), where=where)


def _with_origins(
    place: RemoteFolder, found: Mapping[str, Mapping[str, Any]], contents: Contents, target: Path
) -> Contents:
    """The table of origins comes with a store; a copy that does without is not damaged by that."""
    if ORIGINS not in found or ((target / META).exists() and not (target / ORIGINS).exists()):
        return contents
    size = found[ORIGINS]["size"]
    where = f"{place.url}/{ORIGINS}"
    return with_origins(contents, size, lambda: place.read(ORIGINS, size), where=where)


def _is_here(target: Path, contents: Contents) -> bool:
    """Whether this very folder stands at `target`; raises if something else does."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreExistsError(f"{target}: a file or link is in the way; move it away first")
    names = sorted(entry.name for entry in target.iterdir()) if target.exists() else []
    if not names:
        return False
    try:
        is_same = local_contents(target).manifest == contents.manifest
    except StoreError:
        is_same = False
    if not is_same:
        raise StoreExistsError(
            f"{target}: holds {names[0]!r} and is not the folder at the URL; move it away, or pull "
            "into another folder"
        )
    return True


def _take_exclusions(target: Path, contents: Contents) -> list[str]:
    """The exclusions of the URL for a store that is here; nothing of its own is lifted."""
    theirs = contents.exclusions
    if theirs is None:
        return []  # what is excluded here stays so
    own = read_exclusions(target)
    if own.sha256 == theirs.sha256:
        return []
    if not theirs.covers(own):
        raise StoreExistsError(
            f"{target / EXCLUDE}: excludes tokens that the copy at the URL does not; push it, or "
            "remove it to take over those of the URL"
        )
    write_exclusions(target, theirs.entries)
    return [EXCLUDE]


def _fetch_all(
    place: RemoteFolder,
    target: Path,
    contents: Contents,
    how: tuple[dict[str, int], TransferMeter, int],
) -> list[str]:
    sizes, meter, workers = how
    with _staged(target, contents) as staged:
        for parent in {(staged / fact.name).parent for fact in contents.files}:
            parent.mkdir(exist_ok=True)
        if contents.exclusions is None:
            (staged / EXCLUDE).unlink(missing_ok=True)  # of an earlier try, and lifted since

        def one(fact: FileFact) -> str | None:
            return _fetch_file(place, staged, fact, sizes[fact.name], meter)

        fetched = [name for name in in_parallel(workers, one, contents.files) if name]
        _publish(staged, target, contents)
        meter.set(contents.manifest_name, len(contents.manifest))
    return fetched


def _fetch_file(
    place: RemoteFolder, staged: Path, fact: FileFact, size: int, meter: TransferMeter
) -> str | None:
    """The name of the file if it was fetched; None if an earlier pull had done so."""
    path = staged / fact.name
    if path.is_file():
        try:
            check_local(path, fact)
        except StoreError:
            path.unlink()  # the disk lost it
        else:
            meter.set(fact.name, size)
            return None
    part = path.with_name(path.name + _PART)
    fetch(place, fact, size, part, lambda done: meter.set(fact.name, done))
    part.rename(path)
    return fact.name


@contextmanager
def _staged(target: Path, contents: Contents) -> Iterator[Path]:
    """The hidden folder beside `target` where this pull collects, ours alone while we live."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{contents.manifest_sha256[:16]}.pull.tmp")
    staged.mkdir(exist_ok=True)
    descriptor = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it at death
            is_ours = os.path.samestat(os.fstat(descriptor), staged.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise BuildLockedError(f"{target}: another process pulls this folder now; wait for it")
        yield staged
    finally:
        os.close(descriptor)


def _publish(staged: Path, target: Path, contents: Contents) -> None:
    with atomic_write(staged / contents.manifest_name) as file:
        file.write(contents.manifest)
    for parent in {(staged / fact.name).parent for fact in contents.files} - {staged}:
        sync_folder(parent)
    if contents.kind == "store":
        open_store(staged)
    elif b'"memmap_padded_v1"' in contents.manifest:
        open_memmap_shard(staged).close()
    try:
        staged.rename(target)  # replaces an empty folder, and nothing else
    except OSError as error:
        raise StoreExistsError(
            f"{target}: cannot take its place there: {error.strerror}; what was pulled lies in "
            f"{staged}: look, then pull again"
        ) from error
    sync_folder(target.parent)
