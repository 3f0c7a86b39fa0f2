"""exclude.json, to the byte.

In: entries, or bytes.  Out: bytes, or `Exclusions` that fit their store.
Promise: equal entries are equal bytes; what is decoded is what was written, to the byte, and of
this very store; anything else is an error that says what is wrong.
Not here: changing the file (exclude.py). FORMAT.md has the bytes in words.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shardmill.errors import ManifestError
from shardmill.shards.entries import Manifest, Sha256
from shardmill.shards.exclude_entries import ExcludeEntry, Exclusions, entry_problems
from shardmill.shards.store import fingerprint

EXCLUDE = "exclude.json"
MOST_BYTES = 2**28
_HEAD = re.compile(rb'\{"format":"shardmill-exclude","version":([0-9]+),"sha256":"([0-9a-f]{64})",')
_VERSION = 1
_NO_SEAL = b"0" * 64
_NEXT = "copy it again, or remove it and exclude again what must not be trained on"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-exclude"]
    version: Literal[1]
    sha256: Sha256
    store: Sha256
    entries: tuple[ExcludeEntry, ...]


def encode_exclusions(store: str, entries: Sequence[ExcludeEntry]) -> bytes:
    """exclude.json, to the byte: a line an entry, sealed with its own sha256."""
    head = f'{{"format":"shardmill-exclude","version":{_VERSION},"sha256":"'.encode()
    lines = b",\n".join(msgspec.json.encode(entry) for entry in entries)
    rest = f'","store":"{store}","entries":[\n'.encode() + lines + b"\n]}\n"
    return head + hashlib.sha256(head + _NO_SEAL + rest).hexdigest().encode() + rest


def decode_exclusions(data: bytes, manifest: Manifest, *, where: str) -> Exclusions:
    """What these bytes exclude in the store of this manifest; an error says what is wrong."""
    head = _HEAD.match(data)
    if head is None:
        raise ManifestError(f"{where}: no list of exclusions of ours, or damaged; {_NEXT}")
    if int(head[1]) != _VERSION:
        raise ManifestError(
            f"{where}: version {int(head[1])}, but this shardmill reads version {_VERSION}; "
            "upgrade shardmill"
        )
    zeroed = data[: head.start(2)] + _NO_SEAL + data[head.end(2) :]
    if hashlib.sha256(zeroed).hexdigest() != head[2].decode():
        raise ManifestError(f"{where}: its sha256 is not the one it says: changed; {_NEXT}")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: {error}; {_NEXT}") from error
    own = fingerprint(manifest)
    if file.store != own:
        raise ManifestError(
            f"{where}: excludes tokens of another store, or of this one before it was built again "
            f"(fingerprint {file.store[:12]}, this store has {own[:12]}); {_NEXT}"
        )
    sizes = {name: split.tokens for name, split in manifest.splits.items()}
    documents = {name: split.documents for name, split in manifest.splits.items()}
    for problem in entry_problems(file.entries, sizes, documents):
        raise ManifestError(f"{where}: {problem}; {_NEXT}")
    return Exclusions(store=file.store, entries=file.entries, sha256=file.sha256)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """The bytes of the file, if it is a plain one of possible size; None: there is none."""
    try:
        kind = path.lstat()
        if not stat.S_ISREG(kind.st_mode):
            raise ManifestError(f"{path}: not a plain file (a link?); put the file itself there")
        if kind.st_size > most:
            raise ManifestError(f"{path}: {kind.st_size:,} bytes, wanted at most {most:,}")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
