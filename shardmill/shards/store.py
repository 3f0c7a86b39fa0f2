"""Open a finished store: what is in it and where, without reading a token.

In: a folder.  Out: a `Store`: manifest, token files with known sizes, document starts.
Promise: nothing unfinished, placeholder, truncated, swollen or foreign is ever opened; opening
costs the manifest and one directory listing per folder; a store pickles as its path.
Not here: contents of shards (verify.py), reading windows (the mapped room).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np

from shardmill.errors import DamagedStoreError, OptionError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.shards.entries import Manifest, SplitEntry
from shardmill.shards.layout import DTYPES, INDEX_HEADER_BYTES, META, index_header
from shardmill.shards.manifest import read_manifest
from shardmill.shards.scan import damage, list_files, wanted_sizes

_NEXT_STEP = "copy the store again or build it again; `shardmill verify` lists all damage"


def open_store(folder: str | Path) -> Store:
    """The store at `folder`, after the cheap checks: manifest, and every file's name and size."""
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    if not manifest.built:
        raise not_built(folder)
    wanted = wanted_sizes(manifest)
    problems = list(damage(folder, wanted, list_files(folder, manifest)))
    if problems:
        more = f" (and {len(problems) - 1:,} more damaged files)" if len(problems) > 1 else ""
        raise DamagedStoreError(f"{folder}: {problems[0]}{more}; {_NEXT_STEP}")
    return Store(folder, manifest)


class Store:
    """A finished folder of shards. Made by `open_store`; holds no open file."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.splits: tuple[str, ...] = tuple(manifest.splits)
        self.dtype: str = DTYPES[manifest.token_dtype]
        self.fingerprint = fingerprint(manifest)

    def num_tokens(self, split: str) -> int:
        return self._split(split).tokens

    def num_documents(self, split: str) -> int:
        return self._split(split).documents

    def token_files(self, split: str) -> list[TokenFile]:
        """The shards of a split, in the order of its token space."""
        return [
            TokenFile(path=self.folder / shard.file, num_tokens=shard.tokens, dtype=self.dtype)
            for shard in self._split(split).shards
        ]

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, read-only, on disk: document `i` ends where `i + 1` starts, the
        last one where the split ends."""
        entry = self._split(split)
        path = self.folder / entry.index.file
        starts = _map_index(path, entry.documents)
        if len(starts) and not (starts[0] == 0 and 0 <= starts[-1] <= entry.tokens):
            raise DamagedStoreError(
                f"{path}: documents start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}, the first at 0; {_NEXT_STEP}"
            )
        return starts

    def _split(self, name: str) -> SplitEntry:
        if name not in self.manifest.splits:
            raise OptionError(f"{self.folder}: no split {name!r}; it has {list(self.splits)}")
        return self.manifest.splits[name]

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _reopen, (str(self.folder), self.fingerprint)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v.tokens:,}" for k, v in self.manifest.splits.items())
        return f"Store({str(self.folder)!r}, {self.dtype}, tokens: {sizes or 'none'})"


def fingerprint(manifest: Manifest) -> str:
    """sha256 over what the tokens are: equal fingerprints, equal splits, documents and ids.

    The facts that do not change the tokens (names, ledger, engine) are left out on purpose.
    """
    identity = {
        "format": manifest.format,
        "version": manifest.version,
        "token_dtype": manifest.token_dtype,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "splits": manifest.splits,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def not_built(folder: Path) -> StoreNotFoundError:
    """The one wording for a placeholder."""
    return StoreNotFoundError(
        f'{folder}: a placeholder, not built: {META} says "built": false; build it first'
    )


def _reopen(folder: str, wanted: str) -> Store:
    store = open_store(folder)
    if store.fingerprint != wanted:
        raise DamagedStoreError(
            f"{folder}: other tokens than when this store was pickled (fingerprint "
            f"{store.fingerprint[:12]}, wanted {wanted[:12]}); it was rebuilt meanwhile: reopen it"
        )
    return store


def _map_index(path: Path, entries: int) -> OffsetArray:
    """The int64 of an index file, mapped; its header must be exactly the one we write."""
    try:
        with path.open("rb") as file:
            header = file.read(INDEX_HEADER_BYTES)
        if header != index_header(entries):
            raise DamagedStoreError(
                f"{path}: its .npy header is not that of {entries:,} int64; {_NEXT_STEP}"
            )
        if entries == 0:  # an empty file part cannot be mapped
            starts = np.empty(0, np.int64)
            starts.flags.writeable = False
            return starts
        mapped = np.memmap(path, "<i8", mode="r", offset=INDEX_HEADER_BYTES, shape=(entries,))
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedStoreError):
            raise
        raise DamagedStoreError(f"{path}: cannot be mapped ({error}); {_NEXT_STEP}") from error
    return np.asarray(mapped)
