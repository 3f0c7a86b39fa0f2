"""A stream from text to batches as a PyTorch dataset of dicts of tensors.

The workers of a DataLoader get disjoint documents, and together with those of all other ranks every
document once. The state of a worker is its position after the last batch it gave, so torchdata's
StatefulDataLoader resumes exactly, with the same number of workers. Batches come whole: use
`DataLoader(dataset, batch_size=None)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardmill.loading.streaming import TextStream
from shardmill.records import Batch

TensorBatch = dict[str, torch.Tensor]


class StreamingDataset(IterableDataset[TensorBatch]):
    """The batches of a `TextStream`, as `shardmill.stream(..., to="torch")` gives them.

    Only one iteration at a time: a new one begins at the start, or where `load_state_dict` said.

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
