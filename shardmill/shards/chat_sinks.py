"""Write what conversations have beside their tokens: loss mask, starts of turns, roles.

In: rendered examples of one split.  Out: its three chat files, durable.
Promise: examples that make no sense are refused before a byte of them is written; bounded memory;
equal examples, however they were divided into calls, give equal bytes, also where a call ends in
the middle of a byte of the mask.
Not here: tokens and index (sinks.py), reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardmill.atomic import HashedFile
from shardmill.errors import OptionError
from shardmill.records import ROLES, BoolArray, ChatExamples
from shardmill.shards.entries import ChatEntry, FileEntry
from shardmill.shards.layout import mask_name, roles_name, turns_name
from shardmill.shards.sinks import IndexSink

_CHUNK = 2**20  # tokens or turns at a time


def check_examples(examples: ChatExamples, *, where: str, first: int) -> None:
    """Refuse examples whose parts do not belong together; their ids are checked elsewhere.

    `first` is the number of examples before these, for the message.
    """
    for problem in _shape_problems(examples):
        raise OptionError(f"{where}: {problem}")
    if not len(examples.ids):
        return
    begins = examples.ids.offsets[:-1]
    void = np.flatnonzero(examples.ids.lengths == 0)
    if len(void):
        raise OptionError(f"{where}, example {first + void[0]:,}: has no token; drop it")
    idle = np.flatnonzero(~np.logical_or.reduceat(examples.mask, begins))
    if len(idle):
        raise OptionError(
            f"{where}, example {first + idle[0]:,}: trains no token, so it would cost time and "
            "teach nothing; drop it with a reason"
        )
    turns = np.searchsorted(examples.turn_starts, examples.ids.offsets)
    mute = np.flatnonzero(turns[1:] == turns[:-1])
    if len(mute):
        raise OptionError(f"{where}, example {first + mute[0]:,}: no turn starts in it")


def _shape_problems(examples: ChatExamples) -> Iterator[str]:
    tokens = len(examples.ids.values)
    mask, starts, roles = examples.mask, examples.turn_starts, examples.turn_roles
    if mask.dtype != np.bool_ or mask.shape != (tokens,):
        yield f"the mask is {mask.dtype} {mask.shape}, wanted bool ({tokens:,},), one per token"
    if starts.dtype != np.int64 or starts.ndim != 1:
        yield f"starts of turns are {starts.ndim}-d {starts.dtype}, wanted 1-d int64"
    elif len(starts) and (starts[0] < 0 or (starts[1:] < starts[:-1]).any()):
        yield "starts of turns are negative or decrease"
    elif len(starts) and starts[-1] >= tokens:
        yield f"a turn starts at token {starts[-1]:,} of {tokens:,}"
    if roles.dtype != np.uint8 or roles.shape != starts.shape:
        yield f"roles are {roles.dtype} {roles.shape}, wanted uint8 {starts.shape}, one per turn"
    elif len(roles) and roles.max() >= len(ROLES):
        yield f"a turn has the role {roles.max()}, but there are {len(ROLES)}: {', '.join(ROLES)}"


class MaskSink:
    """One bit per token, the first in the lowest bit of a byte."""

    def __init__(self, path: Path) -> None:
        self.tokens = 0
        self.trained = 0
        self._file = HashedFile(path)
        self._rest: BoolArray = np.empty(0, np.bool_)  # up to 7 tokens that fill no byte yet

    def append(self, mask: BoolArray) -> None:
        for start in range(0, len(mask), _CHUNK):
            part = mask[start : start + _CHUNK]
            bits = np.concatenate((self._rest, part))
            whole = len(bits) // 8 * 8
            self._file.write(np.packbits(bits[:whole], bitorder="little").data)
            self._rest = bits[whole:].copy()
            self.tokens += len(part)
            self.trained += int(np.count_nonzero(part))

    def finish(self) -> str:
        self._file.write(np.packbits(self._rest, bitorder="little").data)
        return self._file.finish()

    def abort(self) -> None:
        self._file.abort()


class ChatSink:
    """The three chat files of one split."""

    def __init__(self, folder: Path, split: str) -> None:
        self._split = split
        self._mask = MaskSink(folder / mask_name(split))
        self._turns = IndexSink(folder, turns_name(split))
        self._roles = HashedFile(folder / roles_name(split))

    def append(self, examples: ChatExamples) -> None:
        """Examples behind those already here; they have been checked."""
        starts, tokens = examples.turn_starts, self._mask.tokens
        for start in range(0, len(starts), _CHUNK):
            self._turns.append(starts[start : start + _CHUNK] + tokens)
        self._roles.write(np.ascontiguousarray(examples.turn_roles).data)
        self._mask.append(examples.mask)

    def finish(self) -> ChatEntry:
        tokens, turns = self._mask.tokens, self._turns.entries
        return ChatEntry(
            mask=FileEntry(file=mask_name(self._split), entries=tokens, sha256=self._mask.finish()),
            turns=self._turns.finish(),
            roles=FileEntry(
                file=roles_name(self._split), entries=turns, sha256=self._roles.finish()
            ),
            num_turns=turns,
            trained_tokens=self._mask.trained,
        )

    def abort(self) -> None:
        self._mask.abort()
        self._turns.abort()
        self._roles.abort()
