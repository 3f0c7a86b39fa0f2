"""What is said of one token, and what is known of the document it stands in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardmill.sources import RowPlace

Kind: TypeAlias = Literal["text", "end", "template", "turn"]
FoundBy: TypeAlias = Literal["origins", "counting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Where one token came from."""

    split: str
    token: int  # its position in the split
    token_id: int
    document: int  # the document or conversation it stands in, a number of the split
    offset: int  # its place in that
    source: str  # the name of the source
    file: str | None  # among the inputs; None: the source is no files
    row: int | None  # a line counts from 1, a row of Parquet or a hub from 0; None: a whole file
    row_id: (
        str  # as dropped rows are named: "pages.jsonl:17"; a conversation's own id if it has one
    )
    own_id: str | None  # what the row calls itself in its field "id"
    kind: Kind  # "end": appended by the build; "template": put there by the chat template; "turn":
    # of a turn that a Jinja template wrote, which tells no words from marks
    text: str  # the row's text, cleaned as the build did; of a chat, the words of the turn
    start: int | None  # characters start..stop of `text`; None: the token has no text
    stop: int | None
    turn: int | None = None  # of a conversation, from 0; None: a document, or before the first turn
    role: str | None = None  # who speaks in it
    part: str | None = None  # "content", "reasoning", "tool_call" or "tools"
    found_by: FoundBy  # "counting": the input was read from its start

    @property
    def characters(self) -> str:
        """The text of the token; a piece of a character has all of it."""
        return "" if self.start is None else self.text[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundText:
    """The row of a document."""

    text: str
    place: RowPlace
    feed: int
    found_by: FoundBy


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of a conversation that one text became."""

    start: int  # in the conversation
    stop: int
    part: str
    text: str  # as it was encoded
    content: str  # of the message it is of, where that has it whole; else the text
    lead: int  # characters of the content before the text
