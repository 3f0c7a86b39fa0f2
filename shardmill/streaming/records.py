"""What flows inside this room: documents with their place, rows with a mark behind each.

Promise: a `Mark` is all that is needed to make every later row again, from the source itself; no
text and no token is in it. So a state stays small whatever is buffered.
Not here: behaviour. `Place` and `Mark` as JSON: see state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardmill.records import BoolArray, Cursor, OffsetArray, Ragged

if TYPE_CHECKING:
    import pyarrow as pa

Tokens = npt.NDArray[np.int32]


class Batch(NamedTuple):
    """One step, always of the shape [A, B, T]: grad_accum, batch_size, seq_len."""

    input_ids: Tokens
    labels: Tokens  # the token after each input, or IGNORE_INDEX
    attention_mask: BoolArray  # False: padding
    segment_ids: Tokens  # 1, 2, ... for the documents of a row; 0: padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a stream has read since its beginning, all epochs together, in input rows.

    A batch of the source is counted when its first document is, so the buckets always sum up. Of
    streams that read the same rows the first alone counts those without text: over all streams
    `documents + empty + dropped` is the input.
    """

    documents: int = 0  # texts that belong to this stream
    elsewhere: int = 0  # texts that other streams take
    empty: int = 0  # rows without text
    dropped: int = 0  # rows that gave no text, for a reason that was logged
    repaired: int = 0  # texts with bytes that were no UTF-8 and were replaced

    @property
    def read(self) -> int:
        return self.documents + self.elsewhere + self.empty + self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stream of documents goes on: before a batch of a unit, or inside one."""

    epoch: int = 0
    unit: int = 0  # how many units of this epoch's order are done
    cursor: Cursor | None = None  # in the unit that follows; None: its start
    skip: int = 0  # texts of the batch behind the cursor that are done, whoever took them
    number: int = 0  # texts of this epoch that are done, whoever took them
    tally: Tally = field(default_factory=Tally)  # of all that is done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Documents in the order of their use. The same `start` gives the same block."""

    start: Place
    texts: pa.LargeStringArray  # may be empty: only rows without text came
    end: Place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Some documents of one block as ids, BOS and EOS included."""

    block: Place  # where the block starts
    first: int  # documents of the block before these
    ids: Ragged  # int32
    cut: OffsetArray  # (n,) ids taken off the end of each document by max_doc_tokens; mostly 0
    read: Tally  # what was read up to the end of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the next row of a stream comes from."""

    place: Place  # of the block that holds its oldest document
    document: int = 0  # of that block; its length: nothing of it is left
    part: int = 0  # sequential: ids of that document in earlier rows; bins: rows that the buffer
    # which begins with that document has given already


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """`n` rows that belong together, and the mark behind each of them."""

    tokens: Tokens  # (n, seq_len + 1), padded behind the documents
    segments: Tokens  # (n, seq_len + 1): 1, 2, ... in each row; 0: padding
    places: tuple[Place, ...]  # those that the marks speak of
    place: OffsetArray  # (n,) which of `places`
    document: OffsetArray  # (n,) Mark.document
    part: OffsetArray  # (n,) Mark.part
    begun: OffsetArray  # (n,) documents whose first token is in the row
    cut_documents: OffsetArray  # (n,) how many of those had ids cut off
    cut_tokens: OffsetArray  # (n,) and how many ids
    read: Tally  # what was read for these rows

    def __len__(self) -> int:
        return len(self.tokens)

    def mark_after(self, row: int) -> Mark:
        return Mark(
            place=self.places[self.place[row]],
            document=int(self.document[row]),
            part=int(self.part[row]),
        )
