"""What moves through a build: some documents or conversations of one source, and the account.

In: arrays.  Out: the same arrays as named runs of bytes, and back.
Promise: what was written as parts comes back equal, however many portions were written in a row.
Not here: files, hashes (segments.py), where a document goes (commit.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.records import BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged

PARTS = ("tokens", "lengths", "drops")
"""Every segment has these; one of conversations has those, unless it is empty."""
CHAT_PARTS = ("mask", "turns", "roles", "splits")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatPart:
    """What conversations have beside their ids."""

    examples: ChatExamples
    splits: npt.NDArray[np.uint8]  # (len(examples.ids),) the number of the split of each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """Some documents, in the dtype of the store, and the rows that gave none."""

    documents: Ragged
    drops: tuple[Drop, ...] = ()
    chat: ChatPart | None = None  # of conversations; its ids are `documents`


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a source says of a portion."""

    num_read: int
    counts: Mapping[str, int] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=dict)  # the source goes on here


def parts_of(portion: Portion, *, tokens: int) -> Iterator[tuple[str, bytes | memoryview]]:
    """(part, bytes) to write behind a segment of so many `tokens`."""
    yield "tokens", _bytes(portion.documents.values)
    yield "lengths", _bytes(portion.documents.lengths.astype("<i8"))
    rows = [msgspec.json.encode((drop.id, drop.reason)) + b"\n" for drop in portion.drops]
    yield "drops", b"".join(rows)
    if portion.chat is not None:
        examples = portion.chat.examples
        yield "mask", _bytes(examples.mask)
        yield "turns", _bytes((examples.turn_starts + tokens).astype("<i8"))
        yield "roles", _bytes(examples.turn_roles)
        yield "splits", _bytes(portion.chat.splits)


def portion_of(data: Mapping[str, npt.NDArray[np.uint8]], dtype: str) -> Portion:
    """All that was written to a segment, as one portion."""
    values = data["tokens"].view(np.dtype(dtype).newbyteorder("<"))
    documents = Ragged.from_lengths(values, data["lengths"].view("<i8"))
    rows = data["drops"].tobytes().splitlines()
    decoded = [msgspec.json.decode(row, type=tuple[str, str]) for row in rows]
    drops = tuple(Drop(id=where, reason=reason) for where, reason in decoded)
    if "mask" not in data:
        return Portion(documents=documents, drops=drops)
    examples = ChatExamples(
        ids=documents,
        mask=data["mask"].view(np.bool_),
        turn_starts=data["turns"].view("<i8"),
        turn_roles=data["roles"],
    )
    chat = ChatPart(examples=examples, splits=data["splits"])
    return Portion(documents=documents, drops=drops, chat=chat)


def _bytes(array: IntArray | BoolArray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data
