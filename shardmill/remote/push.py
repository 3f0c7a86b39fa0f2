"""Push a finished folder to a place.

A place without the manifest is unfinished. The manifest is created last, when every other file is
there with the right checksum; a file that is there already is not sent again. Another folder is
never mixed with what is there, and replaces it only on request: the mark first, then its manifest
goes, then its files. What is excluded there stays excluded, unless replacing was asked for. Nothing
is overwritten: a file that must go is removed, then created, so that a late request of a push
that lost its turn cannot change what the next one sent. See docs/remote.md for the whole protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardmill.arguments import whole_number
from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.remote.claims import FLAG, Turn, take_turn
from shardmill.remote.contents import (
    LARGEST,
    Contents,
    FileFact,
    OnProgress,
    TransferMeter,
    TransferReceipt,
    local_contents,
    read_contents,
    with_exclusions,
)
from shardmill.remote.transfer import check_local, in_parallel, is_same
from shardmill.storage.object_store import TEMPORARY, Listing, RemoteFolder, open_target
from shardmill.store.exclusions import EXCLUDE, MAX_EXCLUDE_BYTES
from shardmill.store.layout import ORIGINS, looks_like_data

log = logging.getLogger(__name__)

MARK = ".shardmill-push.json"
"""What an unfinished push leaves: whose files these are."""

PROBE = ".shardmill-probe"
"""Written and removed before a build, to find out whether that is allowed."""

_MOST_MARK = 1000


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

    Interrupted, do the same again: what arrived stays. `replace` allows another folder to take
    the place of the one there. `storage_options` go to fsspec.
    """
    folder = Path(folder).absolute()
    contents = local_contents(folder)
    return send(folder, contents, open_target(url, storage_options), (workers, progress), replace)


def send(
    folder: Path,
    contents: Contents,
    place: RemoteFolder,
    how: tuple[int, OnProgress | None],
    replace: bool,
) -> TransferReceipt:
    """As `push`; `how` is workers and progress."""
    began = time.monotonic()
    workers = whole_number(how[0], "workers")
    sizes = {fact.name: _size(folder, fact) for fact in contents.files}
    meter = TransferMeter(sum(sizes.values()) + len(contents.manifest), how[1])
    sender = _Sender(folder, place, meter)
    found = place.listing()
    sent: list[str] = []
    try:
        is_there = check_the_way(place, contents, found, replace=replace)
        is_done = is_there and sender.has_all(workers, contents, found, replace=replace)
        is_done = is_done and not (replace and _foreign(contents, found))
    except StoreNotFoundError:  # another push changes the place while we look
        is_done = False
    if is_done:
        settle(place, found)
    else:
        with take_turn(place, contents.manifest_sha256) as turn:
            found = turn.found
            is_there = check_the_way(place, contents, found, replace=replace)
            if not is_there:
                _claim(place, contents, turn)
            elif replace:
                _remove(place, _foreign(contents, found), turn)
            if EXCLUDE in found:
                _keep_excluded(place, contents, turn, may_lift=replace or not is_there)
            sender.begin(turn, is_finished=is_there)
            sent = [name for name in in_parallel(workers, sender.send, contents.files) if name]
            if not is_there:
                _finish(place, contents, sizes, turn)
            _tidy(place, {**turn.found, MARK: {}})
    meter.set(contents.manifest_name, len(contents.manifest))
    left = _foreign(contents, found) if is_there and not replace else []
    if left:
        log.warning(
            "%s/%s: a data file that the manifest does not list (%s in all); it is never read, but "
            "verify reports it: remove it, or ask for replace (--replace)",
            *(place.url, left[0], f"{len(left):,}"),
        )
    own = 0 if is_there else 1
    return TransferReceipt(
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


def settle(place: RemoteFolder, found: Listing) -> None:
    """Remove what killed pushes left at a place whose manifest is there, listed as `found`.

    The manifest says that the folder is finished, whatever else was left. Another push that is at
    work there does this itself when it ends.
    """
    if not any(_is_left(name) for name in found):
        return
    try:
        with take_turn(place, "") as turn:
            if any(name in turn.found for name in LARGEST):
                _tidy(place, turn.found)
    except StoreError as error:
        log.info("%s", error)


def _tidy(place: RemoteFolder, found: Listing) -> None:
    """What killed pushes left, other than flags: those are removed when a turn begins."""
    for name in found:
        if _is_left(name) and not name.startswith(FLAG):
            place.remove(name)


def _is_left(name: str) -> bool:
    return name in (MARK, PROBE) or name.startswith((FLAG, TEMPORARY))


def check_the_way(
    place: RemoteFolder, contents: Contents, found: Listing, *, replace: bool
) -> bool:
    """Whether this very folder is finished there already; raises if another one is in the way."""
    there = _manifests(place, found)
    if there == {contents.manifest_name: contents.manifest}:
        return True
    obstacle = None if replace else _obstacle(place, contents, found, there)
    if obstacle is not None:
        raise StoreExistsError(
            f"{place.url}: {obstacle}; nothing was sent: push to another place, or ask for "
            "replace (--replace) if what is there may go"
        )
    return False


def _claim(place: RemoteFolder, contents: Contents, turn: Turn) -> None:
    """Mark the place as ours, and remove what is in the way: the manifest first, so that what was
    there is unfinished at once."""
    found = turn.found
    there = _manifests(place, found)
    if MARK in found and _small(place, MARK, found) != _mark(contents):
        turn.check()
        place.remove(MARK)
    if not place.create(MARK, _mark(contents)):
        raise StoreError(f"{place.url}: another push began there just now; look, then push again")
    ours = {fact.name for fact in contents.files}
    listed = [old for name, data in there.items() for old in (*_listed(name, data), ORIGINS)]
    gone = dict.fromkeys((*there, *listed, *_foreign(contents, found)))
    _remove(place, [name for name in gone if name not in ours and name in found], turn)


def _remove(place: RemoteFolder, names: Iterable[str], turn: Turn) -> None:
    for name in names:
        turn.check()
        place.remove(name)


def _foreign(contents: Contents, found: Listing) -> list[str]:
    """Data files there that the store does not have: of a push that was killed, or of nobody."""
    if contents.kind != "store":
        return []
    ours = {EXCLUDE, ORIGINS, *LARGEST, *(fact.name for fact in contents.files)}
    return sorted(
        name for name in found if name not in ours and looks_like_data(name.rpartition("/")[2])
    )


def _manifests(place: RemoteFolder, found: Listing) -> dict[str, bytes]:
    return {name: _small(place, name, found) for name in LARGEST if name in found}


def _keep_excluded(place: RemoteFolder, contents: Contents, turn: Turn, *, may_lift: bool) -> None:
    """Refuse to lift what is excluded at the place; or remove it, if it is of no use there."""
    if not may_lift:
        _check_excluded(place, contents, turn.found)
    elif contents.exclusions is None:
        log.warning("%s/%s: goes, and with it what was excluded there", place.url, EXCLUDE)
        turn.check()
        place.remove(EXCLUDE)


def _check_excluded(place: RemoteFolder, contents: Contents, found: Listing) -> None:
    where, size = f"{place.url}/{EXCLUDE}", found[EXCLUDE]["size"]
    if size > MAX_EXCLUDE_BYTES:
        raise StoreExistsError(f"{where}: {size:,} bytes, so none of ours; look there")
    theirs = with_exclusions(contents, place.read(EXCLUDE, size), where=where).exclusions
    assert theirs is not None
    own = contents.exclusions
    if own is None or not own.covers(theirs):
        raise StoreExistsError(
            f"{where}: excludes tokens that the folder here does not; nothing was sent: pull "
            "first, or ask for replace (--replace) to lift what is excluded there"
        )


def _obstacle(
    place: RemoteFolder, contents: Contents, found: Listing, there: Mapping[str, bytes]
) -> str | None:
    if there:
        return f"another finished folder is there ({', '.join(there)})"
    if MARK in found:
        if _small(place, MARK, found) == _mark(contents):
            return None
        return "the unfinished push of another folder is there"
    taken = sorted({EXCLUDE, *(fact.name for fact in contents.files)} & found.keys())
    taken = taken or _foreign(contents, found)
    return f"{taken[0]} is there, of no push of ours" if taken else None


def is_push_of(place: RemoteFolder, folder: Path, found: Listing) -> bool:
    """Whether the unfinished push at `place` is of this finished folder."""
    return _small(place, MARK, found) == _mark(local_contents(folder))


class _Sender:
    """One file at a time, from any thread."""

    def __init__(self, folder: Path, place: RemoteFolder, meter: TransferMeter) -> None:
        self.folder, self.place, self.meter = folder, place, meter
        self.same: dict[str, dict[str, Any]] = {}  # what was known of a file found to be the same
        self.turn: Turn | None = None
        self.is_finished = False

    def has_all(self, workers: int, contents: Contents, found: Listing, *, replace: bool) -> bool:
        """Whether the finished folder there, listed as `found`, needs no change."""
        if EXCLUDE in found and not replace:
            _check_excluded(self.place, contents, found)
        elif EXCLUDE in found and contents.exclusions is None:
            return False

        def is_there(fact: FileFact) -> bool:
            check_local(self.folder / fact.name, fact)
            return self._is_same(fact, found)

        return all(in_parallel(workers, is_there, contents.files))

    def begin(self, turn: Turn, *, is_finished: bool) -> None:
        self.turn, self.is_finished = turn, is_finished

    def send(self, fact: FileFact) -> str | None:
        """The name of the file if it was sent; None if it was there."""
        assert self.turn is not None
        path, found = self.folder / fact.name, self.turn.found
        size = path.stat().st_size if fact.name in self.same else check_local(path, fact)
        if self._is_same(fact, found):
            self.meter.set(fact.name, size)
            return None
        self.turn.check()
        if fact.name == EXCLUDE and self.is_finished:
            self.place.write(EXCLUDE, path.read_bytes())  # never without one in between
        else:
            if fact.name in found:
                self.place.remove(fact.name)
            self.place.put(path, fact.name, lambda done: self.meter.set(fact.name, done))
        if not is_same(self.place, fact, path, self.place.info(fact.name)):
            raise DamagedStoreError(
                f"{self.place.url}/{fact.name}: what arrived is not what was sent; the push is "
                "unfinished: do it again"
            )
        self.meter.set(fact.name, size)
        return fact.name

    def _is_same(self, fact: FileFact, found: Listing) -> bool:
        info = found.get(fact.name)
        if info is None:
            return False
        if self.same.get(fact.name) != info:
            if not is_same(self.place, fact, self.folder / fact.name, info):
                return False
            self.same[fact.name] = info
        return True


def _finish(place: RemoteFolder, contents: Contents, sizes: Mapping[str, int], turn: Turn) -> None:
    """Create the manifest, if everything is there and the place is still ours."""
    found = place.listing()
    is_ours = turn.name in found and MARK in found
    if not is_ours or _small(place, MARK, found) != _mark(contents) or _manifests(place, found):
        raise StoreError(f"{place.url}: another push went over this one; look, then push again")
    for name, size in sizes.items():
        if found.get(name, {}).get("size") != size:
            raise DamagedStoreError(
                f"{place.url}/{name}: was sent, and is gone or changed; the push is unfinished: "
                "does another process write there? Look, then push again"
            )
    turn.check()
    if not place.create(contents.manifest_name, contents.manifest):
        raise StoreError(f"{place.url}: another push went over this one; look, then push again")


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


def _small(place: RemoteFolder, name: str, found: Listing) -> bytes:
    most = LARGEST.get(name, _MOST_MARK)
    size = found[name]["size"]
    if size > most:
        raise StoreExistsError(f"{place.url}/{name}: {size:,} bytes, so none of ours; look there")
    return place.read(name, size)


def _mark(contents: Contents) -> bytes:
    return msgspec.json.encode({"pushing": contents.manifest_sha256}) + b"\n"
