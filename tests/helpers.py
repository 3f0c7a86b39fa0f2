"""Small things several test folders need."""

from __future__ import annotations

import hashlib
from pathlib import Path


def folder_digest(folder: Path) -> str:
    """One hash over every file's relative name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(
                f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode()
            )
            digest.update(path.read_bytes())
    return digest.hexdigest()
