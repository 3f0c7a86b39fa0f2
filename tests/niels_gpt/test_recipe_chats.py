"""Dolly rows and OpenAssistant messages as conversations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.dolly import chats_of_rows
from niels_gpt.data.oasst1 import REASONS, read_threads
from shardmill.chat.policy import Dropped, check_messages
from shardmill.errors import SourceError


def message(name: str, parent: str | None, **changes: Any) -> dict[str, Any]:
    """A message whose role follows from the name's length: "a" asks, "ab" answers."""
    role = "prompter" if len(name) % 2 else "assistant"
    tree = name[0]
    return {
        "message_id": name,
        "parent_id": parent,
        "message_tree_id": tree,
        "text": f"text of {name}",
        "role": role,
        "lang": "en",
        "deleted": False,
        **changes,
    }


def tree(*names: str) -> list[dict[str, Any]]:
    """Messages whose parent is their name without its last letter."""
    return [message(name, name[:-1] or None) for name in names]


def ways(rows: Sequence[dict[str, Any]], **options: Any) -> list[list[str]]:
    threads = read_threads(rows, **options)
    return [[m["content"].removeprefix("text of ") for m in chat] for chat in threads.chats]


def test_every_way_from_a_root_to_a_leaf_is_a_thread() -> None:
    rows = tree("a", "ab", "ac", "abx", "abxy", "b", "bc")
    assert ways(rows) == [["a", "ab", "abx", "abxy"], ["a", "ac"], ["b", "bc"]]


def test_roles_and_names_and_trees_of_a_thread() -> None:
    (chat,) = read_threads(tree("a", "ab")).chats
    assert chat == [
        {"role": "user", "content": "text of a"},
        {"role": "assistant", "content": "text of ab"},
    ]
    assert (chat.id, chat.group) == ("ab", "a")


def test_siblings_carry_the_same_tree() -> None:
    chats = read_threads(tree("a", "ab", "ac", "b", "bc")).chats
    assert [chat.group for chat in chats] == ["a", "a", "b"]


def test_the_order_of_messages_in_the_file_does_not_matter_for_the_threads() -> None:
    rows = tree("a", "ab", "ac", "abx", "abxy", "b", "bc")
    shuffled = random.Random(1).sample(rows, len(rows))
    assert sorted(ways(shuffled)) == sorted(ways(rows))


def test_a_chain_of_5000_messages_is_cut_at_32_without_recursion() -> None:
    rows = [
        message(
            f"m{n}",
            f"m{n - 1}" if n else None,
            role="assistant" if n % 2 else "prompter",
            message_tree_id="m0",
        )
        for n in range(5_000)
    ]
    threads = read_threads(rows)
    assert [len(chat) for chat in threads.chats] == [32]
    assert threads.chats[0][-1] == {"role": "assistant", "content": "text of m31"}
    assert threads.left_out == {"too_deep": 4_968}
    whole = read_threads(rows, max_messages=10_000)
    assert [len(chat) for chat in whole.chats] == [5_000]
    assert whole.left_out == {}


def test_messages_are_left_out_for_a_reason() -> None:
    rows = [
        *tree("a", "ab"),
        message("ac", "a", lang="de"),
        message("acx", "ac"),
        message("ad", "a", deleted=True),
        message("ae", "a", role="moderator"),
        message("ab", "a", text="again"),
        message("zz", "nobody"),
        message("zzz", "zz"),
        message("p", "pq"),
        message("pq", "p"),
    ]
    threads = read_threads(rows)
    assert ways(rows) == [["a", "ab"]]
    assert threads.left_out == {
        "duplicate_id": 1,
        "deleted": 1,
        "other_language": 1,
        "bad_message": 1,
        "missing_parent": 1,
        "below_left_out": 2,
        "no_root": 2,
    }
    assert (threads.num_messages, threads.num_used) == (11, 2)


def test_a_message_becomes_a_leaf_when_all_its_answers_are_left_out() -> None:
    rows = [*tree("a", "ab"), message("abx", "ab", lang="fr"), message("abxy", "abx", lang="fr")]
    assert ways(rows) == [["a", "ab"]]
    assert ways(rows, lang=None) == [["a", "ab", "abx", "abxy"]]


def test_a_row_without_an_id_is_an_error_that_names_it() -> None:
    with pytest.raises(SourceError, match=r"row 1: message_id None.*'text'"):
        read_threads([message("a", None), {"text": "hi", "parent_id": None}])


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(0, 30), deepest=st.integers(2, 6))
def test_every_message_has_one_fate(data: st.DataObject, size: int, deepest: int) -> None:
    rows = []
    for n in range(size):
        parent = data.draw(st.sampled_from([None, *(f"m{k}" for k in range(size)), "gone"]))
        rows.append(
            message(
                f"m{n}",
                parent,
                lang=data.draw(st.sampled_from(["en", "en", "en", "de"])),
                deleted=data.draw(st.sampled_from([False, False, False, True])),
            )
        )
    threads = read_threads(rows, max_messages=deepest)
    used = {m["content"] for chat in threads.chats for m in chat}
    assert threads.num_messages == size == threads.num_used + sum(threads.left_out.values())
    assert len(used) == threads.num_used
    assert set(threads.left_out) <= set(REASONS)
    assert all(1 <= len(chat) <= deepest for chat in threads.chats)
    assert len({chat.id for chat in threads.chats}) == len(threads.chats)
    parents = {f"text of {row['message_id']}": row["parent_id"] for row in rows}
    for chat in threads.chats:
        for before, after in zip([None, *chat], chat, strict=False):
            wanted = before and before["content"].removeprefix("text of ")
            assert parents[after["content"]] == wanted


def test_dolly_puts_the_context_behind_the_instruction() -> None:
    rows = [
        {"instruction": "Sum it up.", "context": "Long text.", "response": "Short."},
        {"instruction": "Name a tree.", "context": "", "response": "Oak."},
        {"instruction": "Name a fish.", "context": None, "response": "Cod."},
        {"instruction": "Name a bird.", "context": " \n", "response": "Wren."},
    ]
    chats = list(chats_of_rows(rows))
    assert [chat[0]["content"] for chat in chats] == [
        "Sum it up.\n\ncontext:\nLong text.",
        "Name a tree.",
        "Name a fish.",
        "Name a bird.",
    ]
    assert chats[0] == [
        {"role": "user", "content": "Sum it up.\n\ncontext:\nLong text."},
        {"role": "assistant", "content": "Short."},
    ]
    assert [chat.id for chat in chats] == ["dolly:0", "dolly:1", "dolly:2", "dolly:3"]


def test_a_dolly_row_without_an_answer_stays_to_be_dropped_by_name() -> None:
    chats = list(chats_of_rows([{"instruction": "Why?"}, {"response": "So."}]))
    assert len(chats) == 2
    for chat in chats:
        with pytest.raises(Dropped, match="content_not_text"):
            check_messages(chat)
