"""The native loader, for PyTorch.

In: a `shardmill.loading.Loader`.  Out: dicts of tensors.
Promise: tensors share the memory of the loader's batch (no copy, unless memory is pinned), and
stay as they are as long as somebody holds them. Position and state are the loader's.
Not here: reading, order, resume (loading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardmill.closing import Closing
from shardmill.loading import Batch, Loader
from shardmill.pytorch.loader_config import has_accelerator
from shardmill.pytorch.states import State


class TokenLoader(Closing):
    """Batches of tensors from a `Loader`: `input_ids` and `labels`, (n, seq_len) int64; with
    documents also `doc_ids`, `position_ids`, `cu_seqlens` (int32) and `max_seqlen` (one number).
    """

    def __init__(self, loader: Loader, *, pin_memory: bool = False) -> None:
        """`pin_memory`: copy into pinned memory, if there is an accelerator to copy to."""
        self.loader = loader
        self._pins = bool(pin_memory) and has_accelerator()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """As the loader: on where its state is."""
        return map(self._tensors, self.loader)

    def state_dict(self) -> State:
        """The loader's."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()

    def __repr__(self) -> str:
        return f"TokenLoader({self.loader!r})"

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        arrays = {
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "doc_ids": batch.doc_ids,
            "position_ids": batch.position_ids,
            "cu_seqlens": batch.cu_seqlens,
        }
        told = {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}
        if batch.max_seqlen is not None:
            told["max_seqlen"] = torch.tensor(batch.max_seqlen)
        if self._pins:
            return {name: tensor.pin_memory() for name, tensor in told.items()}
        return told
