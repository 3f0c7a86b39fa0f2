"""What the recipe's chat iterators give: plain lists of messages that know where they came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

SplitUnit = Literal["example", "tree"]
"""What a chat split draws: single chats, or groups of chats (the threads of one tree)."""


class Message(TypedDict):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(list[Message]):
    """A conversation: a list of messages with a name, and the group (tree) it belongs to.

    Anything that takes `list[Message]` takes a `Chat`. A split by tree keeps a group on one side;
    a plain list is a separate group.
    """

    __slots__ = ("group", "id")

    def __init__(
        self, messages: Iterable[Message] = (), *, id: str = "", group: str | None = None
    ) -> None:
        super().__init__(messages)
        self.id = id  # names the conversation in a ledger: "dolly:17"; "" when it has no name
        self.group = group


__all__ = ["Chat", "Message", "SplitUnit"]
