"""Open a finished store: what is in it and where, without reading a token.

In: a folder.  Out: a `Store`: manifest, token files with known sizes, document starts.
Promise: nothing unfinished, placeholder, truncated, swollen or foreign is ever opened; opening
costs the manifest and one directory listing per folder; a store pickles as its path.
Not here: contents of shards (verify.py), reading windows (the mapped room).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardmill.arguments import choices
from shardmill.errors import DamagedStoreError, OptionError, StoreNotFoundError
from shardmill.records import OffsetArray, TokenFile
from shardmill.shards.entries import Manifest, SplitEntry
from shardmill.shards.layout import DTYPES, META, mask_bytes
from shardmill.shards.manifest import read_manifest, refuse_remote
from shardmill.shards.maps import NEXT_STEP, ChatArrays, map_bytes, map_index
from shardmill.shards.scan import damage, list_files, modification_times, wanted_sizes


def open_store(folder: str | Path) -> Store:
    """The store at `folder`, after the cheap checks: manifest, and every file's name and size."""
    refuse_remote(folder)
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    if not manifest.built:
        raise not_built(folder)
    wanted, found = wanted_sizes(manifest), list_files(folder, manifest)
    problems = list(damage(folder, wanted, found))
    if problems:
        more = f" (and {len(problems) - 1:,} more damaged files)" if len(problems) > 1 else ""
        raise DamagedStoreError(f"{folder}: {problems[0]}{more}; {NEXT_STEP}")
    modified = {
        name: modification_times(found, [shard.file for shard in split.shards])
        for name, split in manifest.splits.items()
    }
    return Store(folder, manifest, modified)


class ShardTable(NamedTuple):
    """The shards of a split as columns: 100,000 of them are soon made."""

    paths: list[str]
    num_tokens: OffsetArray
    modified: OffsetArray  # when each was written, in ns, as seen when the store was opened


class Store:
    """A finished folder of shards. Made by `open_store`; holds no open file."""

    def __init__(self, folder: Path, manifest: Manifest, modified: dict[str, OffsetArray]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._modified = modified  # by split: when each shard was written
        self.splits: tuple[str, ...] = tuple(manifest.splits)
        self.dtype: str = DTYPES[manifest.token_dtype]
        self.fingerprint = fingerprint(manifest)

    def num_tokens(self, split: str) -> int:
        return self._split(split).tokens

    def num_documents(self, split: str) -> int:
        return self._split(split).documents

    @property
    def is_chat(self) -> bool:
        """Whether it holds conversations: then every split has `chat_arrays`."""
        return any(split.chat is not None for split in self.manifest.splits.values())

    def token_files(self, split: str) -> list[TokenFile]:
        """The shards of a split, in the order of its token space."""
        return [
            TokenFile(path=self.folder / shard.file, num_tokens=shard.tokens, dtype=self.dtype)
            for shard in self._split(split).shards
        ]

    def shard_table(self, split: str) -> ShardTable:
        """The same as columns, with the times by which a shard is known again."""
        shards = self._split(split).shards
        root = f"{self.folder}/"
        return ShardTable(
            paths=[root + shard.file for shard in shards],
            num_tokens=np.array([shard.tokens for shard in shards], np.int64),
            modified=self._modified[split],
        )

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, read-only, on disk: document `i` ends where `i + 1` starts, the
        last one where the split ends."""
        entry = self._split(split)
        path = self.folder / entry.index.file
        starts = map_index(path, entry.documents)
        if len(starts) and not (starts[0] == 0 and 0 <= starts[-1] <= entry.tokens):
            raise DamagedStoreError(
                f"{path}: documents start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}, the first at 0; {NEXT_STEP}"
            )
        return starts

    def chat_arrays(self, split: str) -> ChatArrays:
        """Loss mask and turns of a split of conversations, on disk."""
        entry = self._split(split)
        if entry.chat is None:
            raise OptionError(f"{self.folder}: holds documents, so no loss mask and no turns")
        mask = self.folder / entry.chat.mask.file
        bits = map_bytes(mask, mask_bytes(entry.tokens))
        if entry.tokens % 8 and bits[-1] >> entry.tokens % 8:
            raise DamagedStoreError(f"{mask}: has bits behind its last token; {NEXT_STEP}")
        turns = self.folder / entry.chat.turns.file
        starts = map_index(turns, entry.chat.num_turns)
        if len(starts) and not 0 <= starts[0] <= starts[-1] < entry.tokens:
            raise DamagedStoreError(
                f"{turns}: turns start at {starts[0]:,}..{starts[-1]:,}, wanted within "
                f"0..{entry.tokens:,}; {NEXT_STEP}"
            )
        roles = map_bytes(self.folder / entry.chat.roles.file, entry.chat.num_turns)
        return ChatArrays(mask_bits=bits, turn_starts=starts, turn_roles=roles)

    def _split(self, name: str) -> SplitEntry:
        if name not in self.manifest.splits:
            known = choices(name, self.splits, verb="its splits are")
            raise OptionError(f"{self.folder}: no split {name!r}; {known}")
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
