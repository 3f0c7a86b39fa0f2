"""Chats that a careless or hostile hand made: one fate each, bounded, with an error that helps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import OptionError, SourceError
from shardmill.records import Conversation, Drop
from shardmill.sources import BatchLimits, open_chats
from shardmill.testing.sources import Account, account

HI = [{"role": "user", "content": "hi"}]
GOOD = json.dumps({"messages": HI}).encode()


def read(path: Any, **options: Any) -> Account:
    return account(open_chats(path, **options).batches())


def nested(depth: int) -> bytes:
    """A good record with lists in lists: `depth` containers inside one another."""
    deep = b"[" * (depth - 1) + b"]" * (depth - 1)
    return b'{"messages": [{"role": "user", "content": "hi"}], "more": ' + deep + b"}"


@pytest.mark.parametrize("stack", [0, 300])
@pytest.mark.parametrize("mend", [b"", b'"x": "\\ud800", '])
def test_the_depth_limit_does_not_depend_on_the_callers_stack(
    tmp_path: Path, stack: int, mend: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [nested(256), nested(257), nested(900), nested(100_000), GOOD]
    path.write_bytes(b"\n".join(line.replace(b"{", b"{" + mend, 1) for line in lines))

    def call(depth: int) -> Account:
        return call(depth - 1) if depth else read(path, on_bad="skip")

    found = call(stack)
    assert [drop.id for drop in found.drops] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert {drop.reason for drop in found.drops} == {"bad_json"}
    assert [chat.id for chat in found.conversations] == ["a.jsonl:1", "a.jsonl:5"]
    with pytest.raises(SourceError, match=r"a\.jsonl:2: nested deeper than 256"):
        read(path)
    assert sys.getrecursionlimit() >= 1000


def test_brackets_inside_text_are_not_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "[{" * 5000}]}))
    assert len(read(path).conversations) == 1


def test_a_tool_list_nested_too_deep_inside_a_string_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": HI, "tools": "[" * 5000 + "]" * 5000}))
    assert read(path, on_bad="skip").drops == [Drop(id="a.jsonl:1", reason="bad_tools")]


def test_a_string_of_10_megabytes_arrives_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    huge = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    path.write_bytes(b"\n".join([GOOD, huge, GOOD]))
    batches = list(open_chats(path).batches())
    assert [batch.num_read for batch in batches] == [1, 1, 1]
    assert len(batches[1].conversations[0].messages[0]["content"]) == 10_000_000


@pytest.mark.slow
def test_an_error_stays_short_however_long_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"k" * 10**6 + str(n): 1 for n in range(100)}))
    with pytest.raises(SourceError, match="and 80 more") as caught:
        read(path)
    assert len(str(caught.value)) < 3000


def test_numbers_json_does_not_know_and_bad_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"entropy": NaN, "messages": [{"role": "user", "content": "\xff\\ud800\\ud83d\\ude00"}]}'
    )
    (chat,) = read(path).conversations
    assert chat.messages == [{"role": "user", "content": "\ufffd\ufffd\U0001f600"}]
    path.with_suffix(".json").write_bytes(b"[" + path.read_bytes() + b"]")
    (chat,) = read(path.with_suffix(".json")).conversations
    assert chat.messages == [{"role": "user", "content": "\ufffd\ufffd\U0001f600"}]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"[" + GOOD, "not one JSON list"),
        (b"[" + GOOD + b"] x", "not one JSON list"),
        (b"5", "a number"),
        (b"null", "null"),
        (b"[" * 100_000, "not one JSON list"),
        (b"[" + GOOD + b"}", "not one JSON list"),
        (b'"' + GOOD, "a string"),
        (b"what", "not one JSON list of rows: found b'what'"),
        (b'{\n"messages": []\n}', "a.json:1: broken JSON"),
    ],
)
def test_a_json_file_that_is_not_a_list_is_refused(
    tmp_path: Path, body: bytes, problem: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(body)
    with pytest.raises(SourceError, match=problem):
        read(path)


@pytest.mark.parametrize("body", [b"", b" \n", b"[]", b"[ ]\n", b"\xef\xbb\xbf[]"])
def test_an_empty_file_has_no_shape_and_no_conversations(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(body)
    assert read(path) == Account()
    assert open_chats(path).describe()["shape"] is None


def test_bad_rows_of_a_list_are_dropped_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b",".join([b"5", GOOD, b"[]", b'"x"', GOOD]) + b"]")
    found = read(path, on_bad="skip")
    assert [drop.id for drop in found.drops] == [f"a.json:record {n}" for n in (0, 2, 3)]
    assert [chat.id for chat in found.conversations] == ["a.json:record 1", "a.json:record 4"]


@pytest.mark.parametrize("shape", [None, "messages"])
def test_a_file_of_only_bad_rows_is_all_drops(tmp_path: Path, shape: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages":[\nnull\n')
    found = read(path, on_bad="skip", shape=shape)
    assert [(drop.id, drop.reason) for drop in found.drops] == [
        ("a.jsonl:1", "bad_json"),
        ("a.jsonl:2", "bad_json"),
    ]
    with pytest.raises(SourceError, match="line 1"):
        read(path, shape=shape)


@pytest.mark.parametrize("role", ["system", "System", "developer"])
def test_a_system_column_beside_a_system_turn_is_refused_however_it_is_spelt(
    tmp_path: Path, role: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"system": "S", "messages": [{"role": role, "content": "s"}, *HI]}))
    with pytest.raises(SourceError, match="a system column beside a system turn"):
        read(path)


def test_functions_beside_messages_are_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": HI, "functions": [{"name": "f"}]}))
    with pytest.raises(SourceError, match="rename the column to 'tools'"):
        read(path)


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\n" * 70_000 + GOOD + b"\n" + GOOD)
    assert [chat.id for chat in read(path).conversations] == ["a.json:70001", "a.json:70002"]


def test_fields_that_arrow_fills_with_null_count_as_absent(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"function": {"name": "g", "arguments": {"b": 2}}}
    turns = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}],
        [{"role": "assistant", "tool_calls": [other], "train": True}],
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": turns}), path)
    assert read(path).conversations == [
        Conversation(
            id="a.parquet:row 0",
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
        ),
        Conversation(
            id="a.parquet:row 1",
            messages=[{"role": "assistant", "content": None, "tool_calls": [other], "train": True}],
        ),
    ]


def test_a_parquet_text_that_is_not_utf8_is_a_source_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.array([b"a\xff"]).cast(pa.binary())
    text = pa.StringArray.from_buffers(1, bad.buffers()[1], bad.buffers()[2])
    pq.write_table(pa.table({"prompt": text, "answer": ["b"]}), path)
    with pytest.raises(SourceError, match=r"a\.parquet, row group 0"):
        read(path)


@pytest.mark.parametrize(
    "cursor",
    [
        {},
        {"input": 0},
        {"input": 1, "name": "a.jsonl", "position": None, "done": 0},
        {"input": -1, "name": "a.jsonl", "position": None, "done": 0},
        {"input": 0, "name": "b.jsonl", "position": None, "done": 0},
        {"input": 0, "name": "a.jsonl", "position": None, "done": -1},
        {"input": 0, "name": "a.jsonl", "position": None, "done": 2},
        {"input": 0, "name": "a.jsonl", "position": None, "done": True},
        {"input": 0, "name": "a.jsonl", "position": 7, "done": 0},
        {"input": 0, "name": "a.jsonl", "position": {"bytes": 10**9, "lines": 1}, "done": 0},
        {"input": 0, "name": "a.jsonl", "position": {"bytes": len(GOOD), "lines": 1}, "done": 1},
        {"input": 0, "name": "a.jsonl", "position": {"records": 1}, "done": 0},
    ],
)
def test_a_foreign_cursor_is_refused(tmp_path: Path, cursor: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(SourceError, match="cursor"):
        list(open_chats(path).batches(cursor))


def test_inputs_are_named_once_and_by_known_endings(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(GOOD)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.jsonl").write_bytes(GOOD)
    both = [tmp_path / "sub", f"{tmp_path}/*.jsonl"]
    ids = [chat.id for chat in read(both).conversations]
    assert ids == ["sub/a.jsonl:1", "a.jsonl:1", "b.jsonl:1"]
    with pytest.raises(SourceError, match="more than once"):
        open_chats([f"{tmp_path}/*.jsonl", f"{tmp_path}/a*.jsonl"])
    with pytest.raises(SourceError, match=r"ends in none of \.jsonl"):
        open_chats(tmp_path / "c.txt")
    with pytest.raises(SourceError, match="no input named"):
        open_chats([])
    with pytest.raises(SourceError, match="no such file"):
        open_chats(tmp_path / "missing.jsonl")
    with pytest.raises(OptionError, match="on_bad='drop'"):
        open_chats(tmp_path / "a.jsonl", on_bad="drop")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="split does not apply"):
        open_chats(tmp_path / "a.jsonl", split="train")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 3))
    reading = open_chats(path, limits=BatchLimits(num_documents=1)).batches()
    next(reading)
    path.write_bytes(b"\n".join([GOOD] * 4))
    with pytest.raises(SourceError, match="must not change"):
        list(reading)
