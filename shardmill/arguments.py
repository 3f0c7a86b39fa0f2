"""Numbers, names and paths from a caller, checked at the border in the caller's words."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import SupportsIndex

from shardmill.errors import OptionError

_URL = re.compile(r"\s*((?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# pathlib and os.path.normpath turn s3://bucket into s3:/bucket; only these schemes are taken for
# such a URL, since a local folder may have a colon in its name
_MANGLED = re.compile(
    r"(s3a?|gs|gcs|az|abfss?|adl|wasbs?|oci|oss|hf|https?|s?ftp|ssh|hdfs|webhdfs|memory|file|local)"
    r":(?:/|$)",
    re.IGNORECASE,
)


def whole_number(value: SupportsIndex, name: str, *, least: int | None = 1) -> int:
    """`value` as an int of at least `least`: what has `__index__`, but no bool, float or str."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError(f"{name}={value!r} ({type(value).__name__}): wanted a whole number")
    number = operator.index(value)
    if least is not None and number < least:
        raise OptionError(f"{name}={number:,}: wanted at least {least:,}")
    return number


def is_url(value: object) -> bool:
    """Whether this is the text of a URL, as written or as `Path` mangles it (`s3:/bucket/x`).

    Nothing is looked up. "file:///x" is a URL, too; "./s3://x" is a path.
    """
    return _scheme(value) is not None


def refuse_url(value: object, what: str, *, instead: str) -> None:
    """Raise if a URL was given where only a local path makes sense.

    `what` names the argument, `instead` says what to do. Of the URL only the scheme is shown, since
    the rest may hold credentials.
    """
    scheme = _scheme(value)
    if scheme is not None:
        raise OptionError(f"{what}: found a URL ({scheme}://...), wanted a local path; {instead}")


def _scheme(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        return None
    found = _URL.match(text) or _MANGLED.match(text)
    return found[1].lower() if found else None


def check_memory(num_bytes: int, what: str, advice: str) -> None:
    """Refuse what takes more memory than there is, before it takes all of it."""
    there = available_memory()
    if there is not None and num_bytes > there:
        raise OptionError(
            f"{what}: {_gigabytes(num_bytes)}; found {_gigabytes(there)} of memory available to "
            f"this process; {advice}"
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take without swapping; None: the system does not say.

    The least of what the machine and each control group of the process leave. `root`: of /proc and
    /sys.
    """
    machine = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    if machine is None:
        return None
    return max(0, min([int(machine[1]) * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Limit less use of every control group, version 2 or 1, up to the root. Page cache is no use:
    it goes when memory is needed."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        limit, used = (
            ("memory.limit_in_bytes", r"^total_rss (\d+)$")
            if kinds
            else ("memory.max", r"^anon (\d+)$")
        )
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            most = _text(group / limit).strip()
            if most.isdigit():  # "max": no limit
                found = re.search(used, _text(group / "memory.stat"), re.M)
                yield int(most) - (int(found[1]) if found else 0)
            if group == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gigabytes(num_bytes: int) -> str:
    number = num_bytes / 1e9
    return f"{number:,.1f} GB" if number >= 0.1 else f"{number:.3f} GB"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: the only one that begins so, else one that is
    spelled alike; None when none is near. Case, "-" and "_" do not count."""
    plain = {_plain(name): name for name in sorted(known)}
    asked = _plain(word)
    begun = [name for name in plain if len(asked) > 1 and name.startswith(asked)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(asked, plain, n=1)
    return plain[near[0]] if near else None


def choices(word: str, known: Iterable[str], *, verb: str = "known here") -> str:
    """The end of a message about a name that nobody knows:
    did you mean 'train'? Known here: train, val"""
    names = list(known)
    near = nearest(word, names)
    listed = f"{verb}: {', '.join(names) or 'none'}"
    return listed if near is None else f"did you mean {near!r}? {listed[0].upper()}{listed[1:]}"


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")
