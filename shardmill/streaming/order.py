"""In which order a stream reads its source, as the user chose it.

In: numbers of a config.  Out: one checked record.
Promise: together with the source this decides every document of every epoch.
Not here: reading.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.arguments import whole_number
from shardmill.sampling.keys import checked_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Equal orders over equal sources give equal streams."""

    seed: int = 0
    shuffle: bool = False  # units in a drawn order, and documents within blocks
    buffer_documents: int = 10_000  # of a shuffled block, at most
    buffer_bytes: int = 256 * 2**20  # of its text, at most; one document always fits
    repeat: bool = False  # epochs without end, each in its own order
    max_documents: int | None = None  # of each epoch, all streams together; None: all

    def __post_init__(self) -> None:
        checked_seed(self.seed)
        whole_number(self.buffer_documents, "shuffle_buffer_size")
        whole_number(self.buffer_bytes, "shuffle_buffer_bytes")
        if self.max_documents is not None:
            whole_number(self.max_documents, "max_documents")
