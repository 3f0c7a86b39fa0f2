"""Is this a conversation? If not, why not: one reason code, for the ledger.

In: whatever a caller or a file holds.  Out: checked messages, or one of `REASONS`.
Promise: what passes is well formed: known roles, text that has bytes, flags that are flags.
Not here: repair. Nothing is trimmed, merged or invented. Whether a template has a place for it
(turns.py), and which turns are trained (policy.py).

Tool calls and tool definitions as text.

In: what a message or a conversation carries.  Out: one JSON text each, or None when it is no tool.
Promise: a call is {"name": ..., "arguments": ...} on both usual shapes (bare, or inside
"function"); arguments that came as JSON text stay letter for letter; nothing is left out but ids
and types, which no template of tokens writes.
Not here: where the text stands in a turn (spec.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from shardmill.chat.policy import ASSISTANT, TrainPolicy, normal_role, trained_turns
from shardmill.records import ROLES, OffsetArray, Ragged


def is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a value is a JSON object, of whatever class; quick for a dict."""
    return type(value) is dict or isinstance(value, Mapping)


def call_texts(calls: object) -> tuple[str, ...] | None:
    """One JSON text per call, in order; None when a call is not one."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        return None
    texts = tuple(_call_text(call) for call in calls)
    return None if None in texts else texts  # type: ignore[return-value]


def tool_texts(tools: object) -> tuple[str, ...] | None:
    """One JSON text per definition, in order; None when one is no JSON object."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        return None
    texts = tuple(_json(tool) if is_object(tool) else None for tool in tools)
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
        written = arguments.strip() if _is_object(arguments) else None
    else:
        written = _json(arguments) if is_object(arguments) else None
    return None if written is None else f'{{"name": {_json(name)}, "arguments": {written}}}'


def _json(value: object) -> str | None:
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _mapping(value: object) -> dict[object, object]:
    """Mappings that are no dicts, as some readers give them."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _is_object(text: str) -> bool:
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Made once: both are asked for every call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_mapping)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


REASONS = {
    "not_a_list": "the conversation is not a list of messages",
    "no_messages": "the list is empty",
    "bad_message": "a message is not an object with role and content",
    "unknown_role": "a role is none of system, user, assistant, tool, and no other name for one",
    "content_not_text": "a content is neither text nor null beside tool calls",
    "content_part_not_text": "a part of a content is not text (an image, audio, ...)",
    "reasoning_not_text": "a reasoning_content is not a string",
    "not_the_assistants": "tool calls or reasoning in a message that is not the assistant's",
    "bad_tool_call": "a tool call has no name, or arguments that are not a JSON object",
    "bad_tools": "the tools are not a list of JSON objects",
    "unread_key": "a message has a key that no template writes: function_call (use tool_calls), "
    "reasoning or thinking (use reasoning_content), a weight that is not 1 (use train)",
    "bad_train_flag": 'a "train" is neither true nor false',
    "invalid_unicode": "a text holds a lone surrogate, which has no bytes",
    "no_assistant": "no message is the assistant's, so nothing could be trained",
    "nothing_trained": "the policy and the train flags leave no token to train",
    "special_in_text": "the tokenizer made a marker of the template out of text",
    "no_place_for_system": "the template has no place for a system message",
    "system_not_first": "the template folds a system message into the user turn behind it, so it "
    "must come first and a user must follow",
    "mixed_train": "a system message and the user turn it is folded into, one trained and one not",
    "no_place_for_tool_results": "the template has no tool turns",
    "no_place_for_tool_calls": "the template has no place for tool calls",
    "no_place_for_tools": "the template has no place for tool definitions",
    "no_place_for_reasoning": "the template has no place for reasoning",
}
"""Reason code to sentence."""


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """One message, sound."""

    role: int  # a place in ROLES
    text: str | None  # the content, its parts joined; None only beside calls
    reasoning: str = ""  # what an assistant thought first
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


def reason_to_drop(messages: object, policy: TrainPolicy | None = None) -> str | None:
    """The first thing wrong with the messages of a conversation, or None.

    A template may have more reasons: no place for tools, say, or no token left to train.
    """
    checked = check_messages(messages)
    if isinstance(checked, str):
        return checked
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(place, m.train) for place, m in enumerate(checked) if m.train is not None]
    bounds = np.array([0, len(roles)])
    trained = trained_turns(roles, bounds, flags, policy or TrainPolicy())
    if trained.any():
        return None
    return "nothing_trained" if (roles == ASSISTANT).any() else "no_assistant"


def has_bytes(text: str) -> bool:
    """Whether a text can be written in UTF-8: a lone surrogate cannot."""
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
    """Content, reasoning and calls as texts, or the reason why not."""
    if isinstance(content, (list, tuple)):
        content = _join_parts(content)
        if content is None:
            return "content_part_not_text"
    if not isinstance(content, str) and not (content is None and calls):
        return "content_not_text"
    if reasoning is not None and not isinstance(reasoning, str):
        return "reasoning_not_text"
    written = call_texts(calls) if calls else ()
    if written is None:
        return "bad_tool_call"
    if not all(map(has_bytes, (content or "", reasoning or "", *written))):
        return "invalid_unicode"
    return content, reasoning or "", written


def _join_parts(parts: Sequence[object]) -> str | None:
    """The text of a content given as parts; None when one is not text."""
    texts = []
    for part in parts:
        if not is_object(part) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def special_in_text(texts: Ragged, special_ids: Iterable[int]) -> OffsetArray:
    """The numbers of the texts whose encoding holds a special id, ascending.

    A sound tokenizer never does that; a caller's own may. Such text would act as structure.
    """
    special = sorted(special_ids)
    if not special:
        return np.empty(0, np.int64)
    values = texts.values
    # Markers lie close together in most vocabularies, and hardly any text between them.
    between = (values >= special[0]) & (values <= special[-1])
    if not between.any():
        return np.empty(0, np.int64)
    near = np.flatnonzero(between)
    places = near[np.isin(values[near], special)]
    return np.unique(np.searchsorted(texts.offsets, places, side="right") - 1)
