"""Every source of conversations, on random records: the expected ones, from any cursor."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.protocols import ConversationSource, CuttableChats
from shardmill.records import Conversation, Drop
from shardmill.sources import BatchLimits, MemoryChats, open_chats, stamp_of
from shardmill.testing.sources import (
    Account,
    account,
    assert_conversation_ledger_balances,
    assert_conversations_resume_exactly,
    joined,
    nasty_texts,
)

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".jsonl.zst": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
}


@dataclass(frozen=True)
class Case:
    """A record as JSON and its fate: messages, or the reason of its drop."""

    raw: bytes
    messages: list[dict[str, Any]] | None
    reason: str = ""

    @property
    def is_repaired(self) -> bool:
        return self.messages is not None and b"\\ud83d pair" in self.raw


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


def texts() -> st.SearchStrategy[tuple[str, str]]:
    """What is written, and what must come of it."""
    plain = nasty_texts().map(lambda text: (text, text.replace("\r\n", "\n")))
    return plain | st.just(("half \ud83d pair", "half \ufffd pair"))


def turns(shape: str) -> st.SearchStrategy[Case]:
    speakers = {
        "messages": [("user", "user"), ("GPT", "GPT"), ("tool", "tool")],
        "sharegpt": [("human", "user"), ("gpt", "assistant"), ("observation", "tool")],
    }[shape]
    key, said, listed = {
        "messages": ("role", "content", "messages"),
        "sharegpt": ("from", "value", "conversations"),
    }[shape]

    def case(found: list[tuple[tuple[str, str], tuple[str, str]]]) -> Case:
        record = {listed: [{key: speaker[0], said: text[0]} for speaker, text in found]}
        messages = [{"role": speaker[1], "content": text[1]} for speaker, text in found]
        return Case(line(record), messages)

    turn = st.tuples(st.sampled_from(speakers), texts())
    return st.lists(turn, max_size=4).map(case)


def columns(_: str) -> st.SearchStrategy[Case]:
    def case(found: tuple[tuple[str, str], tuple[str, str]]) -> Case:
        question, answer = found
        return Case(
            line({"instruction": question[0], "output": answer[0]}),
            [
                {"role": "user", "content": question[1]},
                {"role": "assistant", "content": answer[1]},
            ],
        )

    return st.tuples(texts(), texts()).map(case)


RECORDS = {"messages": turns, "sharegpt": turns, "alpaca": columns}
BAD = st.sampled_from(
    [
        Case(b'{"messages": [', None, "bad_json"),
        Case(b"[]", None, "bad_json"),
        Case(b"\xff", None, "bad_json"),
        Case(b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", None, "bad_json"),
        Case(b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", None, "bad_json"),
        Case(b'{"other": 1}', None, "other_shape"),
    ]
)


def expected(cases: list[Case], places: Iterator[str]) -> Account:
    named = list(zip(cases, places, strict=False))
    return Account(
        conversations=[
            Conversation(messages=case.messages, id=place)
            for case, place in named
            if case.messages is not None
        ],
        num_read=len(cases),
        counts={"empty": 0, "invalid_utf8": sum(case.is_repaired for case in cases)},
        drops=[
            Drop(id=place, reason=case.reason) for case, place in named if case.messages is None
        ],
    )


def check(make_source: Callable[[], ConversationSource], wanted: Account) -> None:
    assert assert_conversation_ledger_balances(make_source()) == wanted
    assert assert_conversations_resume_exactly(make_source) == wanted
    source = make_source()
    if isinstance(source, CuttableChats):
        for num_bytes in (1, 60):
            assert joined(source.cut(num_bytes)) == wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data(), limits=LIMITS, suffix=st.sampled_from(sorted(PACKERS)))
def test_every_json_line_is_a_conversation_or_a_drop(
    folder: Path, data: st.DataObject, limits: BatchLimits, suffix: str
) -> None:
    shape = data.draw(st.sampled_from(sorted(RECORDS)))
    cases = data.draw(st.lists(RECORDS[shape](shape) | BAD, max_size=10))
    blanks = data.draw(st.lists(st.sampled_from([b"", b"\n", b" \r\n"]), min_size=11, max_size=11))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    body = b"".join(blank + case.raw + end for blank, case in zip(blanks, cases, strict=False))
    body += blanks[10]
    if data.draw(st.booleans()):
        body = b"\xef\xbb\xbf" + body
    path = folder / f"records{suffix}"
    path.write_bytes(PACKERS[suffix](body))
    lines, number = [], 0
    for blank, _ in zip(blanks, cases, strict=False):
        number += 1 + bool(blank)
        lines.append(f"{path.name}:{number}")

    check(
        lambda: open_chats(path, shape=shape, on_bad="skip", limits=limits),
        expected(cases, iter(lines)),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), limits=LIMITS)
def test_files_of_all_kinds_are_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, limits: BatchLimits
) -> None:
    root = tmp_path_factory.mktemp("kinds")
    shape = data.draw(st.sampled_from(sorted(RECORDS)))
    kinds = data.draw(st.permutations([".jsonl", ".json", ".parquet", ".parquet"]))
    everything: list[Case] = []
    places: list[str] = []
    for number, kind in enumerate(kinds):
        cases = data.draw(st.lists(RECORDS[shape](shape), min_size=1, max_size=5))
        cases = [case for case in cases if kind != ".parquet" or b"\\ud83d pair" not in case.raw]
        path = root / f"{number}{kind}"
        raw = [case.raw for case in cases]
        first = {".jsonl": 1, ".json": 0, ".parquet": 0}[kind]
        word = {".jsonl": "", ".json": "record ", ".parquet": "row "}[kind]
        if kind == ".parquet":
            table = pa.Table.from_pylist([json.loads(record) for record in raw])
            pq.write_table(table, path, row_group_size=2)
        elif kind == ".json":
            path.write_bytes(b" [" + b",\n".join(raw) + b"]\n")
        else:
            path.write_bytes(b"\n".join(raw))
        everything += cases
        places += [f"{path.name}:{word}{first + place}" for place in range(len(cases))]

    check(lambda: open_chats(root, shape=shape, limits=limits), expected(everything, iter(places)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_parquet_resumes_inside_and_between_row_groups(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": [str(n) for n in range(8)], "answer": ["x"] * 8})
    pq.write_table(table, path, row_group_size=3)
    limits = BatchLimits(num_documents=size)
    found = assert_conversations_resume_exactly(lambda: open_chats(path, limits=limits))
    assert [chat.messages[0]["content"] for chat in found.conversations] == list("01234567")
    assert [chat.id for chat in found.conversations] == [f"a.parquet:row {n}" for n in range(8)]


@settings(deadline=None, max_examples=60)
@given(chats=st.lists(turns("messages"), max_size=8), limits=LIMITS)
def test_conversations_in_memory_are_cleaned_and_resumed(
    chats: list[Case], limits: BatchLimits
) -> None:
    given = [json.loads(case.raw)["messages"] for case in chats]
    wanted = expected(chats, (f"memory:{number}" for number in range(len(chats))))

    check(lambda: MemoryChats(given, limits=limits), wanted)
    check(lambda: MemoryChats(lambda: iter(given), limits=limits), wanted)
    named = [Conversation(messages=turns, id="mine", group="g") for turns in given]
    found = account(MemoryChats(named, limits=limits).batches()).conversations
    assert [(chat.id, chat.group) for chat in found] == [("mine", "g")] * len(given)


def test_a_generator_and_what_is_not_a_chat_are_refused() -> None:
    with pytest.raises(SourceError, match="only once"):
        MemoryChats(iter([]))
    for wrong in ("hi", ["hi"], 5, {"role": "user"}):
        with pytest.raises(SourceError, match=r"conversation 0 \(from 0\)"):
            list(MemoryChats([wrong]).batches())  # type: ignore[list-item]


def test_a_batch_holds_no_more_than_the_limits(tmp_path: Path) -> None:
    sizes = [10, 90, 1, 300, 99, 1, 1]
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\n".join(
            line({"messages": [{"role": "", "content": "\u00e9" * (n // 2) + "x" * (n % 2)}]})
            for n in sizes
        )
    )
    limits = BatchLimits(num_bytes=100, num_documents=2)
    batches = list(open_chats(path, limits=limits).batches())
    assert [batch.num_read for batch in batches] == [2, 1, 1, 2, 1]


def test_a_description_depends_on_the_content_and_not_on_the_folder(tmp_path: Path) -> None:
    record = line({"messages": [], "prompt": "a", "response": "b"})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(record)
    first, second = (open_chats(tmp_path / name, name="n").describe() for name in ("a", "b"))
    assert first == second == json.loads(json.dumps(first))
    assert str(tmp_path) not in json.dumps(first)
    others = [
        open_chats(tmp_path / "a", name="n", **options).describe()
        for options in ({"shape": "messages"}, {"on_bad": "skip"}, {"shape": "history"})
    ]
    (tmp_path / "a/x.jsonl").write_bytes(record.replace(b'"a"', b'"c"'))
    others.append(open_chats(tmp_path / "a", name="n").describe())
    assert all(other != first for other in others)
    assert first["shape"] == "messages"


def test_a_stamp_sees_a_file_that_was_written_again(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"messages": []}')
    before = stamp_of(open_chats(path))
    assert before == [["x.jsonl", path.stat().st_mtime_ns]]
    path.touch()
    assert stamp_of(open_chats(path)) != before
    assert stamp_of(MemoryChats([])) is None
