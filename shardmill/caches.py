"""Where this user's caches are: one place, chosen as the XDG rules say."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/shardmill/<name>`, or `~/.cache/shardmill/<name>`. Nothing is made there."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardmill" / name
