"""A split of a store, read to be exported; and a store made from token files of other programs.

A split is read in batches of about four million tokens. A new store is staged, compared token for
token with the files it was made from, and only then published; never over another one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.errors import OptionError
from shardmill.formats.parity import Parity, check_documents
from shardmill.formats.token_files import (
    BATCH_DOCUMENTS,
    ForeignFile,
    TokenizerFacts,
    document_cuts,
)
from shardmill.records import JSON, OffsetArray, Ragged
from shardmill.storage.atomic import temporary_name
from shardmill.store import (
    DocumentLedger,
    Ledger,
    Store,
    StoreFacts,
    StoreWriter,
    TokenLedger,
    check_target,
    open_store,
    publish_folder,
    refuse_excluded,
)
from shardmill.store.readers import open_tokens

_SHARD_BYTES = 2**27


class StoreSplit:
    """The documents of one split of a store, in order."""

    def __init__(self, folder: str | Path, split: str) -> None:
        self.store: Store = open_store(folder)
        if split not in self.store.splits:
            raise OptionError(f"{folder}: no split {split!r}; it has {list(self.store.splits)}")
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
        writer.finish(_facts(files, options, documents, tokens))


def _check_ids(file: ForeignFile, batch: Ragged, tokenizer: TokenizerFacts | None) -> None:
    largest = int(batch.values.max(initial=0))
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise OptionError(
            f"{file.path}: id {largest:,}, but the tokenizer {tokenizer.name} has only "
            f"{tokenizer.vocab_size:,} ids, so it did not make these tokens: name the one that did"
        )


def _facts(
    files: Sequence[ForeignFile], options: StoreOptions, documents: int, tokens: int
) -> StoreFacts:
    sources: list[dict[str, JSON]] = [
        {
            **file.facts,
            "file": file.path.name,
            "documents": file.num_documents,
            "tokens": file.num_tokens,
        }
        for file in files
    ]
    ledger = Ledger(
        documents=DocumentLedger(
            read=documents, kept=documents, empty=0, over_budget=0, dropped={}
        ),
        tokens=TokenLedger(encoded=tokens, separators=0, kept=tokens, over_budget=0),
        repaired={},
        chat=None,
    )
    made = options.tokenizer
    return StoreFacts(
        dataset_name=options.name or files[0].path.name,
        dataset_config=None,
        dataset_revision=None,
        streaming=False,
        split_rule=f"all to {options.split}",
        seed=0,
        shuffle_buffer=None,
        append_eot=False,
        unit="document",
        tokenizer_sha256=None if made is None else made.sha256,
        tokenizer_fingerprint=None if made is None else made.fingerprint,
        vocab_size=None if made is None else made.vocab_size,
        special_token_ids={} if made is None else made.special_token_ids,
        sources=sources,
        options={},
        ledger=ledger,
        produced_by={"converted_from": str(files[0].facts.get("format", "tokens"))},
    )
