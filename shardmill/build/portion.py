"""What moves through a build: some documents or conversations of one source, and the account.

In: arrays.  Out: the same arrays as named runs of bytes, and back.
Promise: what was written as parts comes back equal; documents come back batch by batch, as they
were written, because a ledger counts whole batches.
Not here: files, hashes (segments.py), where a document goes (commit.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.records import BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged

PARTS = ("tokens", "lengths", "batches")
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
    void: tuple[int, ...] = ()  # places, among the texts given, of those without a token
    chat: ChatPart | None = None  # of conversations; its ids are `documents`


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a source says of a portion."""

    num_read: int
    num_given: int = 0  # texts or conversations, with those that gave no token
    num_bytes: int = 0  # of text, about
    counts: Mapping[str, int] = field(default_factory=dict)
    num_rows: int = 0  # rows of a file that is read in parts; its drops count them from 0
    begins: bool = False  # rows are counted from 0 here, not on from the portion before
    cursor: Cursor = field(default_factory=dict)  # the source goes on here
    grain: int = 0  # which grain of its unit it is of, or begins in


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """One batch of a segment, as a line of its part "batches"."""

    num_read: int
    num_given: int
    num_bytes: int
    num_documents: int
    drops: list[tuple[str, str, int | None]]  # id, reason, row
    void: tuple[int, ...]
    counts: dict[str, int]
    num_rows: int
    begins: bool
    grain: int


def parts_of(
    portion: Portion, account: Account, *, tokens: int
) -> Iterator[tuple[str, bytes | memoryview]]:
    """(part, bytes) to write behind a segment of so many `tokens`."""
    yield "tokens", _bytes(portion.documents.values)
    yield "lengths", _bytes(portion.documents.lengths.astype("<i8"))
    batch = _Batch(
        num_read=account.num_read,
        num_given=account.num_given,
        num_bytes=account.num_bytes,
        num_documents=len(portion.documents),
        drops=[(drop.id, drop.reason, drop.row) for drop in portion.drops],
        void=portion.void,
        counts=dict(account.counts),
        num_rows=account.num_rows,
        begins=account.begins,
        grain=account.grain,
    )
    yield "batches", msgspec.json.encode(batch) + b"\n"
    if portion.chat is not None:
        examples = portion.chat.examples
        yield "mask", _bytes(examples.mask)
        yield "turns", _bytes((examples.turn_starts + tokens).astype("<i8"))
        yield "roles", _bytes(examples.turn_roles)
        yield "splits", _bytes(portion.chat.splits)


def portions_of(
    data: Mapping[str, npt.NDArray[np.uint8]], dtype: str
) -> Iterator[tuple[Portion, Account]]:
    """All that was written to a segment: batch by batch, or conversations as one portion."""
    values = data["tokens"].view(np.dtype(dtype).newbyteorder("<"))
    documents = Ragged.from_lengths(values, data["lengths"].view("<i8"))
    lines = data["batches"].tobytes().splitlines()
    batches = [msgspec.json.decode(line, type=_Batch) for line in lines]
    if "mask" not in data:
        yield from _by_batch(documents, batches)
        return
    examples = ChatExamples(
        ids=documents,
        mask=data["mask"].view(np.bool_),
        turn_starts=data["turns"].view("<i8"),
        turn_roles=data["roles"],
    )
    chat = ChatPart(examples=examples, splits=data["splits"])
    drops = tuple(drop for batch in batches for drop in _drops_of(batch))
    yield Portion(documents=documents, drops=drops, chat=chat), _account_of(batches)


def _by_batch(documents: Ragged, batches: list[_Batch]) -> Iterator[tuple[Portion, Account]]:
    first = 0
    for batch in batches:
        stop = first + batch.num_documents
        part, drops = documents.slice(first, stop), _drops_of(batch)
        yield Portion(documents=part, drops=drops, void=batch.void), _account_of([batch])
        first = stop


def _account_of(batches: list[_Batch]) -> Account:
    """Of batches that are one portion: one, or conversations, which have no rows."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    return Account(
        num_read=sum(batch.num_read for batch in batches),
        num_given=sum(batch.num_given for batch in batches),
        num_bytes=sum(batch.num_bytes for batch in batches),
        counts=counts,
        num_rows=sum(batch.num_rows for batch in batches),
        begins=any(batch.begins for batch in batches),
        grain=batches[0].grain if batches else 0,
    )


def _drops_of(batch: _Batch) -> tuple[Drop, ...]:
    return tuple(Drop(id=where, reason=reason, row=row) for where, reason, row in batch.drops)


def _bytes(array: IntArray | BoolArray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data
