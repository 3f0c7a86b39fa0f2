"""The real chats named by SHARDMILL_REAL_DATA: the counts its README gives."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from niels_gpt.data import iter_oasst1_sft
from shardmill.records import Conversation
from shardmill.sources import BatchLimits, iter_jsonl_rows, open_chats
from shardmill.testing.sources import (
    assert_conversation_ledger_balances,
    assert_conversations_resume_exactly,
)

ROOT = Path(os.environ.get("SHARDMILL_REAL_DATA", "."))
pytestmark = pytest.mark.skipif(
    "SHARDMILL_REAL_DATA" not in os.environ, reason="SHARDMILL_REAL_DATA is not set"
)


def test_glaive_has_300_chats_with_tools_and_calls() -> None:
    path = ROOT / "chats/glaive_toolcall.sharegpt.jsonl"
    found = assert_conversation_ledger_balances(open_chats(path))
    assert (len(found.conversations), found.drops) == (300, [])
    messages = [message for chat in found.conversations for message in chat.messages]
    roles = Counter(message["role"] for message in messages)
    assert roles == {"user": 746, "assistant": 746 + 211, "tool": 211}
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert len(calls) == 211
    assert all(set(call["function"]) == {"name", "arguments"} for call in calls)
    assert sum(chat.tools is None for chat in found.conversations) == 109
    limits = BatchLimits(num_bytes=2**16)
    again = assert_conversations_resume_exactly(lambda: open_chats(path, limits=limits))
    assert again == found


def test_sgd_has_2098_chats_exactly_as_written() -> None:
    path = ROOT / "chats/sgd_dev.messages.jsonl"
    found = assert_conversation_ledger_balances(open_chats(path))
    rows = list(iter_jsonl_rows(path))
    assert len(rows) == 2_098
    assert found.conversations == [
        Conversation(messages=row["messages"], id=row["dialogue_id"]) for row in rows
    ]


def test_parts_of_reasoning_text_and_calls_become_messages() -> None:
    path = ROOT / "chats/reason_tool_use_demo_50.jsonl"
    found = assert_conversation_ledger_balances(open_chats(path))
    assert (len(found.conversations), found.drops) == (50, [])
    messages = [message for chat in found.conversations for message in chat.messages]
    turns = [turn for row in iter_jsonl_rows(path) for turn in row["messages"]]
    assert Counter(message["role"] for message in messages) == {
        "system": 50,
        "user": 70,
        "assistant": 112,
        "tool": 42,
    }
    kinds = {"reasoning": "reasoning_content", "text": "content", "tool_call": "tool_calls"}
    for message, turn in zip(messages, turns, strict=True):
        parts: dict[str, list[str]] = {kind: [] for kind in kinds}
        for part in turn["content"]:
            parts[part["type"]].append(part["value"])
        assert message.get("reasoning_content", "") == "".join(parts["reasoning"])
        assert (message["content"] or "") == "".join(parts["text"])
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert calls == [json.loads(value) for value in parts["tool_call"]]


def test_a_list_of_1000_rows_gives_their_instructions_and_outputs() -> None:
    path = ROOT / "chats/alpaca_zh_demo.json"
    found = assert_conversation_ledger_balances(open_chats(path))
    rows = json.loads(path.read_text())
    assert [chat.messages[-1]["content"] for chat in found.conversations] == [
        row["output"].replace("\r\n", "\n") for row in rows
    ]
    assert (len(found.conversations), found.drops) == (1_000, [])


def test_dolly_has_15011_chats() -> None:
    source = open_chats(ROOT / "dolly")
    assert source.describe()["shape"] == "prompt-response"
    found = assert_conversation_ledger_balances(source)
    assert (len(found.conversations), found.drops) == (15_011, [])
    for chat, row in zip(found.conversations, iter_jsonl_rows(ROOT / "dolly"), strict=True):
        question, context = row["instruction"], row["context"]
        wanted = f"{question}\n\n{context}" if context.strip() else question
        assert [message["content"] for message in chat.messages] == [
            wanted.replace("\r\n", "\n"),
            row["response"].replace("\r\n", "\n"),
        ]


def test_oasst_threads_are_those_of_the_recipe_in_its_order() -> None:
    source = open_chats(ROOT / "oasst", lang="en", skip_deleted=True)
    found = assert_conversation_ledger_balances(source)
    recipe = list(iter_oasst1_sft(ROOT / "oasst", max_messages=10**6))
    assert len(recipe) == 979
    assert [(chat.id, chat.group, list(chat.messages)) for chat in found.conversations] == [
        (chat.id, chat.group, list(chat)) for chat in recipe
    ]
    assert Counter(drop.reason for drop in found.drops) == {"deleted": 40, "missing_parent": 3}
    limits = BatchLimits(num_documents=97)
    again = assert_conversations_resume_exactly(
        lambda: open_chats(ROOT / "oasst", lang="en", skip_deleted=True, limits=limits)
    )
    assert again == found
