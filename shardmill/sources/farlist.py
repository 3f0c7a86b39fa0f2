"""Which files lie at a URL.

In: a URL of a file, a folder or a glob.  Out: the files, with name, size and the store's own word
for their content.
Promise: as for local files: sorted by relative name; in a folder only files of the wanted endings;
hidden ones (".x", or in a hidden folder) left out, which is announced. A listing is never an old
one, and is asked for again when that may help.
Not here: reading.
"""

from __future__ import annotations

import glob
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardmill.errors import SourceError
from shardmill.sources.far import FarPath, connected, known_by, size_of
from shardmill.sources.farretry import asked
from shardmill.urls import Url

logger = logging.getLogger(__name__)

_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A file that was listed."""

    path: FarPath
    name: str  # relative to the folder that was asked for
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Listing:
    root: str  # names are relative to it
    files: dict[str, dict[str, Any]]  # the client's name -> what it says of it
    is_folder: bool


def find_far(where: str, suffixes: tuple[str, ...]) -> list[Found]:
    """The files there, in order; a file named outright may end in anything. May be none."""
    url = Url(where)
    fs, path = connected(url)
    listing = asked(partial(_list, fs, path.rstrip("/") or path), str(url))
    found = [
        _found(fs, info, name, _relative(name, listing.root))
        for name, info in listing.files.items()
        if info.get("type") == "file" and not name.endswith("/")
    ]
    if len(found) == 1 and not listing.is_folder:
        kept = found
    else:
        kept = [file for file in found if _is_shown(file.name, suffixes, listing)]
    if len(kept) < len(found):
        logger.info(
            "%s: left out %d files, hidden or of other endings",
            url,
            len(found) - len(kept),
        )
    return sorted(kept, key=lambda file: file.name)


def _list(fs: Any, path: str) -> _Listing:
    fs.invalidate_cache()
    try:
        info = fs.info(path)
    except FileNotFoundError:
        if path.startswith(_WEB) or not glob.has_magic(path):
            raise
        return _Listing(_fixed_part(path), fs.glob(path, detail=True), is_folder=False)
    if info["type"] != "directory":
        return _Listing(path.rpartition("/")[0], {path: info}, is_folder=False)
    return _Listing(path, fs.find(path, detail=True), is_folder=True)


def _fixed_part(pattern: str) -> str:
    """The folder of a glob before its first wildcard."""
    parts = pattern.split("/")[:-1]
    wild = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return "/".join(parts[:wild])


def _relative(name: str, root: str) -> str:
    inner = name.removeprefix(root).lstrip("/")
    return str(Url(name)).rpartition("/")[2] if name.startswith(_WEB) else inner


def _is_shown(name: str, suffixes: tuple[str, ...], listing: _Listing) -> bool:
    if any(part.startswith(".") for part in name.split("/")):
        return False
    return not listing.is_folder or name.lower().endswith(suffixes)


def _found(fs: Any, info: dict[str, Any], client_name: str, name: str) -> Found:
    url = Url(str(fs.unstrip_protocol(client_name)))
    if connected(url) != (fs, client_name):
        raise SourceError(
            f"{url}: addresses of this kind cannot be given to another process; copy the "
            "files to a disk or a bucket"
        )
    identity, changed = known_by(info)
    path = FarPath(url=url, identity=identity, changed=changed)
    return Found(path=path, name=name, num_bytes=size_of(info, str(path)))
