"""Trees of messages: every thread once, every other message a reason, siblings in one group."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.records import Drop
from shardmill.sources import BatchLimits, conversations, open_chats
from shardmill.sources.message_trees import Node, TreeRules, link_messages, read_tree
from shardmill.testing.sources import (
    Account,
    account,
    assert_conversation_ledger_balances,
    assert_conversations_resume_exactly,
)


def row(name: str, parent: str | None, tree: str | None = "t", **more: Any) -> dict[str, Any]:
    found = {"message_id": name, "parent_id": parent, "message_tree_id": tree, **more}
    return {"text": name.upper(), "role": "prompter", "lang": "en", **found}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> Account:
    return account(open_chats(path, **options).batches())


def said(account: Account) -> list[str]:
    chats = account.conversations
    return ["".join(message["content"] for message in chat.messages) for chat in chats]


def test_a_tree_gives_every_path_from_its_root_to_a_leaf(tmp_path: Path) -> None:
    rows = [
        row("a", None),
        row("b", "a", role="assistant"),
        row("c", "b"),
        row("d", "a", role="assistant"),
        row("x", None, "u"),
    ]
    found = read(write(tmp_path / "m.jsonl", rows))
    assert said(found) == ["ABC", "AD", "X"]
    assert [chat.id for chat in found.conversations] == ["c", "d", "x"]
    assert [chat.group for chat in found.conversations] == ["t", "t", "u"]
    assert found.conversations[1].messages == [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "D"},
    ]
    assert (found.num_read, found.drops) == (3, [])


def test_a_nested_tree_gives_the_same_threads(tmp_path: Path) -> None:
    def message(name: str, *replies: Any, role: str = "prompter") -> dict[str, Any]:
        return {"message_id": name, "text": name.upper(), "role": role, "replies": list(replies)}

    tree = message("a", message("b", message("c"), role="assistant"), message("d"))
    path = write(tmp_path / "t.jsonl", [{"message_tree_id": "t", "prompt": tree}, {"prompt": tree}])
    found = read(path)
    assert said(found) == ["ABC", "AD", "ABC", "AD"]
    assert [chat.id for chat in found.conversations] == ["c", "d", "c", "d"]
    assert [chat.group for chat in found.conversations] == ["t", "t", "a", "a"]
    del tree["replies"][1]["message_id"], tree["message_id"]
    found = read(write(path, [{"prompt": tree}]))
    assert [chat.id for chat in found.conversations] == ["c", "message 3 of t.jsonl:1"]
    (group,) = {chat.group for chat in found.conversations}
    # By the prompt, so that a tree is in the same split wherever its row is.
    assert (
        read(write(path, [{}, {"prompt": tree}]), on_bad="skip", shape="oasst-tree")
        .conversations[0]
        .group
        == group
    )
    tree["text"] = "another"
    assert {chat.group for chat in read(write(path, [{"prompt": tree}])).conversations} != {group}


def test_each_message_on_no_path_is_a_drop_with_its_reason(tmp_path: Path) -> None:
    rows = [
        row("a", None),
        row("b", "a"),
        row("b", "a"),  # 3: once more
        row("c", "gone"),  # 4
        row("d", "c"),  # 5
        row("e", "f"),  # 6: e and f answer each other
        row("f", "e"),  # 7
        row("g", "g"),  # 8: itself
        row("h", "a", lang="de"),  # 9
        row("i", "h"),  # 10
        row("j", "b", deleted=True),  # 11
        row("k", "e"),  # 12: below the circle
    ]
    path = write(tmp_path / "m.jsonl", rows)
    found = read(path, lang="en", skip_deleted=True)
    assert said(found) == ["AB"]
    reasons = {
        3: "duplicate_id",
        4: "missing_parent",
        5: "below_left_out",
        6: "no_root",
        7: "no_root",
        8: "no_root",
        9: "other_language",
        10: "below_left_out",
        11: "deleted",
        12: "no_root",
    }
    assert found.drops == [Drop(id=f"m.jsonl:{n}", reason=reasons[n]) for n in reasons]
    assert found.num_read == 11
    assert said(read(path)) == ["ABJ", "AHI"]


def test_a_rule_for_trees_is_refused_for_another_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [row("a", None)])
    with pytest.raises(OptionError, match="for the oasst shapes"):
        open_chats(path, shape="messages", lang="en")
    chats = write(tmp_path / "chats.jsonl", [{"messages": []}])
    with pytest.raises(OptionError, match="for the oasst shapes"):
        read(chats, skip_deleted=True)
    with pytest.raises(OptionError, match="language does not apply"):
        open_chats(path, language="en")


def test_paths_are_fresh_lists_in_input_order() -> None:
    nodes = [Node("b", "a"), Node("a", None), Node("c", "a"), Node("d", "b"), Node("e", None)]
    assert list(link_messages(nodes)[0]) == [[1, 0, 3], [1, 2], [4]]
    paths, reasons = link_messages(nodes, max_messages=2)
    assert list(paths) == [[1, 0], [1, 2], [4]]
    assert reasons == [None, None, None, "too_deep", None]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_message_is_on_a_path_or_has_a_reason(data: st.DataObject) -> None:
    ids = st.sampled_from("abcdefgh")
    nodes = data.draw(
        st.lists(st.builds(Node, ids, st.none() | ids, st.sampled_from([None, None, "bad"])))
    )
    limit = data.draw(st.none() | st.integers(1, 4))
    paths, reasons = link_messages(nodes, max_messages=limit)
    found = list(paths)
    used = {number for way in found for number in way}
    assert used == {number for number, fate in enumerate(reasons) if fate is None}
    assert len({way[-1] for way in found}) == len(found)
    for way in found:
        assert nodes[way[0]].parent is None
        assert [nodes[n].parent for n in way[1:]] == [nodes[n].id for n in way[:-1]]
        assert limit is None or len(way) <= limit
    assert all(nodes[number].fault is None for number in used)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_rows_in_any_order_and_files_resume_to_the_same_threads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    num_trees = data.draw(st.integers(1, 4))
    trees = []
    for tree in range(num_trees):
        names = [f"{tree}.{number}" for number in range(data.draw(st.integers(1, 6)))]
        parents = [None] + [
            names[data.draw(st.integers(0, number - 1))] for number in range(1, len(names))
        ]
        rows = [row(*pair, f"t{tree}") for pair in zip(names, parents, strict=True)]
        trees.append(data.draw(st.permutations(rows)))
    rows = [message for tree in trees for message in tree]
    if data.draw(st.booleans()):
        rows = data.draw(st.permutations(rows))
    if data.draw(st.booleans()):
        rows = [{**message, "message_tree_id": None} for message in rows]
    cut = data.draw(st.integers(0, len(rows)))
    write(folder / "a.jsonl", rows[:cut])
    write(folder / "b.jsonl", [{"junk": 1}, *rows[cut:]])
    limits = BatchLimits(num_documents=data.draw(st.integers(1, 4)), num_bytes=100)

    def source() -> Any:
        return open_chats(folder, shape="oasst-messages", on_bad="skip", limits=limits)

    found = assert_conversations_resume_exactly(source)
    assert assert_conversation_ledger_balances(source()) == found
    parents_of = {message["message_id"]: message["parent_id"] for message in rows}
    leaves = set(parents_of) - set(parents_of.values())
    assert Counter(chat.id for chat in found.conversations) == Counter(leaves)
    for chat in found.conversations:
        way, name = [], chat.id
        while name is not None:
            way.append(name)
            name = parents_of[name]
        assert [message["content"] for message in chat.messages] == way[::-1]
        assert chat.group in (f"t{way[-1][0]}", way[-1])
    assert found.drops == [Drop(id="b.jsonl:1", reason="other_shape")]


def test_scattered_rows_are_held_only_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row("a", None, "t"), row("b", None, "u"), row("c", "a", "t")]
    path = write(tmp_path / "m.jsonl", rows)
    assert said(read(path)) == ["AC", "B"]
    monkeypatch.setattr(conversations, "MAX_HELD_BYTES", 2)
    with pytest.raises(SourceError, match="sort the rows by message_tree_id"):
        read(path)
    assert said(read(write(path, [rows[0], rows[2], rows[1]]))) == ["AC", "B"]


@pytest.mark.slow
def test_a_chain_longer_than_any_stack_is_one_thread(tmp_path: Path) -> None:
    num = 10 * sys.getrecursionlimit()
    rows = [row(str(n), str(n - 1) if n else None) for n in range(num)]
    random.Random(0).shuffle(rows)
    (chat,) = read(write(tmp_path / "m.jsonl", rows)).conversations
    assert [message["content"] for message in chat.messages] == [str(n) for n in range(num)]

    nested: dict[str, Any] = {"text": "leaf", "role": "assistant"}
    for _ in range(num - 1):
        nested = {"text": "x", "role": "prompter", "replies": [nested]}
    (deep,) = read_tree({"prompt": nested}, "here", TreeRules())
    assert len(deep.messages) == num  # type: ignore[union-attr]
    while nested.get("replies"):  # unlinked from the top: freeing it at once would recurse
        (nested,) = nested.pop("replies")


def test_many_threads_of_one_tree_may_span_batches(tmp_path: Path) -> None:
    rows = [row("a", None)] + [row(str(n), "a") for n in range(1000)]
    path = write(tmp_path / "m.jsonl", rows)
    limits = BatchLimits(num_documents=64)
    batches = list(open_chats(path, limits=limits).batches())
    assert [batch.num_read for batch in batches] == [64] * 15 + [40]
    assert batches[3].cursor == {"input": 0, "name": "m.jsonl", "position": None, "done": 256}
    assert batches[-1].cursor["done"] == 0
    rest = account(open_chats(path, limits=limits).batches(batches[3].cursor))
    assert [chat.id for chat in rest.conversations] == [str(n) for n in range(256, 1000)]
