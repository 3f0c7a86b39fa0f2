"""Which conversations are well-formed, and the reason code of each that is not."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import REASONS, TrainPolicy, bind_template, known_template
from shardmill.chat.policy import Dropped, check_messages, check_tools, normal_role, special_in_text
from shardmill.records import ROLES, Conversation, Ragged
from shardmill.tokenizers import ByteTokenizer
from tests.chat.conftest import MARKERS

ASKED = {"role": "user", "content": "a"}
SPOKE = {"role": "assistant", "content": "b"}
CALL = {"name": "f", "arguments": {"x": 1}}


def reason_to_drop(messages: Any, policy: TrainPolicy | None = None) -> str | None:
    """Why a template that has everything drops a conversation; None if it does not."""
    tokenizer = ByteTokenizer(byte_offset=len(MARKERS), specials=MARKERS)
    template = bind_template(known_template("chatml"), tokenizer)
    rendered = template.render([Conversation(messages=messages)], policy or TrainPolicy())
    return next((drop.reason for drop in rendered.drops), None)


def spoke(**others: Any) -> list[dict[str, Any]]:
    return [ASKED, {**SPOKE, **others}]


def calls_of(*calls: object) -> tuple[str, ...]:
    """The texts of the calls of a message."""
    checked = check_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    return checked[0].calls


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (["system", "SYSTEM", "Developer"], "system"),
        (["user", "User", "prompter", "HUMAN"], "user"),
        (["assistant", "gpt", "GPT", "bot", "model"], "assistant"),
        (["tool", "function", "Observation", "ipython"], "tool"),
        (["", "users", "system ", "function_call", None, 3, ["user"]], None),
    ],
)
def test_known_role_names_are_accepted_in_any_case(names: list[object], role: str | None) -> None:
    assert [normal_role(name) for name in names] == [role] * len(names)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED, SPOKE], None),
        ((SPOKE,), None),
        ([{"role": "Human", "content": "a"}, {"role": "gpt", "content": ""}], None),
        ([MappingProxyType(SPOKE)], None),
        ("text", "not_a_list"),
        (b"text", "not_a_list"),
        (None, "not_a_list"),
        ({"role": "user"}, "not_a_list"),
        (iter([]), "not_a_list"),
        ([], "no_messages"),
        (["hello"], "bad_message"),
        ([{"role": "user"}], "bad_message"),
        ([{"content": "a"}], "bad_message"),
        ([{"role": "moderator", "content": "a"}], "unknown_role"),
        ([{"role": ["user"], "content": "a"}], "unknown_role"),
        (spoke(content=None), "content_not_text"),
        (spoke(content=7), "content_not_text"),
        (spoke(content={"type": "text", "text": "a"}), "content_not_text"),
        (spoke(content=None, tool_calls=[]), "content_not_text"),
        (spoke(content=None, reasoning_content="hm"), "content_not_text"),
        (spoke(content=None, tool_calls=[CALL]), None),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL]}], None),
        (spoke(content=[{"type": "text", "text": "a"}]), None),
        (spoke(content=[]), None),
        (spoke(content=[{"type": "text", "value": "a"}]), None),
        (spoke(content=[{"type": "image_url"}]), "image_part"),
        (spoke(content=[{"type": "input_audio", "data": "x"}]), "audio_part"),
        (spoke(content=[{"type": "video"}]), "video_part"),
        (spoke(content=[{"type": "reasoning", "text": "hm"}]), "content_part_not_text"),
        (spoke(content=[{"type": "text", "text": None}]), "content_part_not_text"),
        (spoke(content=["a"]), "content_part_not_text"),
        (spoke(reasoning_content=3), "reasoning_not_text"),
        (spoke(reasoning_content=None, tool_calls=None), None),
        ([{**ASKED, "tool_calls": None, "reasoning_content": None}, SPOKE], None),
        ([{**ASKED, "tool_calls": [CALL]}, SPOKE], "not_the_assistants"),
        ([{**ASKED, "reasoning_content": "hm"}, SPOKE], "not_the_assistants"),
        (spoke(tool_calls="f()"), "bad_tool_call"),
        (spoke(tool_calls=[{"name": "f"}]), "bad_tool_call"),
        (spoke(content="caf\u00e9 \ud800"), "invalid_unicode"),
        (spoke(reasoning_content="\udfff"), "invalid_unicode"),
        (spoke(tool_calls=[{"name": "\ud800", "arguments": {}}]), "invalid_unicode"),
        (spoke(train="yes"), "bad_train_flag"),
        (spoke(train=0), "bad_train_flag"),
        (spoke(train=None), "bad_train_flag"),
        (spoke(train=True), None),
        (spoke(train=False), "nothing_trained"),
        ([{**ASKED, "train": True}, {**SPOKE, "train": False}], None),
        ([{"role": "system", "content": "s"}, ASKED], "no_assistant"),
        (spoke(weight=1, name=3, function_call=None, thinking=""), None),
        (spoke(weight="heavy"), "unread_key"),
        (spoke(weight=0), "unread_key"),
        (spoke(function_call={"name": "f", "arguments": "{}"}), "unread_key"),
        (spoke(reasoning="hm"), "unread_key"),
        (spoke(thinking="hm"), "unread_key"),
    ],
)
def test_a_conversation_that_cannot_be_trained_has_a_reason(
    messages: object, reason: str | None
) -> None:
    assert reason_to_drop(messages) == reason
    assert reason is None or reason in REASONS


def test_a_conversation_without_an_assistant_needs_train_on_all() -> None:
    assert reason_to_drop([ASKED], TrainPolicy(train_on="all")) is None
    assert reason_to_drop([ASKED], TrainPolicy(train_on="last-assistant")) == "no_assistant"


def test_parts_are_joined_and_calls_are_written() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "Developer", "content": parts},
        {"role": "bot", "tool_calls": [CALL], "reasoning_content": "hm", "train": False},
    ]
    system, bot = check_messages(messages)
    assert (ROLES[system.role], system.text, system.train) == ("system", "a b", None)
    assert (ROLES[bot.role], bot.text, bot.reasoning) == ("assistant", None, "hm")
    assert bot.calls == ('{"name": "f", "arguments": {"x": 1}}',)
    assert bot.train is False


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (CALL, '{"name": "f", "arguments": {"x": 1}}'),
        ({"type": "function", "id": "1", "function": CALL}, '{"name": "f", "arguments": {"x": 1}}'),
        (
            {"name": 'g"', "arguments": ' {"y":2,\n"y": 1e5} '},
            '{"name": "g\\"", "arguments": {"y":2,\n"y": 1e5}}',
        ),
        ({"name": "\u00e9", "arguments": {"\u4e16": "\u00e9"}},
         '{"name": "\u00e9", "arguments": {"\u4e16": "\u00e9"}}'),
        ({"name": "f", "arguments": MappingProxyType({"a": MappingProxyType({})})},
         '{"name": "f", "arguments": {"a": {}}}'),
    ],
)  # fmt: skip
def test_a_call_becomes_json_and_given_json_stays_unchanged(call: object, text: str) -> None:
    assert calls_of(call) == (text,)


@pytest.mark.parametrize(
    "call",
    [
        "f()",
        {},
        {"name": "", "arguments": {}},
        {"name": 3, "arguments": {}},
        {"name": "f", "arguments": None},
        {"name": "f", "arguments": [1]},
        {"name": "f", "arguments": "no json"},
        {"name": "f", "arguments": "[1]"},
        {"name": "f", "arguments": '{"a": NaN}'},
        {"name": "f", "arguments": {"a": float("inf")}},
        {"name": "f", "arguments": {"a": object()}},
        {"name": "f", "arguments": "[" * 100_000},
        {"function": "f"},
    ],
)
def test_malformed_calls_are_refused(call: object) -> None:
    with pytest.raises(Dropped, match=r"^bad_tool_call$"):
        calls_of(CALL, call)


def test_definitions_are_json_objects_in_a_list() -> None:
    assert check_tools([{"b": 1, "a": "\u00e9"}, {}]) == ('{"b": 1, "a": "\u00e9"}', "{}")
    assert check_tools(None) == check_tools([]) == ()
    for wrong in ("tools", {"name": "f"}, [None], [{"f": object()}], 3):
        with pytest.raises(Dropped, match=r"^bad_tools$"):
            check_tools(wrong)
    with pytest.raises(Dropped, match=r"^invalid_unicode$"):
        check_tools([{"name": "\ud800"}])


def test_special_in_text_finds_the_texts_and_skips_empty_ones() -> None:
    texts = Ragged.from_sequences([[], [5, 1], [], [6], [2, 2], []])
    assert special_in_text(texts, [1, 2]).tolist() == [1, 4]
    assert special_in_text(texts, []).tolist() == []


@settings(deadline=None, max_examples=100)
@given(
    texts=st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=6),
    special=st.sets(st.integers(0, 12) | st.just(70_000), max_size=4),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"]),
)
def test_special_in_text_equals_a_search_one_by_one(
    texts: list[list[int]], special: set[int], dtype: str
) -> None:
    wanted = [number for number, ids in enumerate(texts) if special & set(ids)]
    assert special_in_text(Ragged.from_sequences(texts, dtype), special).tolist() == wanted
