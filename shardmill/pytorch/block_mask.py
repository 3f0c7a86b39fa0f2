"""Attention that stays inside documents.

In: `doc_ids`, equal for tokens of one document.  Out: a mask for SDPA or for flex attention.
Promise: a token sees itself and the tokens of its own document before it, nothing else.
Not here: kernels with `cu_seqlens`; `shardmill.mapped.DocumentWindows` gives those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardmill.errors import OptionError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def document_mask(doc_ids: Tensor) -> Tensor:
    """True where attention is allowed: (n, 1, seq_len, seq_len) bool, for all heads.

    For `scaled_dot_product_attention(q, k, v, attn_mask=...)`. Takes `seq_len ** 2` bytes a row:
    for long rows use `flex_block_mask`.
    """
    _check(doc_ids)
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    return same.tril_().unsqueeze(1)


def flex_block_mask(doc_ids: Tensor, *, block_size: int = 128) -> BlockMask:
    """The same for `flex_attention(q, k, v, block_mask=...)`, on the device of `doc_ids`.

    Empty blocks cost nothing there. It holds on to `doc_ids`: do not overwrite them meanwhile.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    _check(doc_ids)

    def allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (doc_ids[row, query] == doc_ids[row, key])

    num_rows, seq_len = doc_ids.shape
    return create_block_mask(
        allowed,
        B=num_rows,
        H=None,
        Q_LEN=seq_len,
        KV_LEN=seq_len,
        device=str(doc_ids.device),
        BLOCK_SIZE=block_size,
    )


def _check(doc_ids: Tensor) -> None:
    if doc_ids.ndim != 2 or 0 in doc_ids.shape or doc_ids.dtype not in (torch.int32, torch.int64):
        raise OptionError(
            f"doc_ids of shape {tuple(doc_ids.shape)} and {doc_ids.dtype}; wanted (rows, seq_len), "
            f"neither of them 0, of int64 or int32"
        )
