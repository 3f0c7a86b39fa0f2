"""Manifests that know whether they were changed.

In: the keys of a manifest, or the folder of one.  Out: the same with a seal, or checked.
Promise: the seal is the sha256 over all other keys; a file that is no JSON object is one error.
Not here: what the keys mean.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from shardmill.atomic import atomic_write
from shardmill.errors import DamagedStoreError, ManifestError, StoreNotFoundError
from shardmill.interop.packed.staging import MANIFEST
from shardmill.records import JSON

SEAL = "manifest_sha256"
_MAX_MANIFEST = 2**24


def sealed(fields: dict[str, JSON]) -> dict[str, JSON]:
    """A manifest with its seal."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return {**rest, SEAL: digest}


def is_sealed(fields: dict[str, JSON]) -> bool:
    """Whether these are the keys that were sealed."""
    return fields.get(SEAL) == sealed(fields)[SEAL]


def check_plain(path: Path) -> None:
    """Refuse what is there and is no plain file: reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise DamagedStoreError(f"{path}: not a plain file; copy the data again")


def write_manifest(folder: Path, manifest: dict[str, JSON]) -> None:
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=2).encode() + b"\n")


def read_json(folder: Path, what: str) -> tuple[dict[str, JSON], bytes]:
    """The keys of the manifest at `folder`, and its bytes. `what` should be there, for messages."""
    path = folder / MANIFEST
    check_plain(path)
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_MANIFEST else b"(too large)"
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(f"{folder}: no {MANIFEST} here, so no finished {what}") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        fields: dict[str, JSON] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: no manifest of a {what}: {error}") from error
    return fields, data
