"""Everything unfinished of a build, beside its store: lock, plan, journal, staged store.

`<parent>/.<name>.building/` holds it, so the store's own folder is either absent or whole. The lock
is the kernel's (flock): a dead process does not hold it. Workers hold it with the coordinator, so
no other build begins while one of them still writes.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shardmill.arguments import refuse_url
from shardmill.errors import BuildError, BuildLockedError, OptionError, UnfinishedBuildError
from shardmill.records import JSON
from shardmill.storage.atomic import LockedFile, atomic_write, is_temporary
from shardmill.storage.files import describe_difference

log = logging.getLogger(__name__)

_DYING_SECONDS = 0.5  # workers hold the lock too, and die a moment after the coordinator
_FILES = ("lock", "plan.json", "produced_by.json", "dropped_engine.json")
_FOLDERS = ("segments", "store")


@dataclass(frozen=True, slots=True)
class Workplace:
    """An open, locked workplace."""

    folder: Path
    plan: dict[str, JSON]
    resumed: bool
    lock: int  # descriptor of the lock, which is held while any process has it open

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

    def start_again(self, dropped_engine: dict[str, JSON]) -> None:
        """Discard all segments, since the engine that made them is not used any more."""
        shutil.rmtree(self.segments)  # first: a kill in between must not leave them
        self.segments.mkdir()
        (self.folder / "produced_by.json").unlink(missing_ok=True)
        self.write_note("dropped_engine", dropped_engine)


def target_of(folder: str | Path) -> Path:
    """Where a store will be, with every link followed."""
    refuse_url(
        folder,
        "the folder of the store",
        instead="to build to a URL use shardmill.build, or shardmill.remote.build_to around this",
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
    if not (folder / "plan.json").exists():
        return False
    try:
        lock = LockedFile(folder / "lock")
    except OSError:
        return True
    with closing(lock):
        return _take(lock)


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
        earlier = None if left is None else left.get("plan")
        if isinstance(earlier, dict):
            earlier.pop("continues", None)  # which store an append continues
        if left is None or earlier == _as_read(plan):
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


def _as_read(value: dict[str, JSON]) -> dict[str, JSON]:
    """As it comes back from disk: tuples are lists there."""
    return cast(dict[str, JSON], json.loads(json.dumps(value)))


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
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        is_ours = path.is_dir() if path.name in _FOLDERS else path.is_file()
        is_named = path.name in (*_FOLDERS, *_FILES) or is_temporary(path.name)
        if not (is_ours and is_named) or path.is_symlink():
            raise BuildError(
                f"{path}: not made by a build, but this folder is for unfinished builds: move it "
                "away"
            )


def _clear(folder: Path, *, announce: bool) -> None:
    if announce:
        log.warning("%s: discarding the unfinished work of an earlier build", folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _locked(path: Path, store: Path) -> Iterator[int]:
    """Hold `path` exclusively. Retries if its last holder removed it in between."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(LockedFile(path, create=True)) as lock:
            if not _take(lock):
                raise BuildLockedError(
                    f"{store}: another process is building this store (it holds {path}); wait for "
                    "it or build elsewhere"
                )
            if lock.is_at(path):
                yield lock.fileno()
                return


def _take(lock: LockedFile) -> bool:
    """Whether the lock could be taken, if need be after a dying holder."""
    deadline = time.monotonic() + _DYING_SECONDS
    while not lock.lock(wait=False):
        if time.monotonic() > deadline:
            return False
        time.sleep(_DYING_SECONDS / 50)
    return True
