"""`.json` files: a list of rows or an object with one, streamed, and read as JSON lines are."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.sources import BatchLimits, open_chats
from shardmill.testing.sources import (
    account,
    assert_conversation_ledger_balances,
    assert_conversations_resume_exactly,
    nasty_texts,
)

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".json": bytes,
    ".json.gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".json.zst": zstandard.compress,
}
AROUND = ["%s", "\ufeff%s", " \n%s \r\n", '{"rows": %s, "n": 3}']
AROUND += ['{"v": "x[", "o": {"a": [1]}, "rows": %s}']
ROW = {"prompt": "a", "response": "b"}


def write(path: Path, value: Any, **options: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value, **options))
    return path


def answers(path: Path, **options: Any) -> list[str]:
    """What was said last in each conversation."""
    found = account(open_chats(path, **options).batches()).conversations
    return [str(chat.messages[-1]["content"]) for chat in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrays")


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.tuples(nasty_texts(), st.text("\\\"[]{},a", max_size=6)), max_size=6),
    suffix=st.sampled_from(sorted(PACKERS)),
    around=st.sampled_from(AROUND),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    limits=st.builds(BatchLimits, num_bytes=st.integers(1, 300), num_documents=st.integers(1, 3)),
)  # fmt: skip
def test_a_list_gives_what_json_lines_give_from_any_cursor(
    folder: Path,
    texts: list[tuple[str, str]],
    suffix: str,
    around: str,
    indent: int | None,
    ascii_only: bool,
    limits: BatchLimits,
) -> None:
    rows = [{"prompt": asked, "tags": [asked, {}], "response": answer} for asked, answer in texts]
    body = around % json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path = folder / f"rows{suffix}"
    path.write_bytes(PACKERS[suffix](body.encode()))
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    options: dict[str, Any] = {"shape": "prompt-response", "limits": limits}
    if not rows and "rows" in around:
        return  # nothing tells an empty list of rows from one of turns
    found = assert_conversations_resume_exactly(lambda: open_chats(path, **options))
    wanted = account(open_chats(lines, **options).batches()).conversations
    assert [chat.messages for chat in found.conversations] == [chat.messages for chat in wanted]
    ids = [f"rows{suffix}:record {number}" for number in range(len(rows))]
    assert [chat.id for chat in found.conversations] == ids
    assert assert_conversation_ledger_balances(open_chats(path, **options)) == found


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("value", "indent", "wanted"),
    [
        ([ROW] * 2, None, 2),
        ({"version": 1, "data": [ROW] * 2}, None, 2),
        ({"version": 1, "data": [ROW] * 2}, 1, 2),
        ({"data": [{"messages": TALK}] * 2, "license": {"names": ["x"]}}, 1, 2),
        ({"conversations": [{"messages": TALK}] * 2}, None, 2),
        ({"conversations": [{"messages": TALK}] * 2}, 1, 2),
        ({"messages": TALK}, None, 1),  # a row of JSON lines
        ({"tags": [{"name": "x"}], **ROW}, None, 1),
        ({"history": [{"user": "a", "assistant": "b"}]}, None, 1),
    ],
)
def test_a_list_in_an_object_holds_rows_unless_the_object_is_a_row(
    tmp_path: Path, value: Any, indent: int | None, wanted: int
) -> None:
    assert answers(write(tmp_path / "a.json", value, indent=indent)) == ["b"] * wanted


@pytest.mark.parametrize(
    "row", [{"messages": TALK}, {"history": [{"user": "a", "assistant": "b"}]}, {"messages": []}]
)
def test_the_turns_of_one_row_over_many_lines_are_not_taken_for_rows(
    tmp_path: Path, row: Any
) -> None:
    path = write(tmp_path / "a.json", row, indent=1)
    with pytest.raises(SourceError, match=r"a\.json:1: broken JSON"):
        answers(path)
    assert open_chats(write(path, [row], indent=1)).describe()["shape"] in row


def test_lines_of_objects_stay_lines(tmp_path: Path) -> None:
    lines = json.dumps({"data": [{"x": 1}], **ROW}) + "\n" + json.dumps(ROW)
    assert answers(write(tmp_path / "a.json", lines)) == ["b", "b"]
    with pytest.raises(SourceError, match=r"a\.json:1: no known shape.*'data'"):
        answers(write(tmp_path / "a.json", '{"data": [{"x": 1}]}\n{"data": [{"x": 1}]}\n'))


def test_a_turn_key_of_another_name_is_not_taken_for_a_row(tmp_path: Path) -> None:
    talk = [{"who": "user", "said": "a"}, {"who": "assistant", "said": "b"}]
    path = write(tmp_path / "a.json", {"talk": talk})
    keys = {"messages_field": "talk", "role_field": "who", "content_field": "said"}
    assert answers(path, **keys) == ["b"]
    path = write(tmp_path / "b.json", {"all": [{"talk": talk}] * 3})
    assert answers(path, **keys) == ["b"] * 3


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"a": [%s], "b": [%s]}', "several lists, 'a' and 'b', wanted exactly one"),
        ('{"a": [%s]', "after the list 'a': "),
        ('{"a": [%s]} {}', "after the list 'a': "),
        ('{"a": [%s],' + " " * 70_000 + '"b": "' + "x" * 70_000 + '"}', "more than 65,536 bytes"),
        ("[%s], %s", "after it comes"),
        ("[%s, %s", "it has no end"),
        ('["%s', "it has no end"),
    ],
)
@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_a_file_that_is_more_or_less_than_one_list_is_refused(
    tmp_path: Path, body: str, problem: str, on_bad: Any
) -> None:
    text = body.replace("%s", json.dumps(ROW))
    path = write(tmp_path / "a.json", text)
    with pytest.raises(SourceError, match=rf"a\.json: not one JSON list of rows: .*{problem}"):
        answers(path, on_bad=on_bad, shape="prompt-response")


def test_a_broken_row_of_a_list_is_a_drop_like_a_broken_line(tmp_path: Path) -> None:
    rows = [json.dumps(ROW), "5", '{"prompt": tru}', "", json.dumps(ROW)]
    path = write(tmp_path / "a.json", "[" + ",".join(rows) + "]")
    found = assert_conversations_resume_exactly(
        lambda: open_chats(path, on_bad="skip", limits=BatchLimits(num_documents=1))
    )
    assert [drop.id for drop in found.drops] == [f"a.json:record {n}" for n in (1, 2, 3)]
    assert {drop.reason for drop in found.drops} == {"bad_json"}
    assert [chat.id for chat in found.conversations] == ["a.json:record 0", "a.json:record 4"]


@pytest.mark.parametrize("suffix", sorted(PACKERS))
@pytest.mark.parametrize("at", [0, 1, 5, 10**6])
def test_a_cursor_where_no_row_ends_is_refused(tmp_path: Path, suffix: str, at: int) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKERS[suffix](json.dumps([ROW] * 3).encode()))
    cursor: Any = {"input": 0, "name": path.name, "done": 0}
    cursor["position"] = {"records": 1, "bytes": at}
    with pytest.raises(SourceError, match="cursor"):
        list(open_chats(path).batches(cursor))


def test_a_row_that_does_not_fit_into_memory_is_refused_before_it_is_read_whole(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.json", [ROW, {"prompt": "a", "response": "x" * 3_000_000}, ROW])
    limits = BatchLimits(num_bytes=80_000, most_bytes=1_000_000)
    with pytest.raises(SourceError, match=r"a\.json, byte 1,[01].*1,080,000 can be read"):
        answers(path, limits=limits)
    escaped = "[" + json.dumps({"prompt": "a", "response": "\u00e9" * 900_000}) + "]"
    assert len(answers(write(path, escaped), limits=limits)[0]) == 900_000


def test_memory_does_not_grow_with_the_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"prompt": "a", "response": "x" * 500})
    path.write_text("[" + ",\n".join([row] * 12_000) + "]")  # 6.4 MB
    source = open_chats(path, limits=BatchLimits(num_bytes=2**18))
    tracemalloc.start()
    try:
        assert sum(batch.num_read for batch in source.batches()) == 12_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
