"""Columns and turns that several shapes of conversations share, and how each is read."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.messages import Dropped
from shardmill.sources.batches import unix_lines
from shardmill.sources.formats.jsonl import Object, decode_value, kind_of
from shardmill.sources.message_trees import Message
from shardmill.sources.source import BadRowError
from shardmill.sources.turns import calls_in, tidied

_ID_KEYS = ("id", "conversation_id", "dialogue_id", "dialog_id", "chat_id", "uuid")
_MAX_ID = 200

_SYSTEM_KEYS = ("system", "system_prompt")
_SYSTEM_ROLES = ("system", "developer")

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_SHAREGPT_ROLES |= {
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
KEPT = (
    *("name", "train", "weight", "reasoning_content", "thinking", "reasoning"),
    *("tool_calls", "function_call", "tool_call_id"),
)
"""Further keys of a ShareGPT turn that are kept, as in `messages`."""


def with_system(row: Object, messages: list[Message]) -> list[Message]:
    """The messages after those of a system column, when it has text."""
    text = one_of(row, _SYSTEM_KEYS)
    if not text:
        return messages
    if any(str(message.get("role")).lower() in _SYSTEM_ROLES for message in messages):
        raise BadRowError("two_systems", "a system column beside a system turn; keep one of them")
    return [{"role": "system", "content": text}, *messages]


def one_of(row: Object, names: Sequence[str]) -> str | None:
    """The text of the only filled column among `names`; "" or None when none is filled."""
    filled = [name for name in names if row.get(name)]
    if len(filled) > 1:
        first, second = filled[:2]
        raise BadRowError(
            "two_columns", f"{first!r} and {second!r} are both filled; keep one of them"
        )
    present = filled or [name for name in names if row.get(name) is not None]
    if not present:
        return None
    value = row[present[0]]
    if not isinstance(value, str):
        raise BadRowError("not_a_string", f"{present[0]!r} holds {kind_of(value)}, not a string")
    return unix_lines(value)


def tools_of(row: Object) -> list[Object] | None:
    """The list of tools, which may be JSON in a string; None when there are none."""
    if row.get("functions"):
        raise BadRowError("bad_tools", "'functions' would be lost; rename the column to 'tools'")
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = decode_value(tools)
        tools = [tools] if isinstance(tools, dict) else tools
        if tools is None and row["tools"].strip() != "null":
            raise BadRowError("bad_tools", f"'tools' is not JSON: {row['tools'][:60]!r}")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("bad_tools", f"'tools' holds {kind_of(tools)}, wanted a list of objects")
    return tools or None


def from_sharegpt(turn: Message, number: int) -> Message:
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str):
        raise BadRowError(
            "bad_message", f"turn {number}: 'from' is {kind_of(speaker)}, not a string"
        )
    if not is_text(value):
        raise BadRowError(
            "not_a_string", f"turn {number}: 'value' is {kind_of(value)}, not a string"
        )
    role = _SHAREGPT_ROLES.get(speaker.lower(), speaker)
    message: Message = {"role": role, "content": value}
    if len(turn) > 2:
        message |= {key: turn[key] for key in KEPT if turn.get(key) is not None}
    calls = _calls(value) if value and speaker.lower() == "function_call" else []
    if calls:
        if message.get("tool_calls"):
            raise Dropped("two_tool_calls")
        message |= {"tool_calls": calls, "content": None}
    return tidied(message)


def _calls(value: str) -> list[Object]:
    """The calls, when the text is JSON of one or a list of them; else none, and it stays text."""
    try:
        return calls_in(value)
    except Dropped:
        return []


def is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def own_id(row: Object) -> str | None:
    """The row's own id when it is a short string or a number."""
    for key in _ID_KEYS:
        found = row.get(key)
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found) if abs(found) < 10**_MAX_ID else None
        if isinstance(found, str) and 0 < len(found) <= _MAX_ID:
            return found
    return None


def group_of(row: Object) -> str | None:
    """The row's own group; of an integer its decimal digits. "" is how tables write none."""
    group = row.get("group")
    if group is None or isinstance(group, str):
        return group or None
    if isinstance(group, int) and not isinstance(group, bool):
        return str(group)
    raise BadRowError("bad_group", f"'group' holds {kind_of(group)}, wanted a string or an integer")
