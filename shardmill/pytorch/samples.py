"""The samples of one batch, which were read together and need not be put together again.

In: tensors of a whole batch.  Out: one sample after another, or the batch as it was.
Promise: samples are views of the batch; `collate` copies nothing that was read as one batch.
Not here: reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.utils.data import default_collate

Sample = dict[str, Tensor]


class Samples(Sequence[Sample]):
    """A list of samples, made of their batch when somebody asks for one.

    Keeping a single sample keeps the memory of its whole batch: `clone()` what stays.
    """

    def __init__(self, batch: Sample) -> None:
        self.batch = batch  # every tensor (n, ...), with the same n
        self._rows: list[Sample] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if self._rows is None:
            names = tuple(self.batch)
            columns = [torch.unbind(tensor) for tensor in self.batch.values()]
            self._rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return self._rows[index]


def collate(samples: Sequence[Sample]) -> Sample:
    """The batch of these samples: as it was read, or stacked if they come one by one.

    Pass it as `DataLoader(..., collate_fn=collate)`.
    """
    if isinstance(samples, Samples):
        return samples.batch
    stacked: Sample = default_collate(list(samples))
    return stacked
