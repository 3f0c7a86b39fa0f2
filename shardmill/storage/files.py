"""The input files of a source: list them in a fixed order, open them, identify their content.

A file, a folder, a glob or a list of them, on this machine or at a URL. The same tree gives the
same list on every machine, sorted by relative POSIX path (a list keeps the caller's order); names
are unique and relative. In a folder, hidden files and files of other endings are left out, which is
logged. A glob finds hidden files only where it names them. What is in the folder of a store is
found by its own name only.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON
from shardmill.storage.object_store import ObjectPath, check_object, list_objects, open_object
from shardmill.storage.ranges import blocks_of
from shardmill.urls import Url

logger = logging.getLogger(__name__)

FULL_HASH_BYTES = 64 * 2**20
"""Up to this total size every byte is hashed; above it the two ends of each file."""
END_BYTES = 64 * 2**10
FIRST_BLOCK = 256 * 2**10
"""Reading only the first lines of a remote file fetches no more than this."""

Where = str | Path | Sequence[str | Path]
Endings = str | Sequence[str] | None
"""Endings of file names: ".c,.h" or [".c", ".h"]; "*" is any; None: those that a format knows."""

_MOST_ENDINGS = 6  # in a message

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = re.compile(r"(?:file|local)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was when it was listed."""

    place: Path | ObjectPath  # on this machine, or on object storage
    name: str  # relative, POSIX; stored in cursors and manifests
    num_bytes: int

    @property
    def path(self) -> Path:
        """The path of a file on this machine."""
        if isinstance(self.place, Path):
            return self.place
        raise SourceError(f"{self.place}: is on object storage; wanted a file on this machine")

    def __post_init__(self) -> None:
        try:
            self.name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{self.place!r}: the file name is not valid UTF-8; rename it"
            ) from error


def packed(ending: str) -> tuple[str, ...]:
    """An ending, and those of the same files when they are compressed."""
    return ending, f"{ending}.gz", f"{ending}.zst"


def parse_endings(ext: Endings) -> tuple[str, ...] | None:
    """ ".c,.h" or [".c", "h"] as (".c", ".h"); "*" is any ending; None: none were chosen."""
    if ext is None:
        return None
    parts = [part.strip().lower() for part in (ext.split(",") if isinstance(ext, str) else ext)]
    if not parts or (isinstance(ext, str) and not all(parts)):
        raise OptionError("{ext}: wanted endings such as .c,.h, or * for any", ext=ext)
    return tuple("" if part in ("", "*") else "." + part.removeprefix(".") for part in parts)


def list_files(
    where: Where, *, suffixes: tuple[str, ...], ext: Endings = None, quiet: bool = False
) -> tuple[InputFile, ...]:
    """The files of a folder that end in one of `suffixes`, or those of a glob; at least one.

    A file that is named itself may have any ending. With `ext` only files of these endings count,
    however they were named. `quiet`: what is left out is not logged.
    """
    chosen = parse_endings(ext)
    suffixes = suffixes if chosen is None else chosen
    left: Counter[str] = Counter()
    parts = [where] if isinstance(where, str | Path) else where
    found = [_files_at(part, suffixes, left, quiet=quiet) for part in parts]
    files = found[0] if isinstance(where, str | Path) else []
    if not isinstance(where, str | Path):
        files = with_common_names([file for part in found for file in part])
    if chosen is not None:
        left.update(ending_of(file.name) for file in files if not _ends(file.name, chosen))
        files = [file for file in files if _ends(file.name, chosen)]
    if not files:
        others = f"; found {counted(left)}" if left else ""
        raise SourceError(
            f"{Url(str(where))}: no file here ends in {some_endings(suffixes)}{others}; name "
            "another folder, or a glob, or choose endings with {ext}, or say what the files are "
            "with {kind}",
            ext=...,
            kind=...,
        )
    return tuple(files)


def ending_of(name: str) -> str:
    """What a file's name ends in, lower case; the ending before that of a compressed one too."""
    base = name.rpartition("/")[2].lower()
    parts = base.lstrip(".").split(".")[1:]
    return "." + ".".join(parts[-2:] if parts[-1] in ("gz", "zst") else parts[-1:]) if parts else ""


def counted(endings: Mapping[str, int]) -> str:
    """The most frequent endings: "10 .bin, 3 .csv, 2 without ending"."""
    listed = sorted(endings.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{count:,} {ending or 'without ending'}" for ending, count in listed[:_MOST_ENDINGS]]
    rest = sum(count for _, count in listed[_MOST_ENDINGS:])
    return ", ".join([*shown, f"{rest:,} of other endings"] if rest else shown)


def some_endings(suffixes: Sequence[str]) -> str:
    """Endings for a message, without those of compressed files; a long list is cut short."""
    packings = (".gz", ".zst")
    plain = [one for one in suffixes if one.startswith(".") and not one.endswith(packings)]
    more = len(plain) - 2 * _MOST_ENDINGS
    return ", ".join(plain[: 2 * _MOST_ENDINGS]) + (f" and {more} more" if more > 0 else "")


def _ends(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def with_common_names(files: Sequence[InputFile]) -> list[InputFile]:
    """Files that were listed separately, with names relative to the folder that all have in
    common; each at most once."""
    if len({isinstance(file.place, Path) for file in files}) > 1:
        raise SourceError(
            "files on this machine and on object storage in one list; make a source of each"
        )
    parts = [
        file.place.parts if isinstance(file.place, Path) else file.place.url.names for file in files
    ]
    same = 0
    while all(len(names) > same + 1 for names in parts) and len({n[same] for n in parts}) == 1:
        same += 1
    named = ["/".join(names[same:]) for names in parts]
    if len(set(named)) < len(named):
        twice = sorted({name for name in named if named.count(name) > 1})
        raise SourceError(f"listed more than once: {', '.join(twice[:5])}; name each file once")
    return [replace(file, name=name) for file, name in zip(files, named, strict=True)]


def _files_at(
    where: str | Path, suffixes: tuple[str, ...], left: Counter[str], *, quiet: bool
) -> list[InputFile]:
    """The files of one input; the endings of those that were left out are counted in `left`."""
    if _is_remote(where):
        listed, is_folder = list_objects(str(where))
        shown = listed
        if is_folder or len(listed) != 1:
            kept = _visible(
                Url(str(where)),
                [name for _, name, _ in listed],
                left,
                quiet=quiet,
                suffixes=suffixes if is_folder else ("",),
            )
            shown = [listed[number] for number in kept]
        files = [InputFile(place=place, name=name, num_bytes=size) for place, name, size in shown]
        return sorted(files, key=attrgetter("name"))
    path = where if isinstance(where, Path) else Path(_LOCAL.sub("", where, count=1))
    root, paths = find_local(path, suffixes, left, quiet=quiet)
    return [_input_file(path, root) for path in paths]


def _visible(
    where: object,
    names: Sequence[str],
    left: Counter[str],
    *,
    suffixes: tuple[str, ...],
    quiet: bool,
) -> list[int]:
    """The numbers of the files in a folder that are read, by their names relative to it."""
    ours = [number for number, name in enumerate(names) if _ends(name, suffixes)]
    shown = [n for n in ours if not any(part.startswith(".") for part in names[n].split("/"))]
    others = Counter(ending_of(name) for name in names if not _ends(name, suffixes))
    left.update(others)
    num_hidden = len(ours) - len(shown)
    parts = [f"{others.total():,} files of other endings ({counted(others)})"] if others else []
    parts += [f"{num_hidden:,} hidden files"] if num_hidden else []
    if parts and not quiet:
        how = "; read them with ext= (--ext), a glob or kind=text (--kind text)" if others else ""
        logger.info("%s: left out %s%s", where, " and ".join(parts), how)
    return shown


def _is_remote(where: str | Path) -> bool:
    """Whether this names something that is not on this machine. An existing path does not."""
    if isinstance(where, Path) or _LOCAL.match(where) or not _SCHEME.match(where):
        return False
    # Unlike Path.exists, this accepts a name that is too long for a disk.
    return not os.path.exists(where)  # noqa: PTH110


def _input_file(path: Path, root: Path) -> InputFile:
    absolute = path.absolute()
    name = absolute.relative_to(root.absolute()).as_posix()
    try:
        if not path.is_file():
            raise SourceError(f"{path}: not a file; name files, or one folder, or a glob")
        return InputFile(place=absolute, name=name, num_bytes=path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def find_local(
    where: Path, suffixes: tuple[str, ...], left: Counter[str] | None = None, *, quiet: bool = False
) -> tuple[Path, list[Path]]:
    """The files of a file, folder or glob, sorted, and the folder that names are relative to. The
    endings of files that a folder leaves out are counted in `left`."""
    try:
        where.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise SourceError(f"{str(where)[:200]}: cannot be looked up: {error}") from error
    if where.is_dir():
        root, below = where, _files_below(where)
        names = [path.relative_to(where).as_posix() for path in below]
        counts: Counter[str] = Counter() if left is None else left
        shown = _visible(where, names, counts, suffixes=suffixes, quiet=quiet)
        found = [below[number] for number in shown]
    elif where.exists():
        return where.parent, [where]
    elif glob.has_magic(str(where)):
        folders = where.parts[:-1]
        fixed = next((n for n, part in enumerate(folders) if glob.has_magic(part)), len(folders))
        root = Path(*folders[:fixed])
        found = [path for path in _matching(root, where.parts[fixed:]) if path.is_file()]
    else:
        raise SourceError(f"{where}: no such file or folder; check the path, or quote a glob")
    kept = _without_stores(root, found, quiet=quiet)
    return root, sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def _without_stores(root: Path, found: list[Path], *, quiet: bool) -> list[Path]:
    """Without what is in the folder of a store: its list of dropped rows is no input."""
    folders = {path.parent for path in found}
    folders |= {folder.parent for folder in folders if folder != root}  # files of its splits
    stores = sorted(filter(_holds_store, folders))
    for store in stores if not quiet else ():
        logger.warning("%s: holds a store: left out; name a file in it to read it", store)
    return [path for path in found if not any(store in path.parents for store in stores)]


def _holds_store(folder: Path) -> bool:
    try:
        with (folder / "meta.json").open("rb") as file:
            return b'"format": "shardmill-store"' in file.read(2**16)
    except OSError:
        return False


def _files_below(folder: Path) -> list[Path]:
    """The files below a folder, through links to folders too; a folder in a cycle only once.
    Hidden folders are left out."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        # Skipped here, since a hidden folder would otherwise hide a visible link to it.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += (Path(parent, name) for name in names)
    return found


def _matching(root: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """What a glob below `root` finds; "**" is any number of folders.

    No path passes the same folder twice, or two links in a circle would be followed for ever.
    """
    if not root.is_dir():
        return
    for parent, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        here = Path(parent)
        inner = here.relative_to(root).parts
        above = {os.path.realpath(folder) for folder in (here, *here.parents)}
        folders[:] = [
            name
            for name in folders
            if _may_contain((*inner, name), pattern) and os.path.realpath(here / name) not in above
        ]
        yield from (here / name for name in names if _matches((*inner, name), pattern))


def _may_contain(folders: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether something in a folder may match."""
    if "**" in pattern[: len(folders)]:
        return True
    return len(folders) < len(pattern) and _matches(folders, pattern[: len(folders)])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern; hidden names only where the pattern names them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if _matches(parts, pattern[1:]):
            return True
        return bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _raise(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error


def unreadable(where: object, error: OSError) -> SourceError:
    """An error of the system as one of ours."""
    return SourceError(f"{where}: cannot be read: {error.strerror or error}")


@contextmanager
def open_file(file: InputFile, start: int = 0, stop: int | None = None) -> Iterator[io.RawIOBase]:
    """The bytes from `start` on. Objects are fetched ahead up to about `stop` (None: the end)."""
    stream: io.RawIOBase
    try:
        if isinstance(file.place, Path):
            stream = file.place.open("rb", buffering=0)
        else:
            stop = file.num_bytes if stop is None else min(stop, file.num_bytes)
            first = min(start + FIRST_BLOCK, stop)
            blocks = [*blocks_of([(start, first)]), *blocks_of([(first, stop)])]
            stream = open_object(file.place, file.num_bytes, blocks, is_slow_start=True)
        with stream:
            stream.seek(start)
            yield stream
    except OSError as error:
        if error.errno is None:  # not of the system: of a decompressor, or one of ours
            raise
        raise unreadable(file.place, error) from error


def check_unchanged(file: object) -> None:
    """Refuse a file that is gone or has another size than when it was listed.

    On object storage, also one with other content. Those of a commit of the hub never change.
    """
    if not isinstance(file, InputFile):
        return
    if not isinstance(file.place, Path):
        check_object(file.place, file.num_bytes)
        return
    try:
        found = file.place.stat().st_size
    except OSError as error:
        raise unreadable(file.place, error) from error
    if found != file.num_bytes:
        raise SourceError(
            f"{file.place}: {found:,} bytes now, {file.num_bytes:,} when it was listed; a file "
            "must not change while it is read: wait for its writer, then start again"
        )


def stamp_of_file(file: InputFile) -> JSON:
    """When a file was written, or what its storage calls its content."""
    if isinstance(file.place, Path):
        return file.place.stat().st_mtime_ns
    identity = file.place.identity
    return list(identity) if identity is not None else file.place.changed


def fingerprint_files(files: Iterable[InputFile]) -> list[JSON]:
    """Name, size and content of each file, for `describe`.

    While all files together are under 64 MiB the hash covers every byte; above that
    "sha256_of_ends" covers the first and the last 64 KiB of each file. For objects it is what the
    storage calls the content, or the hash of the ends if it has no name for it.
    """
    files = list(files)
    whole = sum(file.num_bytes for file in files) < FULL_HASH_BYTES
    return [fingerprint(file, whole=whole) for file in files]


def has_content(file: InputFile, recorded: Mapping[str, JSON]) -> bool:
    """Whether a file has the content that `fingerprint_files` once recorded; names may differ."""
    if file.num_bytes != recorded["bytes"]:
        return False
    return fingerprint(file, whole="sha256" in recorded) == {**recorded, "file": file.name}


def fingerprint(file: InputFile, *, whole: bool) -> dict[str, JSON]:
    """Name, size and what identifies the content: a hash of all of it or of its ends, or what its
    storage calls it."""
    check_unchanged(file)
    facts: dict[str, JSON] = {"file": file.name, "bytes": file.num_bytes}
    if isinstance(file.place, ObjectPath) and file.place.identity is not None:
        kind, word = file.place.identity
        return {**facts, kind: word}
    with open_file(file, 0, END_BYTES) as raw:
        is_local = isinstance(file.place, Path)  # a local file may give less than it is asked for
        stream = io.BufferedReader(raw) if is_local else raw
        if whole and is_local:
            return {**facts, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        digest = hashlib.sha256(stream.read(END_BYTES) or b"")
        stream.seek(max(file.num_bytes - END_BYTES, 0))  # the ends may overlap
        digest.update(stream.read(END_BYTES) or b"")
        return {**facts, "sha256_of_ends": digest.hexdigest()}


def describe_difference(before: JSON, now: JSON, path: str = "") -> list[str]:
    """Each leaf in which two JSON values differ, as 'path: before -> now'.

    Lists of files are compared by file name: 'a.jsonl: bytes 10 -> 12'.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [
            line
            for key in keys
            for line in describe_difference(before.get(key), now.get(key), f"{path}.{key}")
        ]
    # The splits of a plan are pairs with a name, too.
    is_files = not path.endswith(".fill")
    old_files, new_files = (_files_in(one) if is_files else None for one in (before, now))
    if old_files is not None and new_files is not None:
        return _file_differences(old_files, new_files)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            line
            for index, (old, new) in enumerate(zip(before, now, strict=True))
            for line in describe_difference(old, new, f"{path}[{index}]")
        ]
    return [] if before == now else [f"{path.lstrip('.')}: {_short(before)} -> {_short(now)}"]


def _short(value: JSON) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _files_in(value: JSON) -> dict[str, dict[str, JSON]] | None:
    """Files by name, of a list as `fingerprint_files` or a source's `stamp` makes it; else None."""
    if not isinstance(value, list) or not value:
        return None
    files: dict[str, dict[str, JSON]] = {}
    for one in value:
        if isinstance(one, dict) and isinstance(one.get("file"), str):
            files[str(one["file"])] = {key: one[key] for key in one if key != "file"}
        elif isinstance(one, list) and len(one) == 2 and isinstance(one[0], str):
            files[one[0]] = {
                "last written" if isinstance(one[1], int) else "content": _time(one[1])
            }
        else:
            return None
    return files if len(files) == len(value) else None


def _time(stamp: JSON) -> JSON:
    """Nanoseconds since 1970 as text; anything else as it is."""
    if not isinstance(stamp, int) or not 0 <= stamp < 2**63:
        return stamp
    seconds, rest = divmod(stamp, 10**9)
    shown = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown}.{rest:09d} UTC"


def _file_differences(
    before: dict[str, dict[str, JSON]], now: dict[str, dict[str, JSON]]
) -> list[str]:
    if before.keys() == now.keys() and list(before) != list(now):
        first = next(old for old, new in zip(before, now, strict=True) if old != new)
        return [f"the files are in another order, from {first} on"]
    lines = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            change = "was an input -> is none" if new is None else "was none -> is an input"
            lines.append(f"{name}: {change}")
        else:
            lines += [
                f"{name}: {key} {old.get(key)} -> {new.get(key)}"
                for key in dict.fromkeys([*old, *new])
                if old.get(key) != new.get(key)
            ]
    return lines
