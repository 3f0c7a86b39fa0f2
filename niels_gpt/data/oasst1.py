"""OpenAssistant messages as conversations: every way from a root to a leaf.

In: flat messages with message_id and parent_id, in any order.  Out: one `Chat` per thread.
Promise: time and memory are linear in the messages; no recursion. Each message has one fate: it
is in a thread, or it is counted under a reason. All threads of a tree carry the tree's id as
their group, so a split never parts siblings.
Not here: the choice of good answers. Ranks and labels are not looked at.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data.rows import open_rows
from niels_gpt.messages import Chat, Message
from shardmill.errors import SourceError

log = logging.getLogger(__name__)

DATASET = "OpenAssistant/oasst1"
MAX_MESSAGES = 32

REASONS = {
    "duplicate_id": "a message with this id came before",
    "deleted": "marked as deleted",
    "other_language": "not in the language asked for",
    "bad_message": "a role other than prompter or assistant, or no text",
    "missing_parent": "the parent is not in the data",
    "below_left_out": "answers a message that was left out, directly or further up",
    "too_deep": "beyond the first `max_messages` of its thread",
    "no_root": "the way up runs in a circle",
}
"""Why a message is in no thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The conversations, and the account of all messages."""

    chats: list[Chat]
    num_messages: int  # == num_used + sum(left_out.values())
    num_used: int  # messages that are in at least one thread
    left_out: dict[str, int]  # reason -> messages


def iter_oasst1_sft(
    path: str | Path | None = None,
    *,
    dataset: str = DATASET,
    split: str = "train",
    revision: str | None = None,
    lang: str | None = "en",
    max_messages: int = MAX_MESSAGES,
) -> Iterator[Chat]:
    """The threads of the hub's dataset, or of a local .jsonl file of messages.

    `lang=None` takes every language. What was left out is logged; `read_threads` returns it.
    """
    rows = open_rows(path, dataset=dataset, split=split, revision=revision)
    return iter(read_threads(rows, lang=lang, max_messages=max_messages).chats)


@dataclass(slots=True)
class _Node:
    """One message on its way into a thread."""

    id: str
    parent: str | None
    tree: str
    message: Message
    fault: str | None  # the message's own reason to be left out


def read_threads(
    rows: Iterable[Mapping[str, Any]],
    *,
    lang: str | None = "en",
    max_messages: int = MAX_MESSAGES,
) -> Threads:
    """Rebuild the threads. A thread ends at `max_messages` even when its tree goes deeper."""
    nodes: dict[str, _Node] = {}
    num_messages = 0
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        node = _node(row, number, lang)
        num_messages += 1
        if node.id in nodes:
            left_out["duplicate_id"] += 1
        else:
            nodes[node.id] = node
    children: dict[str | None, list[_Node]] = {}
    for node in nodes.values():
        children.setdefault(node.parent, []).append(node)
    fates: dict[str, str] = {}
    chats = _walk(children, fates, max_messages)
    _lose_orphans(nodes, children, fates)
    used = sum(fate == "used" for fate in fates.values())
    left_out.update(fate for fate in fates.values() if fate != "used")
    left_out["no_root"] += len(nodes) - len(fates)
    counts = {reason: left_out[reason] for reason in REASONS if left_out[reason]}
    if counts:
        log.info(
            "oasst1: %d threads from %d of %d messages; left out: %s",
            len(chats),
            used,
            num_messages,
            ", ".join(f"{count} {reason}" for reason, count in counts.items()),
        )
    return Threads(chats=chats, num_messages=num_messages, num_used=used, left_out=counts)


def _node(row: Mapping[str, Any], number: int, lang: str | None) -> _Node:
    name, parent = row.get("message_id"), row.get("parent_id")
    if not isinstance(name, str) or not (parent is None or isinstance(parent, str)):
        raise SourceError(
            f"oasst1, row {number}: message_id {name!r}, parent_id {parent!r}; wanted texts "
            f"(parent_id null at a root). The row's keys: {sorted(row)}"
        )
    role = {"prompter": "user", "assistant": "assistant"}.get(str(row.get("role")))
    text = row.get("text")
    fault = None
    if row.get("deleted"):
        fault = "deleted"
    elif lang is not None and row.get("lang") != lang:
        fault = "other_language"
    elif role is None or not isinstance(text, str):
        fault = "bad_message"
    message: Message = {
        "role": "user" if role == "user" else "assistant",
        "content": text if isinstance(text, str) else "",
    }
    tree = row.get("message_tree_id")
    return _Node(name, parent or None, tree if isinstance(tree, str) else "", message, fault)


def _walk(
    children: Mapping[str | None, list[_Node]], fates: dict[str, str], max_messages: int
) -> list[Chat]:
    """Depth first from every root, in input order; fills the fate of each message reached."""
    if max_messages < 2:
        raise SourceError(f"max_messages={max_messages}: a question with its answer is 2")
    chats: list[Chat] = []
    for root in children.get(None, []):
        way: list[Message] = []
        stack = [(root, 0)]
        while stack:
            node, depth = stack.pop()
            if node.fault:
                _lose(node, node.fault, "below_left_out", children, fates)
                continue
            fates[node.id] = "used"
            del way[depth:]
            way.append(node.message)
            below = children.get(node.id, [])
            if depth + 1 == max_messages:
                for child in below:
                    _lose(child, "too_deep", "too_deep", children, fates)
                below = []
            sound = [child for child in below if child.fault is None]
            if not sound:
                chats.append(Chat(way, id=node.id, group=root.tree or root.id))
            stack += [(child, depth + 1) for child in reversed(below)]
    return chats


def _lose(
    node: _Node,
    own: str,
    below: str,
    children: Mapping[str | None, list[_Node]],
    fates: dict[str, str],
) -> None:
    """Give a message the fate `own` and all answers under it the fate `below`."""
    fates[node.id] = node.fault or own
    stack = list(children.get(node.id, []))
    while stack:
        lost = stack.pop()
        if lost.id not in fates:
            fates[lost.id] = lost.fault or below
            stack += children.get(lost.id, [])


def _lose_orphans(
    nodes: Mapping[str, _Node],
    children: Mapping[str | None, list[_Node]],
    fates: dict[str, str],
) -> None:
    for parent, orphans in children.items():
        if parent is not None and parent not in nodes:
            for orphan in orphans:
                _lose(orphan, "missing_parent", "below_left_out", children, fates)


__all__ = ["DATASET", "MAX_MESSAGES", "REASONS", "Threads", "iter_oasst1_sft", "read_threads"]
