"""Hugging Face datasets: windows as rows of an Arrow table, asked for a batch at a time.

Rows hold uint16; its formats widen them. Asking the dataset for a list of rows is its quickest way;
torch's loader does that when its sampler gives whole batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, load_from_disk
from read_corpus import BATCH, SEQ_LEN, Corpus
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from peers.shifting import shifted

_ROWS = 4096  # of a part of the table


def _parts(corpus: Corpus) -> Iterator[pa.Table]:
    for tokens in corpus.maps():
        rows = len(tokens) // (SEQ_LEN + 1)
        for row in range(0, rows, _ROWS):
            stop = min(row + _ROWS, rows) * (SEQ_LEN + 1)
            flat = pa.array(np.asarray(tokens[row * (SEQ_LEN + 1) : stop]))
            edges = pa.array(np.arange(0, len(flat) + 1, SEQ_LEN + 1, dtype=np.int32))
            yield pa.table({"ids": pa.ListArray.from_arrays(edges, flat)})


def prepare(corpus: Corpus, place: Path) -> None:
    Dataset(pa.concat_tables(_parts(corpus))).save_to_disk(str(place))


class Batches:
    """Rows in the torch or numpy format; a batch is one request."""

    def __init__(self, place: Path, kind: str) -> None:
        data: Any = load_from_disk(str(place)).with_format(kind)
        batches = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
        self.loader: DataLoader[Any] = DataLoader(
            data, sampler=batches, batch_size=None, collate_fn=lambda batch: batch["ids"]
        )

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for rows in self.loader:
            yield shifted(torch.as_tensor(rows))


def epoch(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {f"datasets, {kind} format": Batches(place, kind) for kind in ("torch", "numpy")}
