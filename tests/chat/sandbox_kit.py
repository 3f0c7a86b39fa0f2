"""Conversations and hostile templates for the tests of the template sandbox."""

from __future__ import annotations

import json
from typing import Any

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & later in a 'city'.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name", "default": "Z\u00fcrich"},
                "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
                "days": {"type": "array", "items": {"type": "integer"}},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}},
                    "required": ["lat"],
                },
                "any": {"oneOf": [{"type": "string"}, {"type": "number", "default": 1.5}]},
            },
            "required": ["city"],
        },
        "return": {"type": "string", "description": "Words"},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "No arguments.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def said(*turns: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Messages of role and content; `more` goes into the last one."""
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    messages[-1].update(more)
    return messages


def _call(arguments: Any, name: str = "get_weather", number: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def _calling(arguments: Any) -> list[dict[str, Any]]:
    return [
        *said(("system", "Be exact."), ("user", "Weather?")),
        {"role": "assistant", "content": "Let me look.", "tool_calls": [_call(arguments)]},
        {"role": "tool", "content": '{"sky": "<grey>"}', "tool_call_id": "call00001"},
        *said(("assistant", "Grey."), ("user", "Thanks"), ("assistant", "Sure.")),
    ]


PARTS = [{"type": "text", "text": " Look "}, {"type": "text", "text": "here.\n"}]
CHATS: dict[str, Chat] = {
    "question": (said(("user", "2 + 2?")), None),
    "answered": (said(("user", "2 + 2?"), ("assistant", "4")), None),
    "system": (said(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello <b>&</b>")), None),
    "turns": (said(*[("user", " a\n"), ("assistant", "b ")] * 4, ("user", "c")), None),
    "tools": (said(("system", "S"), ("user", "Weather?")), [WEATHER, CLOCK]),
    "tools, no system": (said(("user", "Weather?"), ("assistant", "No.")), [WEATHER]),
    "a call": (_calling({"city": "Z\u00fcrich", "days": [1, 2], "deep": {"a": None}}), [WEATHER]),
    "a call in text": (_calling(json.dumps({"city": "Bern"})), [WEATHER, CLOCK]),
    "two calls": (
        [
            *said(("user", "Both?")),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [_call({"city": "Bern"}), _call({}, "clock", "call00002")],
            },
            {"role": "tool", "content": "grey", "tool_call_id": "call00001", "name": "get_weather"},
            {"role": "tool", "content": "12:00", "tool_call_id": "call00002", "name": "clock"},
        ],
        [WEATHER, CLOCK],
    ),
    "reasoning": (
        said(("user", "Why?"), ("assistant", "So."), ("user", "And?"))
        + said(("assistant", "Thus."), reasoning_content="First this,\nthen that."),
        None,
    ),
    "thinking": (said(("user", "Why?"), ("assistant", "So."), thinking="Hm."), None),
    "think tags": (
        said(("user", "Why?"), ("assistant", "<think>\nHm.\n</think>\n\nSo."), ("user", "Ok")),
        None,
    ),
    "parts": (said(("system", PARTS), ("user", PARTS), ("assistant", PARTS)), None),
    "empty": (said(("system", ""), ("user", ""), ("assistant", "")), None),
    "no content": (said(("user", "Hi"), ("assistant", None)), None),
    "other roles": (said(("developer", "D"), ("user", "Hi"), ("narrator", "N")), None),
    "two of one": (said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")), None),
    "nothing": ([], None),
}
