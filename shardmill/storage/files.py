"""Find files on this machine.

In: a file, a folder or a glob.  Out: paths, sorted by relative POSIX path.
Promise: the same tree, the same paths. Links to folders are followed, but none in a circle. In a
folder, files of other endings and hidden ones are left out, which is announced; a glob finds hidden
files only where it names them.
Not here: what a file is called in a source; object storage (`farlist`). Small things that both
sides need are here too.

Which files a source reads, in which order, and how they are recognised again.

In: a file, a folder, a glob, or a list of files; a URL of one of them.  Out: `InputFile`s and their
fingerprints.
Promise: the same tree gives the same list on every machine, sorted by relative POSIX path (a list
keeps the caller's order); names are unique, relative and never absolute; no file twice. A file on
this machine is opened as such; object storage (`far`) is imported when a URL is named.
Not here: parsing. In a folder, files of other endings and hidden ones (".x", or in a hidden folder)
are left out, which is announced.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.urls import Url

if TYPE_CHECKING:
    from shardmill.storage.object_files import FarPath


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


FULL_HASH_BYTES = 64 * 2**20
"""Up to this total size every byte is hashed; above it the ends of each file."""
END_BYTES = 64 * 2**10

Where = str | Path | Sequence[str | Path]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = re.compile(r"(?:file|local)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was when the source was opened."""

    place: Path | FarPath  # on this machine, or on object storage
    name: str  # relative, POSIX; stored in cursors and manifests
    num_bytes: int

    @property
    def path(self) -> Path:
        """Of a file on this machine."""
        if isinstance(self.place, Path):
            return self.place
        raise SourceError(f"{self.place}: lies on object storage, and a file here is wanted")


def list_files(where: Where, *, suffixes: tuple[str, ...]) -> tuple[InputFile, ...]:
    """The files of a folder or glob that end in one of `suffixes`; a file named outright may end
    in anything. Nothing found is an error."""
    if isinstance(where, str | Path):
        files = _files_at(where, suffixes)
    else:
        files = _files_listed(where, suffixes)
    if not files:
        raise SourceError(
            f"{Url(str(where))}: no file here ends in {', '.join(suffixes)}; name another "
            "folder, or a glob"
        )
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SourceError(f"listed more than once: {', '.join(twice[:5])}; name each file once")
    return tuple(files)


def _files_at(where: str | Path, suffixes: tuple[str, ...]) -> list[InputFile]:
    if not isinstance(where, Path) and _is_far(where):
        from shardmill.storage.object_files import find_far

        return [
            InputFile(place=found.path, name=found.name, num_bytes=found.num_bytes)
            for found in find_far(where, suffixes)
        ]
    root, paths = find_local(_local_path(where), suffixes)
    return [_input_file(path, root) for path in paths]


def _is_far(where: str | Path) -> bool:
    """Whether this names something that is not on this machine. A path that exists does not."""
    if isinstance(where, Path) or _LOCAL.match(where) or not _SCHEME.match(where):
        return False
    # Unlike that of a Path, this takes a name that is too long for a disk.
    return not os.path.exists(where)  # noqa: PTH110


def _local_path(where: str | Path) -> Path:
    """The path of a local file, with or without "file://"."""
    return where if isinstance(where, Path) else Path(_LOCAL.sub("", where, count=1))


def _files_listed(where: Sequence[str | Path], suffixes: tuple[str, ...]) -> list[InputFile]:
    urls = [path for path in where if _is_far(path)]
    if not urls:
        paths = [_local_path(path) for path in where]
        root = common_parent(paths)
        return [_input_file(path, root) for path in paths]
    if len(urls) < len(where):
        raise SourceError(
            "files on this machine and on object storage in one list; make a source of each"
        )
    files = [file for url in where for file in _files_at(url, suffixes)]
    return [replace(file, name=name) for file, name in zip(files, _names_apart(files), strict=True)]


def _names_apart(files: Sequence[InputFile]) -> list[str]:
    """Names relative to the folder that all files have in common."""
    parts = [
        str(file.place).split("/") if isinstance(file.place, Path) else file.place.url.names
        for file in files
    ]
    same = 0
    while all(len(names) > same + 1 for names in parts) and len({n[same] for n in parts}) == 1:
        same += 1
    return ["/".join(names[same:]) for names in parts]


@contextmanager
def open_file(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[io.RawIOBase]:
    """The bytes from `start` on; far files are fetched ahead up to about `stop` (None: the end)."""
    try:
        with _opened(file, start, stop) as stream:
            yield stream
    except OSError as error:
        if error.errno is None:  # not of the system: of a decompressor, or one of ours
            raise
        raise unreadable(file.place, error) from error


def _opened(file: InputFile, start: int, stop: int | None) -> io.RawIOBase:
    if not isinstance(file.place, Path):
        from shardmill.storage.object_files import open_far_from

        return open_far_from(file.place, file.num_bytes, start, stop)
    stream = file.place.open("rb", buffering=0)
    stream.seek(start)
    return stream


def stamp_of_file(file: InputFile) -> JSON:
    """When a file was written, or what its store calls its content."""
    if isinstance(file.place, Path):
        return file.place.stat().st_mtime_ns
    return list(file.place.identity) if file.place.identity is not None else file.place.changed


def is_glob(where: str) -> bool:
    return glob.has_magic(where) and not Path(where).exists()


def fingerprint_files(files: Iterable[InputFile]) -> list[JSON]:
    """Name, size and sha256 of each file, for `describe`.

    While all files together are under 64 MiB the hash covers every byte; above that
    "sha256_of_ends" covers the first and the last 64 KiB of each file. Of files on object storage
    it is the store's own word for the content, where it has one; else always the ends.
    """
    files = list(files)
    whole = sum(file.num_bytes for file in files) < FULL_HASH_BYTES
    return [
        {"file": file.name, "bytes": file.num_bytes, **content_of(file, whole=whole)}
        for file in files
    ]


def has_content(file: InputFile, recorded: Mapping[str, JSON]) -> bool:
    """Whether a file is what `fingerprint_files` once recorded of it, its name aside."""
    if file.num_bytes != recorded["bytes"]:
        return False
    now = content_of(file, whole="sha256" in recorded)
    return now == {key: recorded[key] for key in recorded if key not in ("file", "bytes")}


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is gone or has another size than when it was listed; on object storage,
    also one with other content."""
    if not isinstance(file.place, Path):
        from shardmill.storage.object_files import check_far

        check_far(file.place, file.num_bytes)
        return
    try:
        found = file.place.stat().st_size
    except OSError as error:
        raise unreadable(file.place, error) from error
    if found != file.num_bytes:
        raise SourceError(
            f"{file.place}: {found:,} bytes now, {file.num_bytes:,} when it was listed; a file "
            "must not change while it is read: wait for its writer, then start anew"
        )


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
        return InputFile(place=absolute, name=name, num_bytes=path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def content_of(file: InputFile, *, whole: bool) -> dict[str, JSON]:
    """What identifies a file's content: a hash of all of it or of its ends, or its store's word."""
    path = file.place
    if not isinstance(path, Path):
        from shardmill.storage.object_files import describe_far

        return describe_far(path, file.num_bytes, END_BYTES)
    check_unchanged(file)
    try:
        with path.open("rb") as stream:
            if whole:
                return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
            return {"sha256_of_ends": sha256_of_ends(stream, file.num_bytes, END_BYTES)}
    except OSError as error:
        raise unreadable(path, error) from error
