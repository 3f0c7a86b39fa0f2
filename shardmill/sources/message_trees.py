"""Trees of messages: OpenAssistant's two shapes, a tree in one row or one message in each row.

Every path from a root to a leaf is a conversation, and every message that is on no path is a drop
with one reason. Paths come depth first, roots and replies in input order. Time and memory are
linear in the messages, and nothing recurses, so a chain of any length is read. "prompter" becomes
user, other roles stay. A conversation's id is that of its last message, its group is the tree's, so
that siblings stay in one split; a tree without a name is named by its prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardmill.records import Conversation, Drop
from shardmill.sources.batches import unix_lines
from shardmill.sources.formats.jsonl import Object, kind_of
from shardmill.sources.source import BadRowError

Message = dict[str, Any]

OASST_REASONS = {
    "duplicate_id": "an earlier message of its tree has this id",
    "missing_parent": "the message it answers is not in the data",
    "below_left_out": "it answers a message that was left out, directly or further up",
    "too_deep": "it is beyond the longest thread asked for",
    "no_root": "the messages above it form a circle",
    "other_language": "not in the language asked for",
    "deleted": "marked as deleted, which was to be left out",
}
"""Why a message is in no thread; a drop whatever on_bad says."""


class Node(NamedTuple):
    """One message's position in a tree."""

    id: str
    parent: str | None  # None: a root
    fault: str | None = None  # its own reason to be left out, with all answers to it


def link_messages(
    nodes: Sequence[Node], *, max_messages: int | None = None
) -> tuple[Iterator[list[int]], list[str | None]]:
    """Every path from a root to a leaf, as numbers of messages in input order, a fresh list each;
    and of each message None, or why it is on no path. A path ends at `max_messages`."""
    reasons: list[str | None] = ["no_root"] * len(nodes)
    numbers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if numbers.setdefault(node.id, number) != number:
            reasons[number] = "duplicate_id"
    roots: list[int] = []
    children: list[list[int]] = [[] for _ in nodes]
    stack: list[tuple[int, int, str | None]] = []  # a message, its depth, the reason it inherits
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
        reason = reasons[number] = nodes[number].fault or inherited
        passed = inherited if inherited == "too_deep" or reason is None else "below_left_out"
        stack += [(child, depth + 1, passed) for child in children[number]]
    kept = [[child for child in below if reasons[child] is None] for below in children]
    return _paths([root for root in roots if reasons[root] is None], kept), reasons


def _paths(roots: list[int], children: list[list[int]]) -> Iterator[list[int]]:
    for root in roots:
        path: list[int] = []
        stack = [(root, 0)]
        while stack:
            number, depth = stack.pop()
            del path[depth:]
            path.append(number)
            below = children[number]
            if not below:
                yield list(path)
            stack += [(child, depth + 1) for child in reversed(below)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRules:
    """Which messages of a tree are left out, with all answers to them."""

    lang: str | None = None  # those of other languages; None: none
    skip_deleted: bool = False


class TreeRow(NamedTuple):
    """One message of a tree."""

    node: Node
    message: Message
    tree: str | None
    id: str  # of its drop
    row: int | None = None  # of its drop


def is_oasst_tree(row: Object) -> bool:
    prompt = row.get("prompt")
    return isinstance(prompt, dict) and "text" in prompt and "role" in prompt


def is_oasst_message(row: Object) -> bool:
    return all(key in row for key in ("message_id", "parent_id", "text", "role"))


def read_tree_row(row: Object, row_id: str, rules: TreeRules) -> TreeRow:
    """A row that is one message."""
    name, parent = row.get("message_id"), row.get("parent_id")
    tree = row.get("message_tree_id")
    if not isinstance(name, str):
        raise BadRowError("other_shape", f"'message_id' is {kind_of(name)}, not a string")
    if parent is not None and not isinstance(parent, str):
        raise BadRowError("other_shape", f"'parent_id' is {kind_of(parent)}, not a string")
    node = Node(name, parent or None, _fault(row, rules))
    return TreeRow(node, _message(row), tree if isinstance(tree, str) else None, row_id)


def read_tree(
    row: Object, row_id: str, rules: TreeRules, number: int | None = None
) -> Iterator[Conversation | Drop]:
    """A row that is a whole tree."""
    prompt = row.get("prompt")
    if not isinstance(prompt, dict):
        raise BadRowError("other_shape", f"'prompt' is {kind_of(prompt)}, wanted a message")
    given = row.get("message_tree_id") or prompt.get("message_id")
    tree = given if isinstance(given, str) else _digest(prompt)
    rows: list[TreeRow] = []
    stack: list[tuple[object, str | None]] = [(prompt, None)]
    while stack:
        found, parent = stack.pop()
        if not isinstance(found, dict):
            raise BadRowError("bad_message", f"a reply is {kind_of(found)}, wanted an object")
        # Numbered, so that ids that are missing or repeat do no harm.
        name = str(len(rows))
        id, at = found.get("message_id"), None
        if not isinstance(id, str) or not id:
            id, at = f"message {name} of {row_id}", number
        node = Node(name, parent, _fault(found, rules))
        rows.append(TreeRow(node, _message(found), tree, id, at))
        replies = found.get("replies") or []
        if not isinstance(replies, list):
            raise BadRowError("bad_message", f"'replies' holds {kind_of(replies)}, wanted a list")
        stack += [(reply, name) for reply in reversed(replies)]
    return threads(rows, named_by_row=True)


def threads(
    rows: Sequence[TreeRow], *, named_by_row: bool = False
) -> Iterator[Conversation | Drop]:
    """The conversations of some whole trees, then the drops in input order."""
    paths, reasons = link_messages([row.node for row in rows])
    for path in paths:
        first, last = rows[path[0]], rows[path[-1]]
        yield Conversation(
            messages=[rows[number].message for number in path],
            id=last.id if named_by_row else last.node.id,
            row=last.row,
            group=first.tree or first.node.id,
        )
    for row, reason in zip(rows, reasons, strict=True):
        if reason is not None:
            yield Drop(id=row.id, reason=reason, row=row.row)


def _digest(prompt: Object) -> str:
    """A name for a tree that has none. Not its row: of a piece of a file that is not known."""
    text = prompt.get("text")
    return hashlib.sha256(str(text).encode("utf-8", "replace")).hexdigest()[:16]


def _fault(row: Object, rules: TreeRules) -> str | None:
    if rules.skip_deleted and row.get("deleted"):
        return "deleted"
    if rules.lang is not None and row.get("lang") != rules.lang:
        return "other_language"
    return None


def _message(row: Object) -> Message:
    role, text = row.get("role"), row.get("text")
    if not isinstance(role, str) or not isinstance(text, str):
        raise BadRowError(
            "bad_message", f"'role' is {kind_of(role)} and 'text' {kind_of(text)}, wanted strings"
        )
    return {"role": "user" if role == "prompter" else role, "content": unix_lines(text)}
