"""Folders of this machine, as a call names them.

Promise: what is written like a place elsewhere never becomes a folder here that is called s3: or
hub:owner.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardmill.errors import OptionError

_ELSEWHERE = re.compile(r"hub:|[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(place: str | Path, name: str, *, instead: str = "") -> None:
    """Refuse the name of a place that is no folder here; `name` is the flag or argument."""
    if not _ELSEWHERE.match(str(place)) or Path(place).exists():
        return
    found = "a dataset of the hub" if str(place).startswith("hub:") else "a URL"
    raise OptionError(
        f"{name} {place}: {found}, wanted a folder of this machine{instead}; one that is really "
        f"called so is written ./{place}"
    )
