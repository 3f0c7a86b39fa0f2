"""Folders of this machine, as a call names them.

What is written like a URL or a hub dataset never becomes a local folder called s3: or hub:owner.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardmill.arguments import is_url
from shardmill.errors import OptionError


def check_local(place: str | Path, name: str, *, instead: str = "") -> None:
    """Refuse a place that is not a folder of this machine; `name` is the flag or argument."""
    is_dataset = str(place).startswith("hub:")
    if not (is_dataset or is_url(place)) or Path(place).exists():
        return
    found = "a dataset of the hub" if is_dataset else "a URL"
    raise OptionError(
        f"{name} {place}: {found}, wanted a folder of this machine{instead}; a folder of that name "
        f"is written ./{place}"
    )


def check_file(path: Path, name: str) -> None:
    """Refuse to write where something other than a file is: a link, a device, a pipe, a folder."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise OptionError(f"{name} {path}: found a link, device, pipe or folder; wanted a new file")
