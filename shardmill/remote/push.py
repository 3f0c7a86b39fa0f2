"""Push a finished folder to object storage. docs/remote.md has the whole protocol.

The manifest is created last, when every other file is there with the right checksum; a file that is
there already is not sent again. Another folder is never mixed with what is there. Nothing is
overwritten: a file that must go is removed, then created, so that a late request of a push that
lost its claim cannot change what the next one sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, StoreError, StoreExistsError, StoreNotFoundError
from shardmill.remote.claims import CLAIM, PushClaim, claim_folder
from shardmill.remote.contents import (
    BUILD,
    LARGEST,
    MARKER,
    Contents,
    FileFact,
    OnProgress,
    TransferMeter,
    TransferReceipt,
    check_local,
    in_parallel,
    is_same,
    local_contents,
    read_contents,
    read_manifests,
)
from shardmill.remote.folder import TEMPORARY, Listing, RemoteFolder, open_destination
from shardmill.store.exclusions import MAX_EXCLUDE_BYTES, decode_exclusions
from shardmill.store.layout import EXCLUDE, ORIGINS, looks_like_data
from shardmill.store.manifest import decode_manifest

log = logging.getLogger(__name__)

_MOST_MARKER_BYTES = 1000


def push(
    folder: str | Path,
    url: str,
    *,
    workers: int = 8,
    progress: OnProgress | None = None,
    replace: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReceipt:
    """Copy the finished `folder` to `url`, where it is finished too when this returns.

    If it is interrupted, do the same again: what arrived is kept. `replace` allows the folder to
    replace another one there. `storage_options` go to fsspec.
    """
    remote = open_destination(url, storage_options)
    folder = Path(folder).absolute()
    return send(folder, remote, workers=workers, progress=progress, replace=replace)


def send(
    folder: Path,
    remote: RemoteFolder,
    *,
    workers: int = 8,
    progress: OnProgress | None = None,
    replace: bool = False,
) -> TransferReceipt:
    """As `push`, to a folder that is open."""
    began = time.monotonic()
    workers = whole_number(workers, "workers")
    contents = local_contents(folder)
    sizes = {fact.name: _local_size(folder / fact.name) for fact in contents.files}
    sizes[contents.manifest_name] = len(contents.manifest)
    meter = TransferMeter(sizes, progress, began)
    files = _Files(folder, remote, meter)
    found = remote.listing()
    sent: list[str] = []
    try:
        is_there = _is_finished(contents, found, replace=replace)
        is_done = is_there and not (replace and _foreign(contents, found))
        is_done = is_done and files.are_there(workers, contents, found, replace=replace)
    except StoreNotFoundError:  # another push changes the folder while we look
        is_done = False
    if is_done:
        clean_up(found)
    else:
        with claim_folder(remote, contents.manifest_sha256) as claim:
            found = claim.found
            is_there = _is_finished(contents, found, replace=replace)
            if not is_there:
                _take_over(contents, claim)
            elif replace:
                _remove(claim, _foreign(contents, found))
            if is_there and not replace:
                _check_excluded(contents, found)
            elif EXCLUDE in found and contents.exclusions is None:
                where = f"{remote.url}/{EXCLUDE}"
                log.warning("%s: removed, and with it what was excluded there", where)
                _remove(claim, [EXCLUDE])

            def send_one(fact: FileFact) -> str | None:
                return files.send(fact, claim, is_finished=is_there)

            sent = [name for name in in_parallel(workers, send_one, contents.files) if name]
            if not is_there:
                _finish(contents, sizes, claim)
                sent.append(contents.manifest_name)
            _remove_leftovers(remote, [*claim.found, *{MARKER} - claim.found.keys()])
    meter.set(contents.manifest_name, len(contents.manifest))
    foreign = _foreign(contents, found) if is_there and not replace else []
    if foreign:
        log.warning(
            "%s/%s: a data file that the manifest does not list (%s in all); it is never read, but "
            "verify reports it: remove it, or push with replace",
            *(remote.url, foreign[0], f"{len(foreign):,}"),
        )
    return meter.receipt(folder, remote.url, contents, sent)


def clean_up(found: Listing) -> None:
    """Remove what killed pushes left in a folder whose manifest is there.

    The manifest says that the folder is finished, whatever else was left. Another push that is at
    work there does this itself when it ends.
    """
    if not any(_is_leftover(name) for name in found):
        return
    try:
        with claim_folder(found.remote, "") as claim:
            if any(name in claim.found for name in LARGEST):
                _remove_leftovers(found.remote, claim.found)
    except StoreError as error:
        log.info("%s", error)


def _remove_leftovers(remote: RemoteFolder, names: Iterable[str]) -> None:
    """All but claims: those are removed when a claim is won."""
    for name in names:
        if _is_leftover(name) and not name.startswith(CLAIM):
            remote.remove(name)


def _is_leftover(name: str) -> bool:
    return name == MARKER or name.startswith((CLAIM, TEMPORARY, BUILD))


def _is_finished(contents: Contents, found: Listing, *, replace: bool) -> bool:
    """Whether this very folder is finished there already; raises if another one is in the way."""
    manifests = read_manifests(found.read)
    if manifests == {contents.manifest_name: contents.manifest}:
        return True
    if replace:
        return False
    taken = sorted({EXCLUDE, *(fact.name for fact in contents.files)} & found.keys())
    taken = taken or _foreign(contents, found)
    obstacle = None
    if manifests:
        obstacle = f"another finished folder is there ({', '.join(manifests)})"
    elif MARKER in found:
        if not is_marked(found, contents):
            obstacle = "the unfinished push of another folder is there"
    elif any(name.startswith(BUILD) for name in found):
        obstacle = "an unfinished build is there"
    elif taken:
        obstacle = f"{taken[0]} is there, and no push of ours put it there"
    if obstacle is not None:
        raise StoreExistsError(
            f"{found.remote.url}: {obstacle}; nothing was sent: push to another URL, or pass "
            "{replace} if what is there may go",
            replace=True,
        )
    return False


def _take_over(contents: Contents, claim: PushClaim) -> None:
    """Mark the folder as ours, and remove what is in the way.

    The manifest goes first, so that what was there is unfinished at once.
    """
    remote, found = claim.remote, claim.found
    manifests = read_manifests(found.read)
    if MARKER in found and not is_marked(found, contents):
        claim.check()
        remote.remove(MARKER)
    if not remote.create(MARKER, _marker(contents)):
        raise StoreError(f"{remote.url}: another push began there just now; look, then push again")
    ours = {fact.name for fact in contents.files}
    left = [name for name in found if name.startswith(BUILD)]  # of a build that did not finish
    gone = dict.fromkeys((*manifests, *left, *listed_names(manifests), *_foreign(contents, found)))
    _remove(claim, [name for name in gone if name not in ours and name in found])


def _remove(claim: PushClaim, names: Iterable[str]) -> None:
    for name in names:
        claim.check()
        claim.remote.remove(name)


def _foreign(contents: Contents, found: Listing) -> list[str]:
    """Data files there that are not part of the store, left by a killed push, say."""
    if contents.kind != "store":
        return []
    ours = {EXCLUDE, ORIGINS, *LARGEST, *(fact.name for fact in contents.files)}
    return sorted(
        name for name in found if name not in ours and looks_like_data(name.rpartition("/")[2])
    )


def _check_excluded(contents: Contents, found: Listing) -> None:
    """Raise if tokens are excluded there that are not excluded here."""
    where, own = f"{found.remote.url}/{EXCLUDE}", contents.exclusions
    data = found.read(EXCLUDE, MAX_EXCLUDE_BYTES)
    if data is None:
        return
    manifest = decode_manifest(contents.manifest, where=where)
    if own is None or not own.covers(decode_exclusions(data, manifest, where=where)):
        raise StoreExistsError(
            f"{where}: excludes tokens that the local folder does not; nothing was sent: pull "
            "first, or pass {replace} to lift what is excluded there",
            replace=True,
        )


class _Files:
    """The files of one push: which are there already, and sending one, from any thread."""

    def __init__(self, folder: Path, remote: RemoteFolder, meter: TransferMeter) -> None:
        self.folder, self.remote, self.meter = folder, remote, meter
        self.same: dict[str, dict[str, Any]] = {}  # files found equal, and their info then

    def are_there(self, workers: int, contents: Contents, found: Listing, *, replace: bool) -> bool:
        """Whether the finished folder there, listed as `found`, needs no change."""
        if not replace:
            _check_excluded(contents, found)
        elif EXCLUDE in found and contents.exclusions is None:
            return False

        def is_there(fact: FileFact) -> bool:
            check_local(self.folder / fact.name, fact)
            return self._is_same(fact, found)

        return all(in_parallel(workers, is_there, contents.files))

    def send(self, fact: FileFact, claim: PushClaim, *, is_finished: bool) -> str | None:
        """The name of the file if it was sent; None if it was there."""
        path, found = self.folder / fact.name, claim.found
        size = path.stat().st_size if fact.name in self.same else check_local(path, fact)
        if self._is_same(fact, found):
            self.meter.set(fact.name, size)
            return None
        claim.check()
        if fact.name == EXCLUDE and is_finished:
            self.remote.write(EXCLUDE, path.read_bytes())  # at no moment without one
        else:
            if fact.name in found:
                self.remote.remove(fact.name)
            self.remote.put(path, fact.name, lambda done: self.meter.set(fact.name, done))
        if not is_same(self.remote, fact, path, self.remote.info(fact.name)):
            raise DamagedStoreError(
                f"{self.remote.url}/{fact.name}: what arrived is not what was sent; the push is "
                "unfinished: do it again"
            )
        self.meter.set(fact.name, size)
        return fact.name

    def _is_same(self, fact: FileFact, found: Listing) -> bool:
        info = found.get(fact.name)
        if info is None:
            return False
        if self.same.get(fact.name) != info:
            if not is_same(self.remote, fact, self.folder / fact.name, info):
                return False
            self.same[fact.name] = info
        return True


def _finish(contents: Contents, sizes: Mapping[str, int], claim: PushClaim) -> None:
    """Create the manifest, if everything is there and the folder is still ours."""
    remote, found = claim.remote, claim.remote.listing()
    is_ours = claim.name in found and is_marked(found, contents)
    is_ours = is_ours and not read_manifests(found.read)
    if is_ours:
        for name, size in sizes.items():
            if name != contents.manifest_name and found.get(name, {}).get("size") != size:
                raise DamagedStoreError(
                    f"{remote.url}/{name}: was sent, and is gone or changed; the push is "
                    "unfinished: does another process write there? Look, then push again"
                )
        claim.check()
    if not is_ours or not remote.create(contents.manifest_name, contents.manifest):
        raise StoreError(f"{remote.url}: another push took over; look, then push again")


def listed_names(manifests: Mapping[str, bytes]) -> list[str]:
    """The files of manifests that are removed; none of one that is damaged."""
    names = [ORIGINS] if manifests else []
    for name, data in manifests.items():
        with suppress(StoreError):
            names += [fact.name for fact in read_contents(name, data, where=name).files]
    return names


def _local_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DamagedStoreError(
            f"{path}: {error.strerror}; the manifest lists it: build it again"
        ) from error


def is_marked(found: Listing, contents: Contents) -> bool:
    """Whether the marker there is that of an unfinished push of this folder."""
    return found.read(MARKER, _MOST_MARKER_BYTES) == _marker(contents)


def _marker(contents: Contents) -> bytes:
    return msgspec.json.encode({"pushing": contents.manifest_sha256}) + b"\n"
