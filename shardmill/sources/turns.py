"""One turn as a message, however its file writes it, and a file's own names for columns and roles.

A message has a text as "content", what was thought as "reasoning_content", calls as "tool_calls".
Files also write these as parts of the content, under other keys, or inside the text. Nothing is
chosen between two values and nothing changes its order: such a conversation is dropped with one of
`MESSAGE_REASONS`, whatever on_bad says. Null keys count as absent, except for "content": null.
CR LF becomes LF in what is said and thought; in the arguments of a call it stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmill.errors import OptionError
from shardmill.messages import Dropped, PartKind, normal_role, read_part
from shardmill.records import ROLES
from shardmill.sources.batches import unix_lines
from shardmill.sources.formats.jsonl import Object, decode_value, kind_of
from shardmill.sources.message_trees import Message, TreeRules
from shardmill.sources.source import BadRowError

TURN_COLUMNS = ("messages", "conversations", "conversation", "history")
THINK, END_OF_THINK = "<think>", "</think>"

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PART_ORDER: tuple[PartKind, ...] = ("reasoning", "text", "tool_call")
_SPEAKERS = ("role", "from")
_NUM_KEYS = 20  # in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRules(TreeRules):
    """What a caller says about files of conversations."""

    messages_field: str | None = None  # the column of the turns; None: that of the shape
    role_field: str | None = None  # the key of a turn that says who speaks, if not "role" or "from"
    content_field: str | None = None  # and what is said, if not "content" or "value"
    role_map: Mapping[str, str] = field(default_factory=dict)  # the file's names, in any case
    split_think: bool = False  # <think>...</think> before an assistant's words is its reasoning
    fan_out: bool = False  # one conversation for each answer
    ignore_columns: Sequence[str] = ()  # that change what a row means and are not to be read

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore_columns", column_names(self.ignore_columns))
        if not isinstance(self.role_map, Mapping):
            raise OptionError(
                "{role_map}: wanted names with the role each means", role_map=self.role_map
            )
        roles = {}
        for name, role in self.role_map.items():
            known = normal_role(role)
            if not isinstance(name, str) or known is None:
                raise OptionError(
                    f"{{role_map}}: {role!r:.40} is no role; wanted one of {', '.join(ROLES)}",
                    role_map=",".join(f"{key}={value}" for key, value in self.role_map.items()),
                )
            roles[name.lower()] = known
        object.__setattr__(self, "role_map", roles)

    @property
    def names(self) -> list[str]:
        """The options given that rename columns, keys or roles."""
        names = ("messages_field", "role_field", "content_field", "role_map")
        return [name for name in names if getattr(self, name)]

    def described(self) -> dict[str, Any]:
        """For `describe`: what is not given is left out, but for what has always been there."""
        given = {name: getattr(self, name) for name in self.names}
        always = {"lang": self.lang, "skip_deleted": self.skip_deleted}
        switches = {name: True for name in ("split_think", "fan_out") if getattr(self, name)}
        ignored = {"ignore_columns": list(self.ignore_columns)} if self.ignore_columns else {}
        return always | given | switches | ignored


def column_names(given: object) -> tuple[str, ...]:
    """Names that a caller gave as a list; in one order, since no other means anything."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OptionError("{ignore_columns}: wanted a list of names", ignore_columns=given)
    return tuple(sorted(set(map(str, given))))


def missing_options(
    messages: Sequence[Mapping[str, Any]], rules: ReadRules
) -> Iterator[tuple[str, str]]:
    """The options that messages seem to need, each with a sentence that says why."""
    for message in messages:
        role = message.get("role")
        if isinstance(role, str) and normal_role(role) is None:
            yield (
                "role_map",
                f"the role {role!r:.40} is unknown, and a conversation with it is left out; say "
                "which one it means with role_map (--role-map)",
            )
        if not rules.split_think and begins_with_think(message):
            yield (
                "split_think",
                f"an assistant's text begins with {THINK}, which stays text; to read it as "
                "reasoning, pass split_think=True (--split-think)",
            )


def renamed(row: Object, rules: ReadRules) -> Object:
    """The row with the column, keys and roles that the shapes know."""
    name = rules.messages_field
    if name is not None:
        turns = row.get(name)
        if not isinstance(turns, list):
            found = f"holds {kind_of(turns)}" if name in row else "is not in the row"
            raise BadRowError("other_shape", f"the column {name!r} {found}, wanted a list of turns")
        row = {key: row[key] for key in row if key != name and key not in TURN_COLUMNS}
        row["history" if turns and _is_exchange(turns[0], rules) else "messages"] = turns
    for key in TURN_COLUMNS:
        if isinstance(row.get(key), list):
            row = {**row, key: [_renamed_turn(turn, rules) for turn in row[key]]}
    return row


def _is_exchange(turn: object, rules: ReadRules) -> bool:
    """Whether it is both sides of an exchange, as a history has them."""
    speakers = (*_SPEAKERS, rules.role_field)
    return isinstance(turn, list) or (
        isinstance(turn, dict) and not any(speaker in turn for speaker in speakers)
    )


def _renamed_turn(turn: object, rules: ReadRules) -> object:
    if not isinstance(turn, dict):
        return turn
    turn = dict(turn)
    for name, key in ((rules.role_field, "role"), (rules.content_field, "content")):
        if name is not None and name in turn:
            turn[key] = turn.pop(name)
    for key in _SPEAKERS:
        if isinstance(turn.get(key), str):
            turn[key] = rules.role_map.get(turn[key].lower(), turn[key])
    return turn


def tidied(turn: Message) -> Message:
    """The message of a turn; the turn itself when nothing is to be done. Dropped when it cannot be
    one message."""
    content = turn.get("content")
    if len(turn) == 2 and isinstance(content, str) and "\r" not in content:
        return turn
    message = {key: value for key, value in turn.items() if value is not None or key == "content"}
    thoughts = [message[key] for key in _REASONING if message.get(key)]
    calls = [message["tool_calls"]] if message.get("tool_calls") else []
    if message.get("function_call"):
        calls.append(calls_in(message["function_call"]))
    if isinstance(content, str):
        message["content"] = unix_lines(content)
    elif isinstance(content, list | tuple):
        thought, message["content"], called = _from_parts(content)
        thoughts += [thought] if thought else []
        calls += [called] if called else []
    if len(calls) > 1:
        raise Dropped("two_tool_calls")
    if calls:
        message["tool_calls"] = calls[0]
    for key in ("thinking", "reasoning", "function_call"):
        message.pop(key, None)
    return _with_thoughts(message, thoughts)


def _with_thoughts(message: Message, thoughts: Sequence[object]) -> Message:
    """With the one reasoning that was found in any number of places."""
    texts = []
    for thought in thoughts:
        if not isinstance(thought, str):
            raise Dropped("reasoning_not_text")
        texts.append(unix_lines(thought))
    if len(set(texts)) > 1:
        raise Dropped("two_reasonings")
    return {**message, "reasoning_content": texts[0]} if texts else message


def _from_parts(parts: Sequence[object]) -> tuple[str, str | None, list[Object]]:
    """Reasoning, text and calls; the text is None when there are only calls."""
    found: dict[PartKind, list[Any]] = {kind: [] for kind in _PART_ORDER}
    last = 0
    for part in parts:
        kind, value = read_part(part)
        order = _PART_ORDER.index(kind)
        if value != "":  # nothing has no position that could be wrong
            if order < last:
                raise Dropped("part_order")
            last = order
        if kind != "tool_call" and isinstance(value, str):
            value = unix_lines(value)
        found[kind].append(value)
    calls = [call for value in found["tool_call"] for call in calls_in(value)]
    text = "".join(found["text"]) if found["text"] or not calls else None
    return "".join(found["reasoning"]), text, calls


def calls_in(value: object) -> list[Object]:
    """The tool calls of a value: one, a list of them, or JSON of these."""
    found = decode_value(value) if isinstance(value, str) else value
    calls = found if isinstance(found, list) else [found]
    if not calls:
        raise Dropped("bad_tool_call")
    return [_call(call) for call in calls]


def _call(call: object) -> Object:
    """One call in the form {"type": "function", "function": {"name", "arguments"}}."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return dict(call)
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise Dropped("bad_tool_call")
    return {"type": "function", "function": dict(call)}


def kinds_of(row: Object) -> str:
    """The keys of a row for an error, however many and long they are, and what each holds."""
    shown = [f"{key!r:.40} ({_kind_inside(row[key])})" for key in list(row)[:_NUM_KEYS]]
    more = f" and {len(row) - _NUM_KEYS:,} more" if len(row) > _NUM_KEYS else ""
    return (", ".join(shown) or "no keys") + more


def _kind_inside(value: object) -> str:
    """A value's kind; of a list also that of its first item, and the keys of an object."""
    if not isinstance(value, list) or not value:
        return "an empty list" if value == [] else kind_of(value)
    if not isinstance(value[0], dict):
        return f"a list that begins with {kind_of(value[0])}"
    keys = ", ".join(f"{key!r:.20}" for key in list(value[0])[:4])
    return f"a list that begins with an object of {keys or 'no keys'}"


def begins_with_think(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's text begins with <think>."""
    content = message.get("content")
    return (
        isinstance(content, str)
        and THINK in content[: len(THINK) + 100]
        and content.lstrip().startswith(THINK)
        and normal_role(message.get("role")) == "assistant"
    )


def with_split_think(message: Message) -> Message:
    """With the thought before an assistant's words as its reasoning.

    The usual line ends belong to the tags: one inside each, two after. White space before goes.

        "<think>\\nhm\\n</think>\\n\\nyes" -> "hm", "yes"
    """
    if not begins_with_think(message):
        return message
    thought, end, said = message["content"].lstrip().removeprefix(THINK).partition(END_OF_THINK)
    if not end:
        raise Dropped("unclosed_think")
    thought = thought.removeprefix("\n").removesuffix("\n")
    message = {**message, "content": said.removeprefix("\n").removeprefix("\n")}
    given = message.get("reasoning_content")
    return _with_thoughts(message, [one for one in (given, thought) if one])
