"""Token files of other programs, read as documents.

Sizes are checked before the first token is read. Arrays are mapped, and batches are cut at about
four million tokens, so memory is that of the page cache. Ids below 0 are refused where they are
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, StoreError, StoreNotFoundError
from shardmill.records import JSON, OffsetArray, Ragged

BATCH_TOKENS = 2**22
BATCH_DOCUMENTS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """The tokenizer that made some tokens, as a store records it."""

    name: str  # for messages
    fingerprint: str
    sha256: str | None  # of the model's file, if it has one
    vocab_size: int
    special_token_ids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignFile:
    """One file of tokens and the documents in it."""

    path: Path
    dtype: str  # of numpy, with its byte order: "<u2"
    num_tokens: int
    num_documents: int
    ends: Callable[[int, int], OffsetArray]  # where the documents start..stop end, in tokens
    offset: int = 0  # bytes before the first token
    facts: dict[str, JSON] = field(default_factory=dict)  # what else the format states

    def batches(self) -> Iterator[Ragged]:
        """All documents, in order."""
        size = self.offset + self.num_tokens * np.dtype(self.dtype).itemsize
        if file_size(self.path) != size:
            raise DamagedStoreError(f"{self.path}: changed its size; convert again")
        tokens = map_tokens(self.path, self.dtype, self.offset, self.num_tokens)
        begin = 0
        for first in range(0, self.num_documents, BATCH_DOCUMENTS):
            ends = self.ends(first, min(first + BATCH_DOCUMENTS, self.num_documents))
            offsets = np.concatenate(([begin], ends)).astype(np.int64)
            if (np.diff(offsets) < 0).any() or offsets[-1] > self.num_tokens:
                raise DamagedStoreError(
                    f"{self.path}: from document {first:,} on, documents end before they start or "
                    f"after the {self.num_tokens:,} tokens; its index is damaged: copy it again"
                )
            for start, stop in document_cuts(offsets):
                part = offsets[start : stop + 1]
                yield Ragged(tokens[part[0] : part[-1]], part - part[0])
            begin = int(offsets[-1])
        if begin != self.num_tokens:
            raise DamagedStoreError(
                f"{self.path}: its documents end at token {begin:,} of {self.num_tokens:,}; "
                "another file's index, or a damaged one: copy both again"
            )


def all_batches(files: Sequence[ForeignFile]) -> Iterator[Ragged]:
    """The documents of all files, one file after another."""
    return (batch for file in files for batch in file.batches())


def one_document(num_tokens: int) -> Callable[[int, int], OffsetArray]:
    """The ends of a file that is a single document."""
    return lambda start, stop: np.full(stop - start, num_tokens, np.int64)


def ends_in(ends: OffsetArray) -> Callable[[int, int], OffsetArray]:
    """The ends in an array, mapped or not."""
    return lambda start, stop: ends[start:stop].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A token between documents, for files that have no index."""

    token: int
    first: bool = False  # it opens a document, as llm.c writes them, instead of closing it


def documents_of(
    tokens: npt.NDArray[Any], separator: Separator | None
) -> tuple[int, Callable[[int, int], OffsetArray]]:
    """How many documents, and where they end; without a separator all of it is one.

    Separator 9: tokens 4 9 5 6 9 7 end at 2, 5, 6; when it comes first, at 1, 4, 6.
    """
    if separator is None or not len(tokens):
        return (1 if len(tokens) else 0), one_document(len(tokens))
    after = 0 if separator.first else 1
    found = [
        np.flatnonzero(tokens[start : start + BATCH_TOKENS] == separator.token) + start + after
        for start in range(0, len(tokens), BATCH_TOKENS)
    ]
    ends = np.concatenate(found).astype(np.int64)
    ends = ends[(ends > 0) & (ends < len(tokens))]
    ends = np.append(ends, len(tokens))
    return len(ends), ends_in(ends)


def map_tokens(path: Path, dtype: str, offset: int, num_tokens: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r", offset, (num_tokens,)) if num_tokens else np.empty(0, dtype)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def whole_tokens(path: Path, num_bytes: int, dtype: str) -> int:
    """How many tokens `num_bytes` are; a rest is refused."""
    width = np.dtype(dtype).itemsize
    if num_bytes % width:
        raise DamagedStoreError(
            f"{path}: {num_bytes:,} bytes are no whole number of tokens of {width} bytes: "
            "truncated, or another dtype"
        )
    return num_bytes // width


def document_cuts(offsets: OffsetArray) -> Iterator[tuple[int, int]]:
    """Documents start..stop of about a batch each; a longer document alone."""
    start, last = 0, len(offsets) - 1
    while start < last:
        stop = int(np.searchsorted(offsets, offsets[start] + BATCH_TOKENS, side="right")) - 1
        stop = min(max(stop, start + 1), last)
        yield start, stop
        start = stop
