"""Our ways to read a corpus, and the limit that every way is measured against.

In: a corpus.  Out: {name: batches} as of the peers, and the limit as a contender.
Promise: the limit is one thread that casts as many tokens as a batch has, in the order they lie in,
into reused int64 inputs and labels. Nobody can be quicker who makes the same arrays.
Not here: timing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from common import Contender
from read_corpus import BATCH, SEQ_LEN, SPLIT, Corpus
from torch.utils.data import DataLoader

from shardmill.compat.kempnerforge import MemoryMappedDataset, collate
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.store.readers import open_tokens

LIMIT = "copy and cast in order (the limit)"
GATHER = "TokenSpace.gather, inputs and labels"
LOADER, LOADER_AHEAD = "Loader", "Loader, ahead=2"
TORCH = "DataLoader over MemoryMappedDataset"
DOCUMENTS, DOCUMENTS_AHEAD = "Loader, documents", "Loader, documents, ahead=2"
TORCH_DOCUMENTS = "DataLoader over MemoryMappedDataset, packed"
STEP = "the step alone (the limit)"
_WORK = bytes(2 * 2**20)  # hashing it takes a millisecond or two, and other threads may run


class InOrder:
    """The limit."""

    def __init__(self, corpus: Corpus) -> None:
        self.arrays = [np.asarray(tokens) for tokens in corpus.maps()]
        self.x = np.empty(BATCH * SEQ_LEN, np.int64)
        self.y = np.empty(BATCH * SEQ_LEN, np.int64)
        self.place = (0, 0)

    def places(self, calls: int) -> Iterator[tuple[int, int]]:
        size = BATCH * SEQ_LEN
        for _ in range(calls):
            shard, start = self.place
            while start + size + 1 > len(self.arrays[shard]):
                shard, start = (shard + 1) % len(self.arrays), 0
            yield shard, start
            self.place = (shard, start + size)

    def cast(self, place: tuple[int, int]) -> None:
        shard, start = place
        stop = start + BATCH * SEQ_LEN
        self.x[:] = self.arrays[shard][start:stop]
        self.y[:] = self.arrays[shard][start + 1 : stop + 1]

    def contender(self) -> Contender:
        return Contender(name=LIMIT, prepare=self.places, run=self.cast)


class RandomWindows:
    """Windows from anywhere, into reused inputs and labels."""

    def __init__(self, corpus: Corpus) -> None:
        self.space = open_tokens(corpus.store, SPLIT)
        self.x = np.empty((BATCH, SEQ_LEN), np.int64)
        self.y = np.empty((BATCH, SEQ_LEN), np.int64)
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        space, num_starts = self.space, self.space.num_tokens - SEQ_LEN
        while True:
            ids = space.gather(self.rng.integers(0, num_starts, BATCH), SEQ_LEN + 1)
            self.x[:] = ids[:, :-1]
            self.y[:] = ids[:, 1:]
            yield self.x, self.y


class LoaderBatches:
    """The native loader, endless."""

    def __init__(self, corpus: Corpus, *, ahead: int, documents: bool = False) -> None:
        source = TokenSource(corpus.folder, seq_len=SEQ_LEN, split=SPLIT)
        stream = SampleStream([source], seed=0)
        self.loader = Loader(stream, batch_size=BATCH, documents=documents, ahead=ahead)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            yield batch.input_ids, batch.labels, batch.doc_ids, batch.position_ids


class TorchBatches:
    """Torch's own loader: it asks the dataset for whole batches."""

    def __init__(self, corpus: Corpus, *, pack: bool = False, how: Any = collate) -> None:
        data = MemoryMappedDataset(corpus.folder, SEQ_LEN + 1, pack_sequences=pack, split=SPLIT)
        self.loader = DataLoader(
            data, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=how
        )

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            yield batch["input_ids"], batch["labels"], batch.get("doc_ids")


class Steps:
    """A trainer that computes for a while with every batch."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            hashlib.sha256(_WORK).digest()
            yield batch


def step_alone() -> Contender:
    return Contender(name=STEP, prepare=range, run=lambda _: hashlib.sha256(_WORK).digest())


def random(corpus: Corpus) -> dict[str, Iterable[Any]]:
    return {GATHER: RandomWindows(corpus)}


def epoch(corpus: Corpus) -> dict[str, Iterable[Any]]:
    return {
        LOADER: LoaderBatches(corpus, ahead=0),
        LOADER_AHEAD: LoaderBatches(corpus, ahead=2),
        TORCH: TorchBatches(corpus),
        f"{TORCH}, default collate": TorchBatches(corpus, how=None),
    }


def documents(corpus: Corpus) -> dict[str, Iterable[Any]]:
    return {
        DOCUMENTS: LoaderBatches(corpus, ahead=0, documents=True),
        DOCUMENTS_AHEAD: LoaderBatches(corpus, ahead=2, documents=True),
        TORCH_DOCUMENTS: TorchBatches(corpus, pack=True),
    }


def steps(corpus: Corpus) -> dict[str, Iterable[Any]]:
    return {
        f"{name}, a busy trainer": Steps(LoaderBatches(corpus, ahead=ahead))
        for name, ahead in ((LOADER, 0), (LOADER_AHEAD, 2))
    }
