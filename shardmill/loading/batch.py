"""What a rank gets for one step.

In: nothing; these are records.  Out: plain numpy arrays.
Promise: a batch that somebody holds, whole or in part, never changes.
Not here: how it is made (make), tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardmill.records import OffsetArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """`n` windows as inputs and labels, with where they come from."""

    input_ids: OffsetArray  # (n, seq_len) int64, contiguous
    labels: OffsetArray  # (n, seq_len) the token after each input, or IGNORE_INDEX at a border
    doc_ids: OffsetArray | None  # (n, seq_len) 0 for a row's first document, then 1, 2, ...
    position_ids: OffsetArray | None  # (n, seq_len) 0 at the start of every document and row
    cu_seqlens: npt.NDArray[np.int32] | None  # (pieces + 1,) edges of all pieces, rows end to end
    max_seqlen: int | None  # tokens of the longest piece
    # these four with documents=True only; without, labels go on into the next document
    samples: range  # the global numbers of the rows
    source: OffsetArray  # (n,) which source of the stream
    epoch: OffsetArray  # (n,) which pass over that source, from 0
    item: OffsetArray  # (n,) which window of that source

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounters:
    """What was consumed of one source since sample 0, by all ranks together."""

    samples: int
    tokens: int  # inputs: samples * seq_len
    epochs: float  # samples / windows of the source
