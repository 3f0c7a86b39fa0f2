"""OLMo-core: flat files, windows of a fixed length, its own loader without threads.

Its batches hold inputs; labels are made from them as its trainer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
from olmo_core.data.utils import get_labels
from read_corpus import BATCH, EOS, SEQ_LEN, VOCAB_SIZE, Corpus


def prepare(_corpus: Corpus, place: Path) -> None:
    """Its files are as flat as ours; the folder is for its indices."""
    place.mkdir()


class Batches:
    def __init__(self, corpus: Corpus, place: Path, *, documents: bool) -> None:
        data = NumpyFSLDataset(
            *corpus.shards,
            sequence_length=SEQ_LEN,
            pad_token_id=EOS,
            eos_token_id=EOS,
            vocab_size=VOCAB_SIZE,
            dtype=np.uint16,
            generate_doc_lengths=documents,
        )
        data.work_dir = place
        data.prepare()
        self.loader = NumpyFSLDataLoader(
            data,
            collator=DataCollator(pad_token_id=EOS),
            global_batch_size=BATCH * SEQ_LEN,
            work_dir=place,
            num_threads=0,
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.epoch += 1
        self.loader.reshuffle(epoch=self.epoch)
        for batch in self.loader:
            yield batch["input_ids"], get_labels(batch), batch.get("doc_lens")
        self.loader.reset()


def epoch(corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"OLMo-core, no threads": Batches(corpus, place, documents=False)}


def documents(corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"OLMo-core, document lengths": Batches(corpus, place, documents=True)}
