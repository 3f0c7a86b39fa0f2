"""What reading a source has to say: rows that gave no document, and limits that were reached.

In: the drops of source batches, as they are read.  Out: lines in the log.
Promise: the first drops by name, the rest as a number for each reason, so that a log never grows
with the input.
Not here: the counts that a state keeps; see `Tally`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from shardmill.records import Drop
from shardmill.streaming.order import StreamOrder

log = logging.getLogger(__name__)

NUM_NAMED = 10


class Journal:
    """Of one source. A silent one says nothing of drops: another stream reads the same rows."""

    def __init__(self, source: str, *, is_silent: bool = False) -> None:
        self._source, self._is_silent = source, is_silent
        self._num_named = 0
        self._unnamed: Counter[str] = Counter()
        self._is_limit_said = False

    def add_drops(self, drops: Sequence[Drop]) -> None:
        if self._is_silent:
            return
        named = drops[: NUM_NAMED - self._num_named]
        for drop in named:
            log.warning("source %r: %s gave no document: %s", self._source, drop.id, drop.reason)
        self._num_named += len(named)
        self._unnamed.update(drop.reason for drop in drops[len(named) :])

    def end_epoch(self, epoch: int) -> None:
        if self._unnamed:
            reasons = (f"{reason}: {count:,}" for reason, count in sorted(self._unnamed.items()))
            log.warning(
                "source %r, epoch %d: %d more rows gave no document (%s)",
                *(self._source, epoch, self._unnamed.total(), ", ".join(reasons)),
            )
        self._unnamed.clear()

    def limit_of_bytes(self, order: StreamOrder) -> None:
        """A shuffled block was full of bytes before it was full of documents; said once."""
        if not self._is_limit_said:
            log.info(
                "source %r: %d bytes of text fill a shuffled block before %d documents do",
                *(self._source, order.buffer_bytes, order.buffer_documents),
            )
        self._is_limit_said = True
