"""LitData's stream of tokens: chunks of flat tokens, windows cut by its TokensLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming import Cache
from read_corpus import BATCH, SEQ_LEN, Corpus

from peers.shifting import shifted

_CHUNK_WINDOWS = 16_384  # 32 MiB of uint16 a chunk


def prepare(corpus: Corpus, place: Path) -> None:
    """A chunk holds whole windows, so that none is lost at its end."""
    size = (SEQ_LEN + 1) * _CHUNK_WINDOWS
    place.mkdir()
    cache = Cache(str(place), chunk_size=size, item_loader=TokensLoader(SEQ_LEN + 1))
    number = 0
    for tokens in corpus.maps():
        for start in range(0, len(tokens), size):
            cache[number] = torch.from_numpy(tokens[start : start + size].copy())
            number += 1
    cache.done()
    cache.merge()


class Batches:
    def __init__(self, place: Path) -> None:
        data = StreamingDataset(
            input_dir=str(place),
            item_loader=TokensLoader(block_size=SEQ_LEN + 1),
            shuffle=True,
            drop_last=True,
        )
        self.loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0, drop_last=True)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(shifted, self.loader)


def epoch(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"LitData, TokensLoader": Batches(place)}
