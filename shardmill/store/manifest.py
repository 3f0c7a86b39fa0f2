"""meta.json: the one file that makes a folder a store.

In: a manifest, or a folder.  Out: meta.json, or a manifest that can be trusted to be consistent.
Promise: equal manifests give equal bytes; what `read_manifest` returns has known keys only,
possible numbers, sums that agree, names inside the folder, and is what was written, to the byte.
Not here: whether the listed files exist and match (store.py, verify.py).
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardmill.arguments import refuse_url
from shardmill.errors import BuildError, ManifestError, StoreExistsError, StoreNotFoundError
from shardmill.storage.atomic import atomic_write, cannot_write, sync_folder
from shardmill.store.entries import (
    DocumentLedger,
    FileEntry,
    Ledger,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoreFacts,
    TokenLedger,
    empty_ledger,
    manifest_problems,
)
from shardmill.store.layout import FORMAT, META, STORED, VERSION, check_shape, looks_like_data

__all__ = [
    "DocumentLedger",
    "FileEntry",
    "Ledger",
    "Manifest",
    "ShardEntry",
    "SplitEntry",
    "StoreFacts",
    "TokenLedger",
    "decode_manifest",
    "empty_ledger",
    "encode_manifest",
    "make_manifest",
    "read_manifest",
    "write_manifest",
    "write_placeholder",
]

MAX_META_BYTES = 2**30
_SEAL_KEY = "manifest_sha256"
_SEAL = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')
_NO_SEAL = b"0" * 64
_FLAT = re.compile(r".+_(tokens|documents|examples)")
_KEYS = frozenset(Manifest.__struct_fields__)


def make_manifest(facts: StoreFacts, **fields: Any) -> Manifest:
    """The facts of the builder and the account of the files, as one record."""
    known = {name: getattr(facts, name) for name in StoreFacts.__struct_fields__}
    return Manifest(format=FORMAT, version=VERSION, **known, **fields)


def encode_manifest(manifest: Manifest, *, flat: dict[str, int] | None = None) -> bytes:
    """meta.json, to the byte: sorted keys, two spaces, sealed with its own sha256."""
    plain: dict[str, Any] = msgspec.to_builtins(manifest, order="sorted")
    plain.update(_flat_keys(manifest) if flat is None else flat)
    plain[_SEAL_KEY] = _NO_SEAL.decode()
    compact = msgspec.json.encode(plain, order="sorted")
    body = msgspec.json.format(compact, indent=2) + b"\n"
    marker = f'"{_SEAL_KEY}": "'.encode()
    seal = hashlib.sha256(body).hexdigest().encode()
    return body.replace(marker + _NO_SEAL, marker + seal, 1)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Finish a store: checked, atomic, durable. Everything it lists must be on disk before."""
    _write(Path(folder), manifest, flat=None)


def write_placeholder(
    folder: Path,
    facts: StoreFacts,
    splits: Sequence[str],
    *,
    dtype: str = "uint16",
    shard_bytes: int | None = None,
) -> Manifest:
    """Reserve the place of a store that is not built: its split folders and a meta.json."""
    folder, splits = Path(folder), tuple(splits)
    check_shape(splits, dtype, shard_bytes)
    if (folder / META).exists() and read_manifest(folder).built:
        raise StoreExistsError(
            f"{folder}: a finished store stands here; a placeholder never replaces one"
        )
    manifest = make_manifest(
        facts,
        built=False,
        token_dtype=STORED[dtype],
        shard_bytes=shard_bytes,
        splits={},
        dropped=None,
    )
    for split in splits:
        (folder / split).mkdir(parents=True, exist_ok=True)
    unit = facts.unit + "s"
    _write(folder, manifest, flat={f"{s}_{kind}": 0 for s in splits for kind in ("tokens", unit)})
    return manifest


def refuse_remote(folder: str | Path) -> None:
    """Say what to do with a store at a URL where one on this machine is wanted."""
    refuse_url(
        folder,
        "the store",
        instead="copy it with `shardmill pull URL DIR`, or read it through a cache with "
        "shardmill.remote.open_remote; `shardmill info` and `verify` take a URL",
    )


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of `folder`, checked for everything that needs no other file."""
    refuse_remote(folder)
    path = Path(folder) / META
    return decode_manifest(_read_meta(path), where=str(path))


def decode_manifest(data: bytes, *, where: str = META) -> Manifest:
    """The manifest in these bytes; ManifestError says what is wrong and what to do."""
    keys = _top_level(data, where)
    _check_seal(data, where)
    flat = {k: v for k, v in keys.items() if k not in _KEYS and _FLAT.fullmatch(k)}
    unknown = sorted(keys.keys() - _KEYS - flat.keys() - {_SEAL_KEY})
    if unknown:
        raise ManifestError(
            f"{where}: unknown keys {unknown}; version {VERSION} does not have them. A newer "
            "shardmill may have written it, or it was edited: upgrade, or build the store again"
        )
    known = {k: v for k, v in keys.items() if k in _KEYS}
    try:
        manifest = msgspec.json.decode(msgspec.json.encode(known), type=Manifest)
        claimed = {k: msgspec.json.decode(v, type=int) for k, v in flat.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{where}: {error}; a store of version {VERSION} cannot say this: build it again"
        ) from error
    _refuse(where, [*manifest_problems(manifest), *_flat_problems(manifest, claimed)])
    return manifest


def _write(folder: Path, manifest: Manifest, *, flat: dict[str, int] | None) -> None:
    problems = manifest_problems(manifest)
    if problems:
        raise BuildError(f"{folder}: refusing to finish this store: " + "; ".join(problems))
    try:
        data = encode_manifest(manifest, flat=flat)
        decode_manifest(data)  # what we write, we can read
    except (ManifestError, msgspec.MsgspecError, UnicodeEncodeError, TypeError) as error:
        raise BuildError(f"{folder}: these facts do not fit a manifest: {error}") from error
    try:
        with atomic_write(folder / META) as file:
            file.write(data)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise cannot_write(folder / META, error) from error


def _flat_keys(manifest: Manifest) -> dict[str, int]:
    """The per-split totals that people look for first: train_tokens, train_documents, ..."""
    splits = manifest.splits.items()
    totals = {f"{name}_tokens": split.tokens for name, split in splits}
    return totals | {f"{name}_{manifest.unit}s": split.documents for name, split in splits}


def _flat_problems(manifest: Manifest, claimed: dict[str, int]) -> list[str]:
    wanted = _flat_keys(manifest) if manifest.built else dict.fromkeys(claimed, 0)
    return [
        f"{key} is {claimed.get(key)}, but the splits make it {wanted.get(key)}"
        for key in sorted(wanted.keys() | claimed.keys())
        if wanted.get(key) != claimed.get(key)
    ]


def _top_level(data: bytes, where: str) -> dict[str, msgspec.Raw]:
    """The keys of a JSON object that calls itself a store of our version."""
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        name, version = (
            msgspec.json.decode(keys.get(key, msgspec.Raw(b"null")))
            for key in ("format", "version")
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{where}: not a JSON object ({error}); the file is damaged or not ours: build the "
            "store again or copy it again"
        ) from error
    if name != FORMAT:
        raise ManifestError(
            f'{where}: "format" is {name!r}, wanted {FORMAT!r}; this is not a shardmill store'
        )
    if version != VERSION or isinstance(version, bool):
        raise ManifestError(
            f'{where}: "version" is {version!r}, but this shardmill reads version {VERSION}; '
            "upgrade shardmill, or build the store again"
        )
    return keys


def _check_seal(data: bytes, where: str) -> None:
    seals = list(_SEAL.finditer(data))
    if len(seals) != 1:
        raise ManifestError(
            f"{where}: {len(seals)} {_SEAL_KEY} keys with 64 hex digits, wanted one; it was "
            "changed or damaged after the build: copy it again or build the store again"
        )
    start, stop = seals[0].span(1)
    found = hashlib.sha256(data[:start] + _NO_SEAL + data[stop:]).hexdigest()
    wanted = seals[0][1].decode()
    if found != wanted:
        raise ManifestError(
            f"{where}: its sha256 is {found}, but it says {wanted}; it was changed or damaged "
            "after the build: copy it again or build the store again"
        )


def _refuse(where: str, problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 1:,} more problems)" if len(problems) > 1 else ""
        raise ManifestError(f"{where}: {problems[0]}{more}; build the store again")


def _read_meta(path: Path) -> bytes:
    """The bytes of meta.json, if it is a plain file of possible size."""
    try:
        kind = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing_store(path.parent) from error
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise StoreNotFoundError(f"{str(path)[:200]}: cannot be looked up: {error}") from error
    if not stat.S_ISREG(kind.st_mode):
        raise ManifestError(f"{path}: not a plain file (a link or a folder?); put the file itself")
    if kind.st_size > MAX_META_BYTES:
        raise ManifestError(
            f"{path}: {kind.st_size:,} bytes, but no manifest is larger than {MAX_META_BYTES:,}; "
            "this is not a store of ours"
        )
    try:
        with path.open("rb") as file:
            return file.read(kind.st_size)
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error


def _names_inside(folder: Path) -> Iterator[str]:
    """Of files in it and in its folders, those of splits; what cannot be listed is passed over."""
    for path in (folder, *(entry for entry in _listed(folder) if entry.is_dir())):
        yield from (str(entry.relative_to(folder)) for entry in _listed(path))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def missing_store(folder: Path) -> StoreNotFoundError:
    """Why there is no store at `folder`, in the words that fit what is there."""
    if not folder.is_dir():
        return StoreNotFoundError(f"{folder}: no such folder; build a store there first")
    found = next((name for name in _names_inside(folder) if looks_like_data(name)), None)
    if found is not None:
        return StoreNotFoundError(
            f"{folder}: no {META}, so no store or an unfinished one, with files like {found}; "
            "`shardmill check` is for folders of token files, and a store whose manifest is lost "
            "is built or copied again"
        )
    return StoreNotFoundError(f"{folder}: no {META} here, so it is not a store; check the path")
