"""Find files on this machine.

In: a file, a folder or a glob.  Out: paths, sorted by relative POSIX path.
Promise: the same tree, the same paths. Links to folders are followed, but none in a circle. In a
folder, files of other endings and hidden ones are left out, which is announced; a glob finds hidden
files only where it names them.
Not here: what a file is called in a source; object storage (`farlist`). Small things that both
sides need are here too.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import BinaryIO

from shardmill.errors import SourceError

logger = logging.getLogger(__name__)


def find_local(where: Path, suffixes: tuple[str, ...]) -> tuple[Path, list[Path]]:
    """The files of a file, folder or glob, in order, and the folder that names are relative to."""
    try:
        where.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise SourceError(f"{str(where)[:200]}: cannot be looked up: {error}") from error
    if where.is_dir():
        return where, _sorted(where, _shown(where, suffixes))
    if where.exists():
        return where.parent, [where]
    if not glob.has_magic(str(where)):
        raise SourceError(f"{where}: no such file or folder; check the path, or quote a glob")
    root = _fixed_part(where)
    pattern = where.parts[len(root.parts) :]
    return root, _sorted(root, (path for path in _matching(root, pattern) if path.is_file()))


def _matching(root: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """What a glob below `root` finds; "**" is any folders. No way passes the same folder twice,
    through a link: two links in a circle would be followed for ever."""
    if not root.is_dir():
        return
    for parent, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        place = Path(parent)
        inner = place.relative_to(root).parts
        above = {os.path.realpath(folder) for folder in (place, *place.parents)}
        folders[:] = [
            name
            for name in folders
            if _leads_on((*inner, name), pattern) and os.path.realpath(place / name) not in above
        ]
        yield from (place / name for name in names if _matches((*inner, name), pattern))


def _leads_on(folders: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether something may match in a folder."""
    if "**" in pattern[: len(folders)]:
        return True
    return len(folders) < len(pattern) and _matches(folders, pattern[: len(folders)])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path is one that a pattern means; hidden names only where it names them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if _matches(parts, pattern[1:]):
            return True
        return bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _fixed_part(pattern: Path) -> Path:
    """The folder of a glob before its first wildcard: names are relative to it."""
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, through links to folders too; a folder in a cycle only once."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        # Hidden folders are left out here, or one would hide a visible link to it.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names)


def _raise(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error


def _shown(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = list(_walk(folder))
    ours = [path for path in found if path.name.lower().endswith(suffixes)]
    shown = [path for path in ours if not _is_hidden(path.relative_to(folder))]
    if len(shown) < len(found):
        others, hidden = len(found) - len(ours), len(ours) - len(shown)
        logger.info(
            "%s: left out %d files of other endings, %d hidden (and all hidden folders)",
            folder,
            others,
            hidden,
        )
    return shown


def _sorted(root: Path, paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def common_parent(paths: Sequence[Path]) -> Path:
    if not paths:
        return Path()
    return Path(os.path.commonpath([path.absolute().parent for path in paths]))


def unreadable(where: object, error: OSError) -> SourceError:
    """An error of the system in our words."""
    return SourceError(f"{where}: cannot be read: {error.strerror or error}")


def sha256_of_ends(stream: BinaryIO | io.RawIOBase, num_bytes: int, end_bytes: int) -> str:
    """Of the first and the last `end_bytes` of a file, which may overlap."""
    digest = hashlib.sha256(stream.read(end_bytes) or b"")
    stream.seek(max(num_bytes - end_bytes, 0))
    digest.update(stream.read(end_bytes) or b"")
    return digest.hexdigest()
