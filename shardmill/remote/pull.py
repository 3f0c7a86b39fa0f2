"""Pull a finished folder from object storage, or check it there.

Nothing appears at the local folder until everything has arrived and is checked; if it is
interrupted, the same call continues. Of two pulls of one folder the second is refused, and no name
in a manifest leaves the folder. A store that is here already gets the exclusions of the URL, unless
that would lift some of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.arguments import refuse_url, whole_number
from shardmill.errors import (
    BuildLockedError,
    DamagedStoreError,
    ManifestError,
    StoreError,
    StoreExistsError,
)
from shardmill.formats.packed.memmap import open_memmap_shard
from shardmill.remote.contents import (
    Contents,
    FileFact,
    OnProgress,
    TransferMeter,
    TransferReceipt,
    check_local,
    check_size,
    fetch,
    in_parallel,
    list_remote,
    local_contents,
    remote_contents,
    remote_store,
    with_origins,
)
from shardmill.remote.folder import Listing, open_folder
from shardmill.storage.atomic import LockedFile, atomic_write, sync_folder
from shardmill.store import Exclusions, Manifest, open_store, read_exclusions
from shardmill.store.exclusions import write_exclusions
from shardmill.store.layout import EXCLUDE, META, ORIGINS
from shardmill.store.plans import MAX_ORIGINS_BYTES, decode_origins
from shardmill.store.store import foreign, names_in
from shardmill.store.verify import VerifyReport


def pull(
    url: str,
    folder: str | Path,
    *,
    workers: int = 8,
    progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReceipt:
    """Copy the finished folder at `url` to `folder`. If it is interrupted, do the same again."""
    began = time.monotonic()
    workers = whole_number(workers, "workers")
    refuse_url(folder, "folder", instead="name a folder of this machine")
    remote, target = open_folder(url, storage_options), Path(folder).absolute()
    found = list_remote(remote)
    contents = remote_contents(found)
    # A local copy without the table of origins is complete, and stays without.
    if not (target / META).exists() or (target / ORIGINS).exists():
        contents = with_origins(contents, found.read, where=remote.url)
    sizes = {fact.name: check_size(remote, fact, _size(fact, found)) for fact in contents.files}
    sizes[contents.manifest_name] = len(contents.manifest)
    meter = TransferMeter(sizes, progress, began)
    if _is_here(target, contents):
        fetched = _take_exclusions(target, contents)
        in_parallel(workers, lambda fact: check_local(target / fact.name, fact), contents.files)
        return meter.receipt(target, remote.url, contents, fetched)
    with _staging(target, contents) as staged:
        for parent in {(staged / fact.name).parent for fact in contents.files}:
            parent.mkdir(exist_ok=True)
        if contents.exclusions is None:
            (staged / EXCLUDE).unlink(missing_ok=True)  # of an earlier try, and lifted since

        def came(fact: FileFact) -> bool:
            progress = partial(meter.set, fact.name)
            return fetch(remote, fact, sizes[fact.name], staged / fact.name, progress)

        moved = in_parallel(workers, came, contents.files)
        fetched = [fact.name for fact, is_new in zip(contents.files, moved, strict=True) if is_new]
        _publish(staged, target, contents)
    meter.set(contents.manifest_name, len(contents.manifest))
    return meter.receipt(target, remote.url, contents, [*fetched, contents.manifest_name])


def verify_remote(
    url: str,
    *,
    workers: int = 8,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read the whole store at `url` once and compare it with its manifest; nothing is kept here.

    As `verify_store`: what is wrong is a problem in the report; a missing store is an error.
    """
    remote = open_folder(url, storage_options)
    found = list_remote(remote)
    try:
        contents, manifest, _ = remote_store(found)
    except ManifestError as error:
        return VerifyReport(problems=[str(error)], files=1, tokens=0, documents=0)
    sizes = {fact.name: _size(fact, found) for fact in contents.files}
    meter = TransferMeter({name: size or 0 for name, size in sizes.items()}, on_progress)

    def problem(fact: FileFact) -> str | None:
        try:
            size = check_size(remote, fact, sizes[fact.name])
        except DamagedStoreError as error:
            return str(error).removeprefix(f"{remote.url}/")
        sha256 = remote.sha256(fact.name, size)
        meter.set(fact.name, size)
        if sha256 != fact.sha256:
            return f"{fact.name}: its sha256 is {sha256 or 'unknown'}, wanted {fact.sha256}"
        return None

    problems = [text for text in in_parallel(workers, problem, contents.files) if text]
    try:
        table = found.read(ORIGINS, MAX_ORIGINS_BYTES)
        if table is not None:
            decode_origins(table, manifest, where=ORIGINS)
    except StoreError as error:
        problems.append(str(error))
    problems += foreign(dict.fromkeys((*sizes, EXCLUDE, ORIGINS), 0), dict.fromkeys(found))
    sound = len(sizes) - len(problems)
    return VerifyReport(
        problems=problems,
        files=1 + max(sound, 0) + (ORIGINS in found),
        tokens=sum(split.tokens for split in manifest.splits.values()),
        documents=sum(split.documents for split in manifest.splits.values()),
    )


def remote_manifest(
    url: str, *, storage_options: Mapping[str, Any] | None = None
) -> tuple[Manifest, Exclusions]:
    """The manifest of the store at `url`, and what is excluded there. Reads nothing else."""
    found = list_remote(open_folder(url, storage_options))
    _, manifest, exclusions = remote_store(found)
    return manifest, exclusions


def _size(fact: FileFact, found: Listing) -> int | None:
    """Bytes of a remote file; a web server is asked only if the manifest does not say."""
    if not found.remote.is_web:
        return found.get(fact.name, {}).get("size")
    return found.remote.web_size(fact.name, sys.maxsize) if fact.size is None else fact.size


def _is_here(target: Path, contents: Contents) -> bool:
    """Whether this very folder is at `target`; raises if something else is."""
    names = names_in(target)
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
    """Copy the exclusions of the URL to a store that is here, without lifting any of its own."""
    theirs = contents.exclusions
    if theirs is None:
        return []  # what is excluded here stays excluded
    own = read_exclusions(target)
    if own.sha256 == theirs.sha256:
        return []
    if not theirs.covers(own):
        raise StoreExistsError(
            f"{target / EXCLUDE}: excludes tokens that the copy at the URL does not; push it, or "
            "remove it to use those of the URL"
        )
    write_exclusions(target, theirs.entries)
    return [EXCLUDE]


@contextmanager
def _staging(target: Path, contents: Contents) -> Iterator[Path]:
    """The hidden folder beside `target` that this pull writes to, locked while it runs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{contents.manifest_sha256[:16]}.pull.tmp")
    staged.mkdir(exist_ok=True)
    with closing(LockedFile(staged)) as lock:
        if not lock.lock(wait=False) or not lock.is_at(staged):
            raise BuildLockedError(f"{target}: another process pulls this folder now; wait for it")
        yield staged


def _publish(staged: Path, target: Path, contents: Contents) -> None:
    with atomic_write(staged / contents.manifest_name) as file:
        file.write(contents.manifest)
    for parent in {(staged / fact.name).parent for fact in contents.files} - {staged}:
        sync_folder(parent)
    if contents.store is not None:
        open_store(staged)
    elif b'"memmap_padded_v1"' in contents.manifest:
        open_memmap_shard(staged).close()
    try:
        staged.rename(target)  # replaces an empty folder, and nothing else
    except OSError as error:
        raise StoreExistsError(
            f"{target}: cannot be put there: {error.strerror}; what was pulled is in {staged}: "
            "look, then pull again"
        ) from error
    sync_folder(target.parent)
