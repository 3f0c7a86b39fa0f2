"""Splits by a hash: the same documents whatever the order, the batches and the process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import UserList
from dataclasses import replace
from datetime import date
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building.splits import HashSplit
from shardmill.errors import OptionError, SourceError
from shardmill.records import Conversation

THREE = HashSplit(seed=1, fractions=(("val", 0.2), ("test", 0.1)))
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), max_size=30)
MANY = [f"document {number}" for number in range(20_000)]


def of_texts(split: HashSplit, texts: list[str]) -> list[int]:
    found: list[int] = split.of_texts(pa.array(texts, pa.large_string())).tolist()
    return found


def chat(said: str, **more: Any) -> Conversation:
    return Conversation(messages=[{"role": "user", "content": said}], **more)


@settings(deadline=None)
@given(texts=TEXTS, data=st.data())
def test_a_document_has_one_split_in_any_order_and_any_batch(
    texts: list[str], data: st.DataObject
) -> None:
    whole = of_texts(THREE, texts)
    order = data.draw(st.permutations(range(len(texts))))
    cut = data.draw(st.integers(0, len(texts)))
    array = pa.array(texts, pa.large_string())

    assert of_texts(THREE, [texts[at] for at in order]) == [whole[at] for at in order]
    assert [*THREE.of_texts(array[:cut]), *THREE.of_texts(array[cut:])] == whole
    assert [of_texts(THREE, [text])[0] for text in texts] == whole
    assert THREE.of_texts(pa.array(texts, pa.string())[cut:]).tolist() == whole[cut:]
    assert THREE.of_texts(array).dtype == np.uint8


@settings(deadline=None)
@given(said=TEXTS, data=st.data())
def test_a_conversation_has_one_split_in_any_order_and_any_batch(
    said: list[str], data: st.DataObject
) -> None:
    chats = [chat(text, group=data.draw(st.sampled_from([None, "a", "b"]))) for text in said]
    whole = THREE.of_conversations(chats).tolist()
    order = data.draw(st.permutations(range(len(chats))))

    mixed = THREE.of_conversations(chats[at] for at in order).tolist()
    assert mixed == [whole[at] for at in order]


def test_a_split_is_these_very_numbers() -> None:
    """Another hash or key would move documents of stores that exist from train to val."""
    half = HashSplit(seed=7, fractions=(("val", 0.5),))
    assert of_texts(half, list("abcdefghijkl")) == [1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0]
    groups = [chat("q", group=name) for name in "abcdefghijkl"]
    assert half.of_conversations(groups).tolist() == of_texts(half, list("abcdefghijkl"))
    assert half.of_conversations(map(chat, "abcdefghijkl")).tolist() == [
        0,
        0,
        0,
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
    ]


def full(number: int) -> Conversation:
    """With every key that a template reads."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": number}}}
    said = [{"type": "text", "text": "caf\u00e9"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": said, "name": "Ann", "train": False},
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    return Conversation(messages=messages, tools=[{"name": "f"}], id=f"{number}")


def test_the_split_of_tools_calls_and_reasoning_is_these_very_numbers() -> None:
    half = HashSplit(seed=7, fractions=(("val", 0.5),))
    numbers = half.of_conversations(map(full, range(12)))
    assert "".join(map(str, numbers)) == "110000001000"


def test_the_shares_are_those_asked_for() -> None:
    counts = np.bincount(of_texts(THREE, MANY), minlength=3)
    # Five standard deviations of a binomial distribution: sqrt(20,000 * 0.2 * 0.8) is 57.
    for count, share in zip(counts.tolist(), (0.7, 0.2, 0.1), strict=True):
        assert abs(count - 20_000 * share) < 5 * np.sqrt(20_000 * share * (1 - share))
    chats = np.bincount(THREE.of_conversations(map(chat, MANY)), minlength=3)
    assert abs(chats[1] - 4000) < 5 * 57


def test_equal_documents_and_groups_never_part() -> None:
    assert len(set(of_texts(THREE, ["again"] * 50))) == 1
    chats = [chat(f"{number}", group=f"group {number % 700}") for number in range(7000)]
    splits = THREE.of_conversations(chats).tolist()
    together = {(one.group, split) for one, split in zip(chats, splits, strict=True)}
    assert len(together) == 700
    assert {split for _, split in together} == {0, 1, 2}


def test_equal_conversations_never_part_however_they_are_written() -> None:
    for number in range(50):
        said = {"role": "user", "content": f"{number} \u00e9 \ud83d"}
        written = [
            Conversation(messages=[said], tools=[{"a": 1, "b": date(2020, 1, 1)}], id="x"),
            Conversation(
                messages=(MappingProxyType(dict(reversed(said.items()))),),
                tools=UserList([{"b": date(2020, 1, 1), "a": 1}]),
                id="y",
            ),
        ]
        assert len(set(THREE.of_conversations(written).tolist())) == 1
    assert len({THREE.of_conversations([chat("a", tools=[{"n": n}])])[0] for n in range(50)}) == 3


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_a_key_that_no_template_reads_does_not_move_a_conversation(kind: Any) -> None:
    for plain in map(full, range(20)):
        other: dict[Any, Any] = {"id": object(), "timestamp": 1.5, "weight": 1, "group": "g", 5: 6}
        more = [kind({**other, **said}) for said in plain.messages]
        both = [plain, replace(plain, messages=more), replace(plain, messages=UserList(more))]
        assert len(set(THREE.of_conversations(both).tolist())) == 1


@pytest.mark.parametrize(
    "key", ["role", "content", "name", "train", "reasoning_content", "tool_calls", "tool_call_id"]
)
def test_each_key_that_a_template_reads_counts(key: str) -> None:
    chats = [Conversation(messages=[{"role": "user", key: f"{number}"}]) for number in range(50)]
    assert set(THREE.of_conversations(chats).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("messages", [None, 5, "text", {}, [], [5, None, "x", ["y"]]])
def test_what_is_not_messages_has_a_split_and_is_left_to_the_template(messages: Any) -> None:
    assert len(THREE.of_conversations([Conversation(messages=messages)])) == 1


def test_a_larger_share_keeps_what_was_in_it() -> None:
    before: set[int] = set()
    for share in (0.001, 0.01, 0.1, 0.5, 0.9):
        split = HashSplit(seed=3, fractions=(("val", share), ("test", 0.05)))
        found = set(np.flatnonzero(np.array(of_texts(split, MANY)) == 1).tolist())
        assert before < found
        before = found


def test_another_seed_chooses_other_documents() -> None:
    other = HashSplit(seed=2, fractions=THREE.fractions)
    first, second = np.array(of_texts(THREE, MANY)) == 1, np.array(of_texts(other, MANY)) == 1
    # Independent: of one's 20% the other has about 20%.
    assert 0.15 < (first & second).sum() / first.sum() < 0.25


def test_without_fractions_all_go_to_train() -> None:
    split = HashSplit(seed=0)
    assert split.splits == ("train",)
    assert split.words() == "all to train"
    assert of_texts(split, ["a", "b"]) == [0, 0]
    assert split.of_conversations(iter([chat("a")])).tolist() == [0]


def test_the_words_of_the_manifest_name_every_share() -> None:
    assert THREE.splits == ("train", "val", "test")
    assert THREE.words() == (
        "by the hash of seed and document (of a conversation its group, else its messages and "
        "tools): the lowest 0.2 of its range to val, the next 0.1 to test, else train"
    )


@pytest.mark.slow
def test_another_process_chooses_the_same() -> None:
    code = (
        "import pickle, sys, pyarrow as pa\n"
        "split, texts = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(split.of_texts(pa.array(texts, pa.large_string())).tolist())"
    )
    sent = pickle.dumps((THREE, MANY[:40])).hex()
    found = subprocess.run([sys.executable, "-c", code, sent], capture_output=True, check=True)
    assert found.stdout.decode().strip() == str(of_texts(THREE, MANY[:40]))


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), True, "0.1", None])
def test_a_share_outside_of_its_range_is_refused(share: Any) -> None:
    with pytest.raises(OptionError, match="test_fraction"):
        HashSplit(seed=0, fractions=(("val", 0.1), ("test", share)))


def test_shares_that_leave_nothing_to_train_are_refused() -> None:
    with pytest.raises(OptionError, match=r"val_fraction.*test_fraction.*together 1"):
        HashSplit(seed=0, fractions=(("val", 0.7), ("test", 0.3)))


def test_messages_that_are_not_json_are_named() -> None:
    with pytest.raises(SourceError, match=r"conversation 'x'.*give the conversation a group"):
        THREE.of_conversations([chat("a", tools=[{1: "a", "b": 2}], id="x")])
