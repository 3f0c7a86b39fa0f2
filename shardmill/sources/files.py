"""Which files a source reads, in which order, and how they are recognised again.

In: a file, a folder, a glob, or a list of files.  Out: `InputFile`s and their fingerprints.
Promise: the same tree gives the same list on every machine, sorted by relative POSIX path (a list
keeps the caller's order); names are unique, relative and never absolute; no file twice.
Not here: opening or parsing. In a folder, files of other endings and hidden ones (".x", or in a
hidden folder) are left out, which is announced.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from shardmill.errors import SourceError
from shardmill.records import JSON

logger = logging.getLogger(__name__)

FULL_HASH_BYTES = 64 * 2**20
"""Up to this total size every byte is hashed; above it the ends of each file."""
END_BYTES = 64 * 2**10

Where = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was when the source was opened."""

    path: Path
    name: str  # relative, POSIX; stored in cursors and manifests
    num_bytes: int


def list_files(where: Where, *, suffixes: tuple[str, ...]) -> tuple[InputFile, ...]:
    """The files of a folder or glob that end in one of `suffixes`; a file named outright may end
    in anything. Nothing found is an error."""
    if isinstance(where, str | Path):
        root, paths = _find(Path(where), suffixes)
    else:
        paths = [Path(path) for path in where]
        root = _common_parent(paths)
    if not paths:
        raise SourceError(
            f"{where}: no file here ends in {', '.join(suffixes)}; name another folder, or a glob"
        )
    files = [_input_file(path, root) for path in paths]
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SourceError(f"listed more than once: {', '.join(twice[:5])}; name each file once")
    return tuple(files)


def is_glob(where: str) -> bool:
    return glob.has_magic(where) and not Path(where).exists()


def fingerprint_files(files: Iterable[InputFile]) -> list[JSON]:
    """Name, size and sha256 of each file, for `describe`.

    While all files together are under 64 MiB the hash covers every byte; above that
    "sha256_of_ends" covers the first and the last 64 KiB of each file.
    """
    files = list(files)
    whole = sum(file.num_bytes for file in files) < FULL_HASH_BYTES
    key = "sha256" if whole else "sha256_of_ends"
    return [
        {"file": file.name, "bytes": file.num_bytes, key: _sha256(file, whole=whole)}
        for file in files
    ]


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is gone or has another size than when it was listed."""
    try:
        found = file.path.stat().st_size
    except OSError as error:
        raise unreadable(file.path, error) from error
    if found != file.num_bytes:
        raise SourceError(
            f"{file.path}: {found:,} bytes now, {file.num_bytes:,} when it was listed; a file "
            "must not change while it is read: wait for its writer, then start anew"
        )


def unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path}: cannot be read: {error.strerror or error}")


def _find(where: Path, suffixes: tuple[str, ...]) -> tuple[Path, list[Path]]:
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
    found = glob.iglob(str(where), recursive=True)  # noqa: PTH207 - Path.glob matches hidden files
    paths = (Path(path) for path in found)
    return root, _sorted(root, (path for path in paths if path.is_file() and not _goes_round(path)))


def _goes_round(path: Path) -> bool:
    """Whether the way to a file passes the same folder twice, through a link."""
    folders = [os.path.realpath(folder) for folder in path.parents]
    return len(set(folders)) < len(folders)


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


def _common_parent(paths: Sequence[Path]) -> Path:
    if not paths:
        return Path()
    return Path(os.path.commonpath([path.absolute().parent for path in paths]))


def _input_file(path: Path, root: Path) -> InputFile:
    absolute = path.absolute()
    name = absolute.relative_to(root.absolute()).as_posix()
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(f"{path!r}: the file name is not valid UTF-8; rename it") from error
    try:
        if not path.is_file():
            raise SourceError(f"{path}: not a file; name files, or one folder, or a glob")
        return InputFile(path=absolute, name=name, num_bytes=path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def _sha256(file: InputFile, *, whole: bool) -> str:
    check_unchanged(file)
    try:
        with file.path.open("rb") as stream:
            if whole:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            digest = hashlib.sha256(stream.read(END_BYTES))
            stream.seek(max(file.num_bytes - END_BYTES, 0))
            digest.update(stream.read(END_BYTES))
            return digest.hexdigest()
    except OSError as error:
        raise unreadable(file.path, error) from error
