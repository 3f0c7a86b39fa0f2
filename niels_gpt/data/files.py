"""A folder of texts as two sources, for training and validation, split by a seeded list of files.

A file is on one side only. The sides depend on the sorted names, the share and the seed alone, and
within a side files keep the sorted order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import torch

from niels_gpt.seeds import seeded
from shardmill.errors import OptionError
from shardmill.protocols import Source
from shardmill.sources import MemorySource, TextSource

VAL_FRAC = 0.1

Item = TypeVar("Item")
Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")


def num_val(total: int, val_frac: float) -> int:
    """How many of `total` are for validation: at least 1, but none when there are fewer than 2."""
    if not isinstance(val_frac, float | int) or not 0 <= val_frac < 1:
        raise OptionError(f"val_frac={val_frac}: wanted a share from 0 up to but not 1")
    return max(1, int(total * val_frac)) if total >= 2 else 0


def split_list(
    items: Iterable[Item], *, val_frac: float, seed: int
) -> tuple[list[Item], list[Item]]:
    """(train, val): `torch.randperm` over the list picks val, its first; both keep the order."""
    listed = list(items)
    generator = seeded(seed)
    order = torch.randperm(len(listed), generator=generator).tolist()
    chosen = set(order[: num_val(len(listed), val_frac)])
    train = [item for index, item in enumerate(listed) if index not in chosen]
    return train, [listed[index] for index in sorted(chosen)]


def split_folder(
    folder: str | Path, *, name: str, val_frac: float, seed: int
) -> dict[Split, Source]:
    """The .txt and .md files below `folder`, sorted by name, parted into two sources."""
    files = TextSource(folder, ext=(".txt", ".md")).files
    train, val = split_list([file.path for file in files], val_frac=val_frac, seed=seed)
    return {"train": _source(train, f"{name}/train"), "val": _source(val, f"{name}/val")}


def _source(paths: list[Path], name: str) -> Source:
    return TextSource(paths, name=name) if paths else MemorySource([], name=name)


def texts_of(source: Source) -> Iterator[str]:
    """Every document of a source, one by one."""
    for batch in source.batches():
        yield from batch.texts.to_pylist()


__all__ = ["SPLITS", "VAL_FRAC", "Split", "num_val", "split_folder", "split_list", "texts_of"]
