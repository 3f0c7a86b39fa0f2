"""Object storage, through the clients of fsspec: connect, list, and read files by byte ranges.

A file is never downloaded whole to be read. It is identified by its size and by what the storage
calls its content (an ETag, say); if either changes after listing, reading is refused. Credentials
and endpoints come from the client's environment and are never stored, shown or sent.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from shardmill.errors import MissingExtraError, OptionError, SourceError, missing_extra
from shardmill.storage.ranges import Range, RangedFile
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url, remember_options, safe_cause

_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "hf": ("huggingface_hub", "hub")}
# We do the retries (retry.py), not the library that the S3 client uses.
_NO_RETRIES = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}
_DEFAULTS: dict[str, dict[str, Any]] = {"s3": _NO_RETRIES, "s3a": _NO_RETRIES}
# What storages call the content of a file, the most reliable first.
_IDENTITIES = {"md5Hash": "md5", "ETag": "etag", "etag": "etag", "blob_id": "blob_id"}
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPath:
    """The address of a file, and what identified its content when it was listed."""

    url: Url
    identity: tuple[str, str] | None  # ("etag", "9b2c..."); None: this storage has none
    changed: float | None  # the time of the last change, if there is no identity

    def __str__(self) -> str:
        return str(self.url)


def connect(url: Url, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The fsspec client for a URL, and the client's name for the file. Sends no request yet."""
    if url.refusal is not None:
        raise OptionError(url.refusal)
    remember_options(options)
    scheme = url.scheme
    import fsspec  # here, so that reading local files never waits for it
    from fsspec.registry import known_implementations

    try:
        fs, name = fsspec.core.url_to_fs(
            url.reveal(), **{**_DEFAULTS.get(scheme, {}), **(options or {})}
        )
    except ImportError as missing:
        if scheme in _EXTRAS:
            raise missing_extra(*_EXTRAS[scheme]) from missing
        known = known_implementations.get(scheme, {"class": "fsspec."})
        package = known["class"].partition(".")[0]
        own = package == "fsspec"  # a client of fsspec's own says itself what it needs
        advice = missing if own else f"{package} is not installed: pip install {package}"
        raise MissingExtraError(f"{url}: cannot be opened: {advice}") from safe_cause(missing)
    except (ValueError, TypeError, OSError) as error:  # an archive is opened here
        raise OptionError(
            f"{url}: {error}; wanted something like s3://bucket/folder"
        ) from safe_cause(error)
    return fs, str(name)


def fetch_range(fs: Any, name: str, start: int, stop: int) -> bytes:
    """Bytes `start..stop` of a file: all of them, or an error."""
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


def check_object(path: ObjectPath, num_bytes: int) -> None:
    """Refuse a file that is gone or changed since it was listed."""
    fs, name = _connect_file(path.url)

    def info() -> dict[str, Any]:
        fs.invalidate_cache()  # of listings, which may be old
        found: dict[str, Any] = fs.info(name)
        return found

    found = RetryPolicy().call(info, str(path))
    size = _size_of(found, path.url)
    if size != num_bytes or identify(found) != (path.identity, path.changed):
        how = "" if size != num_bytes else ", but rewritten"
        raise SourceError(
            f"{path}: is not the file that was listed: {num_bytes:,} bytes then, {size:,} now"
            f"{how}; a file must not change while it is read: wait for its writer, then start again"
        )


def open_object(
    path: ObjectPath, num_bytes: int, blocks: Sequence[Range] = (), *, is_slow_start: bool = False
) -> RangedFile:
    """The bytes of a file; `blocks` are fetched ahead."""
    fs, name = _connect_file(path.url)
    return RangedFile(
        partial(fetch_range, fs, name),
        num_bytes,
        blocks,
        retry=partial(RetryPolicy().call, what=str(path)),
        is_slow_start=is_slow_start,
    )


def list_objects(where: str) -> tuple[list[tuple[ObjectPath, str, int]], bool]:
    """The files at a URL of a file, a folder or a glob, with their names, which are relative to the
    folder that was listed, and their bytes; and whether it is a folder. May be empty."""
    url = Url(where)
    fs, path = _connect_file(url)
    root, infos, is_folder = RetryPolicy().call(
        partial(_list, fs, path.rstrip("/") or path), str(url)
    )
    found = [
        _listed(fs, info, name, root)
        for name, info in infos.items()
        if info.get("type") == "file" and not name.endswith("/")
    ]
    return found, is_folder


def find_files(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Every file below a folder, now: the client's name -> what the storage says of it."""
    fs.invalidate_cache()
    try:
        found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    except FileNotFoundError:
        return {}
    return found


def _list(fs: Any, path: str) -> tuple[str, dict[str, dict[str, Any]], bool]:
    """The folder that names are relative to, the files, and whether `path` is a folder."""
    fs.invalidate_cache()
    try:
        info = fs.info(path)
    except FileNotFoundError:
        if path.startswith(_WEB) or not glob.has_magic(path):
            raise
        parts = path.split("/")[:-1]
        wild = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        return "/".join(parts[:wild]), fs.glob(path, detail=True), False
    if info["type"] != "directory":
        return path.rpartition("/")[0], {path: info}, False
    return path, fs.find(path, detail=True), True


def _listed(
    fs: Any, info: dict[str, Any], client_name: str, root: str
) -> tuple[ObjectPath, str, int]:
    url = Url(str(fs.unstrip_protocol(client_name)))
    if connect(url) != (fs, client_name):
        raise SourceError(
            f"{url}: addresses of this kind cannot be given to another process; copy the "
            "files to a disk or a bucket"
        )
    name = client_name.removeprefix(root).lstrip("/")
    if client_name.startswith(_WEB):
        name = str(Url(client_name)).rpartition("/")[2]
    identity, changed = identify(info)
    place = ObjectPath(url=url, identity=identity, changed=changed)
    return place, name, _size_of(info, url)


def _connect_file(url: Url) -> tuple[Any, str]:
    fs, name = connect(url)
    if not name.strip("/"):
        raise OptionError(f"{url}: names no bucket; wanted something like s3://bucket/folder")
    return fs, name


def identify(info: dict[str, Any]) -> tuple[tuple[str, str] | None, float | None]:
    """What the storage calls the content of a file; if it has no name for it, the last change."""
    for key, kind in _IDENTITIES.items():
        if word := info.get(key):
            return (kind, str(word).removeprefix("W/").strip('"')), None
    time = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(time, datetime):
        return None, time.timestamp()
    return None, float(time) if isinstance(time, int | float) else None


def _size_of(info: dict[str, Any], url: Url) -> int:
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(f"{url}: the storage does not give its size; copy it elsewhere")
    return size
