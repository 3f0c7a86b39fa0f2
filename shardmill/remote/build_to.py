"""Build a store for a place where nothing can be mapped: in a scratch folder here, then sent.

In: a URL, a block that builds a store in the folder it is given.  Out: the store at the URL.
Promise: the place is looked at and written to before the block begins; the scratch folder is the
same for the same URL, ours alone while we live, and goes when the store there is finished; until
then it is kept, and a resume sends only what is missing.
Not here: building (the block); what is on the wire (send.py).
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import BuildLockedError, StoreError, StoreExistsError, UnfinishedBuildError
from shardmill.remote.contents import LARGEST, OnProgress, TransferReceipt, local_contents
from shardmill.remote.pull import remote_contents
from shardmill.remote.push import MARK, PROBE, is_push_of, send, settle
from shardmill.storage.atomic import cache_folder
from shardmill.storage.locks import LockedFile
from shardmill.storage.object_store import Listing, RemoteFolder, open_target
from shardmill.store.layout import META
from shardmill.urls import Url

log = logging.getLogger(__name__)

_STORE, _LOCK = "store", "lock"
_PASSING = "passing-"  # how the names of folders begin that no later run needs
_SEND_WORKERS = 8


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A store on its way."""

    url: str  # without a password
    folder: Path  # where the block builds it
    receipt: TransferReceipt | None = (
        None  # of the push; None until then, or when it was there before
    )


@contextmanager
def build_to(
    url: str,
    *,
    scratch: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Outgoing]:
    """Build in the folder that this gives; when the block ends well, the store is at `url`.

    `scratch` holds a folder for each URL; None: the user's cache. With `resume` the block must
    resume too: what was built or sent is used, and of a store that is there already only the
    manifest is given to the block, which must find its build done. `overwrite` lets the store
    replace another one there, in the moment it is whole here.
    """
    place = open_target(url, storage_options)
    folder = scratch_store(url, scratch)
    with _alone(folder.parent, place.url):
        if _is_finished(place, folder, resume=resume, overwrite=overwrite):
            with _stand_in(place, folder.parent) as standing:
                yield Outgoing(url=place.url, folder=standing)
                _drop_if_sent(folder, standing)
            return
        log.info("%s: is built in %s, then sent", place.url, folder)
        out = Outgoing(url=place.url, folder=folder)
        yield out
        out.receipt = _sent(place, folder, progress, overwrite=overwrite)
        _discard(folder)


def scratch_store(url: str, scratch: str | Path | None = None) -> Path:
    """Where the store for this URL is built."""
    plain = str(Url(url)).rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", plain.rpartition("/")[2])[:40]
    root = Path(scratch).absolute() if scratch is not None else cache_folder("builds")
    return root / f"{name}-{hashlib.sha256(plain.encode()).hexdigest()[:16]}" / _STORE


def _is_finished(place: RemoteFolder, folder: Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether a store is there that a resume may find its own; raises if something is in the way.

    When it returns, the place can be listed, written to and removed from.
    """
    found = place.listing()
    if not overwrite:
        _refuse(place, folder, found, resume=resume)
    if not (resume or overwrite) and (folder / META).exists():
        raise UnfinishedBuildError(
            f"{place.url}: a store that was built for it and not sent lies in {folder}: send it "
            "with resume (--resume), or start again with overwrite (--overwrite)"
        )
    place.pipe(PROBE, b"shardmill looks whether it may write here\n")  # not after hours of work
    place.remove(PROBE)
    if not (resume and not overwrite and META in found):
        return False
    settle(place, found)
    return True


def _refuse(place: RemoteFolder, folder: Path, found: Listing, *, resume: bool) -> None:
    """What is there, and may not go."""
    finished = [name for name in LARGEST if name in found]
    if finished:
        if not resume or finished != [META]:
            raise StoreExistsError(
                f"{place.url}: a finished folder is there ({', '.join(finished)}); nothing was "
                "built: ask for overwrite (--overwrite) to replace it, or build to another place"
            )
    elif MARK in found:
        is_ours = (folder / META).exists() and is_push_of(place, folder, found)
        if is_ours and not resume:
            raise UnfinishedBuildError(
                f"{place.url}: the store in {folder} was sent there half-way: send the rest with "
                "resume (--resume), or start again with overwrite (--overwrite)"
            )
        if not is_ours:
            raise StoreExistsError(
                f"{place.url}: an unfinished push is there, of no store in {folder}; nothing was "
                "built: finish it where it began, ask for overwrite (--overwrite) if it may go, or "
                "build to another place"
            )
    else:
        strange = sorted(
            name for name in found if not name.startswith(".shardmill-") and name[-1:] != "/"
        )
        if any(strange):
            raise StoreExistsError(
                f"{place.url}: holds {strange[-1]!r} and no {META}, so it is no store; nothing was "
                "built: choose another place, or ask for overwrite (--overwrite) to build over it"
            )


@contextmanager
def _stand_in(place: RemoteFolder, home: Path) -> Iterator[Path]:
    """A folder with the manifest of the store that is there: a resumed build reads no more of it
    to tell whether it is its own, and is done."""
    contents = remote_contents(place, place.listing())
    with tempfile.TemporaryDirectory(prefix=_PASSING, dir=home) as standing:
        folder = Path(standing, _STORE)
        folder.mkdir()
        (folder / META).write_bytes(contents.manifest)
        try:
            yield folder
        except StoreExistsError as error:
            raise StoreExistsError(
                f"{place.url}: a finished store of other input or options is there: build "
                "elsewhere, or, if it may be replaced, ask for overwrite (--overwrite) too"
            ) from error


def _drop_if_sent(folder: Path, standing: Path) -> None:
    """Sweep up behind a build that was killed after its store was sent."""
    here, there = folder / META, standing / META
    if here.is_file() and here.read_bytes() == there.read_bytes():
        _discard(folder)


def _discard(folder: Path) -> None:
    """Away with a store, whose name never stands for half of it."""
    going = folder.with_name(f"{_PASSING}sent")
    folder.rename(going)
    shutil.rmtree(going)


def _sent(
    place: RemoteFolder, folder: Path, progress: OnProgress | None, *, overwrite: bool
) -> TransferReceipt:
    try:
        how = (_SEND_WORKERS, progress)
        return send(folder, local_contents(folder), place, how, overwrite)
    except StoreError as error:
        flags = "resume (--resume)"
        if overwrite or isinstance(error, StoreExistsError):
            flags = "resume and overwrite (--resume --overwrite)"
        raise type(error)(
            f"{error}. The store is built and lies in {folder}: go on with {flags}, which sends "
            "what is missing"
        ) from error


@contextmanager
def _alone(home: Path, url: str) -> Iterator[None]:
    """The scratch folder of a URL, ours while we live; gone at the end if nothing is in it."""
    path = home / _LOCK
    lock = _taken(path, url)
    try:
        for left in home.glob(f"{_PASSING}*"):
            shutil.rmtree(left)
        yield
    finally:
        if list(home.glob("*")) == [path]:
            path.unlink()
            with suppress(OSError):  # somebody put something there just now: theirs
                home.rmdir()
        lock.close()


def _taken(path: Path, url: str) -> LockedFile:
    while True:  # another turn means that its last holder removed it in between
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = LockedFile(path, create=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(
                f"{path.parent}: cannot be the scratch folder of {url}: {error.strerror}; choose "
                "another one (--scratch)"
            ) from error
        if not lock.try_exclusive():
            lock.close()
            raise BuildLockedError(
                f"{url}: another process builds or sends this store now (it holds {path}); wait "
                "for it"
            )
        if lock.is_at(path):
            return lock
        lock.close()
