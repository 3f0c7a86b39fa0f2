"""The batches of a chomp config as a Grain iterator, with statistics. Needs the extra `grain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill.compat.chomp.config import StreamConfig
from shardmill.loading.streaming import Counts, StreamStats, StreamTokenizer, TextStream
from shardmill.trainers.grain import BatchTuple, CheckpointedDataset, PrefetchedIterator


class StreamIterator(PrefetchedIterator[BatchTuple]):
    """Batches as tuples, `config.data.grain_prefetch` of them made ahead in a thread.

    `config.model` has the vocabulary and the ids that are used. State and statistics are those of
    the batches given, whatever was made ahead.
    """

    def __init__(
        self, make: Callable[[], TextStream], config: StreamConfig, tokenizer: StreamTokenizer
    ) -> None:
        super().__init__(CheckpointedDataset(make), config.data.grain_prefetch)
        self.config = config
        self.tokenizer = tokenizer
        self._before = self._totals()

    def __next__(self) -> BatchTuple:
        before = self._totals()
        batch = super().__next__()
        self._before = before
        return batch

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` followed. A refused state changes nothing."""
        super().set_state(state)
        self._before = self._totals()

    def stats(self) -> StreamStats:
        """Counts of the last batch given and of the run so far, for this process."""
        totals = self._totals()
        return StreamStats(batch=totals - self._before, total=totals)

    def _totals(self) -> Counts:
        return Counts(**self.get_state()["totals"])
