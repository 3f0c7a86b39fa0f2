"""Tensors for PyTorch: the native loader, streams from text, and attention inside documents.

Tensors share the memory of the batch (no copy, unless memory is pinned). Position and state are
those of the loader or the stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmill.errors import OptionError, missing_extra
from shardmill.loading import Batch, Loader
from shardmill.protocols import Closing
from shardmill.records import JSON

try:
    import torch
    from torch import Tensor
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as missing:
    raise missing_extra("torch", "torch") from missing

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from shardmill.loading.streaming import TextStream

TensorBatch = dict[str, Tensor]


def has_accelerator() -> bool:
    if hasattr(torch, "accelerator"):  # torch 2.6 and later
        return torch.accelerator.is_available()
    return torch.cuda.is_available()


class TokenLoader(Closing):
    """Batches of tensors from a `Loader`, as `shardmill.load(..., to="torch")` gives them.

    `input_ids` and `labels` are (n, seq_len) int64; with documents also `doc_ids`, `position_ids`,
    `cu_seqlens` (int32) and `max_seqlen` (one number).
    """

    def __init__(self, loader: Loader[Any], *, pin_memory: bool = False) -> None:
        """`pin_memory`: copy into pinned memory, if there is an accelerator to copy to."""
        self.loader = loader
        self._pins = bool(pin_memory) and has_accelerator()

    def __iter__(self) -> Iterator[TensorBatch]:
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

    def _tensors(self, batch: Batch) -> TensorBatch:
        left_out = ("source", "epoch", "item")
        tensors = {name: t for name, t in tensors_of(batch).items() if name not in left_out}
        if batch.max_seqlen is not None:
            tensors["max_seqlen"] = torch.tensor(batch.max_seqlen)
        if self._pins:
            return {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors


class StreamingDataset(IterableDataset[TensorBatch]):
    """The batches of a `TextStream`, as `shardmill.stream(..., to="torch")` gives them.

    The workers of a DataLoader get disjoint documents, and together with those of all other ranks
    every document once. The state of a worker is its position after the last batch it gave, so
    torchdata's StatefulDataLoader resumes exactly, with the same number of workers. Batches come
    whole: use `DataLoader(dataset, batch_size=None)`. Only one iteration at a time: a new one
    begins at the start, or where `load_state_dict` said.

    `input_ids`, `labels` and `segment_ids` are int32, `attention_mask` is bool; labels of -100 are
    not trained.
    """

    def __init__(self, stream: TextStream) -> None:
        """`stream` is that of this rank. Workers find their own share of it."""
        super().__init__()
        self.rank, self.world = stream.rank, stream.world
        self._pipeline = stream.pipeline
        self._pipeline_pid = os.getpid()
        self._start: Mapping[str, Any] | None = None  # where the next iteration begins
        self._current: TextStream | None = None

    def __iter__(self) -> Iterator[TensorBatch]:
        self._end_current()
        current = self._open()
        if self._start is not None:
            current.load_state_dict(self._start)
            self._start = None
        self._current = current
        return map(tensors_of, current)

    def state_dict(self) -> dict[str, Any]:
        """The position of this process or worker after the last batch it gave."""
        if self._start is not None:
            return dict(self._start)
        if self._current is None:
            self._current = self._open()
        return self._current.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration after the batch that `state` followed."""
        with self._open() as probe:
            probe.load_state_dict(state)  # a wrong one is refused here
        self._end_current()
        self._start = dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}

    def _open(self) -> TextStream:
        """Worker w of W in rank r: rank r * W + w of all workers."""
        from shardmill.loading.streaming import TextStream

        if self._pipeline_pid != os.getpid() and self._pipeline.remake is not None:
            self._pipeline = self._pipeline.remake()  # a forked process needs its own encoder
        self._pipeline_pid = os.getpid()
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return TextStream(
            self._pipeline, rank=self.rank * workers + number, world=self.world * workers
        )

    def _end_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()


def tensors_of(batch: Batch[Any]) -> TensorBatch:
    """The same memory as tensors."""
    return {name: torch.from_numpy(array) for name, array in batch.arrays().items()}


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
