"""A dataset whose samples say which they are, and steps of several ranks at once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample i is {"i": i}."""

    def __init__(self, size: int, fingerprint: str = "numbers") -> None:
        self.size = size
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"i": torch.tensor(index)}


def numbers_of(batch: dict[str, Tensor]) -> list[int]:
    return batch["i"].tolist()


def one_step(iterators: list[Any]) -> list[int]:
    """The samples of one step of all ranks, sorted away from who read them."""
    return sorted(chain.from_iterable(numbers_of(next(ranks)) for ranks in iterators))
