"""Conversations in bounded batches that a cursor can cut anywhere.

In: units (one record, or all rows of a tree) and what each gave.  Out: `ConversationBatch`es.
Promise: a batch is a function of where it starts and of what follows: it takes items while they
fit, one at least. Its end is told as a spot: behind so many units, and so many items into the next,
so that a tree of a million threads needs no batch of its own.
`num_read` counts items: conversations made and drops, so it is their sum by construction. A record
that gives five threads counts five, also among those with a replacement if it has one.
Not here: reading, shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from shardmill.errors import SourceError
from shardmill.records import Conversation, ConversationBatch, Cursor, Drop
from shardmill.sources.batching import BatchLimits
from shardmill.sources.shapes import Item


class Spot(NamedTuple):
    """Behind a mark of an input, and behind the first `done` items of the unit that follows."""

    input: int  # its number
    mark: Any  # None: the input's start
    done: int = 0


class Unit(NamedTuple):
    """Items that only come together, and the spot behind them."""

    items: Iterable[Item]
    end: Spot
    repaired: bool = False  # something in their input was no text and was replaced


def batched(
    units: Iterable[Unit],
    start: Spot,
    limits: BatchLimits,
    cursor_at: Callable[[Spot], Cursor],
) -> Iterator[ConversationBatch]:
    """Batches from `start` on; `units` begin with the unit that `start` lies in."""
    held: list[Item] = []
    num_bytes = num_repaired = 0
    end = start
    for item, spot, repaired in _placed(units, start):
        size = text_bytes(item) if isinstance(item, Conversation) else 0
        is_full = num_bytes + size > limits.num_bytes or len(held) == limits.num_documents
        if held and is_full:
            yield _batch(held, num_repaired, cursor_at(end))
            held, num_bytes, num_repaired = [], 0, 0
        held.append(item)
        num_bytes += size
        num_repaired += repaired and isinstance(item, Conversation)
        end = spot
    if held:
        yield _batch(held, num_repaired, cursor_at(end))


def text_bytes(conversation: Conversation) -> int:
    """UTF-8 bytes of every string in a conversation's messages and tools, keys apart."""
    total = 0
    stack: list[Any] = [conversation.tools or ()]
    for message in conversation.messages:
        for value in message.values():
            if type(value) is str:  # nearly always, so the quick way
                total += len(value) if value.isascii() else _utf8_bytes(value)
            elif value is not None:
                stack.append(value)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += _utf8_bytes(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return total


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _placed(units: Iterable[Unit], start: Spot) -> Iterator[tuple[Item, Spot, bool]]:
    """Each item, the spot behind it, and whether its unit was repaired."""
    before, skip = start._replace(done=0), start.done
    for items, end, repaired in units:
        # One item is held back: the spot behind the last one is the end of the unit.
        last: Item | None = None
        done = skip
        rest = iter(items)
        if sum(1 for _ in islice(rest, skip)) < skip:
            raise SourceError(
                f"the cursor stands behind {skip:,} conversations of one record or tree, which has "
                "not so many; resume with the input the cursor came from"
            )
        for item in rest:
            if last is not None:
                done += 1
                yield last, before._replace(done=done), repaired
            last = item
        if last is not None:
            yield last, end, repaired
        before, skip = end, 0
    if skip:
        raise SourceError(
            f"the cursor stands behind {skip:,} conversations of a record or tree that is not "
            "there; resume with the input the cursor came from"
        )


def _batch(items: list[Item], num_repaired: int, cursor: Cursor) -> ConversationBatch:
    return ConversationBatch(
        conversations=tuple(item for item in items if isinstance(item, Conversation)),
        num_read=len(items),
        counts={"invalid_utf8": num_repaired} if num_repaired else {},
        drops=tuple(item for item in items if isinstance(item, Drop)),
        cursor=cursor,
    )
