"""Stores and token files of other programs: a split to export, a store made from files, and the
comparison of two forms of the same data.

A split is read in batches of about four million tokens. A new store is staged, compared token for
token with the files it was made from, and only then published; never over another one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.formats.token_files import (
    BATCH_DOCUMENTS,
    ForeignFile,
    TokenizerFacts,
    document_cuts,
)
from shardmill.records import JSON, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import temporary_name
from shardmill.store import (
    Store,
    StoreWriter,
    check_target,
    given_facts,
    open_store,
    publish_folder,
    refuse_excluded,
)
from shardmill.store.branches import refuse_preferences
from shardmill.store.readers import open_tokens

_SHARD_BYTES = 2**27
_NONE: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared, token for token, and found equal."""

    unit: str  # "bins" or "documents"
    num_units: int
    num_tokens: int

    def to_json(self) -> dict[str, JSON]:
        return {"equal": True, self.unit: self.num_units, "tokens": self.num_tokens}


class StoreSplit:
    """The documents of one split of a store, in order."""

    def __init__(self, folder: str | Path, split: str) -> None:
        self.store: Store = open_store(folder)
        if split not in self.store.splits:
            raise OptionError(f"{folder}: no split {split!r}; it has {list(self.store.splits)}")
        refuse_preferences(self.store, "these formats cannot hold their relation")
        if self.store.is_chat:
            raise OptionError(
                f"{folder}: holds conversations, whose loss mask these formats cannot hold: pack "
                "them and convert the packed shard"
            )
        refuse_excluded(self.store, split, "a conversion")
        self.split = split
        self.dtype = self.store.dtype
        self.num_documents = self.store.num_documents(split)
        self.num_tokens = self.store.num_tokens(split)
        self._starts = self.store.document_starts(split)

    def offsets(self, start: int, stop: int) -> OffsetArray:
        """Where the documents `start..stop` begin, and where the last one ends."""
        found = np.empty(stop - start + 1, np.int64)
        known = self._starts[start : stop + 1]
        found[: len(known)] = known
        found[len(known) :] = self.num_tokens
        return found

    def batches(self) -> Iterator[Ragged]:
        """All documents, in order."""
        with open_tokens(self.store, self.split) as space:
            for first in range(0, self.num_documents, BATCH_DOCUMENTS):
                offsets = self.offsets(first, min(first + BATCH_DOCUMENTS, self.num_documents))
                for start, stop in document_cuts(offsets):
                    part = offsets[start : stop + 1]
                    yield Ragged(space.read(int(part[0]), int(part[-1])), part - part[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a new store contains and records."""

    split: str = "train"
    name: str | None = None  # of the data
    tokenizer: TokenizerFacts | None = None  # that made the tokens; None: not known


def store_from_files(
    files: Sequence[ForeignFile], folder: str | Path, options: StoreOptions
) -> Parity:
    """Make a store at `folder` with the documents of all files; what was compared at the end."""
    target = Path(folder).absolute()
    check_target(target, overwrite=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = temporary_name(target)
    try:
        _write(files, staged, options)
        copied = StoreSplit(staged, options.split).batches()
        given = (batch for file in files for batch in file.batches())
        parity = check_documents(given, copied, f"{files[0].path} and {target}")
        publish_folder(staged, target, overwrite=False)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return parity


def _write(files: Sequence[ForeignFile], staged: Path, options: StoreOptions) -> None:
    narrow = all(np.dtype(file.dtype).itemsize < 4 for file in files)
    dtype = "uint16" if narrow else "uint32"
    with StoreWriter(
        staged, splits=[options.split], dtype=dtype, shard_bytes=_SHARD_BYTES
    ) as writer:
        for file in files:
            for batch in file.batches():
                _check_ids(file, batch, options.tokenizer)
                writer.append(options.split, batch, where=str(file.path))
        documents, tokens = writer.num_documents(options.split), writer.num_tokens(options.split)
        writer.finish(given_facts(documents, tokens, **_known(files, options)))


def _check_ids(file: ForeignFile, batch: Ragged, tokenizer: TokenizerFacts | None) -> None:
    largest = int(batch.values.max(initial=0))
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise OptionError(
            f"{file.path}: id {largest:,}, but the tokenizer {tokenizer.name} has only "
            f"{tokenizer.vocab_size:,} ids, so it did not make these tokens: name the one that did"
        )


def _known(files: Sequence[ForeignFile], options: StoreOptions) -> dict[str, Any]:
    """What the files and the caller say, as a manifest records it."""
    known: dict[str, Any] = {
        "dataset_name": options.name or files[0].path.name,
        "split_rule": f"all to {options.split}",
        "sources": [
            {
                **file.facts,
                "file": file.path.name,
                "documents": file.num_documents,
                "tokens": file.num_tokens,
            }
            for file in files
        ],
        "produced_by": {"converted_from": str(files[0].facts.get("format", "tokens"))},
    }
    if options.tokenizer is not None:
        known |= {
            "tokenizer_sha256": options.tokenizer.sha256,
            "tokenizer_fingerprint": options.tokenizer.fingerprint,
            "vocab_size": options.tokenizer.vocab_size,
            "special_token_ids": options.tokenizer.special_token_ids,
        }
    return known


def check_documents(first: Iterable[Ragged], second: Iterable[Ragged], where: str) -> Parity:
    """Compare the ids and the length of every document, however each side is divided: equal to the
    last token, or an error names the first difference. `where` names both sides."""
    streams = (iter(first), iter(second))
    rests = [Ragged(np.empty(0, np.int64), np.zeros(1, np.int64))] * 2  # not yet compared
    num_documents = num_tokens = 0
    while True:
        for side in (0, 1):
            while not len(rests[side]) and (batch := next(streams[side], None)) is not None:
                rests[side] = batch
        left, right = rests
        count = min(len(left), len(right))
        if not count:
            break
        one, other = left.slice(0, count), right.slice(0, count)
        if not np.array_equal(one.lengths, other.lengths):
            lengths = (one.lengths, other.lengths)
            raise difference(where, "the lengths of documents", *lengths, num_documents)
        if not np.array_equal(one.values, other.values):
            raise difference(where, "the token ids", one.values, other.values, num_tokens)
        num_documents += count
        num_tokens += len(one.values)
        rests = [left.slice(count, len(left)), right.slice(count, len(right))]
    if len(rests[0]) or len(rests[1]):
        raise difference(where, "one has more documents or tokens than the other")
    return Parity(unit="documents", num_units=num_documents, num_tokens=num_tokens)


def difference(
    where: str, what: str, left: IntArray = _NONE, right: IntArray = _NONE, before: int = 0
) -> DamagedStoreError:
    """The error for two forms that are not equal. `before`: what was equal before these arrays."""
    if left is not right:
        count = min(len(left), len(right))
        places = np.flatnonzero(left[:count] != right[:count])
        what += f" differ at {before + (int(places[0]) if len(places) else count):,}"
    return DamagedStoreError(
        f"{where}: not the same data: {what}; a file was changed or damaged meanwhile: remove the "
        "copy and convert again"
    )
