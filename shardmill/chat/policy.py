"""What a chat template promises, and which turns and tokens are trained.

`TRAIN_ON` holds the mask policies: to add one, write a function of roles and bounds and add it
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import (
    JSON,
    ROLES,
    BoolArray,
    ChatExamples,
    Conversation,
    Drop,
    IntArray,
    OffsetArray,
)

SYSTEM, USER, ASSISTANT, TOOL = (
    ROLES.index(role) for role in ("system", "user", "assistant", "tool")
)

ROLE_NAMES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "prompter": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names that datasets use, in lower case -> role."""


def normal_role(role: object) -> str | None:
    """The role that a name means, in any case; None for an unknown name, which is never guessed."""
    return ROLE_NAMES.get(role.lower()) if isinstance(role, str) else None


def _last_assistant_turns(roles: IntArray, bounds: IntArray) -> BoolArray:
    trained: BoolArray = roles == ASSISTANT
    turns = np.flatnonzero(trained)
    owner = np.searchsorted(bounds, turns, side="right")
    trained[turns[:-1][owner[:-1] == owner[1:]]] = False
    return trained


TrainOn = Literal["assistant", "last-assistant", "all"]
TRAIN_ON: dict[TrainOn, Callable[[IntArray, IntArray], BoolArray]] = {
    "assistant": lambda roles, _: roles == ASSISTANT,
    "last-assistant": _last_assistant_turns,
    "all": lambda roles, _: np.ones(len(roles), np.bool_),
}
"""Mask policies: (roles, bounds) as in `trained_turns` -> which turns are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPolicy:
    """Which turns are trained. A message's own "train": true or false takes precedence."""

    train_on: TrainOn = "assistant"
    train_on_eot: bool = True  # a trained turn also trains its end

    def __post_init__(self) -> None:
        if self.train_on not in TRAIN_ON:
            raise OptionError(
                f"{{train_on}}: wanted one of {', '.join(TRAIN_ON)}", train_on=self.train_on
            )
        if not isinstance(self.train_on_eot, bool):
            raise OptionError(
                "{train_on_eot}: wanted True or False", train_on_eot=self.train_on_eot
            )

    def __str__(self) -> str:
        return f"train_on={self.train_on}, train_on_eot={str(self.train_on_eot).lower()}"


def trained_turns(
    roles: IntArray, bounds: IntArray, flags: Sequence[tuple[int, bool]], policy: TrainPolicy
) -> BoolArray:
    """True for each turn that is trained.

    roles: (turns,) positions in ROLES.  bounds: (n + 1,) conversation c is turns
    bounds[c]..bounds[c + 1].  flags: (turn, its own "train") where a message has one.
    """
    trained = TRAIN_ON[policy.train_on](roles, bounds)
    for turn, wanted in flags:
        trained[turn] = wanted
    return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What a template made of some conversations."""

    examples: ChatExamples
    kept: OffsetArray  # (len(examples.ids),) position of each in the input, ascending
    drops: tuple[Drop, ...]  # the others, in order


class ChatTemplate(Protocol):
    """Conversations to tokens with a loss mask, bound to one tokenizer.

    Ids and mask come out of one pass over the conversation, never out of a search in ids or text.
    A conversation is rendered whole or dropped with a reason; every example trains at least one
    token; text never becomes structure.
    """

    @property
    def name(self) -> str: ...

    @property
    def marker_ids(self) -> frozenset[int]:
        """Every id that only structure may have: no content encodes to one of them."""

    def describe(self) -> dict[str, JSON]:
        """What identifies the template, for the manifest: kind, name, and a "sha256" over
        everything that decides ids or mask apart from the tokenizer."""

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered: ...


def assistant_mask(
    ids: IntArray, *, open_id: int, end_id: int, starts: npt.ArrayLike | None = None
) -> BoolArray:
    """Which tokens the assistant said, for ids that come without turns; the shape of `ids`.

    True exactly after an assistant's opening token, up to and including the next end token.
    ids: (n,) one conversation, or (rows, n), each row its own conversation.
    starts: for flat ids of several conversations, where each begins; a turn left open before a
    start ends there. Not for 2-D ids.
    """
    if open_id == end_id:
        raise OptionError(f"the assistant's opening id and the end id are both {open_id}")
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise OptionError(f"ids of shape {ids.shape}: wanted (n,) or (rows, n)")
    if starts is not None and ids.ndim == 2:
        raise OptionError("starts are for flat ids; the rows of 2-D ids are already separate")
    if starts is None:
        starts = np.arange(len(ids)) * ids.shape[-1] if ids.ndim == 2 else ()
    begins = np.asarray(starts, np.int64)
    if begins.size and (begins.min() < 0 or begins.max() > ids.size):
        raise OptionError(f"starts {begins.min():,}..{begins.max():,} of {ids.size:,} ids")
    # Runs between markers, each spoken if the marker before it opens.
    #     open = 7, end = 9:  ids    5  7  4  4  9  4
    #                         runs   .  .| x  x  x| .
    # A start begins a run that is not spoken; sorted last among equals, it wins over a marker's.
    flat = ids.reshape(-1)
    is_open = flat == open_id
    markers = np.flatnonzero(is_open | (flat == end_id))
    opens = is_open[markers]
    edges = np.concatenate(([0], markers + 1, begins))
    spoken = np.concatenate(([False], opens, np.zeros(len(begins), np.bool_)))
    order = np.argsort(edges, kind="stable")
    mask: BoolArray = np.repeat(spoken[order], np.diff(edges[order], append=len(flat)))
    mask[markers[opens]] = False
    return mask.reshape(ids.shape)
