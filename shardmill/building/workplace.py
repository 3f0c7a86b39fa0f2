"""The folder beside a store in which it is built: lock, plan, journal, staged store.

`<parent>/.<name>.building/` holds everything unfinished, so the store's own folder is either absent
or whole. The lock is the kernel's (flock): a dead process does not hold it. Workers hold it with
the coordinator, so no other build begins while one of them still writes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shardmill.arguments import refuse_url
from shardmill.building.spec import describe_difference
from shardmill.errors import BuildError, BuildLockedError, OptionError, UnfinishedBuildError
from shardmill.records import JSON
from shardmill.storage.atomic import atomic_write, is_temporary

log = logging.getLogger(__name__)

_DYING_SECONDS = 0.5  # workers hold the lock too, and die a moment after the coordinator
_NOTES = ("plan", "produced_by", "dropped_engine")
_NAMES = {"lock", "segments", "store", *(f"{note}.json" for note in _NOTES)}


@dataclass(frozen=True, slots=True)
class Workplace:
    """An open, locked workplace."""

    folder: Path
    plan: dict[str, JSON]
    resumed: bool
    lock: int  # the open lock: it is held while any process has it

    @property
    def segments(self) -> Path:
        return self.folder / "segments"

    def staging(self) -> Path:
        """An empty folder for the store itself."""
        path = self.folder / "store"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        return path

    def read_note(self, name: str) -> dict[str, JSON] | None:
        return _read_json(self.folder / f"{name}.json")

    def write_note(self, name: str, value: dict[str, JSON]) -> None:
        with atomic_write(self.folder / f"{name}.json") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())

    def remove_note(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def discard_segments(self) -> None:
        shutil.rmtree(self.segments)
        self.segments.mkdir()


def target_of(folder: str | Path) -> Path:
    """Where a store will be, with every link followed."""
    refuse_url(
        folder,
        "the folder of the store",
        instead="to build to a URL use shardmill.build or `shardmill build --out URL`",
    )
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise OptionError(
            f"{str(folder)!r:.300}: cannot be the folder of a store: {error}"
        ) from error


def workplace_of(store: Path) -> Path:
    return store.parent / f".{store.name}.building"


def has_unfinished_build(store: Path) -> bool:
    """True when an earlier build of this store did not finish; False while one is running."""
    folder = workplace_of(target_of(store))
    return (folder / "plan.json").exists() and not _is_held(folder / "lock")


@contextmanager
def open_workplace(
    store: Path, plan: dict[str, JSON], *, stamps: list[JSON], resume: bool
) -> Iterator[Workplace]:
    """Lock the workplace; keep what an earlier run left only with `resume` and an equal plan.

    `stamps` identify the input as it is on this machine. The workplace is removed when the block
    succeeds, or fails before a segment was sealed; else it is kept.
    """
    folder = workplace_of(store)
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", store) as lock:
        found = folder / "plan.json"
        resumed = resume and found.exists()
        asked: dict[str, JSON] = {"plan": plan, "stamps": stamps}
        if resumed:
            _check_plan(store, _read_json(found), asked)
        else:
            _clear(folder, announce=found.exists())
        work = Workplace(folder, plan, resumed=resumed, lock=lock)
        work.segments.mkdir(exist_ok=True)
        if not resumed:
            work.write_note("plan", asked)
        try:
            yield work
        except BaseException:
            if not any(work.segments.glob("*/*.json")):
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def remove_workplace(store: Path, plan: dict[str, JSON]) -> None:
    """Clean up after a build that was killed after its store was published.

    A workplace without a plan is one whose removal was killed: nothing in it can be resumed.
    """
    folder = workplace_of(store)
    if not folder.exists():
        return
    _refuse_foreign(folder)
    with _locked(folder / "lock", store):
        left = _read_json(folder / "plan.json")
        if left is None or not describe_difference(left.get("plan"), _as_read(plan)):
            shutil.rmtree(folder)


def _read_json(path: Path) -> dict[str, JSON] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BuildError(
            f"{path}: damaged ({error}), so this build cannot be resumed: start again with "
            "{overwrite}",
            overwrite=True,
        ) from error
    return cast(dict[str, JSON], value)


def _as_read(value: dict[str, JSON]) -> JSON:
    """As it comes back from disk: tuples are lists there."""
    return cast(JSON, json.loads(json.dumps(value)))


def _check_plan(store: Path, earlier: JSON, asked: dict[str, JSON]) -> None:
    changes = describe_difference(earlier, _as_read(asked))
    if changes:
        shown = "\n  ".join(change.removeprefix("plan.") for change in changes[:8])
        raise UnfinishedBuildError(
            f"{store}: the unfinished build had other options or input, so it cannot be resumed "
            f"(before -> now):\n  {shown}\n"
            "Repeat the first command to resume it, or start again with {overwrite}.",
            overwrite=True,
        )


def _refuse_foreign(folder: Path) -> None:
    """Only what a build made is ever deleted."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BuildError(f"{folder}: a link or file where a build needs a folder: move it away")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(name for name in names - _NAMES if not is_temporary(name))
    if foreign:
        raise BuildError(
            f"{folder / foreign[0]}: not made by a build, but this folder is for unfinished "
            "builds: move it away"
        )


def _clear(folder: Path, *, announce: bool) -> None:
    if announce:
        log.warning("%s: discarding the unfinished work of an earlier build", folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _is_held(path: Path) -> bool:
    """Whether a living process holds this lock."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path, store: Path) -> Iterator[int]:
    """Hold `path` exclusively. Retries if its last holder removed it in between."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _take(handle):
            os.close(handle)
            raise BuildLockedError(
                f"{store}: another process is building this store (it holds {path}); wait for it "
                "or build elsewhere"
            )
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)
    try:
        yield handle
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    """Whether the lock could be taken."""
    deadline = time.monotonic() + _DYING_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_DYING_SECONDS / 50)
        else:
            return True
