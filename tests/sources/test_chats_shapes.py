"""Each shape: what comes of a record, and why another gives nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import OptionError, SourceError
from shardmill.records import Conversation, Drop
from shardmill.sources import CHAT_REASONS, SHAPES, open_chats
from shardmill.testing.sources import account

Turns = list[dict[str, Any]]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, **options: Any) -> list[Conversation]:
    return account(open_chats(path, **options).batches()).conversations


def one(tmp_path: Path, record: Any, **options: Any) -> Conversation:
    (found,) = read(write(tmp_path / "chats.jsonl", record), **options)
    return found


def pair(question: str | None, answer: str | None) -> Turns:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


HI = pair("hi", "yo")
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]


@pytest.mark.parametrize(
    ("shape", "record", "messages"),
    [
        ("messages", {"messages": HI}, HI),
        ("messages", {"conversations": HI}, HI),
        ("messages", {"messages": []}, []),
        ("sharegpt", {"conversations": SHAREGPT}, HI),
        ("sharegpt", {"messages": SHAREGPT}, HI),
        (
            "sharegpt",
            {"conversations": SHAREGPT, "system": "be kind"},
            [{"role": "system", "content": "be kind"}, *HI],
        ),
        (
            "history",
            {"instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]]},
            [*pair("a", "b"), *pair("c\n\nd", "e")],
        ),
        (
            "history",
            {"prompt": "c", "response": "d", "history": [["a", "b"]], "system": "s"},
            [{"role": "system", "content": "s"}, *pair("a", "b"), *pair("c", "d")],
        ),
        ("history", {"history": [["a", "b"], ["c", None]]}, [*pair("a", "b"), *pair("c", None)]),
        ("history", {"prompt": "c", "response": "d", "history": []}, pair("c", "d")),
        ("history", {"prompt": "c", "response": "d", "history": None}, pair("c", "d")),
        ("alpaca", {"instruction": "add", "input": "1 2", "output": "3"}, pair("add\n\n1 2", "3")),
        ("alpaca", {"instruction": "hi", "input": " ", "output": "yo"}, HI),
        ("alpaca", {"instruction": "", "input": "hi", "output": "yo"}, HI),
        (
            "prompt-response",
            {"instruction": "who?", "context": "Ada.", "response": "Ada", "category": "qa"},
            pair("who?\n\nAda.", "Ada"),
        ),
        ("prompt-response", {"question": "hi", "answer": "yo"}, HI),
        ("prompt-response", {"query": "hi", "completion": "yo"}, HI),
        ("prompt-response", {"prompt": "hi", "question": "", "output": "yo"}, HI),
        ("prompt-response", {"prompt": "hi", "response": None}, pair("hi", None)),
        (
            "prompt-response",
            {"system_prompt": "s", "question": "hi", "response": "yo"},
            [{"role": "system", "content": "s"}, *HI],
        ),
    ],
)
def test_a_shape_is_found_and_read(
    tmp_path: Path, shape: str, record: Any, messages: Turns
) -> None:
    path = write(tmp_path / "chats.jsonl", record)
    assert open_chats(path).describe()["shape"] == shape
    wanted = [Conversation(messages=messages, id="chats.jsonl:1")]
    assert read(path) == wanted
    assert read(path, shape=shape) == wanted


def test_messages_stay_as_written_except_for_line_ends_and_nulls(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\r\n}"}}
    turns = [
        {"role": "Developer", "content": "a\r\nb\rc\r\r\n", "name": None, "train": None},
        {"role": "user", "content": [{"type": "text", "text": "x\r\ny"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "train": False},
        {"role": "tool", "content": " \ufeff5 ", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning_content": "so\r\n", "tool_calls": None},
        {"role": 7, "content": 8},
        {"role": "user"},
    ]
    tools = [{"name": "f", "default": None}]
    found = one(tmp_path, {"messages": turns, "tools": tools, "id": "x7"})
    assert found == Conversation(
        id="x7",
        tools=tools,
        messages=[
            {"role": "Developer", "content": "a\nb\rc\r\n"},
            {"role": "user", "content": "x\ny"},
            {"role": "assistant", "content": None, "tool_calls": [call], "train": False},
            {"role": "tool", "content": " \ufeff5 ", "tool_call_id": "c1"},
            {"role": "assistant", "content": "", "reasoning_content": "so\n"},
            {"role": 7, "content": 8},
            {"role": "user"},
        ],
    )


def test_sharegpt_calls_become_tool_calls_when_they_are_json(tmp_path: Path) -> None:
    turns = [
        {"from": "Human", "value": "a\r\n", "train": True},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": [1]}}'},
        {"from": "observation", "value": '{"y": 2}'},
        {"from": "function_call", "value": '[{"name": "f", "arguments": "{}"}, {"name": "g"}]'},
        {"from": "function_call", "value": "{'name': 'f'}"},
        {"from": "function_call", "value": '{"tool": "f"}'},
        {"from": "function_call", "value": "[]"},
        {"from": "tool", "value": None},
        {"from": "bing", "value": "b"},
    ]

    def call(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": function}

    found = one(tmp_path, {"conversations": turns, "tools": '[{"name": "f"}]'})
    assert found.tools == [{"name": "f"}]
    assert found.messages == [
        {"role": "user", "content": "a\n", "train": True},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(name="f", arguments={"x": [1]})],
        },
        {"role": "tool", "content": '{"y": 2}'},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(name="f", arguments="{}"), call(name="g")],
        },
        {"role": "assistant", "content": "{'name': 'f'}"},
        {"role": "assistant", "content": '{"tool": "f"}'},
        {"role": "assistant", "content": "[]"},
        {"role": "tool", "content": None},
        {"role": "bing", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("tools", "wanted"),
    [
        (None, None),
        ("", None),
        (" ", None),
        ("null", None),
        ("[]", None),
        ([], None),
        ('{"name": "f"}', [{"name": "f"}]),
        ('[{"name": "f"}]', [{"name": "f"}]),
        ([{"name": "f"}], [{"name": "f"}]),
    ],
)
def test_tools_are_a_list_however_they_are_written(tmp_path: Path, tools: Any, wanted: Any) -> None:
    for record in ({"messages": HI}, {"conversations": SHAREGPT}, {"prompt": "a", "answer": "b"}):
        assert one(tmp_path, {**record, "tools": tools}).tools == wanted


@pytest.mark.parametrize(
    ("shape", "record", "reason"),
    [
        ("messages", {"messages": "hi"}, "other_shape"),
        ("messages", {"messages": None}, "other_shape"),
        ("messages", {"messages": {"role": "user"}}, "other_shape"),
        ("messages", {"messages": ["hi"]}, "bad_message"),
        ("messages", {"messages": [HI]}, "bad_message"),
        ("messages", {"messages": [{"content": "x"}]}, "bad_message"),
        ("messages", {"messages": SHAREGPT}, "bad_message"),
        ("messages", {"messages": HI, "tools": "[{]"}, "bad_tools"),
        ("messages", {"messages": HI, "tools": ["f"]}, "bad_tools"),
        ("messages", {"messages": HI, "tools": 5}, "bad_tools"),
        ("messages", {"messages": [{"role": "system"}], "system": "x"}, "two_systems"),
        ("messages", {"messages": HI, "system": 5}, "not_a_string"),
        ("sharegpt", {"conversations": HI}, "bad_message"),
        ("sharegpt", {"conversations": [{"from": 5, "value": "x"}]}, "bad_message"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 5}]}, "not_a_string"),
        ("history", {"history": "x", "prompt": "a", "answer": "b"}, "other_shape"),
        ("history", {"history": [["a"]]}, "bad_message"),
        ("history", {"history": [["a", 5]]}, "bad_message"),
        ("history", {"history": ["ab"]}, "bad_message"),
        ("history", {"history": []}, "other_shape"),
        ("history", {"history": [["a", "b"]], "prompt": "c"}, "other_shape"),
        ("alpaca", {"instruction": "a"}, "other_shape"),
        ("alpaca", {"instruction": "a", "output": 5}, "not_a_string"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "other_shape"),
        ("alpaca", {"instruction": "a", "output": "b", "prompt": "c"}, "two_columns"),
        ("prompt-response", {"prompt": "a"}, "other_shape"),
        ("prompt-response", {"answer": "a"}, "other_shape"),
        ("prompt-response", {"prompt": ["a"], "answer": "b"}, "not_a_string"),
        ("prompt-response", {"prompt": [], "answer": "b"}, "not_a_string"),
        ("prompt-response", {"prompt": "a", "answer": 0}, "not_a_string"),
        ("prompt-response", {"prompt": "a", "question": "b", "answer": "c"}, "two_columns"),
        ("prompt-response", {"prompt": "a", "answer": "b", "output": "c"}, "two_columns"),
        ("oasst-tree", {"prompt": "x"}, "other_shape"),
        ("oasst-tree", {"prompt": {"text": "x", "role": 5}}, "bad_message"),
        ("oasst-tree", {"prompt": {"text": "x", "role": "p", "replies": {}, "a": 1}}, None),
        ("oasst-tree", {"prompt": {"text": "x", "role": "p", "replies": "x"}}, "bad_message"),
        ("oasst-tree", {"prompt": {"text": "x", "role": "p", "replies": ["x"]}}, "bad_message"),
        ("oasst-messages", {"message_id": 5, "role": "p", "text": "x"}, "other_shape"),
        (
            "oasst-messages",
            {"message_id": "a", "parent_id": 5, "role": "p", "text": "x"},
            "other_shape",
        ),
        ("oasst-messages", {"message_id": "a", "role": ["p"], "text": "x"}, "bad_message"),
        ("oasst-messages", {"message_id": "a", "role": "p", "text": None}, "bad_message"),
    ],
)
def test_a_record_that_does_not_fit_is_an_error_or_a_drop(
    tmp_path: Path, shape: str, record: Any, reason: str | None
) -> None:
    path = write(tmp_path / "chats.jsonl", record)
    if reason is None:
        assert len(read(path, shape=shape)) == 1
        return
    assert reason in CHAT_REASONS
    found = account(open_chats(path, shape=shape, on_bad="skip").batches())
    assert found.drops == [Drop(id="chats.jsonl:1", reason=reason)]
    assert (found.conversations, found.num_read) == ([], 1)
    with pytest.raises(SourceError, match=r"chats\.jsonl:1: .*on_bad='skip'"):
        read(path, shape=shape)


@pytest.mark.parametrize(
    "record", [{}, {"text": "x"}, {"messages": "x"}, {"messages": ["x"]}, {"prompt": "only"}]
)
@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_an_unknown_shape_shows_the_keys_and_the_shapes(
    tmp_path: Path, record: Any, on_bad: Any
) -> None:
    path = write(tmp_path / "chats.jsonl", record)
    with pytest.raises(SourceError) as caught:
        read(path, on_bad=on_bad)
    message = str(caught.value)
    assert all(repr(key) in message for key in record)
    assert all(f"{name}: {shape.keys}" in message for name, shape in SHAPES.items())


def test_an_unknown_name_of_a_shape_shows_the_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": HI})
    with pytest.raises(OptionError, match=r"(?s)'share'.*sharegpt: conversations: "):
        open_chats(path, shape="share")


def test_turns_win_over_columns_and_a_named_shape_over_both(tmp_path: Path) -> None:
    record = {"prompt": "p", "response": "r", "messages": HI, "conversations": SHAREGPT}
    path = write(tmp_path / "chats.jsonl", record)
    assert open_chats(path).describe()["shape"] == "messages"
    assert read(path)[0].messages == HI
    assert read(path, shape="prompt-response")[0].messages == pair("p", "r")


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b", "messages": HI}),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b", "history": []}),
        ({"conversations": SHAREGPT}, {"messages": HI}),
        ({"messages": HI}, {"prompt": "a", "answer": "b"}),
    ],
)
def test_a_later_record_of_another_shape_is_never_read_in_part(
    tmp_path: Path, first: Any, later: Any
) -> None:
    path = write(tmp_path / "chats.jsonl", first, later, first)
    with pytest.raises(SourceError, match=r"chats\.jsonl:2: "):
        read(path)
    found = account(open_chats(path, on_bad="skip").batches())
    assert found.drops == [Drop(id="chats.jsonl:2", reason="other_shape")]
    assert [chat.id for chat in found.conversations] == ["chats.jsonl:1", "chats.jsonl:3"]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"id": "a", "uuid": "b"}, "a"),
        ({"id": 17}, "17"),
        ({"id": 0}, "0"),
        ({"conversation_id": "c"}, "c"),
        ({"dialogue_id": "1_00000"}, "1_00000"),
        ({"id": True, "uuid": "b"}, "b"),
        ({"id": ""}, "chats.jsonl:1"),
        ({"id": None}, "chats.jsonl:1"),
        ({"id": ["a"]}, "chats.jsonl:1"),
        ({"id": "x" * 201}, "chats.jsonl:1"),
        ({"id": "\ud800"}, "\ufffd"),
    ],
)
def test_a_conversation_has_its_own_id_or_that_of_its_row(
    tmp_path: Path, keys: Any, wanted: str
) -> None:
    assert one(tmp_path, {**keys, "messages": HI}).id == wanted


ONE_EACH: dict[str, Any] = {
    "messages": {"messages": HI},
    "sharegpt": {"conversations": SHAREGPT},
    "history": {"history": [["hi", "yo"]]},
    "alpaca": {"instruction": "hi", "output": "yo"},
    "prompt-response": {"prompt": "hi", "response": "yo"},
}


def as_lines(path: Path, rows: Turns) -> Path:
    return write(path.with_suffix(".jsonl"), *rows)


def as_list(path: Path, rows: Turns) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows))
    return path


def as_parquet(path: Path, rows: Turns) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


FILES = [as_lines, as_list, as_parquet]


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize("shape", ONE_EACH)
def test_a_row_may_name_its_group(tmp_path: Path, shape: str, make: Any) -> None:
    cases: list[tuple[list[Any], list[str | None]]] = [
        (["a", None, "", "\u00e9"], ["a", None, None, "\u00e9"]),
        ([7, -1, None, 2**63 - 1], ["7", "-1", None, "9223372036854775807"]),
    ]
    for groups, wanted in cases:
        rows = [{**ONE_EACH[shape], "group": group} for group in groups]
        path = make(tmp_path / "rows", rows)
        assert open_chats(path).describe()["shape"] == shape
        found = read(path)
        assert [one.group for one in found] == wanted
        without = read(make(tmp_path / "rows", [ONE_EACH[shape]] * 4))
        assert [replace(one, group=None) for one in found] == without


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize("shape", ONE_EACH)
def test_a_group_of_another_type_is_an_error_or_a_drop(
    tmp_path: Path, shape: str, make: Any
) -> None:
    kinds: dict[str, Any] = {
        "a list": ["a"],
        "an object": {"a": 1},
        "a boolean": True,
        "a number": 1.0,
    }
    for kind, group in kinds.items():
        path = make(tmp_path / "rows", [{**ONE_EACH[shape], "group": group}])
        (drop,) = account(open_chats(path, on_bad="skip").batches()).drops
        assert drop.reason == "bad_group"
        wanted = f"'group' holds {kind}, wanted a string or an integer;.*on_bad='skip'"
        with pytest.raises(SourceError, match=wanted):
            read(path)


def test_the_group_of_a_tree_is_the_tree(tmp_path: Path) -> None:
    tree = {"prompt": {"text": "x", "role": "prompter"}, "message_tree_id": "t", "group": "g"}
    row = {"message_id": "a", "parent_id": None, "role": "prompter", "text": "x"}
    assert one(tmp_path, tree).group == "t"
    assert one(tmp_path, {**row, "message_tree_id": "t", "group": ["g"]}).group == "t"


def test_the_shape_found_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": HI})
    with caplog.at_level("INFO", "shardmill.sources"):
        read(path)
    assert any("read as 'messages'" in record.message for record in caplog.records)
