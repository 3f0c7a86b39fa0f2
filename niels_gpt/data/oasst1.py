"""OpenAssistant messages as conversations: one `Chat` for every path from a root to a leaf.

Messages with message_id and parent_id may come in any order. Time and memory are linear in the
messages, without recursion. Each message is in a thread, or it is counted under a reason. All
threads of a tree carry the tree's id as their group, so that a split can keep siblings together.
Ranks and labels are not looked at.
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
from shardmill.sources.message_trees import Node, link_messages

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


def read_threads(
    rows: Iterable[Mapping[str, Any]],
    *,
    lang: str | None = "en",
    max_messages: int = MAX_MESSAGES,
) -> Threads:
    """Rebuild the threads. A thread ends at `max_messages` even when its tree goes deeper."""
    if max_messages < 2:
        raise SourceError(f"max_messages={max_messages}: a question with its answer is 2")
    nodes: list[Node] = []
    messages: list[Message] = []
    trees: list[str] = []
    for number, row in enumerate(rows):
        message, fault = _message(row, lang)
        nodes.append(_node(row, number, fault))
        messages.append(message)
        tree = row.get("message_tree_id")
        trees.append(tree if isinstance(tree, str) else "")
    paths, reasons = link_messages(nodes, max_messages=max_messages)
    chats = [
        Chat(
            [messages[number] for number in path],
            id=nodes[path[-1]].id,
            group=trees[path[0]] or nodes[path[0]].id,
        )
        for path in paths
    ]
    left_out = Counter(reason for reason in reasons if reason is not None)
    counts = {reason: left_out[reason] for reason in REASONS if left_out[reason]}
    used = len(nodes) - sum(counts.values())
    if counts:
        log.info(
            "oasst1: %d threads from %d of %d messages; left out: %s",
            len(chats),
            used,
            len(nodes),
            ", ".join(f"{count} {reason}" for reason, count in counts.items()),
        )
    return Threads(chats=chats, num_messages=len(nodes), num_used=used, left_out=counts)


def _node(row: Mapping[str, Any], number: int, fault: str | None) -> Node:
    name, parent = row.get("message_id"), row.get("parent_id")
    if not isinstance(name, str) or not (parent is None or isinstance(parent, str)):
        raise SourceError(
            f"oasst1, row {number}: message_id {name!r}, parent_id {parent!r}; wanted texts "
            f"(parent_id null at a root). The row's keys: {sorted(row)}"
        )
    return Node(name, parent or None, fault)


def _message(row: Mapping[str, Any], lang: str | None) -> tuple[Message, str | None]:
    """What is said, and the message's own reason to be left out."""
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
    return message, fault


__all__ = ["DATASET", "MAX_MESSAGES", "REASONS", "Threads", "iter_oasst1_sft", "read_threads"]
