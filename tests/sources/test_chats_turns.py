"""How files write a turn: one message comes of it, or a drop that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import REASONS
from shardmill.errors import OptionError, SourceError
from shardmill.messages import MESSAGE_REASONS
from shardmill.records import Conversation, Drop
from shardmill.sources import CHAT_REASONS, MemoryChats, open_chats
from shardmill.testing.sources import (
    account,
    assert_conversation_ledger_balances,
    assert_conversations_resume_exactly,
    assert_cut_is_the_source,
    nasty_texts,
)

Turn = dict[str, Any]
Turns = list[Turn]

CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = {"type": "function", "function": CALL}
THOUGHT = {"type": "reasoning", "value": "hm"}
THINKING = {"type": "thinking", "thinking": "h"}
SAID = {"type": "text", "text": "yo"}
NOTHING = {"type": "text", "text": ""}
CALLING = {"type": "tool_call", "value": json.dumps(CALL)}
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> list[Turns]:
    source = open_chats(path, **options)
    return [list(chat.messages) for chat in account(source.batches()).conversations]


def said(**turn: Any) -> Turn:
    return {"role": "assistant", "content": "yo", **turn}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (said(content=[SAID]), said()),
        (said(content=[{"type": "text", "value": "yo"}]), said()),
        (said(content=[{"type": "text", "text": None, "value": "yo"}]), said()),
        (said(content=[{"type": "text", "text": "yo", "value": "yo"}]), said()),
        (said(content=[{"type": "text", "text": "", "value": "yo"}]), said()),
        (said(content=[{"type": "text", "text": "y"}, {"type": "text", "value": "o"}]), said()),
        (said(content=[{"type": "text", "text": "y\r\n"}]), said(content="y\n")),
        (said(content=[]), said(content="")),
        (said(content=[THOUGHT, SAID]), said(reasoning_content="hm")),
        (
            said(content=[THINKING, {"type": "reasoning", "text": "m"}]),
            said(content="", reasoning_content="hm"),
        ),
        (said(content=[CALLING]), said(content=None, tool_calls=[CALLED])),
        (
            said(content=[{"type": "tool_call", "value": CALL}]),
            said(content=None, tool_calls=[CALLED]),
        ),
        (
            said(content=[THOUGHT, SAID, CALLING, {"type": "tool_call", "value": [CALL]}]),
            said(reasoning_content="hm", tool_calls=[CALLED, CALLED]),
        ),
        (
            said(content=[NOTHING, THOUGHT, CALLING, NOTHING]),
            said(content="", reasoning_content="hm", tool_calls=[CALLED]),
        ),
        (said(thinking="hm"), said(reasoning_content="hm")),
        (said(reasoning="h\r\nm"), said(reasoning_content="h\nm")),
        (said(reasoning="hm", thinking="hm", reasoning_content="hm"), said(reasoning_content="hm")),
        (said(reasoning="", thinking="hm", reasoning_content=None), said(reasoning_content="hm")),
        (said(content=[THOUGHT, SAID], thinking="hm"), said(reasoning_content="hm")),
        (said(function_call=CALL), said(tool_calls=[CALLED])),
        (said(function_call=CALL, content=None), said(tool_calls=[CALLED], content=None)),
        (
            said(function_call={**CALL, "arguments": '{"x": 1}'}),
            said(tool_calls=[{**CALLED, "function": {**CALL, "arguments": '{"x": 1}'}}]),
        ),
        (said(function_call=None, tool_calls=[CALL]), said(tool_calls=[CALL])),
        (said(content="<think>hm</think>yo"), said(content="<think>hm</think>yo")),
        ({"role": "tool", "content": [SAID]}, {"role": "tool", "content": "yo"}),
    ],
)  # fmt: skip
def test_a_turn_becomes_one_message_however_it_is_written(
    tmp_path: Path, turn: Turn, message: Turn
) -> None:
    assert read(write(tmp_path / "a.jsonl", {"messages": [turn]})) == [[message]]
    (chat,) = account(MemoryChats([[turn]]).batches()).conversations
    assert chat.messages == [message]
    if isinstance(turn["content"], str):
        row = {"from": "gpt", "value": turn["content"], **turn}
        del row["role"], row["content"]
        assert read(write(tmp_path / "a.jsonl", {"conversations": [row]})) == [[message]]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (said(content=[{"type": "image"}, SAID]), "image_part"),
        (said(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "image_part"),
        (said(content=[{"type": "input_audio", "input_audio": {}}]), "audio_part"),
        (said(content=[{"type": "Video_URL"}]), "video_part"),
        (said(content=[{"type": "file"}]), "content_part_not_text"),
        (said(content=[{"text": "a"}]), "content_part_not_text"),
        (said(content=["a"]), "content_part_not_text"),
        (said(content=[{"type": ["text"], "text": "a"}]), "content_part_not_text"),
        (said(content=[{"type": "text", "text": "a", "value": "b"}]), "content_part_not_text"),
        (said(content=[{"type": "text", "text": 5}]), "content_part_not_text"),
        (said(content=[{"type": "reasoning", "value": 5}]), "reasoning_not_text"),
        (said(content=[SAID, THOUGHT]), "part_order"),
        (said(content=[CALLING, SAID]), "part_order"),
        (said(content=[CALLING, THOUGHT]), "part_order"),
        (said(content=[THOUGHT, SAID, THOUGHT]), "part_order"),
        (said(content=[{"type": "tool_call", "value": "f()"}]), "bad_tool_call"),
        (said(content=[{"type": "tool_call", "value": "[]"}]), "bad_tool_call"),
        (said(content=[{"type": "tool_call", "value": {"tool": "f"}}]), "bad_tool_call"),
        (said(function_call="f"), "bad_tool_call"),
        (said(function_call=CALL, tool_calls=[CALL]), "two_tool_calls"),
        (said(content=[CALLING], tool_calls=[CALL]), "two_tool_calls"),
        (said(thinking="a", reasoning="b"), "two_reasonings"),
        (said(content=[THOUGHT], reasoning_content="b"), "two_reasonings"),
        (said(reasoning={"effort": "high"}), "reasoning_not_text"),
    ],
)
@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_what_no_message_can_hold_is_a_drop_with_its_reason(
    tmp_path: Path, turn: Turn, reason: str, on_bad: Any
) -> None:
    assert reason in MESSAGE_REASONS
    assert MESSAGE_REASONS.items() <= REASONS.items() & CHAT_REASONS.items()
    rows = [{"messages": HI}, {"messages": [*HI, turn]}, {"id": "x", "messages": [turn]}]
    source = open_chats(write(tmp_path / "a.jsonl", *rows), on_bad=on_bad)
    found = assert_conversation_ledger_balances(source)
    assert found.conversations == [Conversation(messages=HI, id="a.jsonl:1")]
    assert found.drops == [Drop(id="a.jsonl:2", reason=reason), Drop(id="x", reason=reason)]
    assert_cut_is_the_source(source, 60)
    in_memory = account(MemoryChats([HI, [turn]]).batches())
    assert in_memory.drops == [Drop(id="memory:1", reason=reason)]
    assert [chat.messages for chat in in_memory.conversations] == [HI]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>hm</think>yo", said(reasoning_content="hm")),
        ("<think>\nhm\n</think>\n\nyo", said(reasoning_content="hm")),
        (" \n<think>\n\nhm\n\n</think>\n\n\nyo", said(content="\nyo", reasoning_content="\nhm\n")),
        ("<think>\n\n</think>\n\nyo", said()),
        ("<think>hm</think>", said(content="", reasoning_content="hm")),
        ("<think>a</think>b</think>c", said(content="b</think>c", reasoning_content="a")),
        ("so <think>hm</think>yo", said(content="so <think>hm</think>yo")),
        ("<thinking>hm</thinking>yo", said(content="<thinking>hm</thinking>yo")),
    ],
)
def test_a_thought_before_the_words_is_split_off_on_request(
    tmp_path: Path, text: str, message: Turn
) -> None:
    asked = {"role": "user", "content": text}
    for row in (
        {"messages": [asked, said(content=text)]},
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}]},
        {"history": [[text, text]]},
        {"prompt": text, "response": text},
    ):
        path = write(tmp_path / "a.jsonl", row)
        assert read(path, split_think=True) == [[asked, message]]
        assert read(path) == [[asked, said(content=text)]]


def test_a_thought_that_does_not_end_or_differs_is_a_drop(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"messages": [said(content="<think>hm")]},
        {"messages": [said(content="<think>hm</think>yo", reasoning="no")]},
        {"messages": [said(content="<think>hm</think>yo", reasoning="hm")]},
    ]
    source = open_chats(write(tmp_path / "a.jsonl", *rows), split_think=True)
    found = account(source.batches())
    assert [drop.reason for drop in found.drops] == ["unclosed_think", "two_reasonings"]
    assert [chat.messages for chat in found.conversations] == [[said(reasoning_content="hm")]]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    caplog.clear()
    return found


@pytest.mark.parametrize("shape", [None, "messages"])
def test_a_missing_option_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: Any
) -> None:
    rows = [{"messages": HI}] * 3
    rows += [{"messages": [{"role": "ai", "content": "<think>a</think>b"}, *HI]}] * 3
    rows += [{"messages": [said(content="<think>a</think>b")]}] * 3
    path = write(tmp_path / "a.jsonl", *rows)
    source = open_chats(path, shape=shape)
    source.describe()
    assert len(list(source.batches())) == 1
    for piece in source.cut(100):
        list(piece.batches())
    role, think = warnings_of(caplog)
    assert "a.jsonl:4: the role 'ai' is unknown" in role
    assert "role_map (--role-map)" in role
    assert "a.jsonl:7: " in think
    assert "split_think=True (--split-think)" in think
    read(path, shape=shape, split_think=True, role_map={"AI": "assistant"})
    assert warnings_of(caplog) == []


def test_names_of_columns_keys_and_roles_can_be_given(tmp_path: Path) -> None:
    talk = [
        {"speaker": "Human", "utterance": "hi", "name": "Ada"},
        {"speaker": "AI", "utterance": "yo", "thinking": "hm"},
    ]
    row = {"messages": "of the day", "history": ["x"], "talk": talk, "system": "s"}
    path = write(tmp_path / "a.jsonl", row, {"talk": [], "system": None})
    keys = {"role_field": "speaker", "content_field": "utterance"}
    roles = {"human": "user", "ai": "assistant"}
    source = open_chats(path, messages_field="talk", role_map=roles, **keys)
    found = assert_conversations_resume_exactly(lambda: source)
    assert [chat.messages for chat in found.conversations] == [
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "hi", "name": "Ada"},
            {"role": "assistant", "content": "yo", "reasoning_content": "hm"},
        ],
        [],
    ]
    described = source.describe()
    given = {"messages_field": "talk", "role_map": roles, **keys}
    assert {key: described[key] for key in given} == given
    assert json.loads(json.dumps(described)) == described
    assert (
        not given.keys()
        & open_chats(write(tmp_path / "b.jsonl", {"messages": HI})).describe().keys()
    )


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([["hi", "yo"]], HI),
        ([{"user": "hi", "assistant": "yo"}], HI),
        ([{"human": "hi", "bot": "yo"}], HI),
        ([{"question": "hi", "answer": "yo"}], HI),
        (
            [{"user": "hi", "assistant": "yo", "thinking": "hm", "function_call": CALL}],
            [HI[0], said(reasoning_content="hm", tool_calls=[CALLED])],
        ),
        (HI, HI),
        ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], HI),
        ([["hi", "yo"], {"user": "hi", "bot": "yo"}, *HI], [*HI, *HI, *HI]),
    ],
)
def test_a_history_holds_pairs_or_objects_under_any_column(
    tmp_path: Path, turns: Any, messages: Turns
) -> None:
    last = {"instruction": "a", "output": "b"}
    path = write(tmp_path / "a.jsonl", {"history": turns, **last}, {"history": turns})
    assert open_chats(path).describe()["shape"] == "history"
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read(path) == [[*messages, *pair], messages]
    path = write(tmp_path / "b.jsonl", {"dialog": turns})
    assert read(path, messages_field="dialog") == [messages]


@pytest.mark.parametrize(
    "turns", [[{"user": "a"}], [["a", "b"], {"x": 1}], [["a", "b"], 5], [{"user": "a", "bot": 5}]]
)
def test_a_history_of_something_else_is_refused(tmp_path: Path, turns: Any) -> None:
    path = write(tmp_path / "a.jsonl", {"history": turns})
    with pytest.raises(SourceError, match=r"a\.jsonl:1: "):
        read(path, shape="history")


def test_a_role_map_changes_the_roles_of_every_shape_that_has_them(tmp_path: Path) -> None:
    roles = {"gpt": "user", "User": "assistant", "human": "assistant"}
    swapped = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "yo"}]
    turns = [{"role": "user", "content": "hi"}, {"role": "gpt", "content": "yo"}]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    for row in ({"messages": turns}, {"conversations": shared}, {"history": turns}):
        assert read(write(tmp_path / "a.jsonl", row), role_map=roles) == [swapped]


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ({"prompt": "a", "answer": "b"}, {"role_map": {"a": "user"}}, "role_map"),
        ({"instruction": "a", "output": "b"}, {"role_field": "x"}, "role_field"),
        ({"prompt": {"text": "x", "role": "p"}}, {"split_think": True}, "split_think"),
        ({"messages": HI}, {"role_map": {"a": "asistant"}}, "role_map='a=asistant'"),
        ({"messages": HI}, {"role_map": "a=user"}, "role_map='a=user'"),
        ({"messages": HI}, {"lang": "en"}, "lang and skip_deleted"),
    ],
)
def test_an_option_that_does_not_apply_is_refused_by_name(
    tmp_path: Path, row: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        read(write(tmp_path / "a.jsonl", row), **options)


def test_an_unreadable_file_says_what_it_holds_and_what_can_be_said(tmp_path: Path) -> None:
    row = {"talk": [{"speaker": "a", "text": "b"}], "n": 5, "tags": [], "ids": ["x"], "ok": True}
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(SourceError) as caught:
        read(path)
    message = str(caught.value)
    assert (
        "found 'talk' (a list that begins with an object of 'speaker', 'text'), 'n' (a number), "
        "'tags' (an empty list), 'ids' (a list that begins with a string), 'ok' (a boolean)"
    ) in message
    for option in ("messages_field", "role_field", "content_field", "role_map", "shape"):
        assert option in message
    with pytest.raises(SourceError, match=r"the column 'talks' is not in the row.*found 'talk'"):
        read(path, messages_field="talks")
    with pytest.raises(SourceError, match="the column 'n' holds a number, wanted a list of turns"):
        read(path, messages_field="n")
    assert len(read(path, messages_field="talk", role_field="speaker")) == 1


# Every way to write a conversation gives the same messages.

WORDS = nasty_texts().map(lambda text: text.replace("\r", ""))
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.lists(WORDS, max_size=2), max_size=2)
CALLS = st.builds(
    lambda name, arguments, as_text: {
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
    },
    st.sampled_from(["f", "get_it"]),
    ARGUMENTS,
    st.booleans(),
)


@st.composite
def messages_of_all_kinds(draw: st.DrawFn) -> Turns:
    """Messages in the form that templates take."""
    found = []
    for role in draw(
        st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=5)
    ):
        message: Turn = {"role": role, "content": draw(WORDS)}
        if role == "assistant":
            thought, calls = draw(WORDS), draw(st.lists(CALLS, max_size=2))
            message |= {"reasoning_content": thought} if thought else {}
            message |= {"tool_calls": calls} if calls else {}
            if calls and draw(st.booleans()):
                message["content"] = None
        found.append(message)
    return found


def pairs() -> st.SearchStrategy[Turns]:
    """Questions and answers in turn, at least one."""
    one = st.tuples(WORDS, WORDS)
    return st.lists(one, min_size=1, max_size=3).map(
        lambda found: [
            {"role": role, "content": text}
            for pair in found
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    )


def as_parts(message: Turn, draw: Callable[..., Any]) -> Turn:
    """Some keys of a message as parts of its content, others under other names."""
    message = dict(message)
    parts: list[Turn] = []
    thought, calls = message.pop("reasoning_content", None), message.pop("tool_calls", None)
    key = draw(st.sampled_from(["reasoning_content", "thinking", "reasoning", "part", "think"]))
    is_said = message["content"] is not None
    if key == "think" and is_said and thought and "</think>" not in thought:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        thought = None
    if thought and key not in ("part", "think"):
        message[key], thought = thought, None
    if thought:
        parts.append({"type": "reasoning", "value": thought})
    text = message["content"]
    at = draw(st.integers(0, len(text or "")))
    pieces = [] if text is None else [text[:at], text[at:]]
    name = draw(st.sampled_from(["text", "value"]))
    parts += [{"type": "text", name: piece} for piece in pieces]
    how = draw(st.sampled_from(["tool_calls", "function_call", "part"]))
    if calls and how == "function_call" and len(calls) == 1:
        message["function_call"], calls = calls[0]["function"], None
    elif calls and how == "tool_calls":
        message["tool_calls"], calls = calls, None
    for call in calls or ():
        value = call["function"]
        as_text = draw(st.booleans())
        parts.append({"type": "tool_call", "value": json.dumps(value) if as_text else value})
    if (parts and (thought or calls)) or draw(st.booleans()):
        message["content"] = parts if text is not None or parts else None
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turns")


@settings(deadline=None, max_examples=100)
@given(data=st.data(), messages=messages_of_all_kinds())
def test_every_way_to_write_messages_gives_the_same(
    folder: Path, data: st.DataObject, messages: Turns
) -> None:
    written = [as_parts(message, data.draw) for message in messages]
    column = data.draw(st.sampled_from(["messages", "conversations", "talk"]))
    named = {"messages_field": "talk"} if column == "talk" else {}
    path = write(folder / "a.jsonl", {column: written})
    assert read(path, shape="messages", split_think=True, **named) == [messages]


@settings(deadline=None, max_examples=60)
@given(messages=messages_of_all_kinds(), as_list=st.booleans())
def test_every_conversation_of_sharegpt_gives_its_messages(
    folder: Path, messages: Turns, as_list: bool
) -> None:
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    turns: Turns = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message["content"] = None
            values = [call["function"] for call in calls]
            value = json.dumps(values if as_list or len(values) > 1 else values[0])
            turns.append({"from": "function_call", "value": value})
        else:
            turns.append({"from": names[message["role"]], "value": message["content"]})
        if "reasoning_content" in message:
            turns[-1]["thinking"] = message["reasoning_content"]
    path = write(folder / "b.jsonl", {"conversations": turns})
    assert read(path, shape="sharegpt") == [messages]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), messages=pairs())
def test_every_way_to_write_questions_and_answers_gives_the_same(
    folder: Path, data: st.DataObject, messages: Turns
) -> None:
    texts = [message["content"] for message in messages]
    exchanges = list(zip(texts[::2], texts[1::2], strict=True))
    ways: dict[str, Any] = {
        "pairs": [list(pair) for pair in exchanges],
        "user": [{"user": asked, "assistant": answer} for asked, answer in exchanges],
        "human": [{"human": asked, "bot": answer} for asked, answer in exchanges],
        "turns": messages,
    }
    history = ways[data.draw(st.sampled_from(sorted(ways)))]
    row: Turn = {"history": history}
    if data.draw(st.booleans()):
        last = len(history) - (2 if history is messages else 1)
        asked, answer = exchanges[-1]
        row = {"history": history[:last], "instruction": asked, "output": answer}
    assert read(write(folder / "c.jsonl", row), shape="history") == [messages]
    (first, *_) = exchanges
    for keys in (("instruction", "output"), ("prompt", "response"), ("question", "answer")):
        row = dict(zip(keys, first, strict=True))
        assert read(write(folder / "c.jsonl", row)) == [messages[:2]]
