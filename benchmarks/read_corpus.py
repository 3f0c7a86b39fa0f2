"""The tokens that all readers read: one store, whose shards are plain files of uint16.

In: a folder and a size.  Out: a `Corpus`.
Promise: equal sizes give equal bytes; documents of 600 tokens in the mean, each closed by `EOS`,
which occurs nowhere else, so that readers without a document index find the same documents.
Not here: the formats of others; each of them writes its own from this (peers/).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.records import Ragged
from shardmill.store import Store, StoreWriter, given_facts, open_store

BATCH, SEQ_LEN = 32, 1024
EOS, VOCAB_SIZE = 0, 16_000
SPLIT = "train"
SHARD_BYTES = 128 * 2**20
_PART = 4 * 2**20  # tokens made at a time


@dataclass(frozen=True)
class Corpus:
    """A finished store and what others need to know about it."""

    folder: Path

    @cached_property
    def store(self) -> Store:
        return open_store(self.folder)

    @property
    def shards(self) -> list[Path]:
        """Flat little-endian uint16, one behind the other."""
        return [file.path for file in self.store.token_files(SPLIT)]

    @property
    def num_tokens(self) -> int:
        return self.store.num_tokens(SPLIT)

    def maps(self) -> list[npt.NDArray[np.uint16]]:
        return [np.memmap(path, "<u2", mode="r") for path in self.shards]


def write_corpus(folder: Path, num_tokens: int, *, shard_bytes: int = SHARD_BYTES) -> Corpus:
    rng = np.random.default_rng(0)
    written = documents = 0
    with StoreWriter(folder, splits=[SPLIT], dtype="uint16", shard_bytes=shard_bytes) as writer:
        while written < num_tokens:
            part = _documents(rng, min(_PART, num_tokens - written))
            writer.append(SPLIT, part, where="random documents")
            written += len(part.values)
            documents += len(part)
        known = {"dataset_name": "random tokens", "split_rule": "all train"}
        writer.finish(given_facts(documents, written, vocab_size=VOCAB_SIZE, **known))
    return Corpus(folder)


def _documents(rng: np.random.Generator, num_tokens: int) -> Ragged:
    """Documents of lognormal length, the last one cut so that the sum is exact."""
    values = rng.integers(EOS + 1, VOCAB_SIZE, num_tokens, dtype=np.uint16)
    lengths = rng.lognormal(6.0, 0.9, num_tokens // 100 + 2).astype(np.int64) + 1
    edges = np.cumsum(lengths)
    offsets = np.concatenate(([0], edges[edges < num_tokens], [num_tokens]))
    values[offsets[1:] - 1] = EOS
    return Ragged(values, offsets)
