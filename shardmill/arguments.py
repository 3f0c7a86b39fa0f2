"""Check numbers, names and paths that a caller gave, with errors in the caller's words."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex

from shardmill.errors import OptionError

_URL = re.compile(r"\s*((?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# pathlib and os.path.normpath turn s3://bucket into s3:/bucket. Only these schemes count as a
# mangled URL, since a local folder may have a colon in its name.
_MANGLED = re.compile(
    r"(s3a?|gs|gcs|az|abfss?|adl|wasbs?|oci|oss|hf|https?|s?ftp|ssh|hdfs|webhdfs|memory|file|local)"
    r":(?:/|$)",
    re.IGNORECASE,
)


def whole_number(value: SupportsIndex, name: str, *, least: int | None = 1) -> int:
    """`value` as an int of at least `least`. Accepts anything with `__index__` except bool."""
    option = f"{{{name}}}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        kind = type(value).__name__
        raise OptionError(f"{option} ({kind}): wanted a whole number", **{name: value})
    number = operator.index(value)
    if least is not None and number < least:
        raise OptionError(f"{option}: wanted at least {least:,}", **{name: number})
    return number


def is_url(value: object) -> bool:
    """Whether this is a URL, as written or as `Path` mangles it (`s3:/bucket/x`).

    Looks at the text only. "file:///x" is a URL, "./s3://x" is a path.
    """
    return _scheme(value) is not None


def refuse_url(value: object, what: str, *, instead: str) -> None:
    """Raise if a URL was given where only a local path makes sense.

    `what` names the argument and `instead` says what to do. Only the scheme of the URL is shown,
    since the rest may hold credentials.
    """
    scheme = _scheme(value)
    if scheme is not None:
        raise OptionError(f"{what}: found a URL ({scheme}://...), wanted a local path; {instead}")


def check_local(path: str | Path, name: str, *, instead: str = "") -> None:
    """Refuse a URL or a hub dataset where a local folder is wanted, before a folder called `s3:` is
    made. `name` is the option, `instead` what else it takes."""
    is_dataset = str(path).startswith("hub:")
    if not (is_dataset or is_url(path)) or Path(path).exists():
        return
    found = "a hub dataset" if is_dataset else "a URL"
    raise OptionError(
        f"{{{name}}}: {found}, wanted a local folder{instead}; write ./{path} for a folder of that "
        "name",
        **{name: str(path)},
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None.

    The only name that begins with `word`, else one that is spelled alike. Case, "-" and "_" are
    ignored.
    """
    plain = {_plain(name): name for name in sorted(known)}
    wanted = _plain(word)
    begun = [name for name in plain if len(wanted) > 1 and name.startswith(wanted)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(wanted, plain, n=1)
    return plain[near[0]] if near else None


def choices(word: str, known: Iterable[str], *, verb: str = "known here") -> str:
    """The end of a message about an unknown name: did you mean 'train'? Known here: train, val"""
    names = list(known)
    near = nearest(word, names)
    listed = f"{verb}: {', '.join(names) or 'none'}"
    return listed if near is None else f"did you mean {near!r}? {listed[0].upper()}{listed[1:]}"


def _scheme(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        return None
    found = _URL.match(text) or _MANGLED.match(text)
    return found[1].lower() if found else None


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")
