"""Where a store will be, and everything unfinished of its build: lock, plan, receipts, shards.

A `Workplace` is beside a store in a folder, or at a URL (`shardmill.remote.workplace`).

Beside a folder it is `<parent>/.<name>.building/`, so the store's own folder is either absent or
whole. The lock is the kernel's (flock): a dead process does not hold it. Workers of this machine
hold it with the coordinator, so no other build begins while one of them still writes. What a lost
worker of a cluster writes later goes to the folders of its own run, where the bytes are the same or
nobody looks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from shardmill.arguments import check_local, is_url, refuse_url
from shardmill.building.segments import Output
from shardmill.errors import (
    BuildError,
    BuildLockedError,
    LossError,
    OptionError,
    UnfinishedBuildError,
)
from shardmill.records import JSON
from shardmill.storage.atomic import (
    HashedFile,
    LockedFile,
    atomic_write,
    cannot_write,
    is_temporary,
    sync_folder,
    temporary_name,
)
from shardmill.storage.files import describe_difference
from shardmill.store import (
    Manifest,
    WrittenShard,
    check_target,
    is_finished,
    publish_folder,
    read_manifest,
)

log = logging.getLogger(__name__)

_DYING_SECONDS = 0.5  # workers hold the lock too, and die a moment after the coordinator
_FILES = ("lock", "plan.json", "run.json", "produced_by.json", "dropped_engine.json")
_RUN = re.compile(r"run-[0-9a-f]{16}")


class NotSharedError(BuildError):
    """A worker on another machine does not see the folder of the store."""


class StoreOutput(Output, Protocol):
    """An `Output` as the coordinator uses it."""

    @property
    def store(self) -> Path:
        """The folder for everything of the store but its shards."""

    def remove_receipt(self, name: str) -> None: ...

    def keep_only(self, names: Collection[str]) -> None:
        """Remove every shard that is not one of these."""


class Workplace(Protocol):
    """Where a store will be. The notes are JSON files beside the receipts."""

    resumed: bool  # True: what an earlier run left is used

    @property
    def folder(self) -> Path:
        """Of the store; of a store at a URL, for the files at work."""

    @property
    def url(self) -> str | None:
        """Without secrets; None: the store is in the folder."""

    @property
    def lock(self) -> int:
        """A descriptor that workers of this machine hold open with the coordinator."""

    def manifest(self) -> Manifest | None:
        """Of the finished store that is there."""

    def has_unfinished_build(self) -> bool:
        """True when an earlier build did not finish; False while one is running."""

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raise if no store may be built there."""

    def clean_up(self, plan: dict[str, JSON]) -> None:
        """Remove what a build of this plan left that was killed after its store was published."""

    def locked(self, *, resume: bool, overwrite: bool) -> AbstractContextManager[None]:
        """The lock. Everything below needs it."""

    def check_lock(self) -> None:
        """Raise unless it is certain that no other build has the lock."""

    def clear(self) -> None:
        """Remove what an earlier build left unfinished."""

    def read_note(self, name: str) -> dict[str, JSON] | None: ...

    def write_note(self, name: str, value: dict[str, JSON]) -> None: ...

    def start_again(self, dropped_engine: dict[str, JSON]) -> None:
        """Discard all work, since the engine that made it is not used any more."""

    def output(self) -> StoreOutput:
        """Where this build writes, as it is now. A resumed build continues where its first run
        wrote."""

    def publish(self, staged: Path, *, overwrite: bool) -> tuple[int, int]:
        """The store in the folder `staged` is complete; at a URL, but for its shards, which are
        there: from here on it exists. How many files and bytes of it were sent to a URL."""

    def remove(self, *, keep_receipts: bool) -> None:
        """Remove everything but the store; `keep_receipts`: nothing, if there is a receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOutput:
    """Folders that all workers see. The `StoreOutput` of this machine and of shared disks.

    A file gets its name when it is complete, so that two attempts at a unit, one of them on a
    machine that was given up, can only replace a file by an equal one.
    """

    store: Path
    receipts: Path

    def create(self, name: str) -> HashedFile:
        path = self.store / name
        try:
            path.parent.mkdir(exist_ok=True)
            return HashedFile(temporary_name(path))
        except FileNotFoundError as error:
            raise NotSharedError(
                f"{self.store}: is not there on {socket.gethostname()}: workers write the store "
                "themselves, so its folder must be one that all machines share, or a URL"
            ) from error
        except OSError as error:
            raise cannot_write(path, error) from error

    def keep(self, file: HashedFile, name: str) -> str:
        sha256 = file.finish()
        try:
            file.path.replace(self.store / name)
            sync_folder(file.path.parent)
        except OSError as error:
            raise cannot_write(self.store / name, error) from error
        return sha256

    def write_receipt(self, name: str, data: bytes, shards: Collection[str]) -> None:  # noqa: ARG002
        try:
            with atomic_write(self.receipts / name) as file:
                file.write(data)
        except OSError as error:
            raise cannot_write(self.receipts / name, error) from error

    def read_receipt(self, name: str) -> bytes | None:
        try:
            return (self.receipts / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def remove_receipt(self, name: str) -> None:
        (self.receipts / name).unlink(missing_ok=True)

    def has(self, name: str, num_bytes: int) -> bool:
        path = self.store / name
        return path.is_file() and path.stat().st_size == num_bytes

    def holds(self, shard: WrittenShard, num_bytes: int) -> bool:
        if not self.has(shard.file, num_bytes):
            return False
        with (self.store / shard.file).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256

    def keep_only(self, names: Collection[str]) -> None:
        for folder in self.store.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                if f"{folder.name}/{path.name}" not in names:
                    path.unlink()


@dataclass(slots=True)
class FolderWorkplace:
    """The `Workplace` of a store in a folder."""

    store: Path  # with every link followed
    resumed: bool = False
    lock: int = -1

    def __str__(self) -> str:
        return str(self.store)

    @property
    def folder(self) -> Path:
        return self.store

    @property
    def url(self) -> None:
        return None

    @property
    def work(self) -> Path:
        return workplace_of(self.store)

    def manifest(self) -> Manifest | None:
        return read_manifest(self.store) if is_finished(self.store) else None

    def has_unfinished_build(self) -> bool:
        if not (self.work / "plan.json").exists():
            return False
        try:
            lock = LockedFile(self.work / "lock")
        except OSError:
            return True
        with closing(lock):
            return _take(lock)

    def check(self, *, resume: bool, overwrite: bool) -> None:  # noqa: ARG002 - a URL needs it
        check_target(self.store, overwrite=overwrite)

    @contextmanager
    def locked(self, *, resume: bool, overwrite: bool) -> Iterator[None]:  # noqa: ARG002
        _refuse_foreign(self.work)
        with _locked(self.work / "lock", self.store) as self.lock:
            yield

    def clean_up(self, plan: dict[str, JSON]) -> None:
        if not self.work.exists():
            return
        with self.locked(resume=True, overwrite=False):
            left = self.read_note("plan")
            earlier = None if left is None else left.get("plan")
            if isinstance(earlier, dict):
                earlier.pop("continues", None)  # which store an append continues
            # Without a plan it is one whose removal was killed: nothing in it can be resumed.
            if left is None or earlier == _as_read(plan):
                shutil.rmtree(self.work)

    def check_lock(self) -> None:
        """A lock of the kernel is never lost."""

    def clear(self) -> None:
        if (self.work / "plan.json").exists():
            log.warning("%s: discarding the unfinished work of an earlier build", self.work)
        for path in self.work.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def read_note(self, name: str) -> dict[str, JSON] | None:
        path = self.work / f"{name}.json"
        return _decoded(path) if path.exists() else None

    def write_note(self, name: str, value: dict[str, JSON]) -> None:
        with atomic_write(self.work / f"{name}.json") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())

    def start_again(self, dropped_engine: dict[str, JSON]) -> None:
        (self.work / "run.json").unlink()  # first: a kill in between must not leave it in use
        for path in self.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (self.work / "produced_by.json").unlink(missing_ok=True)
        self.write_note("dropped_engine", dropped_engine)

    def output(self) -> FolderOutput:
        noted = self.read_note("run")
        if noted is None:
            noted = {"name": f"run-{secrets.token_hex(8)}"}
            self.write_note("run", noted)
        name = str(noted.get("name"))
        if not _RUN.fullmatch(name):
            raise _damaged(self.work / "run.json", f"names {name!r:.40}")
        run = self.work / name
        out = FolderOutput(store=run / "store", receipts=run / "receipts")
        out.store.mkdir(parents=True, exist_ok=True)
        out.receipts.mkdir(exist_ok=True)
        return out

    def publish(self, staged: Path, *, overwrite: bool) -> tuple[int, int]:
        publish_folder(staged, self.store, overwrite=overwrite)
        return 0, 0

    def remove(self, *, keep_receipts: bool) -> None:
        if not (keep_receipts and any(self.work.glob("run-*/receipts/*.receipt"))):
            shutil.rmtree(self.work)


def target_of(folder: str | Path) -> Path:
    """Where a store in a folder will be, with every link followed."""
    refuse_url(
        folder, "the folder of the store", instead="a store at a URL is built by shardmill.build"
    )
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise OptionError(
            f"{str(folder)!r:.300}: cannot be the folder of a store: {error}"
        ) from error


def workplace_of(store: Path) -> Path:
    return store.parent / f".{store.name}.building"


def workplace_at(out: str | Path, scratch: str | Path | None = None) -> Workplace:
    """The workplace of a store at a URL or in a folder; `scratch`: for the files at work of a URL.
    Nothing is written or asked yet."""
    if isinstance(out, str) and is_url(out) and "://" in out:
        if scratch is not None:
            check_local(scratch, "scratch")
        from shardmill.remote.workplace import UrlWorkplace  # fsspec takes a while

        return UrlWorkplace(out, scratch)
    if scratch is not None:
        raise OptionError(
            f"{{scratch}}: only for a store at a URL, but {{out}} is the folder {out}, where it is "
            "built",
            scratch=str(scratch),
            out=...,
        )
    check_local(out, "out", instead=", or a URL such as s3://bucket/path")
    return FolderWorkplace(target_of(out))


def has_unfinished_build(store: str | Path) -> bool:
    """True when an earlier build of this store did not finish; False while one is running."""
    return workplace_at(store).has_unfinished_build()


@contextmanager
def open_workplace(
    place: Workplace | Path,
    plan: dict[str, JSON],
    *,
    stamps: list[JSON],
    resume: bool,
    overwrite: bool = False,
) -> Iterator[Workplace]:
    """Lock the workplace; keep what an earlier run left only with `resume` and an equal plan.

    `stamps` identify the input as it is on this machine. The workplace is removed when the block
    succeeds, or fails before a receipt was written, or has kept nothing; else it is kept.
    """
    work: Workplace = FolderWorkplace(place) if isinstance(place, Path) else place
    with work.locked(resume=resume, overwrite=overwrite):
        earlier = work.read_note("plan") if resume else None
        work.resumed = earlier is not None
        asked: dict[str, JSON] = {"plan": plan, "stamps": stamps}
        if earlier is not None:
            _check_plan(work, earlier, asked)
        else:
            work.clear()
            work.write_note("plan", asked)
        try:
            yield work
        except BaseException as error:
            nothing_kept = isinstance(error, LossError) and not error.num_kept
            work.remove(keep_receipts=not nothing_kept)
            raise
        work.remove(keep_receipts=False)


def _decoded(path: Path) -> dict[str, JSON]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "not an object")
    return cast(dict[str, JSON], value)


def _damaged(path: Path, problem: str) -> BuildError:
    return BuildError(
        f"{path}: damaged ({problem}), so this build cannot be resumed: start again with "
        "{overwrite}",
        overwrite=True,
    )


def _as_read(value: dict[str, JSON]) -> dict[str, JSON]:
    """As it comes back from disk: tuples are lists there."""
    return cast(dict[str, JSON], json.loads(json.dumps(value)))


def _check_plan(work: Workplace, earlier: JSON, asked: dict[str, JSON]) -> None:
    changes = describe_difference(earlier, _as_read(asked))
    if changes:
        shown = "\n  ".join(change.removeprefix("plan.") for change in changes[:8])
        raise UnfinishedBuildError(
            f"{work}: the unfinished build had other options or input, so it cannot be resumed "
            f"(before -> now):\n  {shown}\n"
            "Repeat the first command to resume it, or start again with {overwrite}.",
            overwrite=True,
        )


def _refuse_foreign(folder: Path) -> None:
    """Only what a build made is ever deleted."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BuildError(f"{folder}: a link or file where a build needs a folder: move it away")
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        is_run = _RUN.fullmatch(path.name) is not None
        is_ours = path.is_dir() if is_run else path.is_file()
        is_named = is_run or path.name in _FILES or is_temporary(path.name)
        if not (is_ours and is_named) or path.is_symlink():
            raise BuildError(
                f"{path}: not made by a build, but this folder is for unfinished builds: move it "
                "away"
            )


@contextmanager
def _locked(path: Path, store: Path) -> Iterator[int]:
    """Hold `path` exclusively. Retries if its last holder removed it in between."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(LockedFile(path, create=True)) as lock:
            if not _take(lock):
                raise BuildLockedError(
                    f"{store}: another process is building this store ({_holders(path)} holds "
                    f"{path}); wait for it or build elsewhere"
                )
            if lock.is_at(path):
                yield lock.fileno()
                return


def _holders(path: Path) -> str:
    """Who has the lock open, as far as Linux tells this user."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or gone
            if path in map(Path.resolve, (process / "fd").iterdir()):
                found.append(int(process.name))
    return ", ".join(f"process {pid}" for pid in sorted({*found} - {os.getpid()})) or "it"


def _take(lock: LockedFile) -> bool:
    """Whether the lock could be taken, if need be after a dying holder."""
    deadline = time.monotonic() + _DYING_SECONDS
    while not lock.lock(wait=False):
        if time.monotonic() > deadline:
            return False
        time.sleep(_DYING_SECONDS / 50)
    return True
