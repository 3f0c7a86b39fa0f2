"""The folder beside a store in which it is built: lock, plan, scratch.

`<parent>/.<name>.building/` holds everything unfinished, so the store's own folder is either
absent or whole. The lock is the kernel's (flock): a dead process does not hold it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shardmill.atomic import atomic_write
from shardmill.build.spec import describe_difference
from shardmill.errors import BuildLockedError, UnfinishedBuildError
from shardmill.records import JSON

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workplace:
    """An open, locked workplace."""

    folder: Path
    plan: dict[str, JSON]
    resumed: bool

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
        path = self.folder / f"{name}.json"
        return cast(dict[str, JSON], json.loads(path.read_bytes())) if path.exists() else None

    def write_note(self, name: str, value: dict[str, JSON]) -> None:
        with atomic_write(self.folder / f"{name}.json") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())

    def remove_note(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def discard_segments(self) -> None:
        shutil.rmtree(self.segments)
        self.segments.mkdir()


def workplace_of(store: Path) -> Path:
    return store.parent / f".{store.name}.building"


def has_unfinished_build(store: Path) -> bool:
    """True when an earlier build of this store stopped half-way and can be resumed."""
    return (workplace_of(store.resolve()) / "plan.json").exists()


@contextmanager
def open_workplace(store: Path, plan: dict[str, JSON], *, resume: bool) -> Iterator[Workplace]:
    """Lock the workplace; keep what an earlier run left only if asked to and if its plan is equal.

    Removed when the block ends well, kept when it raises.
    """
    folder = workplace_of(store)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", store):
        earlier = _read_plan(folder)
        if resume and earlier is not None:
            _check_plan(store, earlier, plan)
        else:
            _clear(folder, announce=earlier is not None)
        work = Workplace(folder, plan, resumed=resume and earlier is not None)
        work.segments.mkdir(exist_ok=True)
        if earlier is None or not resume:
            work.write_note("plan", plan)
        yield work
        shutil.rmtree(folder)


def remove_workplace(store: Path) -> None:
    """Sweep up behind a build that was killed after its store was published."""
    folder = workplace_of(store)
    if folder.exists():
        with _locked(folder / "lock", store):
            shutil.rmtree(folder)


def _read_plan(folder: Path) -> JSON:
    path = folder / "plan.json"
    if not path.exists():
        return None
    return cast(JSON, json.loads(path.read_bytes()))


def _check_plan(store: Path, earlier: JSON, plan: dict[str, JSON]) -> None:
    changes = describe_difference(earlier, cast(JSON, json.loads(json.dumps(plan))))
    if changes:
        shown = "\n  ".join(changes[:8])
        raise UnfinishedBuildError(
            f"{store}: the unfinished build was asked for something else, so it cannot be "
            f"resumed (before -> now):\n  {shown}\n"
            "Repeat the first command to resume it, or start again with --overwrite."
        )


def _clear(folder: Path, *, announce: bool) -> None:
    if announce:
        log.warning("%s: discarding the unfinished work of an earlier build", folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _locked(path: Path, store: Path) -> Iterator[None]:
    """Hold `path` exclusively. Retries when its last holder removed it in between."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BuildLockedError(
                f"{store}: another process builds this store now (it holds {path}); "
                "wait for it or build elsewhere"
            ) from None
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)
