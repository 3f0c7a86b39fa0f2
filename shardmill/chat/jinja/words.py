"""What a text template is given, and whether it wrote all of it.

In: checked messages.  Out: messages as a Jinja template wants them; harmless copies of them; what
the template wrote other than the words.
Promise: nothing a caller sends is lost between the conversation and the template; a copy is
harmless: its texts are plain letters, so whatever structure its rendering has is the template's.
Not here: rendering (engine.py), ids (turns.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardmill.chat.check import CheckedMessage
from shardmill.chat.roles import ASSISTANT
from shardmill.records import ROLES

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]*|\s*")
"""Texts a template may compare with ("function", "string"): they stay as they are."""

PLACES = {
    "tools": "no_place_for_tools",
    "calls": "no_place_for_tool_calls",
    "reasoning": "no_place_for_reasoning",
}
_LOST = "content_changed"


def as_messages(
    messages: Sequence[Mapping[str, Any]], checked: Sequence[CheckedMessage], arguments: str
) -> list[dict[str, Any]]:
    """Every key but "train", with the one name of the role and the content as one text.

    arguments: "as-given", or the form of a call's arguments that the template can write: "object"
    or "text".
    """
    found = []
    for message, sound in zip(messages, checked, strict=True):
        plain = {key: value for key, value in message.items() if key != "train"}
        plain["role"], plain["content"] = ROLES[sound.role], sound.text
        if sound.calls:
            plain["tool_calls"] = [_with_arguments(call, arguments) for call in plain["tool_calls"]]
        found.append(plain)
    return found


def _with_arguments(call: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The call in the shape transformers documents, {"type", "function": {"name", "arguments"}}."""
    function = dict(call.get("function", call))
    around = dict(call) if "function" in call else {"id": function.pop("id", None)}
    given = function["arguments"]
    if form == "object" and isinstance(given, str):
        function["arguments"] = json.loads(given)
    if form == "text" and not isinstance(given, str):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    outer = {key: value for key, value in around.items() if value is not None}
    return {"type": "function", **outer, "function": function}


def leaves(value: object) -> Iterator[str]:
    """Every text inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from leaves(part)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for part in value:
            yield from leaves(part)


def harmless(value: Any) -> Any:
    """The same shape with plain letters for texts. Blank texts and plain names stay."""
    if isinstance(value, str):
        return value if _PLAIN_NAME.fullmatch(value) else "a"
    if isinstance(value, Mapping):
        return {key: harmless(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [harmless(part) for part in value]
    return value


def lost_words(message: CheckedMessage, turn: str, answer: str | None) -> str | None:
    """Why this turn is not what was said: a reason code, or None.

    turn: what the template wrote for it.  answer: what follows the generation prompt, for an
    assistant's turn.  A template may trim a text, and nothing else.
    """
    text = message.text or ""
    if any(_name(call) not in turn for call in message.calls):
        return PLACES["calls"]
    if message.reasoning.strip() not in turn:
        return PLACES["reasoning"]
    if message.role != ASSISTANT or answer is None:
        # A tool's result may be written as a JSON string.
        quoted = json.dumps(text.strip(), ensure_ascii=False)[1:-1]
        return None if text.strip() in turn or quoted in turn else _LOST
    if message.calls or message.reasoning:
        made_up = message.text is None and answer.lstrip().startswith("None")
        return _LOST if made_up or text.strip() not in answer else None
    return None if starts_with_words(answer, text) else _LOST


def starts_with_words(written: str, text: str) -> bool:
    """Whether a text comes first, as it is or trimmed; the template may put blanks before it."""
    return written.startswith(text) or written.lstrip().startswith(text.strip())


def names_of_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tools are called, those that have a name."""
    named = (
        tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools
    )
    return [tool["name"] for tool in named if isinstance(tool.get("name"), str)]


def _name(call: str) -> str:
    return str(json.loads(call)["name"])


def arguments_form(write: Callable[[dict[str, Any]], str | None]) -> str:
    """How a template can write a call's arguments, by trying: "as-given", "object", "text", "none".

    write: a tool call to what the template writes for it, None when it refuses. Many templates turn
    arguments that are JSON text into a quoted string, others write an object the way Python does;
    both are silent.
    """
    given = '{"quarry": "marble"}'
    as_object = write(_call(json.loads(given))) or ""
    as_text = write(_call(given)) or ""
    object_ok = all(word in as_object for word in ("lookup", "quarry", "marble"))
    object_ok = object_ok and "'quarry'" not in as_object
    text_ok = "lookup" in as_text and given in as_text
    if object_ok and text_ok:
        return "as-given"
    return "object" if object_ok else "text" if text_ok else "none"


def _call(arguments: object) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}
