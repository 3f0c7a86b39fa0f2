"""MosaicML Streaming: windows as rows of MDS shards, read from local disk."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from read_corpus import BATCH, SEQ_LEN, Corpus
from torch.utils.data import DataLoader

from peers.shifting import shifted

_SHARD_BYTES = 64 * 2**20
_SCRIPTS = str(Path(__file__).parents[1])
# The package is called `streaming`, and so is one of our scripts: look past them.
sys.path.remove(_SCRIPTS)
_streaming = importlib.import_module("streaming")
sys.path.insert(0, _SCRIPTS)
MDSWriter, StreamingDataset = _streaming.MDSWriter, _streaming.StreamingDataset


def prepare(corpus: Corpus, place: Path) -> None:
    columns = {"ids": f"ndarray:uint16:{SEQ_LEN + 1}"}
    with MDSWriter(out=str(place), columns=columns, size_limit=_SHARD_BYTES) as out:
        for tokens in corpus.maps():
            for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN + 1):
                out.write({"ids": tokens[start : start + SEQ_LEN + 1]})


def _collate(rows: list[dict[str, Any]]) -> Any:
    return torch.from_numpy(np.stack([row["ids"] for row in rows]).astype(np.int64))


class Batches:
    def __init__(self, place: Path) -> None:
        data = StreamingDataset(local=str(place), shuffle=True, batch_size=BATCH)
        self.loader: DataLoader[Any] = DataLoader(
            data, batch_size=BATCH, drop_last=True, collate_fn=_collate
        )

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(shifted, self.loader)


def epoch(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"MosaicML StreamingDataset": Batches(place)}
