"""Trees of messages: who is in a tree, and every way from a root to a leaf.

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
