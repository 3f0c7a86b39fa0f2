"""The conversations on which a loss mask is proved.

In: the literals of a template's markers.  Out: the same conversations on every machine, with their
sha256.
Promise: texts of different turns of a conversation share no word, so that a turn in the wrong place
is seen. A template must keep the `needed` ones; the others it may decline with a reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.records import Conversation

BATTERY_VERSION = 1

PLAIN = ("what is a mill", "a house that grinds")
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
class Item:
    """One conversation of the battery."""

    name: str
    conversation: Conversation
    needed: bool = False  # a template that drops it is refused


def battery(literals: Sequence[str] = ()) -> tuple[Item, ...]:
    """All items. `literals`: what a template's markers look like as text."""
    return (*_needed(), *_borders(), *_shapes(), *_tools(), *_injected(literals))


def battery_sha256(items: Sequence[Item]) -> str:
    told = [[item.name, item.needed, item.conversation.messages] for item in items]
    tools = [item.conversation.tools for item in items]
    return hashlib.sha256(json.dumps([told, tools], sort_keys=True).encode()).hexdigest()


def plain_item() -> Item:
    """The simplest of all: what a template's opening and end are learnt from."""
    return Item(name="plain", conversation=_chat(*PLAIN), needed=True)


def padded_item() -> Item:
    """Blanks around the words: whether a template trims is learnt from it."""
    return Item(name="blanks around", conversation=_chat("  so ", "  wind and water  "))


def _needed() -> list[Item]:
    long = " ".join(f"word{number}" for number in range(150))
    turns = ("first stone", "one, two", "second stone", "three, four", "third stone", "five!")
    flagged = [dict(message) for message in _chat("alpha", "gamma", "delta", "beta").messages]
    flagged[1]["train"], flagged[3]["train"] = False, True
    items = [
        plain_item(),
        Item(name="several turns", conversation=_chat(*turns)),
        Item(name="emoji", conversation=_chat(_EMOJI, f"yes {_EMOJI}")),
        Item(name="combining marks", conversation=_chat(_MARKS, f"so {_MARKS}")),
        Item(name="wide and right to left", conversation=_chat(f"{_CJK} {_RTL}", f"{_RTL} {_CJK}")),
        Item(name="one letter", conversation=_chat("q", "r")),
        Item(name="long", conversation=_chat(long, long.replace("word", "term"))),
        Item(name="code", conversation=_chat("show", "def f(x):\n    return x\n\n\nf(1)")),
        Item(name="flags", conversation=Conversation(messages=flagged, id="flags")),
    ]
    return [Item(name=i.name, conversation=i.conversation, needed=True) for i in items]


def _borders() -> list[Item]:
    """Contents that begin or end with blanks, or are nothing else."""
    return [
        padded_item(),
        Item(name="empty answer", conversation=_chat("say nothing", "")),
        Item(name="empty question", conversation=_chat("", "who is there")),
        Item(name="blank answer", conversation=_chat("say little", "   ")),
        Item(name="newlines behind", conversation=_chat("stop late\n\n", "so be it\n\n", "on")),
        Item(name="newlines before", conversation=_chat("\n\nbegin late", "\nas you wish")),
        Item(name="tabs", conversation=_chat("\ttabs\t", "\twhy not\t")),
    ]


def _shapes() -> list[Item]:
    """Roles in every order people write them."""
    flag = {"role": "user", "content": "trained question", "train": True}
    return [
        Item(name="system", conversation=_chat("hello", "good day", system="be brief")),
        Item(name="system, turns", conversation=_chat("u", "v", "w", "x", system="be kind")),
        Item(name="empty system", conversation=_chat("ask", "tell", system="")),
        Item(name="assistant first", conversation=_talk("assistant: welcome", "user: thanks")),
        Item(
            name="assistant first, on",
            conversation=_talk("assistant: in", "user: ok", "assistant: out"),
        ),
        Item(name="two users", conversation=_talk("user: north", "user: south", "assistant: east")),
        Item(
            name="two assistants",
            conversation=_talk("user: red", "assistant: green", "assistant: blue"),
        ),
        Item(name="open end", conversation=_talk("user: tick", "assistant: tock", "user: and")),
        Item(
            name="trained question",
            conversation=Conversation(
                messages=[flag, {"role": "assistant", "content": "its reply"}], id="flag"
            ),
        ),
    ]


def _tools() -> list[Item]:
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
    items = [
        Item(name=name, conversation=Conversation(messages=messages, id=name))
        for name, messages in found.items()
    ]
    offered = Conversation(messages=[asked, calling, result, told], tools=[_TOOL], id="tools")
    return [*items, Item(name="tools", conversation=offered)]


def _injected(literals: Sequence[str]) -> list[Item]:
    """Every marker's literal inside text, where it must stay text."""
    found = []
    for literal in sorted(set(literals))[:_MAX_LITERALS]:
        if not literal.strip():
            continue
        found += [
            Item(name=f"{literal} asked", conversation=_chat(f"see {literal} there", "indeed")),
            Item(name=f"{literal} answered", conversation=_chat("well", f"a{literal}b {literal}")),
        ]
    every = "".join(sorted(set(literals)))
    if every.strip():
        found.append(Item(name="all markers", conversation=_chat(every, f"right {every}", "more")))
    return found


def _chat(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn; a question left over at the end is answered."""
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
