"""Conversations to turns: which texts are encoded, and which fixed pieces surround each.

`collect_turns` lists the texts of many conversations. A plain turn, one text between its opening
and its end, takes the short way; `lay_out` writes a conversation that holds more. Every word of a
conversation appears in its turns, or the conversation is dropped with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.chat.policy import (
    ASSISTANT,
    ROLE_NAMES,
    SYSTEM,
    TOOL,
    USER,
    CheckedMessage,
    Dropped,
    TrainPolicy,
    check_messages,
    check_tools,
    has_bytes,
    trained_messages,
)
from shardmill.chat.template_spec import (
    Fragments,
    Insert,
    Marker,
    TemplateSpec,
    Text,
    Value,
    system_must_be_first,
)
from shardmill.records import ROLES, Conversation, IntArray, OffsetArray

Names: TypeAlias = tuple[str, ...]
"""Names of fixed pieces: "begin", "user.before", "tool_call.after", ... A template need not have
all of them."""
Form: TypeAlias = tuple[Names, Names]
"""The fixed pieces left and right of a text."""

MARKER = "marker:"
"""Starts the name of a piece that is one marker inside a turn."""


def _opening(role: str, *, begin: Names = ()) -> Names:
    plain = ("no_reasoning", "assistant.content") if role == "assistant" else ()
    default = ("default_system",) if begin and role != "system" else ()
    return (*begin, *default, f"{role}.before", *plain)


PLAIN_FORMS: list[Form] = [
    *(
        (_opening(role, begin=begin), (f"{role}.end", f"{role}.after"))
        for begin in ((), ("begin",))
        for role in ROLES
    ),
    *(((f"{role}.opened",), (f"{role}.end", f"{role}.after")) for role in ROLES),
]
"""The form of a turn that is one text: by role, then by role for the first of a conversation, then
by role for one whose marker is the end of the turn before it."""
FIRST, OPENED = len(ROLES), 2 * len(ROLES)


class PlacedText(NamedTuple):
    """One text of a turn, and the fixed pieces around it."""

    text: str
    left: Names
    right: Names


Turn: TypeAlias = tuple[CheckedMessage, list[PlacedText]]
"""A message, or the first of several that share a turn, and the texts of the turn, at least one."""


def lay_out(conversation: Conversation, spec: TemplateSpec, policy: TrainPolicy) -> list[Turn]:
    """The turns of a conversation; Dropped if it cannot be written."""
    messages = check_messages(conversation.messages)
    tools = check_tools(conversation.tools)
    for message in messages:
        _check_support(message, tools, spec)
    if spec.begin and system_must_be_first(spec):
        _check_system(messages)
    values = iter(_call_values(conversation.messages, messages, spec) if spec.join else ())
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
            raise Dropped("system_not_first")
        trained = trained_messages(messages, policy)
        if trained[0] != trained[1]:
            raise Dropped("mixed_train")
        text = f"{untrimmed[0].text}{spec.fold_system}{messages[1].text}"
        messages = [CheckedMessage(USER, text, train=bool(trained[0])), *messages[2:]]
    if tools and messages[0].role != SYSTEM:  # tools are in the system turn
        messages = [CheckedMessage(SYSTEM, spec.default_system or ""), *messages]
    if not spec.join:
        return [
            (message, _turn_texts(message, () if number else tools, spec, first=not number))
            for number, message in enumerate(messages)
        ]
    turns: list[Turn] = []
    for group in _shared_turns(messages, spec, policy):
        kind = _kind(group[0], turns[-1][0], spec) if turns else FIRST
        placed = _joined_texts(group, () if turns else tools, spec, values, kind)
        turns.append((group[0], placed))
    return turns


def _check_support(message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec) -> None:
    role = ROLES[message.role]
    if role == "system" and role not in spec.roles and spec.fold_system is None:
        raise Dropped("no_place_for_system")
    if role == "tool" and role not in spec.roles:
        raise Dropped("no_place_for_tool_results")
    if message.calls and spec.tool_call is None:
        raise Dropped("no_place_for_tool_calls")
    if message.reasoning and spec.reasoning is None:
        raise Dropped("no_place_for_reasoning")
    if tools and spec.tools is None:
        raise Dropped("no_place_for_tools")


def _check_system(messages: Sequence[CheckedMessage]) -> None:
    """For a template that writes a system message bare."""
    if any(message.role == SYSTEM for message in messages[1:]):
        raise Dropped("system_not_first")
    if messages[0].role == SYSTEM and not messages[0].text:
        raise Dropped("no_place_for_system")  # the turn would have no token


# A turn whose texts are encoded one by one.


def _turn_texts(
    message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec, *, first: bool
) -> list[PlacedText]:
    """The texts of one turn in order: reasoning, words, calls, tools."""
    words = message.text
    opening, ending = PLAIN_FORMS[message.role + FIRST * first]
    if words is not None and not (message.reasoning or message.calls or tools):
        return [PlacedText(words, opening, ending)]
    inside: list[tuple[str, Names, Names]] = []
    if message.reasoning:
        inside.append((message.reasoning, ("reasoning.before",), ("reasoning.after",)))
    if words is not None:
        inside.append((words, (), ()))
    preceded = bool(words)  # `between` is written only if something of the turn precedes it
    inserts = [("tool_call", call) for call in message.calls]
    inserts += [("tools", spec.tools_separator.join(tools))] if tools else []
    for name, text in inserts:
        between = (f"{name}.between",) if preceded else ()
        inside.append((text, (*between, f"{name}.before"), (f"{name}.after",)))
        preceded = True
    last = len(inside) - 1
    return [
        PlacedText(text, left if at else opening + left, right + ending if at == last else right)
        for at, (text, left, right) in enumerate(inside)
    ]


# A turn whose texts are joined.


def shared_opener(role: str, spec: TemplateSpec, *, calls: bool = False) -> bool:
    """Whether a turn of this role right after an answer is opened by the end of the answer."""
    end = spec.call_end if calls and spec.call_end else spec.roles["assistant"].end
    return spec.shared_ends and role in spec.roles and end[-1:] == spec.roles[role].before[:1]


def _kind(message: CheckedMessage, before: CheckedMessage, spec: TemplateSpec) -> int:
    answered = before.role == ASSISTANT
    opened = answered and shared_opener(ROLES[message.role], spec, calls=bool(before.calls))
    return OPENED if opened else 0


def _shared_turns(
    messages: list[CheckedMessage], spec: TemplateSpec, policy: TrainPolicy
) -> list[list[CheckedMessage]]:
    """The messages of each turn: one, or a run of tool results if the template joins them."""
    tool = spec.roles.get("tool")
    if tool is None or tool.content is None or not tool.content.between:
        return [[message] for message in messages]
    turns: list[list[CheckedMessage]] = []
    trained = trained_messages(messages, policy).tolist()
    for message, wanted, before in zip(messages, trained, [None, *trained], strict=False):
        if message.role == TOOL and turns and turns[-1][0].role == TOOL:
            if wanted != before:
                raise Dropped("mixed_train")
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


Values: TypeAlias = Mapping[str, str]
"""Of a call: its "name" and "id"."""


def _call_values(
    given: Sequence[Mapping[str, Any]], messages: Sequence[CheckedMessage], spec: TemplateSpec
) -> list[Values]:
    """The values that the template writes, for each call and each tool result in their order.

    A result answers the call with its id; without ids, the calls of a message in their order.
    """
    of_calls = _values_in(spec.tool_call)
    of_results = _values_in(spec.roles["tool"].content) if "tool" in spec.roles else set()
    found: list[Values] = []
    calls: list[dict[str, Any]] = []
    number = 0
    for raw, message in zip(given, messages, strict=True) if of_calls or of_results else ():
        if message.calls:
            names = [_name_and_arguments(call)[0] for call in message.calls]
            ids = [call.get("id") for call in raw["tool_calls"]]
            calls = [{"name": name, "id": one} for name, one in zip(names, ids, strict=True)]
            number = 0
            found += [_needed(call, of_calls) for call in calls if of_calls]
        if message.role == TOOL:
            name = raw.get("tool_call_id")
            in_order = calls[min(number, len(calls) - 1)] if calls else {}
            answered = next((call for call in calls if name and call["id"] == name), in_order)
            number += 1
            found += [_needed({**answered, "id": name}, of_results)] if of_results else []
    return found


def _needed(values: Mapping[str, Any], names: set[str]) -> Values:
    found: dict[str, str] = {}
    for name in names:
        value = values.get(name)
        if not isinstance(value, str) or not value or not has_bytes(value):
            raise Dropped("bad_tool_call")
        found[name] = value
    return found


def _values_in(insert: Insert | None) -> set[str]:
    return {p.value for p in insert.before if isinstance(p, Value)} if insert else set()


def _joined_texts(
    group: Sequence[CheckedMessage],
    tools: Sequence[str],
    spec: TemplateSpec,
    values: Iterator[Values],
    kind: int,
) -> list[PlacedText]:
    """The texts of one turn, each as long as no marker divides it. kind: 0, `FIRST` or `OPENED`."""
    message = group[0]
    opening, ending = PLAIN_FORMS[message.role + kind]
    if message.role == ASSISTANT:
        # Words come first, and in their usual place?
        plain = not message.reasoning and not (
            message.calls and (spec.preamble or not message.text)
        )
        without = {"no_reasoning": bool(message.reasoning), "assistant.content": not plain}
        opening = tuple(name for name in opening if not without.get(name))
        inside = _answer(message, spec, values, plain=plain)
        if message.calls and spec.call_end:
            ending = ("calls.end", "assistant.after")
    else:
        inside = _words(group, tools, spec, values)
        if tools and spec.tools_end:
            ending = ("tools.end", "system.after")
    placed: list[PlacedText] = []
    left, divided = opening, True
    for piece in inside:
        if isinstance(piece, Marker):
            left, divided = (*left, MARKER + piece.marker), True
        elif divided:
            placed.append(PlacedText(piece, left, ()))
            left, divided = (), False
        else:
            placed[-1] = placed[-1]._replace(text=placed[-1].text + piece)
    if not placed:
        placed, left = [PlacedText("", left, ())], ()
    placed[-1] = placed[-1]._replace(right=left + ending)
    return placed


Inside: TypeAlias = list[str | Marker]
"""What is between the opening and the end of a turn."""


def _filled(pieces: Fragments, values: Values = MappingProxyType({})) -> Inside:
    """The pieces with the values in their places."""
    filled = [
        p.text if isinstance(p, Text) else values[p.value] if isinstance(p, Value) else p
        for p in pieces
    ]
    return [piece for piece in filled if piece]


def _around(words: str, insert: Insert | None, values: Values = MappingProxyType({})) -> Inside:
    middle: Inside = [words] if words else []
    if insert is None:
        return middle
    return [*_filled(insert.before, values), *middle, *_filled(insert.after)]


def _answer(
    message: CheckedMessage, spec: TemplateSpec, values: Iterator[Values], *, plain: bool
) -> Inside:
    """What the assistant says: reasoning, words, calls. `plain`: the opening leads to the words."""
    inside = _around(message.reasoning, spec.reasoning) if message.reasoning else []
    preamble = spec.preamble if message.calls else None
    if message.text or not message.calls:
        around = None if plain else preamble or spec.roles["assistant"].content
        inside += _around(message.text or "", around)
    preceded = bool(message.text) and not preamble
    for call in message.calls:
        assert spec.tool_call is not None
        inside += _filled(spec.tool_call.between) if preceded else []
        inside += _call(call, spec, values)
        preceded = True
    return inside


def _call(call: str, spec: TemplateSpec, values: Iterator[Values]) -> Inside:
    assert spec.tool_call is not None
    needed = _values_in(spec.tool_call)
    filled = next(values) if needed else {}
    arguments = _name_and_arguments(call)[1]
    if spec.argument is None:
        return _around(arguments if "name" in needed else call, spec.tool_call, filled)
    inside = _filled(spec.tool_call.before, filled)
    try:
        pairs = [
            (key, one if isinstance(one, str) else json.dumps(one, ensure_ascii=False))
            for key, one in _DECODER.decode(arguments).items()
        ]
    except RecursionError:
        raise Dropped("bad_tool_call") from None
    for key, text in pairs:
        if not has_bytes(key) or not has_bytes(text):  # escaped in the JSON
            raise Dropped("invalid_unicode")
        inside += _around(text, spec.argument, {"key": key})
    return [*inside, *_filled(spec.tool_call.after)]


def _name_and_arguments(call: str) -> tuple[str, str]:
    """Of a call as `check_messages` writes it: {"name": ..., "arguments": ...}."""
    name, stop = _DECODER.raw_decode(call, len('{"name": '))
    return name, call[stop + len(', "arguments": ') : -1]


_DECODER = json.JSONDecoder()


def _words(
    group: Sequence[CheckedMessage],
    tools: Sequence[str],
    spec: TemplateSpec,
    values: Iterator[Values],
) -> Inside:
    """What another role says, and tools."""
    role = spec.roles[ROLES[group[0].role]]
    inside: Inside = []
    for number, message in enumerate(group):
        words = message.text or ""
        if number and role.content:
            inside += _filled(role.content.between)
        if words or not tools:
            words = json.dumps(words, ensure_ascii=False) if role.json else words
            named = message.role == TOOL and _values_in(role.content)
            inside += _around(words, role.content, next(values) if named else {})
    if tools:
        assert spec.tools is not None
        written = _around(spec.tools_separator.join(tools), spec.tools)
        between = _filled(spec.tools.between) if group[0].text else []
        parts = (written, between, inside) if spec.tools_first else (inside, between, written)
        inside = [piece for part in parts for piece in part]
    return inside


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


def _is_plain(role: str, spec: TemplateSpec) -> bool:
    """Whether a text of this role is one of `PLAIN_FORMS`, whatever stands beside it."""
    if role == "system" and system_must_be_first(spec):
        return False
    one = spec.roles[role]
    return role == "assistant" or (one.content is None and not one.json)


def collect_turns(
    conversations: Sequence[Conversation], spec: TemplateSpec, policy: TrainPolicy
) -> Turns:
    """The turns of all conversations that the template can write, and reasons for the others."""
    # Usual spellings of the roles that have turns of their own.
    codes = {
        spelling: ROLES.index(role)
        for name, role in ROLE_NAMES.items()
        if role in spec.roles and _is_plain(role, spec)
        for spelling in (name, name.title(), name.upper())
    }
    forms = list(PLAIN_FORMS)
    numbers = {form: number for number, form in enumerate(forms)}
    texts: list[str] = []
    roles, stops, kept = bytearray(), [0], list[int]()  # stops: of the turns of each conversation
    dropped, flags = list[tuple[int, str]](), list[tuple[int, bool]]()
    continued: list[int] = []  # texts that do not start a turn
    other_forms: list[tuple[int, int]] = []  # (text, form) where the form is not the plain one
    trim = spec.trim
    for position, conversation in enumerate(conversations):
        texts_before = len(texts)
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
            if len(roles) > stops[-1]:
                kept.append(position)
                stops.append(len(roles))
                continue
        del texts[texts_before:], roles[stops[-1] :]
        try:
            laid = lay_out(conversation, spec, policy)
        except Dropped as why:
            dropped.append((position, str(why)))
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
        stops.append(len(roles))
    bounds = np.array(stops)
    turn_roles = np.frombuffer(bytes(roles), np.uint8)
    first_texts = np.delete(np.arange(len(texts)), continued)
    form_of: IntArray = np.zeros(len(texts), np.intp)
    form_of[first_texts] = turn_roles
    form_of[first_texts[bounds[:-1]]] += FIRST
    if spec.shared_ends:
        after_answer = np.append(False, turn_roles[:-1] == ASSISTANT)
        after_answer[bounds[:-1]] = False
        opened = [number for number, role in enumerate(ROLES) if shared_opener(role, spec)]
        form_of[first_texts[after_answer & np.isin(turn_roles, opened)]] += OPENED
    at, found = np.array(other_forms, np.intp).reshape(-1, 2).T
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
