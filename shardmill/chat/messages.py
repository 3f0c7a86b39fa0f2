"""Check conversations: well-formed messages, or one reason code.

Nothing is trimmed, merged or invented. What passes has known roles, text that can be written in
UTF-8, and boolean train flags. Tool calls and tool definitions become JSON text: a call is
{"name": ..., "arguments": ...} for both usual shapes (bare, or inside "function"), and arguments
that came as JSON text stay unchanged. Ids and types of calls are left out, since no template made
of tokens writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from shardmill.chat.policy import TrainPolicy, normal_role, trained_turns
from shardmill.records import ROLES, BoolArray, OffsetArray, Ragged

REASONS = {
    "not_a_list": "the conversation is not a list of messages",
    "no_messages": "the list is empty",
    "bad_message": "a message is not an object with role and content",
    "unknown_role": "a role is not system, user, assistant or tool, nor a known name for one",
    "content_not_text": "a content is neither text nor null beside tool calls",
    "content_part_not_text": "a part of a content is not text (an image, audio, ...)",
    "reasoning_not_text": "a reasoning_content is not a string",
    "not_the_assistants": "tool calls or reasoning in a message that is not the assistant's",
    "bad_tool_call": "a tool call has no name, or arguments that are not a JSON object",
    "bad_tools": "the tools are not a list of JSON objects",
    "unread_key": "a message has a key that no template writes: function_call (use tool_calls), "
    "reasoning or thinking (use reasoning_content), a weight that is not 1 (use train)",
    "bad_train_flag": 'a "train" is neither true nor false',
    "invalid_unicode": "a text holds a lone surrogate, which UTF-8 cannot write",
    "no_assistant": "no message is the assistant's, so nothing could be trained",
    "nothing_trained": "the policy and the train flags leave no token to train",
    "special_in_text": "the tokenizer turned text into a marker of the template",
    "no_place_for_system": "the template has no system messages",
    "system_not_first": "the template puts a system message into the user turn after it, so it "
    "must come first and a user must follow",
    "mixed_train": "messages that the template writes as one turn, one trained and one not",
    "no_place_for_tool_results": "the template has no tool turns",
    "no_place_for_tool_calls": "the template has no tool calls",
    "no_place_for_tools": "the template has no tool definitions",
    "no_place_for_reasoning": "the template has no reasoning",
    "template_refuses": "the template raised an error on this conversation, or wrote far too much",
    "prefix_changes": "the template writes earlier turns differently when later ones follow",
    "prompt_changes": "the answer does not follow the template's own generation prompt",
    "tokens_merge": "one token spans the border of two turns, or of a prompt and its answer",
    "content_changed": "the template wrote something other than the message says",
    "mask_disagrees": "the generation blocks do not hold all of the assistant's words",
    "trains_others": "the generation blocks hold more than the assistant's words and their end",
    "no_end": "the turn has no special token at its end, so its end cannot be left untrained",
}
"""Reason code -> sentence: what is wrong with the messages, what no template or this one writes,
and what a Jinja template did with them."""


def is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a value is a JSON object of any class; fast for a dict."""
    return type(value) is dict or isinstance(value, Mapping)


def check_tools(tools: object) -> tuple[str, ...] | str:
    """One JSON text per definition, in order, or a reason code; None means no tools."""
    texts = _texts(tools or (), lambda tool: _json(tool) if is_object(tool) else None)
    if texts is None:
        return "bad_tools"
    return texts if all(map(has_bytes, texts)) else "invalid_unicode"


def _texts(values: object, write: Callable[[object], str | None]) -> tuple[str, ...] | None:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return None
    texts = tuple(map(write, values))
    return None if None in texts else texts  # type: ignore[return-value]


def _call_text(call: object) -> str | None:
    if not is_object(call):
        return None
    inner = call.get("function", call)
    if not is_object(inner):
        return None
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        written = arguments.strip() if _is_json_object(arguments) else None
    else:
        written = _json(arguments) if is_object(arguments) else None
    return None if written is None else f'{{"name": {_json(name)}, "arguments": {written}}}'


def _json(value: object) -> str | None:
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _as_dict(value: object) -> dict[object, object]:
    """For mappings that are not dicts, as some readers give them."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Made once: they are used for every call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_as_dict)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """One well-formed message."""

    role: int  # a position in ROLES
    text: str | None  # the content, its parts joined; None only if there are calls
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # JSON texts
    train: bool | None = None  # its own flag; None leaves it to the policy


def check_messages(messages: object) -> list[CheckedMessage] | str:
    """The messages of a conversation, or the first thing wrong with it."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        return "not_a_list"
    if not messages:
        return "no_messages"
    checked = []
    for message in messages:
        found = check_message(message)
        if isinstance(found, str):
            return found
        checked.append(found)
    return checked


def trained_messages(checked: Sequence[CheckedMessage], policy: TrainPolicy) -> BoolArray:
    """Which messages of one conversation are trained, by the policy and their own flags."""
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(at, m.train) for at, m in enumerate(checked) if m.train is not None]
    return trained_turns(roles, np.array([0, len(roles)]), flags, policy)


def has_bytes(text: str) -> bool:
    """Whether a text can be written in UTF-8; a lone surrogate cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_UNREAD = ("function_call", "reasoning", "thinking")


def check_message(message: object) -> CheckedMessage | str:
    """One message, or the first thing wrong with it."""
    if not is_object(message) or "role" not in message:
        return "bad_message"
    calls = message.get("tool_calls")
    if any(map(message.get, _UNREAD)) or message.get("weight", 1) not in (1, None):
        return "unread_key"
    if "content" not in message and not calls:
        return "bad_message"
    role = normal_role(message["role"])
    if role is None:
        return "unknown_role"
    reasoning = message.get("reasoning_content")
    texts = _check_texts(message.get("content"), reasoning, calls)
    if isinstance(texts, str):
        return texts
    if (calls or reasoning) and role != "assistant":
        return "not_the_assistants"
    train = message.get("train")
    if "train" in message and not isinstance(train, bool):
        return "bad_train_flag"
    flag = train if isinstance(train, bool) else None
    return CheckedMessage(ROLES.index(role), *texts, train=flag)


def _check_texts(
    content: object, reasoning: object, calls: object
) -> tuple[str | None, str, tuple[str, ...]] | str:
    """Content, reasoning and calls as text, or a reason code."""
    if isinstance(content, (list, tuple)):
        content = _join_parts(content)
        if content is None:
            return "content_part_not_text"
    if not isinstance(content, str) and not (content is None and calls):
        return "content_not_text"
    if reasoning is not None and not isinstance(reasoning, str):
        return "reasoning_not_text"
    written = _texts(calls, _call_text) if calls else ()
    if written is None:
        return "bad_tool_call"
    if not all(map(has_bytes, (content or "", reasoning or "", *written))):
        return "invalid_unicode"
    return content, reasoning or "", written


def _join_parts(parts: Sequence[object]) -> str | None:
    """The text of a content given as parts; None if a part is not text."""
    texts = []
    for part in parts:
        text = part.get("text") if is_object(part) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def special_in_text(texts: Ragged, special_ids: Iterable[int]) -> OffsetArray:
    """Which texts encode to a special id, ascending.

    No tokenizer of this library does that, but a user's own may. Such text would act as structure.
    """
    special = sorted(special_ids)
    if not special:
        return np.empty(0, np.int64)
    values = texts.values
    # Markers are close together in most vocabularies, with hardly any text ids between them.
    between = (values >= special[0]) & (values <= special[-1])
    if not between.any():
        return np.empty(0, np.int64)
    near = np.flatnonzero(between)
    found = near[np.isin(values[near], special)]
    return np.unique(np.searchsorted(texts.offsets, found, side="right") - 1)
