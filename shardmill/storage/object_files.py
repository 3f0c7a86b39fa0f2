"""Files on object storage, read in place. The one importer of fsspec in this room.

In: a URL, for any client of fsspec that is installed.  Out: a file's bytes, by ranges, and what the
store says of it.
Promise: never a whole download: ranges, planned ones a few blocks ahead, each retried and whole. A
file is known by its size and by what the store itself calls its content; when that is another than
it was listed with, reading is refused. Credentials and endpoints are the client's affair: they come
from its environment, and are in nothing that is stored, told or sent.
Not here: which files there are (`farlist`); what the bytes mean; local files.

Which files lie at a URL.

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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import fsspec

from shardmill.errors import MissingExtraError, OptionError, SourceError, missing_extra
from shardmill.records import JSON
from shardmill.storage.files import sha256_of_ends
from shardmill.storage.ranges import Range, RangedFile, blocks_of
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url, safe_cause

FIRST_BLOCK = 256 * 2**10
"""A reader of the first lines alone costs no more."""

_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "hf": ("huggingface_hub", "hub")}
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
_PACKAGES |= {"http": "aiohttp", "https": "aiohttp", "oss": "ossfs", "oci": "ocifs"}
# The tries are ours to count (`farretry`), not those of the client below the client.
_ONCE = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _ONCE, "s3a": _ONCE}
# What stores call the content of a file, the surest first.
_IDENTITIES = {"md5Hash": "md5", "ETag": "etag", "etag": "etag", "blob_id": "blob_id"}
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPath:
    """Where a file lies, and what it was when it was listed. Small to send."""

    url: Url
    identity: tuple[str, str] | None  # ("etag", "9b2c..."); None: this store has none
    changed: float | None  # when it was written, as the store says; of a store without identity

    def __str__(self) -> str:
        return str(self.url)


def check_far(path: FarPath, num_bytes: int) -> None:
    """Refuse a file that is gone or is another than when it was listed."""
    found = RetryPolicy().call(partial(_info, path.url), str(path))
    size, known = size_of(found, str(path)), known_by(found)
    if size != num_bytes or known != (path.identity, path.changed):
        raise SourceError(
            f"{path}: is not the file that was listed: {num_bytes:,} bytes then, {size:,} now"
            f"{'' if size != num_bytes else ', but written anew'}; a file must not change while it "
            "is read: wait for its writer, then start anew"
        )


def open_far(
    path: FarPath, num_bytes: int, blocks: Sequence[Range] = (), *, is_slow_start: bool = False
) -> RangedFile:
    """The bytes of a file, with `blocks` of them fetched ahead."""
    fs, name = connected(path.url)
    return RangedFile(
        partial(_fetch, fs, name),
        num_bytes,
        blocks,
        retry=partial(RetryPolicy().call, what=str(path)),
        is_slow_start=is_slow_start,
    )


def open_far_from(path: FarPath, num_bytes: int, start: int, stop: int | None) -> RangedFile:
    """To be read from `start` on, in order, to about `stop` (None: the end)."""
    stop = num_bytes if stop is None else min(stop, num_bytes)
    first = min(start + FIRST_BLOCK, stop)
    blocks = [*blocks_of([(start, first)]), *blocks_of([(first, stop)])]
    stream = open_far(path, num_bytes, blocks, is_slow_start=True)
    stream.seek(start)
    return stream


def describe_far(path: FarPath, num_bytes: int, end_bytes: int) -> dict[str, JSON]:
    """What identifies the content: the store's own word for it, else a hash of its two ends."""
    check_far(path, num_bytes)
    if path.identity is not None:
        kind, word = path.identity
        return {kind: word}
    with open_far(path, num_bytes) as stream:
        return {"sha256_of_ends": sha256_of_ends(stream, num_bytes, end_bytes)}


def connected(url: Url) -> tuple[Any, str]:
    """The client for a URL, and what it calls the file. Asks nobody anything yet."""
    if url.refusal is not None:
        raise OptionError(url.refusal)
    protocol = url.scheme
    try:
        fs, name = fsspec.core.url_to_fs(url.reveal(), **_OPTIONS.get(protocol, {}))
    except ImportError as missing:
        raise _missing(protocol, missing) from missing
    except (ValueError, TypeError, OSError) as error:  # an archive is opened here
        raise SourceError(
            f"{url}: {error}; wanted something like s3://bucket/folder"
        ) from safe_cause(error)
    if not str(name).strip("/"):
        raise SourceError(f"{url}: names no bucket; wanted something like s3://bucket/folder")
    return fs, str(name)


def known_by(info: dict[str, Any]) -> tuple[tuple[str, str] | None, float | None]:
    """The store's own word for the content of a file; or else when the file was written."""
    for key, kind in _IDENTITIES.items():
        if word := info.get(key):
            return (kind, str(word).removeprefix("W/").strip('"')), None
    time = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(time, datetime):
        return None, time.timestamp()
    return None, float(time) if isinstance(time, int | float) else None


def size_of(info: dict[str, Any], where: str) -> int:
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(f"{where}: the store does not say how large it is; copy it elsewhere")
    return size


def _info(url: Url) -> dict[str, Any]:
    fs, name = connected(url)
    fs.invalidate_cache()  # of listings, which may be old
    found: dict[str, Any] = fs.info(name)
    return found


def _fetch(fs: Any, name: str, start: int, stop: int) -> bytes:
    data: bytes = fs.cat_file(name, start=start, end=stop)
    if len(data) > stop - start:
        raise SourceError(
            f"the server at {urlsplit(name).netloc.rpartition('@')[2]} does not serve ranges: "
            f"{len(data):,} bytes came, {stop - start:,} were asked for; download the file first"
        )
    if len(data) != stop - start:
        raise ConnectionError(
            f"{len(data):,} bytes came, {stop - start:,} were asked for (from {start:,})"
        )
    return data


def _missing(protocol: str, error: ImportError) -> MissingExtraError:
    if protocol in _EXTRAS:
        return missing_extra(*_EXTRAS[protocol])
    package = _PACKAGES.get(protocol)
    advice = f"{package} is not installed: pip install {package}" if package else str(error)
    return MissingExtraError(f"{protocol}:// cannot be read: {advice}")


logger = logging.getLogger(__name__)

_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A file that was listed."""

    path: FarPath
    name: str  # relative to the folder that was asked for
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Listing:
    root: str  # names are relative to it
    files: dict[str, dict[str, Any]]  # the client's name -> what it says of it
    is_folder: bool


def find_far(where: str, suffixes: tuple[str, ...]) -> list[ListedFile]:
    """The files there, in order; a file named outright may end in anything. May be none."""
    url = Url(where)
    fs, path = connected(url)
    listing = RetryPolicy().call(partial(_list, fs, path.rstrip("/") or path), str(url))
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


def _found(fs: Any, info: dict[str, Any], client_name: str, name: str) -> ListedFile:
    url = Url(str(fs.unstrip_protocol(client_name)))
    if connected(url) != (fs, client_name):
        raise SourceError(
            f"{url}: addresses of this kind cannot be given to another process; copy the "
            "files to a disk or a bucket"
        )
    identity, changed = known_by(info)
    path = FarPath(url=url, identity=identity, changed=changed)
    return ListedFile(path=path, name=name, num_bytes=size_of(info, str(path)))
