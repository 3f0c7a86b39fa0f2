"""Push a finished folder to a place.

In: a finished folder, a URL.  Out: the same files there, the manifest last, and a receipt.
Promise: a place without the manifest is unfinished, and the manifest comes when every other file
lies there with the right checksum; a file that does so already is not sent again; another folder
is never mixed with what is there, and replaces it only on request, its manifest gone first. What is
excluded there stays excluded, unless replacing was asked for.
Not here: what a client does on the wire; locks (two pushes at once: the later mark wins, and the
other is refused before its manifest).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, ManifestError, StoreError, StoreExistsError
from shardmill.remote.contents import LARGEST, local_contents, read_contents, with_exclusions
from shardmill.remote.hashing import check_local, is_same
from shardmill.remote.parallel import in_parallel
from shardmill.remote.place import Place, open_place
from shardmill.remote.records import Contents, FileFact, Meter, OnProgress, Receipt
from shardmill.shards.exclude_file import EXCLUDE, MOST_BYTES
from shardmill.shards.layout import ORIGINS

log = logging.getLogger(__name__)

MARK = ".shardmill-push.json"
"""What an unfinished push leaves: whose files these are."""

_MOST_MARK = 1000
Listing = dict[str, dict[str, Any]]


def push(
    folder: str | Path,
    url: str,
    *,
    workers: int = 8,
    progress: OnProgress | None = None,
    replace: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Receipt:
    """Copy the finished `folder` to `url`, where it is finished too when this returns.

    Interrupted, do the same again: what arrived stays. `replace` allows another folder to take
    the place of the one there. `storage_options` go to fsspec.
    """
    folder = Path(folder).absolute()
    contents = local_contents(folder)
    return send(folder, contents, open_place(url, storage_options), (workers, progress), replace)


def send(
    folder: Path,
    contents: Contents,
    place: Place,
    how: tuple[int, OnProgress | None],
    replace: bool,
) -> Receipt:
    """As `push`; `how` is workers and progress."""
    began = time.monotonic()
    workers = whole_number(how[0], "workers")
    sizes = {fact.name: _size(folder, fact) for fact in contents.files}
    meter = Meter(sum(sizes.values()) + len(contents.manifest), how[1])
    found = place.listing()
    is_there = clear_the_way(place, contents, found, replace=replace)
    if not is_there:
        place.write(MARK, _mark(contents))
    if EXCLUDE in found:
        _keep_excluded(place, contents, found, may_lift=replace or not is_there)
    sender = _Sender(folder, place, found, meter)
    sent = [name for name in in_parallel(workers, sender.send, contents.files) if name]
    if not is_there:
        _finish(place, contents)
    elif MARK in found:
        place.remove(MARK)
    meter.set(contents.manifest_name, len(contents.manifest))
    own = 0 if is_there else 1
    return Receipt(
        folder=folder,
        url=place.url,
        kind=contents.kind,
        manifest_sha256=contents.manifest_sha256,
        files=len(contents.files) + 1,
        bytes=sum(sizes.values()) + len(contents.manifest),
        moved_files=len(sent) + own,
        moved_bytes=sum(sizes[name] for name in sent) + own * len(contents.manifest),
        kept_files=len(contents.files) - len(sent) + 1 - own,
        seconds=time.monotonic() - began,
    )


def clear_the_way(place: Place, contents: Contents, found: Listing, *, replace: bool) -> bool:
    """Whether this very folder is finished there already; raises if another one is in the way.

    With `replace`, what is in the way goes: its manifest first, so that it is unfinished at once.
    """
    there = {name: _small(place, name, found) for name in LARGEST if name in found}
    if there == {contents.manifest_name: contents.manifest}:
        return True
    obstacle = _obstacle(place, contents, found, there)
    if obstacle is None:
        return False
    if not replace:
        raise StoreExistsError(
            f"{place.url}: {obstacle}; nothing was sent: push to another place, or ask for "
            "replace (--replace) if what is there may go"
        )
    for name in there:
        place.remove(name)
    place.write(MARK, _mark(contents))
    ours = {fact.name for fact in contents.files}
    for name, data in there.items():
        for old in (*_listed(name, data), ORIGINS):
            if old not in ours and old in found:
                place.remove(old)
    return False


def _keep_excluded(place: Place, contents: Contents, found: Listing, *, may_lift: bool) -> None:
    """Refuse to lift what is excluded at the place; or take it away, if it is of no use there."""
    if not may_lift:
        where, size = f"{place.url}/{EXCLUDE}", found[EXCLUDE]["size"]
        if size > MOST_BYTES:
            raise StoreExistsError(f"{where}: {size:,} bytes, so none of ours; look there")
        theirs = with_exclusions(contents, place.read(EXCLUDE, size), where=where).exclusions
        assert theirs is not None
        own = contents.exclusions
        if own is None or not own.covers(theirs):
            raise StoreExistsError(
                f"{where}: excludes tokens that the folder here does not; nothing was sent: pull "
                "first, or ask for replace (--replace) to lift what is excluded there"
            )
    elif contents.exclusions is None:
        log.warning("%s/%s: goes, and with it what was excluded there", place.url, EXCLUDE)
        place.remove(EXCLUDE)


def _obstacle(
    place: Place, contents: Contents, found: Listing, there: Mapping[str, bytes]
) -> str | None:
    if there:
        return f"another finished folder is there ({', '.join(there)})"
    if MARK in found:
        if _small(place, MARK, found) == _mark(contents):
            return None
        return "the unfinished push of another folder is there"
    taken = sorted({EXCLUDE, *(fact.name for fact in contents.files)} & found.keys())
    return f"{taken[0]} is there, of no push of ours" if taken else None


def is_push_of(place: Place, folder: Path, found: Listing) -> bool:
    """Whether the unfinished push at `place` is of this finished folder."""
    return _small(place, MARK, found) == _mark(local_contents(folder))


class _Sender:
    """One file at a time, from any thread."""

    def __init__(self, folder: Path, place: Place, found: Listing, meter: Meter) -> None:
        self.folder, self.place, self.found, self.meter = folder, place, found, meter

    def send(self, fact: FileFact) -> str | None:
        """The name of the file if it was sent; None if it was there."""
        path = self.folder / fact.name
        size = check_local(path, fact)
        info = self.found.get(fact.name)
        if info is not None and is_same(self.place, fact, path, info):
            self.meter.set(fact.name, size)
            return None
        self.place.put(path, fact.name, lambda done: self.meter.set(fact.name, done))
        if not is_same(self.place, fact, path, self.place.info(fact.name)):
            raise DamagedStoreError(
                f"{self.place.url}/{fact.name}: what arrived is not what was sent; the push is "
                "unfinished: do it again"
            )
        self.meter.set(fact.name, size)
        return fact.name


def _finish(place: Place, contents: Contents) -> None:
    """The manifest, if this place is still ours."""
    found = place.listing()
    if clear_the_way(place, contents, found, replace=False):
        return  # another push of the same folder was quicker
    if MARK not in found:
        raise StoreError(f"{place.url}: another push went over this one; look, then push again")
    place.write(contents.manifest_name, contents.manifest)
    place.remove(MARK)


def _listed(name: str, data: bytes) -> list[str]:
    """The files of a manifest that goes; of a damaged one nobody knows."""
    try:
        return [fact.name for fact in read_contents(name, data, where=name).files]
    except (ManifestError, StoreError):
        return []


def _size(folder: Path, fact: FileFact) -> int:
    try:
        return (folder / fact.name).stat().st_size
    except OSError as error:
        raise DamagedStoreError(
            f"{folder / fact.name}: {error.strerror}; the manifest lists it: make it again"
        ) from error


def _small(place: Place, name: str, found: Listing) -> bytes:
    most = LARGEST.get(name, _MOST_MARK)
    size = found[name]["size"]
    if size > most:
        raise StoreExistsError(f"{place.url}/{name}: {size:,} bytes, so none of ours; look there")
    return place.read(name, size)


def _mark(contents: Contents) -> bytes:
    return msgspec.json.encode({"pushing": contents.manifest_sha256}) + b"\n"
