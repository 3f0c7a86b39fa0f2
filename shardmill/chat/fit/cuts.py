"""Where examples that are too long are cut, each policy a pure function on arrays.

In: examples that are longer than a row and train something.  Out: head, start, stop of each.
Promise: a row is `values[begin:begin + head] + values[start:stop]`, at most `row_len` tokens, and
holds the last trained token behind its first place (all but `keep_first`, which keeps the start).

How `drop_oldest_turns` makes room, in this order, until the example fits:

1. What lies behind the last trained turn goes: no trained token sees it.
2. The oldest exchanges go, whole. An exchange begins at the first turn that is not the system's,
   and at each user (or later system) turn right behind an assistant or tool turn. The exchange of
   the last trained turn stays, and so does what is before the first: prefix and system turns.
3. The system turns go, then the oldest turns of the last exchange: the row begins with a turn.
4. The beginning of the last trained turn goes: the row begins inside it and holds its end.

In 3 and 4 a prefix (a BOS) of at most a quarter of the row stays. The last trained turn stays up to
its end, its last trained token when more than a quarter of the row would follow that.
Not here: which examples are too long, counting, copying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.chat.roles import ASSISTANT, SYSTEM, TOOL
from shardmill.errors import OptionError
from shardmill.records import BoolArray, ChatExamples, OffsetArray

_SMALL_PART = 4  # up to 1/4 of a row may hold a prefix, or an untrained end, when room is short

Cuts: TypeAlias = tuple[OffsetArray, OffsetArray, OffsetArray]
CutFunction: TypeAlias = "Callable[[Scene, int], Cuts]"


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Some examples as positions in the flat array of all tokens."""

    begin: OffsetArray  # (n,) where each example begins
    end: OffsetArray  # (n,) and ends
    last: OffsetArray  # (n,) its last trained token; before `begin` when nothing is trained
    turns: OffsetArray  # (turns + 1,) starts of the turns of all examples, and a sentinel
    roles: npt.NDArray[np.uint8]  # (turns,) who speaks
    trained: OffsetArray  # positions of all trained tokens

    @classmethod
    def of(cls, examples: ChatExamples) -> Scene:
        offsets, total = examples.ids.offsets, len(examples.ids.values)
        turns, roles = examples.turn_starts, examples.turn_roles
        if examples.mask.shape != (total,) or turns.shape != roles.shape:
            raise OptionError(
                f"examples of {total:,} tokens with a mask of shape {examples.mask.shape}, "
                f"{len(turns):,} turn starts and {len(roles):,} turn roles: wanted one mask value "
                "a token and one role a turn"
            )
        trained = np.flatnonzero(examples.mask)
        return cls(
            begin=offsets[:-1],
            end=offsets[1:],
            last=last_before(trained, offsets[1:]),
            turns=np.append(turns, total + 1),
            roles=roles,
            trained=trained,
        )

    def take(self, chosen: OffsetArray) -> Scene:
        """The scene of some of the examples."""
        return replace(self, begin=self.begin[chosen], end=self.end[chosen], last=self.last[chosen])

    def trains(self, cuts: Cuts) -> BoolArray:
        """Is a token behind the first of each row trained? For rows without a head."""
        _, start, stop = cuts
        return last_before(self.trained, stop) > start

    def cuts_a_turn(self, cuts: Cuts) -> BoolArray:
        """Does a row begin or end inside a turn?"""
        _, start, stop = cuts
        first: BoolArray = (start > self.begin) & (_next(self.turns, start) != start)
        last: BoolArray = (stop < self.end) & (_next(self.turns, stop) != stop)
        return first | last


def keep_first(scene: Scene, row_len: int) -> Cuts:
    """truncate-right. May keep nothing that is trained: the caller looks."""
    return np.zeros_like(scene.begin), scene.begin, scene.begin + row_len


def keep_last(scene: Scene, row_len: int) -> Cuts:
    """truncate-left: the last tokens up to the end of the last trained turn."""
    stop = _stop(scene, row_len)
    return np.zeros_like(stop), np.maximum(scene.begin, stop - row_len), stop


def drop_oldest_turns(scene: Scene, row_len: int) -> Cuts:
    """Steps 1 to 4 of the module's head; each overrides the one before where that was too little.

    Example: prefix b, turns S U A U A, a row of 7:

        b S S U U A A A U A A   has 11 tokens, wanted 7
        b S S . . . . . U A A   step 2: head 3, from the second U on
    """
    stop = _stop(scene, row_len)
    begin, last, exchanges = scene.begin, scene.last, _exchanges(scene)
    # Step 2: the first exchange that fits behind all that comes before the exchanges.
    first = _next(exchanges, begin)
    head = np.where(first <= last, first - begin, 0)
    start = _next(exchanges, stop - (row_len - head))
    # Steps 3 and 4: what fits behind the prefix alone, a whole turn of the last exchange or a tail.
    prefix = _prefix(scene, row_len)
    tail = stop - (row_len - prefix)
    turn = _next(scene.turns, np.maximum(tail, last_before(exchanges, last + 1)))
    hard = np.where(turn <= last - (prefix == 0), turn, tail)
    too_little = start > last - (head == 0)
    head, start = np.where(too_little, prefix, head), np.where(too_little, hard, start)
    # Step 1 alone.
    enough = stop - begin <= row_len
    return np.where(enough, 0, head), np.where(enough, begin, start), stop


def _stop(scene: Scene, row_len: int) -> OffsetArray:
    """The end of the last trained turn, or right behind its last trained token."""
    turn_end = np.minimum(_next(scene.turns, scene.last + 1), scene.end)
    untrained = turn_end - scene.last - 1
    return np.where(untrained <= row_len // _SMALL_PART, turn_end, scene.last + 1)


def _prefix(scene: Scene, row_len: int) -> OffsetArray:
    """Tokens before the first turn, 0 when they are many; an example without turns has none."""
    first = _next(scene.turns, scene.begin)
    prefix = np.where(first <= scene.last, first - scene.begin, 0)
    return np.where(prefix <= row_len // _SMALL_PART, prefix, 0)


def last_before(positions: OffsetArray, limit: OffsetArray) -> OffsetArray:
    """The last of the ascending `positions` before each limit, in whatever example; else -1."""
    if not len(positions):
        return np.full_like(limit, -1)
    place = np.searchsorted(positions, limit) - 1
    return np.where(place < 0, -1, positions[place])


def _next(positions: OffsetArray, least: OffsetArray) -> OffsetArray:
    """The first of the ascending `positions` from `least` on; the sentinel when there is none."""
    place = np.searchsorted(positions, least)
    return positions[np.minimum(place, len(positions) - 1)]


def _exchanges(scene: Scene) -> OffsetArray:
    """Where the exchanges of these examples begin, and the sentinel.

    Those of other examples may be wrong, or missing.
    """
    roles, turns = scene.roles, scene.turns
    answers = (roles == ASSISTANT) | (roles == TOOL)
    begins = np.zeros(len(turns), np.bool_)
    begins[1:-1] = answers[:-1] & ~answers[1:]
    begins[np.searchsorted(turns, scene.begin)] = False  # the answer before is another example's
    talk = np.flatnonzero(roles != SYSTEM)
    place = np.searchsorted(turns[talk], scene.begin)
    begins[talk[place[place < len(talk)]]] = True
    begins[-1] = True
    return turns[begins]
