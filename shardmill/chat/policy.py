"""What a chat template is asked for, whatever kind it is.

In: conversations and a policy.  Out: `Rendered`: their tokens and which of them are trained.
Promise of every template: ids and mask come out of one pass over the conversation, never out of a
search in ids or text; a conversation comes out whole or among the drops; every example trains at
least one token; text never becomes structure.

Which turns are trained: the one place for this rule.

In: who speaks in each turn, where conversations begin, the messages' own flags, a policy.
Out: one bool per turn.
Promise: a message's own flag is stronger than the policy.
Not here: which tokens of a trained turn are trained (assemble.py, for templates made of tokens).

Which tokens the assistant said: the one place for this rule.

In: ids of rendered conversations.  Out: one bool per token.
Promise: True exactly for the tokens after an assistant's opening token, up to and including the
next end token. The opening token itself is False; so is everything outside.
Not here: shifting to labels, padding, truncation. A caller that pads clears its padding itself.

Who speaks: the one table of role names, used by everyone.

In: a role as some dataset writes it.  Out: one of `ROLES`, or None.
Promise: any case; a name that is not in the table is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

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

TrainOn = Literal["assistant", "last-assistant", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPolicy:
    """Which turns are trained. A message's own "train": true or false is stronger."""

    train_on: TrainOn = "assistant"  # or the last assistant turn only, or every turn's words
    train_on_eot: bool = True  # a trained turn trains its end too


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What a template made of some conversations."""

    examples: ChatExamples
    kept: OffsetArray  # (len(examples.ids),) position of each among the input, ascending
    drops: tuple[Drop, ...]  # the others, in order


class ChatTemplate(Protocol):
    """Conversations to tokens with a loss mask, bound to one tokenizer."""

    @property
    def name(self) -> str: ...

    @property
    def marker_ids(self) -> frozenset[int]:
        """Every id that only structure may have: no content encodes to one of them."""

    def describe(self) -> dict[str, JSON]:
        """What identifies it, for the manifest: kind, name, and a "sha256" over everything that
        decides ids or mask apart from the tokenizer."""

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered: ...


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
"""Every name in lower case to the role it means."""

SYSTEM, USER, ASSISTANT, TOOL = (
    ROLES.index(role) for role in ("system", "user", "assistant", "tool")
)


def normal_role(role: object) -> str | None:
    """The role a name means, in any case; None when it means none."""
    return ROLE_NAMES.get(role.lower()) if isinstance(role, str) else None


def check_policy(policy: TrainPolicy) -> None:
    """OptionError for a policy that is none."""
    known = get_args(TrainOn)
    if policy.train_on not in known:
        raise OptionError(f"train_on={policy.train_on!r}: wanted one of {', '.join(known)}")
    if not isinstance(policy.train_on_eot, bool):
        raise OptionError(f"train_on_eot={policy.train_on_eot!r}: wanted True or False")


def trained_turns(
    roles: IntArray, bounds: IntArray, flags: Sequence[tuple[int, bool]], policy: TrainPolicy
) -> BoolArray:
    """True for each turn that is trained.

    roles: (turns,) places in ROLES.  bounds: (n + 1,) conversation c is turns
    bounds[c]..bounds[c + 1].  flags: (turn, its own "train") of those that have one.
    """
    check_policy(policy)
    trained: BoolArray
    if policy.train_on == "all":
        trained = np.ones(len(roles), np.bool_)
    else:
        trained = roles == ASSISTANT
    if policy.train_on == "last-assistant":
        turns = np.flatnonzero(trained)
        owner = np.searchsorted(bounds, turns, side="right")
        trained[turns[:-1][owner[:-1] == owner[1:]]] = False
    for turn, wanted in flags:
        trained[turn] = wanted
    return trained


MaskArray = npt.NDArray[np.bool_]


def assistant_mask(
    ids: IntArray,
    *,
    open_id: int,
    end_id: int,
    starts: npt.ArrayLike | None = None,
) -> MaskArray:
    """True where the assistant speaks or ends, in the shape of `ids`.

    ids: (n,) one conversation, or (rows, n), each row its own conversation.
    starts: for flat ids that hold several conversations, where each begins; nothing that was
    left open before a start reaches behind it. Not for 2-D ids.
    """
    if open_id == end_id:
        raise OptionError(f"the assistant's opening id and the end id are both {open_id}")
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise OptionError(f"ids of shape {ids.shape}: wanted (n,) or (rows, n)")
    if starts is not None and ids.ndim == 2:
        raise OptionError("starts are for flat ids; the rows of 2-D ids are apart already")
    if starts is None:
        starts = np.arange(len(ids)) * ids.shape[-1] if ids.ndim == 2 else ()
    begins = np.asarray(starts, np.int64)
    if begins.size and (begins.min() < 0 or begins.max() > ids.size):
        raise OptionError(f"starts {begins.min():,}..{begins.max():,} of {ids.size:,} ids")
    return _mask(ids.reshape(-1), open_id, end_id, begins).reshape(ids.shape)


def _mask(ids: IntArray, open_id: int, end_id: int, starts: IntArray) -> MaskArray:
    """Runs between markers, each spoken when the marker before it opens.

        open = 7, end = 9:  ids    5  7  4  4  9  4
                            runs   .  .| x  x  x| .

    A start begins a run that is not spoken; where it meets a marker's run, the start wins.
    """
    is_open = ids == open_id
    markers = np.flatnonzero(is_open | (ids == end_id))
    opens = is_open[markers]
    edges = np.concatenate(([0], markers + 1, starts))
    spoken = np.concatenate(([False], opens, np.zeros(len(starts), np.bool_)))
    order = np.argsort(edges, kind="stable")
    said: MaskArray = np.repeat(spoken[order], np.diff(edges[order], append=len(ids)))
    said[markers[opens]] = False
    return said
