"""Inputs and labels of whole windows, as trainers make them."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two contiguous int64 tensors (n, length - 1): what kernels and `view(-1)` want."""
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if ids.dtype == torch.int64:
        return inputs.contiguous(), labels.contiguous()
    return inputs.long(), labels.long()
