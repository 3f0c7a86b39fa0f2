"""Which input is a URL, and what of it may be told.

In: a path or URL as a caller wrote it, or the words of an error.  Out: the same without secrets.
Promise: user, password and query never come out; a path that exists on this machine is no URL.
Not here: opening anything.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = re.compile(r"(?:file|local)://")
_USER = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>)]*")


def is_url(where: str | Path) -> bool:
    """Whether this names something that is not on this machine."""
    if isinstance(where, Path) or _LOCAL.match(where) or not _SCHEME.match(where):
        return False
    # Unlike that of a Path, this takes a name that is too long for a disk.
    return not os.path.exists(where)  # noqa: PTH110


def local_path(where: str | Path) -> Path:
    """The path of a local file, with or without "file://"."""
    return where if isinstance(where, Path) else Path(_LOCAL.sub("", where, count=1))


def shown(text: str) -> str:
    """Words that may be told: no user or password in a URL, no query of a web address (there "?" is
    no wildcard, and signatures are there)."""
    return _QUERY.sub(r"\1", _USER.sub("", text))
