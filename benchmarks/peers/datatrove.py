"""datatrove's folder of token files, through torch's loader, without workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.utils.dataset import DatatroveFolderDataset
from read_corpus import BATCH, EOS, SEQ_LEN, Corpus
from torch.utils.data import DataLoader

from peers.shifting import shifted


class Batches:
    """Inputs and labels; positions too, if the dataset gives them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            yield *shifted(batch["input_ids"]), batch.get("positions")


def prepare(corpus: Corpus, place: Path) -> None:
    """Its files are as flat as ours, under other names."""
    place.mkdir()
    for number, path in enumerate(corpus.shards):
        (place / f"{number:05d}.ds").hardlink_to(path)


def _loader(place: Path, **options: Any) -> DataLoader[Any]:
    data = DatatroveFolderDataset(
        str(place), SEQ_LEN, filename_pattern="*.ds", token_size=2, shuffle=True, **options
    )
    return DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)


def epoch(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    return {"datatrove": Batches(_loader(place))}


def documents(_corpus: Corpus, place: Path) -> dict[str, Iterable[Any]]:
    loader = _loader(place, return_positions=True, positions_from_eos_token_id=EOS)
    return {"datatrove, positions": Batches(loader)}
