"""The batches of a stream as Grain's iterator, with statistics.

In: a function that opens the batches.  Out: a `grain.DatasetIterator` of them.
Promise: state and statistics speak of the batches given, whatever Grain's thread has made ahead.
Not here: Grain itself (shardmill.grain, imported at the top: this file needs the extra).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill.grain import CheckpointedDataset, PrefetchedIterator
from shardmill.streaming.config import StreamConfig
from shardmill.streaming.iterator import BatchIterator
from shardmill.streaming.records import Batch
from shardmill.streaming.stats import Counts, StreamStats
from shardmill.streaming.tokenizers import StreamTokenizer


class StreamIterator(PrefetchedIterator[Batch]):
    """Batches, `config.data.grain_prefetch` of them made early in a thread.

    `config.model` has the vocabulary and the ids that hold, whatever the file said.
    """

    def __init__(
        self, make: Callable[[], BatchIterator], config: StreamConfig, tokenizer: StreamTokenizer
    ) -> None:
        super().__init__(CheckpointedDataset(make), config.data.grain_prefetch)
        self.config = config
        self.tokenizer = tokenizer
        self._before = self._totals()

    def __next__(self) -> Batch:
        before = self._totals()
        batch = super().__next__()
        self._before = before
        return batch

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that `state` followed; one that is refused changes nothing."""
        super().set_state(state)
        self._before = self._totals()

    def stats(self) -> StreamStats:
        """Of the last batch given and of the run so far, this process alone."""
        totals = self._totals()
        return StreamStats(batch=totals - self._before, total=totals)

    def _totals(self) -> Counts:
        return Counts(**self.get_state()["totals"])
