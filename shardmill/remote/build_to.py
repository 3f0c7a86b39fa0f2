"""Build a store for object storage: in a local scratch folder, which is then pushed.

The destination is listed and written to before the build begins. The scratch folder is the same for
the same URL, locked while the build runs, and removed when the store at the URL is finished. Until
then it is kept, and a resumed build sends only what is missing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import BuildLockedError, StoreError, StoreExistsError, UnfinishedBuildError
from shardmill.remote.contents import (
    LARGEST,
    MARKER,
    OnProgress,
    TransferReceipt,
    local_contents,
    remote_contents,
)
from shardmill.remote.folder import Listing, RemoteFolder, open_destination
from shardmill.remote.push import PROBE, clean_up, is_marked, send
from shardmill.storage.atomic import LockedFile, cache_folder
from shardmill.store.layout import META
from shardmill.urls import Url

log = logging.getLogger(__name__)

_STORE = "store"
_PASSING = "passing-"  # how the names of folders begin that no later run needs


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A store that is being built for a URL."""

    url: str  # without a password
    folder: Path  # where the block builds it
    receipt: TransferReceipt | None = None  # of the push; stays None if the store was there before


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
    """Build in the folder that this yields; when the block ends well, the store is at `url`.

    `scratch` holds a folder for each URL; None: the user's cache. With `resume` the block must
    resume too: what was built or sent is used. If the store at the URL is finished already, the
    block gets a folder with its manifest only, and must find its build done. `overwrite` lets the
    store replace another one there, once it is whole here.
    """
    remote = open_destination(url, storage_options)
    folder = scratch_store(url, scratch)
    with _locked(folder.parent, remote.url):
        if _is_finished(remote, folder, resume=resume, overwrite=overwrite):
            with _manifest_only(remote, folder.parent) as stand_in:
                yield Outgoing(url=remote.url, folder=stand_in)
                # left by a build that was killed after its store was sent
                here, there = folder / META, stand_in / META
                if here.is_file() and here.read_bytes() == there.read_bytes():
                    _discard(folder)
            return
        log.info("%s: is built in %s, then sent", remote.url, folder)
        out = Outgoing(url=remote.url, folder=folder)
        yield out
        try:
            out.receipt = send(folder, remote, progress=progress, replace=overwrite)
        except StoreError as error:
            flags = "{resume}"
            if overwrite or isinstance(error, StoreExistsError):
                flags = "{resume} and {overwrite}"
            raise type(error)(
                f"{error}. The store is built and is in {folder}: pass {flags} to send what is "
                "missing",
                resume=True,
                overwrite=True,
            ) from error
        _discard(folder)


def scratch_store(url: str, scratch: str | Path | None = None) -> Path:
    """Where the store for this URL is built."""
    plain = str(Url(url)).rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", plain.rpartition("/")[2])[:40]
    root = Path(scratch).absolute() if scratch is not None else cache_folder("builds")
    return root / f"{name}-{hashlib.sha256(plain.encode()).hexdigest()[:16]}" / _STORE


def _is_finished(remote: RemoteFolder, folder: Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether a store is there that a resumed build may recognise; raises if anything is in the
    way. When it returns, the remote folder can be listed, written to and removed from."""
    found = remote.listing()
    if not overwrite:
        _refuse_other(folder, found, resume=resume)
    if not (resume or overwrite) and (folder / META).exists():
        raise UnfinishedBuildError(
            f"{remote.url}: a store that was built for it and not sent is in {folder}: pass "
            "{resume} to send it, or {overwrite} to start again",
            resume=True,
            overwrite=True,
        )
    remote.pipe(PROBE, b"shardmill looks whether it may write here\n")  # not after hours of work
    remote.remove(PROBE)
    if not resume or overwrite or META not in found:
        return False
    clean_up(found)
    return True


def _refuse_other(folder: Path, found: Listing, *, resume: bool) -> None:
    """Raise if something is there that may not be replaced."""
    remote = found.remote
    finished = [name for name in LARGEST if name in found]
    if finished:
        if not resume or finished != [META]:
            raise StoreExistsError(
                f"{remote.url}: a finished folder is there ({', '.join(finished)}); nothing was "
                "built: pass {overwrite} to replace it, or build to another URL",
                overwrite=True,
            )
    elif MARKER in found:
        is_built = (folder / META).exists()
        is_ours = is_built and is_marked(found, local_contents(folder))
        if is_ours and not resume:
            raise UnfinishedBuildError(
                f"{remote.url}: the store in {folder} was sent there half-way: pass {{resume}} to "
                "send the rest, or {overwrite} to start again",
                resume=True,
                overwrite=True,
            )
        if not is_ours:
            raise StoreExistsError(
                f"{remote.url}: an unfinished push is there, of no store in {folder}; nothing was "
                "built: finish it where it began, pass {overwrite} if it may go, or build to "
                "another URL",
                overwrite=True,
            )
    else:
        strange = sorted(
            name for name in found if not name.startswith(".shardmill-") and name[-1:] != "/"
        )
        if any(strange):
            raise StoreExistsError(
                f"{remote.url}: holds {strange[-1]!r} and no {META}, so it is not a store; nothing "
                "was built: choose another URL, or pass {overwrite} to build over it",
                overwrite=True,
            )


@contextmanager
def _manifest_only(remote: RemoteFolder, home: Path) -> Iterator[Path]:
    """A folder with only the manifest of the store that is there.

    A resumed build needs no more of it to see whether the store is its own, and done.
    """
    contents = remote_contents(remote.listing())
    with tempfile.TemporaryDirectory(prefix=_PASSING, dir=home) as stand_in:
        folder = Path(stand_in, _STORE)
        folder.mkdir()
        (folder / META).write_bytes(contents.manifest)
        try:
            yield folder
        except StoreExistsError as error:
            raise StoreExistsError(
                f"{remote.url}: a finished store of other input or options is there: build "
                "elsewhere, or pass {overwrite} too if it may be replaced",
                overwrite=True,
            ) from error


def _discard(folder: Path) -> None:
    """Remove a store; at no moment is half of it under its name."""
    going = folder.with_name(f"{_PASSING}sent")
    folder.rename(going)
    shutil.rmtree(going)


@contextmanager
def _locked(home: Path, url: str) -> Iterator[None]:
    """The scratch folder of a URL, locked; removed at the end if it is empty."""
    while True:  # again, if the last holder removed it in between
        try:
            home.mkdir(parents=True, exist_ok=True)
            lock = LockedFile(home)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(
                f"{home}: cannot be the scratch folder of {url}: {error.strerror}; choose another "
                "one with {scratch}",
                scratch=...,
            ) from error
        with closing(lock):
            if not lock.lock(wait=False):
                raise BuildLockedError(
                    f"{url}: another process builds or sends this store now (it holds {home}); "
                    "wait for it"
                )
            if not lock.is_at(home):
                continue
            for left in home.glob(f"{_PASSING}*"):
                shutil.rmtree(left)
            try:
                yield
            finally:
                with suppress(OSError):  # something is in it
                    home.rmdir()
            return
