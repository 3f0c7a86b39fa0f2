"""meta.json files: written atomically, and equal dicts always as equal bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shardmill.errors import ManifestError, StoreNotFoundError
from shardmill.storage.atomic import atomic_write


def write_meta(path: str, meta: dict[str, Any]) -> None:
    """Replace `path` atomically. Keys are sorted; a value JSON cannot say (NaN) is an error."""
    target = Path(path)
    data = json.dumps(meta, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        file.write(data)


def read_meta(path: str) -> dict[str, Any]:
    """The dict in `path`."""
    try:
        meta = json.loads(Path(path).read_bytes())
    except FileNotFoundError as missing:
        raise StoreNotFoundError(
            f"{path}: no such file, so nothing finished is here; build the cache first"
        ) from missing
    except (ValueError, RecursionError) as broken:
        raise ManifestError(f"{path}: not JSON ({broken}); build the cache again") from broken
    if not isinstance(meta, dict):
        raise ManifestError(f"{path}: found a {type(meta).__name__}, wanted an object")
    return meta


def sha256_file(path: str) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["read_meta", "sha256_file", "write_meta"]
