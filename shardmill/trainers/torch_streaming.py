"""A stream from text to batches as a PyTorch dataset.

In: a config of `shardmill.loading.streaming`, and which of how many processes this is.
Out: dicts of tensors [A, B, T].
Promise: the workers of a DataLoader get disjoint documents, and together with those of all other
processes every document once. The state says where each worker is behind the last batch it gave,
so torchdata's StatefulDataLoader resumes exactly, with the same number of workers.
Not here: batching (batches come whole: `DataLoader(dataset, batch_size=None)`), devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardmill.loading.streaming import BatchIterator, StreamConfig, read_config
from shardmill.loading.streaming.iterator import Pipeline
from shardmill.loading.streaming.open import open_pipeline, which_process
from shardmill.records import Batch

TensorBatch = dict[str, torch.Tensor]


class StreamingDataset(IterableDataset[TensorBatch]):
    """Batches of a stream. One iteration at a time: a new one begins at the beginning, or where
    `load_state_dict` said.

    `input_ids`, `labels` and `segment_ids` are int32, `attention_mask` is bool; labels of -100 are
    not trained on.
    """

    def __init__(
        self,
        config: StreamConfig | Mapping[str, Any] | str | Path,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> None:
        """Under several ranks each passes its own (RANK, WORLD_SIZE); workers need nothing."""
        super().__init__()
        self.config = read_config(config)
        self.process_index, self.process_count = which_process(process_index, process_count)
        self._start: Mapping[str, Any] | None = None  # where the next iteration begins
        self._current: BatchIterator | None = None
        self._pipeline: tuple[int, Pipeline] | None = None  # of the process with this id

    def __iter__(self) -> Iterator[TensorBatch]:
        self._end_current()
        current = self._opened()
        if self._start is not None:
            current.set_state(self._start)
            self._start = None
        self._current = current
        return map(tensors_of, current)

    def state_dict(self) -> dict[str, Any]:
        """Where this process or worker is behind the last batch it gave."""
        if self._start is not None:
            return dict(self._start)
        if self._current is None:
            self._current = self._opened()
        return self._current.get_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins behind the batch that `state` followed."""
        with self._opened() as probe:
            probe.set_state(state)  # a wrong one is refused here
        self._end_current()
        self._start = dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None, "_pipeline": None}

    def _opened(self) -> BatchIterator:
        """Worker w of W in process p: consumer p * W + w."""
        if self._pipeline is None or self._pipeline[0] != os.getpid():
            self._pipeline = (os.getpid(), open_pipeline(self.config))
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return BatchIterator(
            self._pipeline[1],
            process_index=self.process_index * workers + number,
            process_count=self.process_count * workers,
        )

    def _end_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()


def tensors_of(batch: Batch) -> TensorBatch:
    """The same memory as tensors."""
    return {name: torch.from_numpy(array) for name, array in batch.arrays().items()}
