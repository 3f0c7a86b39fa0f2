"""Conversations as columns of texts, and texts with the template's fixed tokens around them.

`lay_out` says which texts a conversation has and which fixed pieces surround each of them;
`collect_turns` does that for many conversations, with a fast path for plain messages, {"role",
"content"} and nothing else; `assemble` joins the encoded texts and the fixed tokens. Every word of
a conversation appears in its turns, or the conversation is dropped with a reason. The mask follows
from the same numbers as the ids, never from looking at them, and no Python loop visits tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.chat.messages import (
    CheckedMessage,
    check_messages,
    has_bytes,
    tool_texts,
    trained_messages,
)
from shardmill.chat.policy import ROLE_NAMES, SYSTEM, USER, TrainPolicy
from shardmill.chat.template_spec import TemplateSpec
from shardmill.records import ROLES, BoolArray, Conversation, IntArray, OffsetArray, Ragged

Names: TypeAlias = tuple[str, ...]
"""Names of fixed pieces: "begin", "user.before", "tool_call.after", ..."""
Form: TypeAlias = tuple[Names, Names]
"""The fixed pieces left and right of a text."""

PLAIN_FORMS: list[Form] = [
    ((*begin, f"{role}.before"), (f"{role}.end", f"{role}.after"))
    for begin in ((), ("begin",))
    for role in ROLES
]
"""The form of a turn that is one text: by role, then by role for the first of a conversation."""


class PlacedText(NamedTuple):
    """One text of a turn, and the fixed pieces around it."""

    text: str
    left: Names
    right: Names


def lay_out(
    conversation: Conversation, spec: TemplateSpec, policy: TrainPolicy
) -> list[tuple[CheckedMessage, list[PlacedText]]] | str:
    """The turns of a conversation, each with at least one text, or one of `REASONS`."""
    messages = check_messages(conversation.messages)
    if isinstance(messages, str):
        return messages
    tools = tool_texts(conversation.tools) if conversation.tools else ()
    if tools is None:
        return "bad_tools"
    if not all(map(has_bytes, tools)):
        return "invalid_unicode"
    for message in messages:
        reason = _unsupported(message, tools, spec)
        if reason is not None:
            return reason
    untrimmed = messages
    if spec.trim:
        messages = [
            replace(m, text=m.text and m.text.strip(), reasoning=m.reasoning.strip())
            for m in messages
        ]
    if spec.fold_system is not None and any(m.role == SYSTEM for m in messages):
        # The system message becomes the beginning of the user turn after it, untrimmed.
        roles = [m.role for m in messages]
        if SYSTEM in roles[1:] or roles[:2] != [SYSTEM, USER]:
            return "system_not_first"
        trained = trained_messages(messages, policy)
        if trained[0] != trained[1]:
            return "mixed_train"
        text = f"{untrimmed[0].text}{spec.fold_system}{messages[1].text}"
        messages = [CheckedMessage(USER, text, train=bool(trained[0])), *messages[2:]]
    if tools and messages[0].role != SYSTEM:
        messages = [CheckedMessage(SYSTEM, ""), *messages]  # tools are in the system turn
    return [
        (message, _turn_texts(message, () if number else tools, first=not number))
        for number, message in enumerate(messages)
    ]


def _unsupported(message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec) -> str | None:
    """Why the template cannot write this, or None."""
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


def _turn_texts(message: CheckedMessage, tools: Sequence[str], *, first: bool) -> list[PlacedText]:
    """The texts of one turn in order: reasoning, words, calls, tools."""
    words = message.text
    opening, ending = PLAIN_FORMS[message.role + len(ROLES) * first]
    if words is not None and not (message.reasoning or message.calls or tools):
        return [PlacedText(words, opening, ending)]
    inside: list[tuple[str, Names, Names]] = []
    if message.reasoning:
        inside.append((message.reasoning, ("reasoning.before",), ("reasoning.after",)))
    if words is not None:
        inside.append((words, (), ()))
    preceded = bool(words)  # `between` is written only if something of the turn precedes it
    inserts = [("tool_call", call) for call in message.calls]
    inserts += [("tools", "\n".join(tools))] if tools else []
    for name, text in inserts:
        between = (f"{name}.between",) if preceded else ()
        inside.append((text, (*between, f"{name}.before"), (f"{name}.after",)))
        preceded = True
    last = len(inside) - 1
    return [
        PlacedText(text, left if at else opening + left, right + ending if at == last else right)
        for at, (text, left, right) in enumerate(inside)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of many conversations as columns, without those that were dropped."""

    texts: list[str]
    roles: npt.NDArray[np.uint8]  # (turns,) positions in ROLES
    flags: list[tuple[int, bool]]  # (turn, its own "train"), for the few that have one
    bounds: OffsetArray  # (conversations + 1,) conversation c is turns bounds[c]..bounds[c + 1]
    first_texts: OffsetArray  # (turns,) the text that each turn starts with
    text_bounds: OffsetArray  # (conversations + 1,) the same bounds, counted in texts
    forms: list[Form]
    form_of: IntArray  # (texts,) positions in `forms`
    kept: list[int]  # (conversations,) position of each in the input
    dropped: list[tuple[int, str]]  # (position in the input, reason)


def collect_turns(
    conversations: Sequence[Conversation], spec: TemplateSpec, policy: TrainPolicy
) -> Turns:
    """The turns of all conversations that the template can write, and reasons for the others."""
    # Usual spellings of the roles that have turns of their own.
    codes = {
        spelling: ROLES.index(role)
        for name, role in ROLE_NAMES.items()
        if role in spec.roles
        for spelling in (name, name.title(), name.upper())
    }
    forms = list(PLAIN_FORMS)
    numbers = {form: number for number, form in enumerate(forms)}
    texts: list[str] = []
    roles, num_turns, kept = bytearray(), list[int](), list[int]()
    dropped, flags = list[tuple[int, str]](), list[tuple[int, bool]]()
    continued: list[int] = []  # texts that do not start a turn
    other_forms: list[tuple[int, int]] = []  # (text, form) where the form is not the plain one
    trim = spec.trim
    for position, conversation in enumerate(conversations):
        turns_before, texts_before = len(roles), len(texts)
        messages = conversation.messages
        for message in messages if type(messages) is list and not conversation.tools else ():
            if type(message) is not dict or len(message) != 2:
                break
            try:
                text, role = message["content"], codes[message["role"]]
            except (KeyError, TypeError):
                break
            if type(text) is not str or not (text.isascii() or has_bytes(text)):
                break
            texts.append(text.strip() if trim else text)
            roles.append(role)
        else:
            if len(roles) > turns_before:
                kept.append(position)
                num_turns.append(len(roles) - turns_before)
                continue
        del texts[texts_before:], roles[turns_before:]
        laid = lay_out(conversation, spec, policy)
        if isinstance(laid, str):
            dropped.append((position, laid))
            continue
        for checked, placed in laid:
            if checked.train is not None:
                flags.append((len(roles), checked.train))
            roles.append(checked.role)
            continued.extend(range(len(texts) + 1, len(texts) + len(placed)))
            for text, left, right in placed:
                number = numbers.setdefault((left, right), len(forms))
                if number == len(forms):
                    forms.append((left, right))
                other_forms.append((len(texts), number))
                texts.append(text)
        kept.append(position)
        num_turns.append(len(laid))
    turn_roles = np.frombuffer(bytes(roles), np.uint8)
    bounds = np.zeros(len(num_turns) + 1, np.int64)
    np.cumsum(num_turns, out=bounds[1:])
    first_texts = np.arange(len(texts))
    if continued:
        first_texts = np.delete(first_texts, continued)
    form_of: IntArray = np.zeros(len(texts), np.intp)
    form_of[first_texts] = turn_roles
    form_of[first_texts[bounds[:-1]]] += len(ROLES)
    if other_forms:
        at, found = np.array(other_forms, np.intp).T
        form_of[at] = found
    return Turns(
        texts=texts,
        roles=turn_roles,
        flags=flags,
        bounds=bounds,
        first_texts=first_texts,
        text_bounds=np.append(first_texts, len(texts))[bounds],
        forms=forms,
        form_of=form_of,
        kept=kept,
        dropped=dropped,
    )


STRUCTURE, WORDS, END = 0, 1, 2
"""Kinds of fixed tokens: never trained; trained with their turn; the end of their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Fixed tokens, encoded once."""

    ids: OffsetArray  # (n,)
    kinds: IntArray  # (n,) STRUCTURE, WORDS or END


def assemble(
    texts: Ragged,
    turns: Turns,
    pieces: Mapping[str, Fixed],
    trained_turn: BoolArray,
    *,
    train_ends: bool,
) -> tuple[IntArray, BoolArray, OffsetArray, OffsetArray]:
    """All encoded texts with the fixed tokens of their forms around them.

    Returns values and mask of all tokens; offsets, with text i and its fixed tokens at
    offsets[i]..offsets[i + 1]; and the number of trained tokens of each text.
    """
    trained = trained_turn
    if len(texts) != len(trained):
        trained = np.repeat(trained, np.diff(turns.first_texts, append=len(texts)))
    # The forms in one table: form f is left_of[f] + right_of[f] tokens from starts[f] on. A role
    # that the template has no turns for has no pieces, and no text uses its form.
    sides = [[pieces[n] for n in names if n in pieces] for form in turns.forms for names in form]
    used = [
        Fixed(np.empty(0, np.int64), np.empty(0, np.uint8)),
        *(p for side in sides for p in side),
    ]
    ids, kinds = (np.concatenate([getattr(p, part) for p in used]) for part in ("ids", "kinds"))
    wanted = (kinds == WORDS) | (kinds == END) if train_ends else kinds == WORDS
    left_of, right_of = np.array([sum(len(p.ids) for p in side) for side in sides]).reshape(-1, 2).T
    stops = np.cumsum(left_of + right_of)
    starts = stops - left_of - right_of
    wanted_before = np.concatenate(([0], np.cumsum(wanted)))
    num_wanted = wanted_before[stops] - wanted_before[starts]

    sizes, left, right = texts.lengths, left_of[turns.form_of], right_of[turns.form_of]
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(left + sizes + right, out=offsets[1:])
    # Fixed tokens left of a text, the text, fixed tokens right of it:  . . x x x . | . . x x .
    flags = np.zeros((len(texts), 3), np.bool_)
    flags[:, 1] = trained
    lengths = np.stack((left, sizes, right), axis=1).reshape(-1)
    mask: BoolArray = np.repeat(flags.reshape(-1), lengths)
    # For every fixed token, in order: its position in the table, and in the result. Those right of
    # a text come after it, so as many positions further as it is long.
    before = np.cumsum(left + right) - left - right
    in_table: OffsetArray = np.repeat(starts[turns.form_of] - before, left + right)
    count = np.arange(len(in_table))
    in_table += count
    shifts = np.stack((offsets[:-1] - before, offsets[:-1] + sizes - before), axis=1)
    sided = np.stack((left, right), axis=1)
    in_result: OffsetArray = np.repeat(shifts.reshape(-1), sided.reshape(-1))
    in_result += count

    is_text = np.ones(len(mask), np.bool_)
    is_text[in_result] = False
    dtype = np.result_type(texts.values.dtype, np.min_scalar_type(int(ids.max(initial=0))))
    values: IntArray = np.empty(len(mask), dtype)
    values[is_text] = texts.values
    values[in_result] = ids.astype(dtype)[in_table]
    mask[in_result] = wanted[in_table] & np.repeat(trained, left + right)
    return values, mask, offsets, trained * (sizes + num_wanted[turns.form_of])
