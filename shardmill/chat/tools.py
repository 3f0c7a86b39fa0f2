"""Tool calls and tool definitions as text.

In: what a message or a conversation carries.  Out: one JSON text each, or None when it is no tool.
Promise: a call is {"name": ..., "arguments": ...} on both usual shapes (bare, or inside
"function"); arguments that came as JSON text stay letter for letter; nothing is left out but ids
and types, which no template of tokens writes.
Not here: where the text stands in a turn (spec.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard


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
