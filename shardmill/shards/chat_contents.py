"""Read the chat files of a split and compare them with its entry.

In: paths and what the manifest says of them.  Out: sentences about what is wrong.
Promise: a few MiB of memory; every byte is hashed; a mask with bits behind the last token, another
number of trained tokens or an example that trains nothing, turns that fall or lie outside, an
example without a turn, and unknown roles are found.
Not here: names and sizes (scan.py), tokens and index (contents.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardmill.records import ROLES, OffsetArray
from shardmill.shards.contents import Tick, chunks, hash_problem
from shardmill.shards.entries import ChatEntry, SplitEntry
from shardmill.shards.layout import INDEX_HEADER_BYTES, index_header

_MASK_BYTES = 2**17  # at a time: a million tokens, eight bytes each while they are counted
_STARTS = 2**19


def check_mask(
    path: Path, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None, tick: Tick
) -> Iterator[str]:
    """sha256, trained tokens, no bit behind the last token, and one trained in each example.

    `starts` of the examples; None when their index is damaged.
    """
    sha256 = hashlib.sha256()
    counts = _TrainedCounts(split.tokens, starts)
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        for start in range(0, len(chunk), _MASK_BYTES):
            counts.add(np.frombuffer(chunk[start : start + _MASK_BYTES], np.uint8))
    yield from hash_problem(sha256.hexdigest(), chat.mask.sha256)
    yield from counts.problems(chat.trained_tokens)


class _TrainedCounts:
    """Trained tokens in front of each start, over chunks of the mask, so that neighbours tell
    how many an example has."""

    def __init__(self, tokens: int, starts: OffsetArray | None) -> None:
        self._tokens = tokens
        self._starts = np.empty(0, np.int64) if starts is None else starts
        self._next = 0  # the first start not seen
        self._before = -1  # trained tokens in front of the start seen last
        self._idle: int | None = None  # the first example that trains nothing
        self._seen = self.trained = 0
        self._beyond = False

    def add(self, packed: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        bits = np.unpackbits(packed, bitorder="little")
        inside = min(len(bits), self._tokens - self._seen)
        self._beyond |= bool(bits[inside:].any())
        counted = np.zeros(inside + 1, np.int64)
        np.cumsum(bits[:inside], out=counted[1:])
        stop = int(np.searchsorted(self._starts, self._seen + inside))
        for low in range(self._next, stop, _STARTS):
            here = self._starts[low : min(low + _STARTS, stop)]
            self._note(counted[here - self._seen] + self.trained, low)
        self._next = stop
        self._seen += inside
        self.trained += int(counted[-1])

    def _note(self, before: OffsetArray, first: int) -> None:
        """Trained tokens in front of the examples `first` and following."""
        idle = np.flatnonzero(np.diff(before, prepend=self._before) == 0)
        if len(idle) and self._idle is None:
            self._idle = first + int(idle[0]) - 1
        self._before = int(before[-1])

    def problems(self, claimed: int) -> Iterator[str]:
        if self._beyond:
            yield f"has bits behind its last token, {self._tokens:,}"
        if self.trained != claimed:
            yield f"trains {self.trained:,} tokens, but the manifest says {claimed:,}"
        if len(self._starts):
            # one more start, behind the last example, closes it
            self._note(np.array([self.trained], np.int64), len(self._starts))
        if self._idle is not None:
            yield f"example {self._idle:,} trains no token"


def check_turns(
    path: Path, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None, tick: Tick
) -> Iterator[str]:
    """sha256, header, starts that never fall and lie within the split, a turn in each example."""
    sha256, previous, seen, problem = hashlib.sha256(), 0, 0, ""
    examples = _OwnedTurns(starts)
    for number, chunk in enumerate(chunks(path, tick)):
        sha256.update(chunk)
        if number == 0 and chunk[:INDEX_HEADER_BYTES] != index_header(chat.num_turns):
            yield f"its header is not that of {chat.num_turns:,} int64"
        data = chunk[INDEX_HEADER_BYTES:] if number == 0 else chunk
        turns = np.frombuffer(data, "<i8", count=len(data) // 8)
        if not len(turns) or problem:
            continue
        falls = np.flatnonzero(turns < np.concatenate(([previous], turns[:-1])))
        if len(falls):
            problem = f"turn {seen + falls[0]:,} starts before the one in front of it, or before 0"
        elif turns[-1] >= split.tokens:
            problem = f"a turn starts at token {turns[-1]:,} of {split.tokens:,}"
        else:
            examples.add(turns)
        previous, seen = int(turns[-1]), seen + len(turns)
    yield from hash_problem(sha256.hexdigest(), chat.turns.sha256)
    if problem:
        yield problem
    else:
        yield from examples.problems()


class _OwnedTurns:
    """Which example each turn starts in: a step of more than one leaves an example out."""

    def __init__(self, starts: OffsetArray | None) -> None:
        self._starts = starts
        self._last = -1
        self._mute: int | None = None

    def add(self, turns: OffsetArray) -> None:
        if self._starts is None:
            return
        for low in range(0, len(turns), _STARTS):
            owners = np.searchsorted(self._starts, turns[low : low + _STARTS], side="right") - 1
            self._step(owners)

    def _step(self, owners: OffsetArray) -> None:
        steps = np.flatnonzero(np.diff(owners, prepend=self._last) > 1)
        if len(steps) and self._mute is None:
            before = owners[steps[0] - 1] if steps[0] else self._last
            self._mute = int(before) + 1
        self._last = int(owners[-1])

    def problems(self) -> Iterator[str]:
        if self._starts is not None:
            self._step(np.array([len(self._starts)], np.int64))
        if self._mute is not None:
            yield f"no turn starts in example {self._mute:,}"


def check_roles(path: Path, chat: ChatEntry, tick: Tick) -> Iterator[str]:
    """sha256, and no role that does not exist."""
    sha256, highest = hashlib.sha256(), 0
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        highest = max(highest, int(np.frombuffer(chunk, np.uint8).max(initial=0)))
    yield from hash_problem(sha256.hexdigest(), chat.roles.sha256)
    if highest >= len(ROLES):
        yield f"holds the role {highest}, but there are {len(ROLES)}: {', '.join(ROLES)}"
