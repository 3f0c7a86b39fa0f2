"""One rendered conversation, its turns matched with its messages.

In: a template and a conversation.  Out: an `Example`, a reason code, or `Refuted` with a `Failure`.
Promise: an `Example` has one mask bit per id, turns that ascend, and a message for every turn.
Not here: whether the right tokens are trained (judge.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardmill.chat.check import CheckedMessage, check_messages
from shardmill.chat.contract import ChatTemplate, Rendered, TrainPolicy
from shardmill.chat.policy import trained_turns
from shardmill.chat.roles import ASSISTANT, SYSTEM, TOOL
from shardmill.records import ROLES, BoolArray, Conversation, IntArray

DROPPED = "dropped: "
"""The name of the check that a needed conversation is kept, before the reason it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failure:
    """One conversation on which a check failed."""

    check: str  # the name of the check
    told: str  # what is wrong, in one sentence
    conversation: Conversation
    policy: TrainPolicy
    ids: IntArray | None = None
    mask: BoolArray | None = None
    answers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    # the turns that should be trained, start and stop in `ids`, and their words


class Refuted(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.told)
        self.failure = failure


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One kept conversation."""

    conversation: Conversation
    policy: TrainPolicy
    checked: list[CheckedMessage]
    ids: IntArray
    mask: BoolArray
    bounds: list[int]  # where each turn starts, and where the last one stops
    roles: list[int]  # places in ROLES, one per turn
    groups: list[list[int]]  # the messages of each turn; none for one the template made up
    wanted: list[bool | None]  # whether each turn should be trained; None when nobody says

    def refute(self, check: str, told: str) -> Refuted:
        answers = {
            (self.bounds[turn], self.bounds[turn + 1]): self.checked[group[-1]].text or ""
            for turn, group in enumerate(self.groups)
            if self.wanted[turn] and group
        }
        failure = Failure(
            check=check,
            told=told,
            conversation=self.conversation,
            policy=self.policy,
            ids=self.ids,
            mask=self.mask,
            answers=answers,
        )
        return Refuted(failure)


def render_one(
    template: ChatTemplate, conversation: Conversation, policy: TrainPolicy
) -> Example | str:
    """The example, or the reason it was dropped for. Raises Refuted when it is neither."""
    rendered = template.render([conversation], policy)
    if not len(rendered.kept) and len(rendered.drops) == 1 and rendered.drops[0].reason:
        return rendered.drops[0].reason
    checked = check_messages(conversation.messages)
    if rendered.kept.tolist() != [0] or rendered.drops or isinstance(checked, str):
        told = f"{rendered.kept.tolist()} kept and {len(rendered.drops)} dropped of one"
        raise Refuted(Failure(check="account", told=told, conversation=conversation, policy=policy))
    return _matched(rendered, conversation, checked, policy)


def _matched(
    rendered: Rendered,
    conversation: Conversation,
    checked: list[CheckedMessage],
    policy: TrainPolicy,
) -> Example:
    examples = rendered.examples
    ids, mask = np.asarray(examples.ids[0]), np.asarray(examples.mask)
    starts, roles = examples.turn_starts.tolist(), examples.turn_roles.tolist()
    groups = match_turns(roles, [message.role for message in checked])
    failure = Failure(
        check="turns", told="", conversation=conversation, policy=policy, ids=ids, mask=mask
    )
    if mask.shape != ids.shape or mask.dtype != np.bool_ or len(starts) != len(roles):
        told = f"{len(ids)} ids, {mask.shape} mask, {len(starts)} turns, {len(roles)} roles"
        raise Refuted(replace(failure, told=told))
    if not starts or starts[0] < 0 or (np.diff([*starts, len(ids)]) <= 0).any():
        raise Refuted(replace(failure, told=f"turns start at {starts} of {len(ids)} ids"))
    if groups is None:
        said = [ROLES[message.role] for message in checked]
        found = [ROLES[role] if role < len(ROLES) else f"role {role}" for role in roles]
        raise Refuted(replace(failure, told=f"the turns are of {found}, the messages of {said}"))
    wanted = _wanted(checked, groups, policy)
    bounds = [*starts, len(ids)]
    return Example(conversation, policy, checked, ids, mask, bounds, roles, groups, wanted)


def _wanted(
    checked: list[CheckedMessage], groups: list[list[int]], policy: TrainPolicy
) -> list[bool | None]:
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(place, m.train) for place, m in enumerate(checked) if m.train is not None]
    trained = trained_turns(roles, np.array([0, len(roles)]), flags, policy)
    made_up = None if policy.train_on == "all" else False
    return [bool(trained[group].any()) if group else made_up for group in groups]


def match_turns(roles: list[int], messages: list[int]) -> list[list[int]] | None:
    """Which messages make each turn; None when they do not fit.

    One each, but: system messages may be folded into the turn behind them, a run of tool results
    may be one turn, and a template may open with a system turn of its own.
    """
    groups: list[list[int]] = []
    place = 0
    for turn, role in enumerate(roles):
        start = place
        while role != SYSTEM and place < len(messages) and messages[place] == SYSTEM:
            place += 1  # folded
        if place > start and start != 0:
            return None
        if turn == 0 and role == SYSTEM and messages[0] != SYSTEM:
            groups.append([])
            continue
        if place == len(messages) or messages[place] != role:
            return None
        place += 1
        if role == TOOL and roles[turn + 1 : turn + 2] != [TOOL] and roles[turn - 1] != TOOL:
            while place < len(messages) and messages[place] == TOOL:
                place += 1
        groups.append(list(range(start, place)))
    return groups if place == len(messages) else None


def is_assistant(example: Example, turn: int) -> bool:
    return example.roles[turn] == ASSISTANT
