"""The conversations on which a loss mask is proved; the same on every machine.

Texts of different turns of a conversation share no word, so a turn in the wrong position is
noticed. A template must keep the `needed` ones; it may decline the others with a reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.records import Conversation

BATTERY_VERSION = 1

_EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44b\U0001f3fd 1\ufe0f\u20e3"
_MARKS = "e\u0301 a\u0300\u0301\u0302 \u1e14\u0300 \ud55c\uae00 \u1112\u1161\u11ab"
_CJK = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u4e2d\u6587\uff0c\u6807\u70b9"
_RTL = "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eback\u202c"
_MAX_LITERALS = 12

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_quarry",
        "description": "Where a stone comes from",
        "parameters": {"type": "object", "properties": {"stone": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryItem:
    """One conversation of the battery."""

    name: str
    conversation: Conversation
    needed: bool = False  # a template that drops it is refused


def battery(literals: Sequence[str] = ()) -> tuple[BatteryItem, ...]:
    """All items. `literals`: the markers of a template as text."""
    others = {**_blanks(), **_shapes(), **_tools(), **_injected(literals)}
    return (
        *(BatteryItem(name=n, conversation=chat, needed=True) for n, chat in _needed().items()),
        *(BatteryItem(name=n, conversation=chat) for n, chat in others.items()),
    )


def battery_sha256(items: Sequence[BatteryItem]) -> str:
    chats = [[item.name, item.needed, item.conversation.messages] for item in items]
    tools = [item.conversation.tools for item in items]
    return hashlib.sha256(json.dumps([chats, tools], sort_keys=True).encode()).hexdigest()


def plain_conversation() -> Conversation:
    """The simplest one: a template's opening and end are learnt from it."""
    return _chat("what is a mill", "a house that grinds")


def padded_conversation() -> Conversation:
    """Blanks around the words: whether a template trims is learnt from it."""
    return _chat("  so ", "  wind and water  ")


def _needed() -> dict[str, Conversation]:
    long = " ".join(f"word{number}" for number in range(150))
    turns = ("first stone", "one, two", "second stone", "three, four", "third stone", "five!")
    flagged = [dict(message) for message in _chat("alpha", "gamma", "delta", "beta").messages]
    flagged[1]["train"], flagged[3]["train"] = False, True
    return {
        "plain": plain_conversation(),
        "several turns": _chat(*turns),
        "emoji": _chat(_EMOJI, f"yes {_EMOJI}"),
        "combining marks": _chat(_MARKS, f"so {_MARKS}"),
        "wide and right to left": _chat(f"{_CJK} {_RTL}", f"{_RTL} {_CJK}"),
        "one letter": _chat("q", "r"),
        "long": _chat(long, long.replace("word", "term")),
        "code": _chat("show", "def f(x):\n    return x\n\n\nf(1)"),
        "flags": Conversation(messages=flagged, id="flags"),
    }


def _blanks() -> dict[str, Conversation]:
    """Contents that begin or end with blanks, or are only blanks."""
    return {
        "blanks around": padded_conversation(),
        "empty answer": _chat("say nothing", ""),
        "empty question": _chat("", "who is there"),
        "blank answer": _chat("say little", "   "),
        "newlines behind": _chat("stop late\n\n", "so be it\n\n", "on"),
        "newlines before": _chat("\n\nbegin late", "\nas you wish"),
        "tabs": _chat("\ttabs\t", "\twhy not\t"),
    }


def _shapes() -> dict[str, Conversation]:
    """Roles in every order people write them."""
    flag = {"role": "user", "content": "trained question", "train": True}
    answer = {"role": "assistant", "content": "its reply"}
    return {
        "system": _chat("hello", "good day", system="be brief"),
        "system, turns": _chat("u", "v", "w", "x", system="be kind"),
        "empty system": _chat("ask", "tell", system=""),
        "assistant first": _talk("assistant: welcome", "user: thanks"),
        "assistant first, on": _talk("assistant: in", "user: ok", "assistant: out"),
        "two users": _talk("user: north", "user: south", "assistant: east"),
        "two assistants": _talk("user: red", "assistant: green", "assistant: blue"),
        "open end": _talk("user: tick", "assistant: tock", "user: and"),
        "trained question": Conversation(messages=[flag, answer], id="flag"),
    }


def _tools() -> dict[str, Conversation]:
    call = {"name": "find_quarry", "arguments": {"stone": "marble"}}
    calling = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
    }
    asked = {"role": "user", "content": "where is marble from"}
    result = {
        "role": "tool",
        "content": "Carrara",
        "name": "find_quarry",
        "tool_call_id": "call00001",
    }
    other = {**result, "content": "Paros"}
    told = {"role": "assistant", "content": "out of Italy"}
    spoken = {**calling, "content": "let me look"}
    thought = {"role": "assistant", "content": "seven", "reasoning_content": "three plus four"}
    found: dict[str, list[dict[str, Any]]] = {
        "tool call": [asked, calling],
        "tool call with words": [asked, spoken],
        "tool result": [asked, calling, result, told],
        "two tool results": [asked, calling, result, other, told],
        "reasoning": [{"role": "user", "content": "add up"}, thought],
        "reasoning, turns": [
            {"role": "user", "content": "add up"},
            thought,
            {"role": "user", "content": "once more"},
            {"role": "assistant", "content": "eight", "reasoning_content": "one beyond"},
        ],
    }
    items = {name: Conversation(messages=chat, id=name) for name, chat in found.items()}
    chat = found["tool result"]
    items["tools"] = Conversation(messages=chat, tools=[_TOOL], id="tools")
    return items


def _injected(literals: Sequence[str]) -> dict[str, Conversation]:
    """The literal of every marker inside text, where it must stay text."""
    found = {}
    for literal in sorted(set(literals))[:_MAX_LITERALS]:
        if literal.strip():
            found[f"{literal} asked"] = _chat(f"see {literal} there", "indeed")
            found[f"{literal} answered"] = _chat("well", f"a{literal}b {literal}")
    every = "".join(sorted(set(literals)))
    if every.strip():
        found["all markers"] = _chat(every, f"right {every}", "more")
    return found


def _chat(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn; a question at the end gets an answer."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = (
        [] if system is None else [{"role": "system", "content": system}]
    )
    messages += [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    if messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": "fine"})
    return Conversation(messages=messages, id=texts[0][:40])


def _talk(*turns: str) -> Conversation:
    parts = [turn.partition(": ") for turn in turns]
    messages = [{"role": role, "content": text} for role, _, text in parts]
    return Conversation(messages=messages, id=turns[0])
