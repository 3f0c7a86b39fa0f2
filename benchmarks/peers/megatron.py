"""Megatron Core: its indexed dataset, GPTDataset over it, torch's loader.

No dense attention mask is asked for; documents are told apart by positions that restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from read_corpus import BATCH, EOS, SEQ_LEN, SPLIT, VOCAB_SIZE, Corpus
from torch.utils.data import DataLoader

from shardmill.store.readers import open_tokens

_DOCUMENTS = 4096  # written at a time


def prepare(corpus: Corpus, place: Path) -> None:
    place.mkdir()
    edges = np.append(corpus.store.document_starts(SPLIT), corpus.num_tokens)
    out = IndexedDatasetBuilder(str(place / "tokens.bin"), dtype=np.uint16)
    with open_tokens(corpus.store, SPLIT) as space:
        for first in range(0, len(edges) - 1, _DOCUMENTS):
            part = edges[first : first + _DOCUMENTS + 1]
            ids = space.read(int(part[0]), int(part[-1]))
            out.add_document(torch.from_numpy(ids.astype(np.int64)), np.diff(part).tolist())
    out.finalize(str(place / "tokens.idx"))


class Batches:
    def __init__(self, place: Path, *, documents: bool) -> None:
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=SEQ_LEN,
            split="1",
            path_to_cache=str(place / "cache"),
            tokenizer=SimpleNamespace(
                eod=EOS, pad=-1, vocab_size=VOCAB_SIZE, unique_identifiers={"name": "none"}
            ),
            reset_position_ids=documents,
            reset_attention_mask=False,
            eod_mask_loss=documents,
            create_attention_mask=False,
        )
        tokens = IndexedDataset(str(place / "tokens"), mmap=True)
        every = np.arange(len(tokens.sequence_lengths), dtype=np.int32)
        data: Any = GPTDataset(tokens, str(place / "tokens"), every, None, Split.train, config)
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=BATCH, drop_last=True)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            yield batch["tokens"], batch["labels"], batch["position_ids"]


def epoch(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"Megatron GPTDataset": Batches(place, documents=False)}


def documents(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"Megatron GPTDataset, positions": Batches(place, documents=True)}
