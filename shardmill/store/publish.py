"""Move a finished store into its place in one step.

In: a staged folder with a finished store; the place it shall have.  Out: the store, there.
Promise: at every instant the place holds the old store, nothing (only if nothing was there), or
the whole new one; a finished store is replaced only on request; a file that is not part of a
store is never deleted.
Not here: writing (writer.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from shardmill.errors import BuildError, ManifestError, StoreExistsError, StoreNotFoundError
from shardmill.storage.atomic import exchange, is_temporary, sync_folder, temporary_name
from shardmill.store.entries import Manifest, file_names
from shardmill.store.exclusions import EXCLUDE
from shardmill.store.layout import META, is_own_name
from shardmill.store.manifest import read_manifest
from shardmill.store.store import open_store


def publish_folder(staged: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the finished store `staged` to `target`, on the same disk.

    `target` may be missing, an empty folder or a placeholder; a finished store only with
    `overwrite`; anything else is refused by name and left as it is.
    """
    staged, target = Path(staged).absolute(), Path(target).absolute()
    open_store(staged)  # never publish what could not be opened afterwards
    target.parent.mkdir(parents=True, exist_ok=True)
    if check_target(target, overwrite=overwrite):
        _replace(staged, target)
    else:
        _rename(staged, target)
    sync_folder(target.parent)
    if staged.parent != target.parent:
        sync_folder(staged.parent)


def check_target(target: Path, *, overwrite: bool) -> bool:
    """Whether a store may be published at `target`: raises if not.

    False: nothing is in the way.  True: a store or a placeholder is, and may go.
    """
    target = Path(target)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreExistsError(f"{target}: a file or link is in the way; move it away first")
    names = sorted(entry.name for entry in target.iterdir()) if target.exists() else []
    if not names:
        return False
    if META not in names:
        raise StoreExistsError(
            f"{target}: holds {names[0]!r} and no {META}, so it is no finished store; move it "
            "away or choose another folder"
        )
    manifest = _readable(target)
    if not overwrite and (manifest is None or manifest.built):
        raise StoreExistsError(
            f"{target}: {'a finished' if manifest else 'a damaged or foreign'} store stands here; "
            "ask for overwrite to replace it, or choose another folder"
        )
    for file in _foreign_files(target, set(file_names(manifest)) if manifest else set()):
        if file == EXCLUDE:
            raise StoreExistsError(
                f"{target / file}: what was excluded from training here, by positions in tokens "
                "that would be replaced; move it away first, and exclude again behind the build"
            )
        raise StoreExistsError(
            f"{target / file}: no build of ours makes such a file, so it will not be deleted with "
            "the store around it; move it away first"
        )
    return True


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds a manifest that can be read and says "built"."""
    manifest = _readable(Path(folder))
    return manifest is not None and manifest.built


def _readable(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (ManifestError, StoreNotFoundError):
        return None


def _foreign_files(target: Path, listed: set[str]) -> list[str]:
    """What in a store's folder neither its manifest lists nor any build of ours makes."""
    walk = os.walk(target)
    paths = [Path(top, name) for top, folders, names in walk for name in (*folders, *names)]
    plain = [path for path in paths if path.is_symlink() or not path.is_dir()]
    files = [(path.relative_to(target).as_posix(), path.name) for path in plain]
    return sorted(
        file
        for file, name in files
        if not (file in listed or is_own_name(file) or is_temporary(name))
    )


def _rename(staged: Path, target: Path) -> None:
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise StoreExistsError(
                f"{target}: another process put files there meanwhile; look, then build again"
            ) from error
        raise _cannot_move(staged, target, error) from error


def _replace(staged: Path, target: Path) -> None:
    """Old and new change places; the old one goes. A name that nobody resumes from is used in
    between, so that a crash can never make a later build publish the old store again."""
    aside = temporary_name(target)
    try:
        staged.rename(aside)
        if not exchange(aside, target):
            _two_renames(aside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.rename(staged)
        raise _cannot_move(staged, target, error) from error
    sync_folder(target.parent)
    shutil.rmtree(aside)


def _two_renames(aside: Path, target: Path) -> None:
    """Without an atomic exchange: an instant with nothing at `target`, but nothing is lost."""
    old = temporary_name(target)
    target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        old.rename(target)
        raise
    old.rename(aside)


def _cannot_move(staged: Path, target: Path, error: OSError) -> BuildError:
    hint = "stage it beside the target" if error.errno == errno.EXDEV else "nothing was published"
    return BuildError(f"cannot move {staged} to {target}: {error.strerror}; {hint}")
