"""Real chats: everything has a place, and what is trained is what the assistant said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardmill.chat import TrainPolicy, bind_template, known_template
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from tests.chat.oracle import said

DATA = os.environ.get("SHARDMILL_REAL_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DATA is None, reason="SHARDMILL_REAL_DATA is not set"),
]


def rows(name: str) -> list[dict[str, Any]]:
    assert DATA is not None
    return [json.loads(line) for line in (Path(DATA) / name).read_text().splitlines()]


def dolly() -> list[Conversation]:
    return [
        Conversation(
            messages=[
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["response"]},
            ]
        )
        for row in rows("dolly/databricks-dolly-15k.jsonl")
    ]


def sgd() -> list[Conversation]:
    return [Conversation(messages=row["messages"]) for row in rows("chats/sgd_dev.messages.jsonl")]


def glaive() -> list[Conversation]:
    """Calls and tools as JSON; roles under their usual names, for the oracle."""
    names = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}
    found = []
    for row in rows("chats/glaive_toolcall.sharegpt.jsonl"):
        messages: list[dict[str, Any]] = []
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            else:
                messages.append({"role": names[turn["from"]], "content": turn["value"]})
        found.append(Conversation(messages=messages, tools=json.loads(row["tools"])))
    return found


@pytest.mark.parametrize("name", ["four-marker", "chatml", "llama-3", "gemma"])
@pytest.mark.parametrize("read", [dolly, sgd, glaive])
def test_what_is_trained_is_what_the_assistant_said(
    name: str, read: Any, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    conversations = read()
    tokenizer = chat_tokenizers["byte"]
    template = bind_template(known_template(name), tokenizer)
    rendered = template.render(conversations, TrainPolicy())
    if read is glaive and name != "chatml":
        assert len(rendered.kept) + len(rendered.drops) == len(conversations)
        assert {drop.reason for drop in rendered.drops} <= {
            "no_place_for_tools",
            "no_place_for_tool_calls",
            "no_place_for_tool_results",
        }
        assert len(rendered.drops) > 0
    else:
        assert rendered.drops == ()
    offsets = rendered.examples.ids.offsets
    for n, position in enumerate(rendered.kept.tolist()):
        mask = rendered.examples.mask[offsets[n] : offsets[n + 1]]
        spoken = tokenizer.decode(rendered.examples.ids[n][mask])
        assert spoken == said(name, conversations[position])
