"""OpenAssistant's two shapes: a tree in one record, or one message in each row.

In: records.  Out: every way from a root to a leaf as a `Conversation`, a `Drop` for each message
that is on none.
Promise: "prompter" becomes user, other roles stay; a thread's id is its last message's, its group
is the tree's, so that siblings never part. No recursion. By default every message counts; `Rules`
leave out other languages and deleted ones, with all answers to them.
Not here: ranks and labels; which rows make a tree (see `rows_of_trees`).

Trees of messages: who is in a tree, and every way from a root to a leaf.

In: each message's id, its parent's id, and its own fault if it has one.  Out: fates, then ways.
Promise: time and memory are linear in the messages, plus the ways as they are asked for; no
recursion, so a chain of any length is read. Every message is on a way or has exactly one reason.
Ways come depth first, roots and answers in input order.
Not here: what a message says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmill.records import Conversation, Drop
from shardmill.sources.chats.json_records import Misfit, Record, kind_of
from shardmill.sources.chats.shape_readers import Message, clean_text

TREE_REASONS = {
    "duplicate_id": "a message with this id came before in its tree",
    "missing_parent": "the message it answers is not in the data",
    "below_left_out": "it answers a message that was left out, directly or further up",
    "too_deep": "it lies beyond the longest thread asked for",
    "no_root": "the way up runs in a circle",
}
"""Why a message is on no way, beside its own fault."""


class Node(NamedTuple):
    """One message's place in a tree."""

    id: str
    parent: str | None  # None: a root
    fault: str | None = None  # the message's own reason to be left out, with all answers to it


@dataclass(frozen=True, slots=True)
class Forest:
    """Sound messages, by number, in input order."""

    roots: list[int]
    children: list[list[int]]  # of each message; sound ones only
    fates: list[str | None]  # of each message: None, or why it is on no way


def plant(nodes: Sequence[Node], *, max_messages: int | None = None) -> Forest:
    """Find each message's answers and fate. A way ends at `max_messages`."""
    fates: list[str | None] = ["no_root"] * len(nodes)
    numbers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if numbers.setdefault(node.id, number) != number:
            fates[number] = "duplicate_id"
    roots: list[int] = []
    children: list[list[int]] = [[] for _ in nodes]
    stack: list[tuple[int, int, str | None]] = []  # a message, its depth, what it inherits
    for number in numbers.values():
        parent = nodes[number].parent
        if parent is None:
            roots.append(number)
            stack.append((number, 1, None))
        elif parent in numbers:
            children[numbers[parent]].append(number)
        else:
            stack.append((number, 1, "missing_parent"))
    while stack:
        number, depth, inherited = stack.pop()
        if inherited is None and max_messages is not None and depth > max_messages:
            inherited = "too_deep"
        fate = fates[number] = nodes[number].fault or inherited
        passed = inherited if inherited == "too_deep" or fate is None else "below_left_out"
        stack += [(child, depth + 1, passed) for child in children[number]]
    sound = [[child for child in below if fates[child] is None] for below in children]
    return Forest([root for root in roots if fates[root] is None], sound, fates)


def ways(forest: Forest) -> Iterator[list[int]]:
    """Every way from a root to a leaf, as numbers of messages; a fresh list each."""
    for root in forest.roots:
        way: list[int] = []
        stack = [(root, 0)]
        while stack:
            number, depth = stack.pop()
            del way[depth:]
            way.append(number)
            below = forest.children[number]
            if not below:
                yield list(way)
            stack += [(child, depth + 1) for child in reversed(below)]


OASST_REASONS = TREE_REASONS | {
    "other_language": "not in the language asked for",
    "deleted": "marked as deleted, which was to be left out",
}
"""Why a message is in no thread; drops whatever on_bad says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which messages of a tree count."""

    lang: str | None = None  # None: every language
    skip_deleted: bool = False


class TreeRow(NamedTuple):
    """One message, read."""

    node: Node
    message: Message
    tree: str | None
    place: str  # the id of its drop


def is_oasst_tree(record: Record) -> bool:
    prompt = record.get("prompt")
    return isinstance(prompt, dict) and "text" in prompt and "role" in prompt


def is_oasst_message(record: Record) -> bool:
    return all(key in record for key in ("message_id", "parent_id", "text", "role"))


def read_row(record: Record, place: str, rules: Rules) -> TreeRow:
    """A flat row."""
    name, parent = record.get("message_id"), record.get("parent_id")
    tree = record.get("message_tree_id")
    if not isinstance(name, str):
        raise Misfit("other_shape", f"'message_id' is {kind_of(name)}, no string")
    if parent is not None and not isinstance(parent, str):
        raise Misfit("other_shape", f"'parent_id' is {kind_of(parent)}, no string")
    node = Node(name, parent or None, _fault(record, rules))
    return TreeRow(node, _message(record), tree if isinstance(tree, str) else None, place)


def read_tree(record: Record, place: str, rules: Rules) -> Iterator[Conversation | Drop]:
    """A whole tree in one record."""
    prompt = record.get("prompt")
    if not isinstance(prompt, dict):
        raise Misfit("other_shape", f"'prompt' is {kind_of(prompt)}, wanted a message")
    given = record.get("message_tree_id") or prompt.get("message_id")
    tree = given if isinstance(given, str) else place
    rows: list[TreeRow] = []
    stack: list[tuple[object, str | None]] = [(prompt, None)]
    while stack:
        found, parent = stack.pop()
        if not isinstance(found, dict):
            raise Misfit("bad_message", f"a reply is {kind_of(found)}, wanted an object")
        # Numbered, so that ids that are missing or repeat do no harm.
        number = str(len(rows))
        given = found.get("message_id")
        where = given if isinstance(given, str) and given else f"{place} message {number}"
        node = Node(number, parent, _fault(found, rules))
        rows.append(TreeRow(node, _message(found), tree, where))
        replies = found.get("replies") or []
        if not isinstance(replies, list):
            raise Misfit("bad_message", f"'replies' holds {kind_of(replies)}, wanted a list")
        stack += [(reply, number) for reply in reversed(replies)]
    return threads(rows, named_by_place=True)


def threads(
    rows: Sequence[TreeRow], *, named_by_place: bool = False
) -> Iterator[Conversation | Drop]:
    """The conversations of some whole trees, then the drops in input order."""
    forest = plant([row.node for row in rows])
    for way in ways(forest):
        first, last = rows[way[0]], rows[way[-1]]
        yield Conversation(
            messages=[rows[number].message for number in way],
            id=last.place if named_by_place else last.node.id,
            group=first.tree or first.node.id,
        )
    for row, fate in zip(rows, forest.fates, strict=True):
        if fate is not None:
            yield Drop(id=row.place, reason=fate)


def _fault(record: Record, rules: Rules) -> str | None:
    if rules.skip_deleted and record.get("deleted"):
        return "deleted"
    if rules.lang is not None and record.get("lang") != rules.lang:
        return "other_language"
    return None


def _message(record: Record) -> Message:
    role, text = record.get("role"), record.get("text")
    if not isinstance(role, str) or not isinstance(text, str):
        raise Misfit(
            "bad_message", f"'role' is {kind_of(role)} and 'text' {kind_of(text)}, wanted strings"
        )
    return {"role": "user" if role == "prompter" else role, "content": clean_text(text)}
