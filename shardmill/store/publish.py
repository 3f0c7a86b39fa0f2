"""Publish a finished store atomically, and decide what it may replace.

At every instant the target holds the old store, nothing (only if nothing was there) or the whole
new one. A finished store is replaced only on request. A file that no build of ours makes is never
deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from shardmill.errors import BuildError, ManifestError, StoreExistsError, StoreNotFoundError
from shardmill.storage.atomic import exchange, is_temporary, sync_folder, temporary_name
from shardmill.store.exclusions import EXCLUDE
from shardmill.store.layout import META, is_own_name
from shardmill.store.manifest import Manifest, file_names, read_manifest
from shardmill.store.store import open_store


def publish_folder(staged: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the finished store `staged` to `target`, on the same disk.

    `target` may be missing, an empty folder or a placeholder, and with `overwrite` a finished
    store. Anything else is refused by name and left as it is.
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
    """Raise if a store may not be published at `target`.

    Returns whether there is a store or a placeholder that has to be replaced.
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
            f"{target}: already holds a {'finished' if manifest else 'damaged or foreign'} store; "
            "pass {overwrite} to replace it, or choose another folder",
            overwrite=True,
        )
    for file in _foreign_files(target, set(file_names(manifest)) if manifest else set()):
        if file == EXCLUDE:
            raise StoreExistsError(
                f"{target / file}: lists what was excluded from training, by positions in tokens "
                "that would be replaced; move it away first, and exclude again after the build"
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
    """Files in a store's folder that neither its manifest lists nor any build of ours makes."""
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
                f"{target}: another process put files there meanwhile; check them, then build again"
            ) from error
        raise _cannot_move(staged, target, error) from error


def _replace(staged: Path, target: Path) -> None:
    """Swap old and new, then delete the old one. In between the new store has a name that no build
    resumes from, so that after a crash no later build publishes the old store again."""
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
    """Without an atomic exchange: `target` is missing for an instant, but nothing is lost."""
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
