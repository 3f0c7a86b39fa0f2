"""The tokens of a folder or a store, and whether all their ids are in the vocabulary.

Files are read as a loader reads them, in the memory of one chunk: every token, or a sample that is
spread evenly from the first to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.errors import OptionError
from shardmill.loading.config import meant_split
from shardmill.records import TokenFile
from shardmill.store import Store
from shardmill.store.readers import TokenSpace, open_token_folder, open_tokens
from shardmill.store.readers.foreign import (
    FORMATS,
    META_JSON,
    METADATA_YAML,
    DtypeRule,
    declared_facts,
)

CHUNK = 2**21
"""Tokens read at a time."""
_LEAST_CHUNK = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokens:
    """A folder that could be opened, and what it records about its tokens."""

    folder: Path
    files: tuple[TokenFile, ...]
    decided: DtypeRule
    file_pattern: str | None  # None: a store lists its files
    store: Store | None = None
    split: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    recorded_by: str = ""  # the file that records the vocabulary and the tokenizer

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    def open(self) -> TokenSpace:
        if self.store is not None and self.split is not None:
            return open_tokens(self.store, self.split)
        return TokenSpace(self.files)

    def location(self, token: int) -> str:
        """The file of a token, and which token of the file it is."""
        for file in self.files:
            if token < file.num_tokens:
                return f"{file.path}, token {token:,}"
            token -= file.num_tokens
        raise IndexError(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdScan:
    """The ids that were seen. Positions are counted over all files."""

    num_seen: int
    largest_id: int  # -1 when no token was seen
    largest_at: int
    num_outside: int  # ids that the vocabulary does not have
    first_outside: tuple[int, int] | None  # (position, id)


def find_tokens(
    folder: Path, *, file_pattern: str | None, dtype: str | None, split: str | None
) -> FoundTokens:
    """The tokens that `folder` means: a store, its split, or a folder of token files."""
    found = meant_split(folder, split)
    if found is not None:
        return _tokens_of_store(*found, file_pattern, dtype)
    if split is not None:
        raise OptionError(f"--split {split}: {folder} is not a store, so it has no splits")
    pattern = file_pattern or choose_pattern(folder)
    opened = open_token_folder(folder, pattern, dtype=dtype)
    facts = declared_facts(opened.folder)
    there = [name for name in (META_JSON, METADATA_YAML) if (opened.folder / name).is_file()]
    return FoundTokens(
        folder=opened.folder,
        files=opened.files,
        decided=opened.decided,
        file_pattern=pattern,
        vocab_size=facts.vocab_size,
        tokenizer=facts.tokenizer,
        recorded_by=" or ".join(there),
    )


def _tokens_of_store(
    store: Store, split: str, file_pattern: str | None, dtype: str | None
) -> FoundTokens:
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations, which `shardmill verify` checks; train on "
            f"it with shardmill.load and a plan of `shardmill pack`, which use its loss mask"
        )
    if file_pattern is not None:
        raise OptionError(
            f"--file-pattern {file_pattern}: {store.folder} is a store, which lists its files"
        )
    if dtype is not None and dtype != store.dtype:
        raise OptionError(f"--dtype {dtype}: {store.folder} is a store of {store.dtype}")
    reason = "the store's manifest says so"
    return FoundTokens(
        folder=store.folder,
        files=tuple(store.token_files(split)),
        decided=DtypeRule(dtype=store.dtype, rule="store", reason=reason),
        file_pattern=None,
        store=store,
        split=split,
        vocab_size=store.manifest.vocab_size,
        recorded_by="the manifest",
    )


def choose_pattern(folder: Path) -> str:
    """The pattern of the only kind of token files that is there; "*.npy" when there are none."""
    there = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    kinds = [suffix for suffix in FORMATS if suffix in there]
    if len(kinds) > 1:
        raise OptionError(
            f"{folder}: there are {' and '.join(kinds)} files, perhaps the same tokens twice; "
            f"choose with --file-pattern '*{kinds[0]}' or '*{kinds[1]}'"
        )
    return f"*{kinds[0]}" if kinds else "*.npy"


def scan_ids(
    space: TokenSpace,
    *,
    vocab_size: int | None,
    sample: int | None,
    on_progress: Callable[[int, int], None],
) -> IdScan:
    """The largest id, and those that are `vocab_size` or more."""
    chunks = list(_chunks(space.num_tokens, sample))
    total = sum(stop - start for start, stop in chunks)
    largest = (-1, 0)
    seen, num_outside, first = 0, 0, None
    for start, stop in chunks:
        ids = space.read(start, stop)
        at = int(ids.argmax())
        if ids[at] > largest[0]:
            largest = (int(ids[at]), start + at)
        if vocab_size is not None and ids[at] >= vocab_size:
            outside = np.flatnonzero(ids >= vocab_size)
            num_outside += len(outside)
            first = first or (start + int(outside[0]), int(ids[outside[0]]))
        seen += stop - start
        on_progress(seen, total)
    return IdScan(
        num_seen=seen,
        largest_id=largest[0],
        largest_at=largest[1],
        num_outside=num_outside,
        first_outside=first,
    )


def _chunks(num_tokens: int, sample: int | None) -> Iterator[tuple[int, int]]:
    """Half-open ranges of tokens: all of them, or about `sample` tokens in evenly spread ones."""
    size = CHUNK if sample is None else min(sample, max(_LEAST_CHUNK, min(CHUNK, sample // 64)))
    count = num_tokens if sample is None else -(-sample // size)
    if count * size >= num_tokens:
        for start in range(0, num_tokens, CHUNK):
            yield start, min(start + CHUNK, num_tokens)
        return
    # the first at 0, the last up to the end; count * size < num_tokens, so none overlap
    for number in range(count):
        start = (num_tokens - size) * number // max(1, count - 1)
        yield start, start + size
