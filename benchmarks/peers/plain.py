"""What people write by hand: torch's loader over `np.memmap`, a window a sample.

The best of the usual ways: maps stay open, one cast a sample, no workers. Windows do not cross
files. `documents` numbers documents and restarts positions with a running sum over the end tokens.
`TUNED` are quicker than what is in use: rows to look at, that nothing is judged by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from read_corpus import BATCH, EOS, SEQ_LEN, Corpus
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from peers.shifting import shifted

TUNED = ("DataLoader, memmap, shifted once a batch", "get_batch of nanoGPT, map kept")


class Windows(Dataset[Any]):
    """Window `i`, whole, as int64."""

    def __init__(self, corpus: Corpus) -> None:
        self.maps = corpus.maps()
        counts = [(len(tokens) - 1) // SEQ_LEN for tokens in self.maps]
        self.edges = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def window(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        file = int(self.edges.searchsorted(index, side="right")) - 1
        start = (index - int(self.edges[file])) * SEQ_LEN
        return self.maps[file][start : start + SEQ_LEN + 1].astype(np.int64)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.window(index))


class Pairs(Windows):
    """The same as inputs and labels."""

    def __getitem__(self, index: int) -> Any:
        ids = torch.from_numpy(self.window(index))
        return ids[:-1], ids[1:]


class WithDocuments(Windows):
    """Inputs, labels, document numbers and positions of one window."""

    def __getitem__(self, index: int) -> Any:
        ids = self.window(index)
        ends = np.flatnonzero(ids[:-1] == EOS) + 1
        starts = np.zeros(SEQ_LEN + 1, np.int64)
        starts[ends] = ends
        begun = np.zeros(SEQ_LEN + 1, np.int64)
        begun[ends] = 1
        places = np.arange(SEQ_LEN) - np.maximum.accumulate(starts[:-1])
        labels = ids[1:].copy()
        labels[ends - 1] = -100
        arrays = (ids[:-1], labels, np.cumsum(begun[:-1]), places)
        return tuple(torch.from_numpy(array) for array in arrays)


class Shifted:
    """Whole windows of a loader, shifted a batch at a time."""

    def __init__(self, batches: Iterable[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(shifted, self.batches)


class RandomBatches:
    """nanoGPT's get_batch: random starts, a slice and a cast for each x and each y, stacked.

    It maps the file anew for every batch; `keep` does not.
    """

    def __init__(self, corpus: Corpus, *, keep: bool) -> None:
        self.tokens = max(corpus.maps(), key=len)
        self.keep = keep
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, num_starts = self.tokens, len(self.tokens) - SEQ_LEN
        while True:
            if not self.keep:
                tokens = np.memmap(self.tokens.filename, self.tokens.dtype, mode="r")
            starts = torch.randint(num_starts, (BATCH,), generator=self.generator).tolist()
            x = [torch.from_numpy(tokens[s : s + SEQ_LEN].astype(np.int64)) for s in starts]
            y = [torch.from_numpy(tokens[s + 1 : s + SEQ_LEN + 1].astype(np.int64)) for s in starts]
            yield torch.stack(x), torch.stack(y)


def loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)


def prepare(_corpus: Corpus, _place: Path) -> None:
    """Nothing: the shards are flat files."""


def epoch(corpus: Corpus, _place: Path) -> dict[str, Iterable[Any]]:
    return {
        "DataLoader, memmap, x and y a sample": loader(Pairs(corpus)),
        "DataLoader, memmap, shifted once a batch": Shifted(loader(Windows(corpus))),
    }


def random(corpus: Corpus, _place: Path) -> dict[str, Iterable[Any]]:
    return {
        "get_batch of nanoGPT": RandomBatches(corpus, keep=False),
        "get_batch of nanoGPT, map kept": RandomBatches(corpus, keep=True),
    }


def documents(corpus: Corpus, _place: Path) -> dict[str, Iterable[Any]]:
    return {"DataLoader, memmap, documents a sample": loader(WithDocuments(corpus))}
