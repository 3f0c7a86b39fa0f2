"""Tensors for PyTorch: the native loader, and attention that stays inside documents.

Tensors share the memory of the loader's batch (no copy, unless memory is pinned). Position and
state are the loader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmill.errors import OptionError, missing_extra
from shardmill.loading import Batch, Loader
from shardmill.protocols import Closing
from shardmill.records import JSON

try:
    import torch
    from torch import Tensor
except ImportError as missing:
    raise missing_extra("torch", "torch") from missing

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def has_accelerator() -> bool:
    if hasattr(torch, "accelerator"):  # torch 2.6 and later
        return torch.accelerator.is_available()
    return torch.cuda.is_available()


class TokenLoader(Closing):
    """Batches of tensors from a `Loader`, as `shardmill.load(..., to="torch")` gives them.

    `input_ids` and `labels` are (n, seq_len) int64; with documents also `doc_ids`, `position_ids`,
    `cu_seqlens` (int32) and `max_seqlen` (one number).
    """

    def __init__(self, loader: Loader, *, pin_memory: bool = False) -> None:
        """`pin_memory`: copy into pinned memory, if there is an accelerator to copy to."""
        self.loader = loader
        self._pins = bool(pin_memory) and has_accelerator()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Continues from the loader's position."""
        return map(self._tensors, self.loader)

    def state_dict(self) -> dict[str, JSON]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()

    def __repr__(self) -> str:
        return f"TokenLoader({self.loader!r})"

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        left_out = ("source", "epoch", "item")
        arrays = {name: a for name, a in batch.arrays().items() if name not in left_out}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if batch.max_seqlen is not None:
            tensors["max_seqlen"] = torch.tensor(batch.max_seqlen)
        if self._pins:
            return {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors


def document_mask(doc_ids: Tensor) -> Tensor:
    """True where attention is allowed: (n, 1, seq_len, seq_len) bool, for all heads.

    For `scaled_dot_product_attention(q, k, v, attn_mask=...)`. Takes `seq_len ** 2` bytes per row;
    use `flex_block_mask` for long rows.
    """
    _check(doc_ids)
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    return same.tril_().unsqueeze(1)


def flex_block_mask(doc_ids: Tensor, *, block_size: int = 128) -> BlockMask:
    """The same for `flex_attention(q, k, v, block_mask=...)`, on the device of `doc_ids`.

    Empty blocks cost nothing there. The mask keeps a reference to `doc_ids`: do not change them
    while it is used.
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
