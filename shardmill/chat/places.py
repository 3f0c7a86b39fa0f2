"""One conversation laid out by a template: which texts, and which fixed pieces around each.

In: a conversation of any kind and a spec.  Out: the texts of each turn, or the reason why none.
Promise: every word of the conversation has a place in its turns, or the conversation none.
Not here: ids. Most conversations take a shorter way to the same result (turns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from shardmill.chat.check import CheckedMessage, check_messages, has_bytes
from shardmill.chat.contract import TrainPolicy
from shardmill.chat.roles import SYSTEM, USER
from shardmill.chat.spec import TemplateSpec
from shardmill.chat.tools import tool_texts
from shardmill.records import ROLES, Conversation

Names: TypeAlias = tuple[str, ...]
"""Names of fixed pieces: "begin", "user.before", "tool_call.after", ..."""

NO_WORDS = CheckedMessage(SYSTEM, "")
"""The system turn that tools stand in when the conversation has none."""


class Placed(NamedTuple):
    """One text of a turn, and what stands around it."""

    text: str
    left: Names
    right: Names


Turn: TypeAlias = tuple[CheckedMessage, list[Placed]]
"""A turn has at least one text."""


def lay_out(
    conversation: Conversation, spec: TemplateSpec, policy: TrainPolicy
) -> list[Turn] | str:
    """The turns of a conversation, or one of `REASONS`."""
    checked = check_messages(conversation.messages)
    if isinstance(checked, str):
        return checked
    tools = tool_texts(conversation.tools) if conversation.tools else ()
    if tools is None:
        return "bad_tools"
    if not all(map(has_bytes, tools)):
        return "invalid_unicode"
    for message in checked:
        reason = no_place(message, tools, spec)
        if reason is not None:
            return reason
    messages = [trimmed(message) for message in checked] if spec.trim else checked
    if spec.fold_system is not None:
        folded = _fold(checked, messages, spec.fold_system, policy)
        if isinstance(folded, str):
            return folded
        messages = folded
    if tools and messages[0].role != SYSTEM:
        messages = [NO_WORDS, *messages]
    return [
        (message, place(message, () if number else tools, first=not number))
        for number, message in enumerate(messages)
    ]


def no_place(message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec) -> str | None:
    """Why the template cannot say this, or None."""
    role = ROLES[message.role]
    if role == "system" and role not in spec.roles and spec.fold_system is None:
        return "no_place_for_system"
    if role == "tool" and role not in spec.roles:
        return "no_place_for_tool_results"
    if message.calls and spec.tool_call is None:
        return "no_place_for_tool_calls"
    if message.reasoning and spec.reasoning is None:
        return "no_place_for_reasoning"
    if tools and spec.tools is None:
        return "no_place_for_tools"
    return None


def trimmed(message: CheckedMessage) -> CheckedMessage:
    """Without white space around its words."""
    text = None if message.text is None else message.text.strip()
    return replace(message, text=text, reasoning=message.reasoning.strip())


def _fold(
    original: list[CheckedMessage], messages: list[CheckedMessage], join: str, policy: TrainPolicy
) -> list[CheckedMessage] | str:
    """The system message opens the user turn behind it, as it was written."""
    places = [number for number, message in enumerate(messages) if message.role == SYSTEM]
    if not places:
        return messages
    if places != [0] or len(messages) == 1 or messages[1].role != USER:
        return "system_not_first"
    system, user = original[0], messages[1]
    usual = policy.train_on == "all"
    told = {usual if flag is None else flag for flag in (system.train, user.train)}
    if len(told) > 1:
        return "mixed_train"
    text = f"{system.text}{join}{user.text}"
    return [CheckedMessage(USER, text, train=told.pop()), *messages[2:]]


def place(message: CheckedMessage, tools: Sequence[str], *, first: bool) -> list[Placed]:
    """The texts of one turn in order: reasoning, words, calls, tools."""
    role, words = ROLES[message.role], message.text
    inside: list[tuple[str, Names, Names]] = []
    if message.reasoning:
        inside.append((message.reasoning, ("reasoning.before",), ("reasoning.after",)))
    if words is not None:
        inside.append((words, (), ()))
    behind = bool(words)
    for call in message.calls:
        inside.append((call, _before("tool_call", behind), ("tool_call.after",)))
        behind = True
    if tools:
        inside.append(("\n".join(tools), _before("tools", behind), ("tools.after",)))
    opening = ("begin", f"{role}.before") if first else (f"{role}.before",)
    ending = (f"{role}.end", f"{role}.after")
    last = len(inside) - 1
    return [
        Placed(
            text, left if number else opening + left, right + ending if number == last else right
        )
        for number, (text, left, right) in enumerate(inside)
    ]


def _before(name: str, behind: bool) -> Names:
    return (f"{name}.between", f"{name}.before") if behind else (f"{name}.before",)
