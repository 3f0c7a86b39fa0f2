"""Many conversations at a time: what waits to be encoded, and what came out.

In: single conversations.  Out: groups of a few megabytes; `ChatExamples`.
Promise: order is kept, and a group's size depends on its texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardmill.records import BoolArray, ChatExamples, Ragged

if TYPE_CHECKING:
    from shardmill.chat.jinja.turns import Turns
    from shardmill.chat.jinja.writing import Writing

Written: TypeAlias = "tuple[Writing, BoolArray]"
"""What a template wrote, and which of the messages are trained."""

_CHARACTERS_PER_CALL = 2**22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One kept conversation."""

    turns: Turns
    mask: BoolArray


def grouped(written: Iterator[Written | str]) -> Iterator[list[Written | str]]:
    """So many conversations at a time that their texts stay within a few megabytes."""
    group: list[Written | str] = []
    size = 0
    for one in written:
        group.append(one)
        size += 0 if isinstance(one, str) else sum(map(len, one[0].texts()))
        if size > _CHARACTERS_PER_CALL:
            yield group
            group, size = [], 0
    yield group


def join_examples(good: Sequence[Example]) -> ChatExamples:
    """The examples behind one another."""
    ids = Ragged.from_sequences([one.turns.ids for one in good])
    begins = ids.offsets[:-1].tolist()
    starts = [one.turns.starts + begin for one, begin in zip(good, begins, strict=True)]
    return ChatExamples(
        ids=ids,
        mask=_joined([one.mask for one in good], np.bool_),
        turn_starts=_joined(starts, np.int64),
        turn_roles=_joined([one.turns.roles for one in good], np.uint8),
    )


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
