"""The shapes that conversations are written in: which one a row has, and how it is read.

Each row is judged alone. Where a row has the keys of several shapes, the first in `SHAPES` wins:
those that hold whole turns come before those that hold columns, because a prompt beside messages is
nearly always taken from them. Roles of `messages` stay as written; the words that ShareGPT defines
become roles, others stay. CR LF becomes LF in everything that is said. How a turn becomes a message
is in `turns.py`. Two filled columns that mean the same are an error, never a choice. A column
`group` holds a row together with others in a split; trees have their own. Whether roles and
contents make sense is decided by the `chat` package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from shardmill.arguments import nearest
from shardmill.errors import OptionError
from shardmill.messages import MESSAGE_REASONS, Dropped
from shardmill.records import Conversation, Drop
from shardmill.sources.batches import unix_lines
from shardmill.sources.columns import (
    KEPT,
    from_sharegpt,
    group_of,
    is_text,
    one_of,
    own_id,
    tools_of,
    with_system,
)
from shardmill.sources.formats.jsonl import Object, kind_of
from shardmill.sources.functions import MAP_REASONS
from shardmill.sources.message_trees import (
    OASST_REASONS,
    Message,
    TreeRow,
    is_oasst_message,
    is_oasst_tree,
    read_tree,
    read_tree_row,
)
from shardmill.sources.preferences import (
    PREFERENCE_REASONS,
    is_kto,
    is_preference,
    read_kto,
    read_preference,
)
from shardmill.sources.source import BadRowError
from shardmill.sources.turns import ReadRules, tidied, with_split_think

CHAT_REASONS = (
    OASST_REASONS
    | MESSAGE_REASONS
    | PREFERENCE_REASONS
    | MAP_REASONS
    | {
        "bad_json": "not a JSON object, or nested too deep",
        "other_shape": "the keys are not those of the shape",
        "bad_message": "a turn or message is not built as the shape says",
        "not_a_string": "something that should be text is not",
        "bad_tools": "the tools are not a list of objects",
        "bad_group": "the group is neither a string nor an integer",
        "two_systems": "a system column beside a system turn",
        "two_columns": "two columns that mean the same both hold text",
        "ignored_column": "a column that changes what the row means, which the first rows lack",
    }
)
"""Every reason of a conversation source's drops."""

_MESSAGES_KEYS = ("messages", "conversations", "conversation")
_SHAREGPT_KEYS = ("conversations", "conversation", "messages")
_QUESTIONS = ("prompt", "question", "instruction", "query")
_ANSWERS = ("response", "answer", "output", "completion")
_CONTEXTS = ("context", "input")
_ASKED = (*_QUESTIONS, "user", "human")  # in an exchange of a history
_SAID = (*_ANSWERS, "assistant", "bot")


def _read_messages(row: Object) -> list[Message]:
    return [tidied(turn) for turn in _turns(row, _MESSAGES_KEYS, "role")]


def _read_sharegpt(row: Object) -> list[Message]:
    turns = _turns(row, _SHAREGPT_KEYS, "from")
    return [from_sharegpt(turn, number) for number, turn in enumerate(turns)]


def _has_turns(row: Object, *, keys: Sequence[str], speaker: str) -> bool:
    """A list whose first turn names a speaker; or [] under the first key."""
    found = any(_begins_with(row.get(key), speaker) for key in keys)
    return found or row.get(keys[0]) == []


def _begins_with(turns: object, speaker: str) -> bool:
    return isinstance(turns, list) and isinstance((turns or [0])[0], dict) and speaker in turns[0]


def _turns(row: Object, keys: Sequence[str], speaker: str) -> list[Message]:
    """The list whose first turn names a speaker, else the first list."""
    lists = [row[key] for key in keys if isinstance(row.get(key), list)]
    if not lists:
        raise BadRowError("other_shape", f"no list under {' or '.join(map(repr, keys))}")
    named = (found for found in lists if _begins_with(found, speaker))
    turns: list[Message] = next(named, lists[0])
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadRowError("bad_message", f"turn {number} is {kind_of(turn)}, wanted an object")
        if speaker not in turn:
            raise BadRowError("bad_message", f"turn {number} has no {speaker!r}")
    return turns


def _is_history(row: Object) -> bool:
    """A list of pairs or turns; or null or [] in a column where other rows have them."""
    history = row.get("history", "")
    if history is None or history == []:
        return _is_prompt_response(row)
    return isinstance(history, list) and (
        _is_pair(history[0]) or (isinstance(history[0], dict) and _is_exchange_or_turn(history[0]))
    )


def _is_exchange_or_turn(entry: Object) -> bool:
    is_exchange = not (entry.keys().isdisjoint(_ASKED) or entry.keys().isdisjoint(_SAID))
    return is_exchange or "role" in entry or "from" in entry


def _is_alpaca(row: Object) -> bool:
    texts = row.get("instruction", 0), row.get("input"), row.get("output", 0)
    return all(map(is_text, texts)) and not any(
        row.get(name) for name in _QUESTIONS + _ANSWERS if name not in ("instruction", "output")
    )


def _is_prompt_response(row: Object) -> bool:
    questions = [row[name] for name in _QUESTIONS if name in row]
    answers = [row[name] for name in _ANSWERS if name in row]
    return bool(questions and answers) and all(map(is_text, questions + answers))


def _read_history(row: Object) -> list[Message]:
    """The exchanges or turns, then the last question and answer, when there are such columns."""
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRowError(
            "other_shape", f"'history' holds {kind_of(history)}, wanted a list of pairs or turns"
        )
    messages = [
        message for number, entry in enumerate(history) for message in _said_in(entry, number)
    ]
    if not messages or not row.keys().isdisjoint(_QUESTIONS + _ANSWERS):
        messages += _last_pair(row)
    return messages


def _said_in(entry: object, number: int) -> list[Message]:
    """The messages of one entry of a history."""
    if isinstance(entry, dict):
        if "role" in entry:
            return [tidied(entry)]
        if "from" in entry:
            return [from_sharegpt(entry, number)]
        if _is_exchange_or_turn(entry):
            asked, answer = _last_pair(entry, _ASKED, _SAID)
            more = {key: entry[key] for key in KEPT if entry.get(key) is not None}
            return [asked, tidied(answer | more)]  # whatever was thought or called is the answer's
    if not isinstance(entry, list) or not _is_pair(entry):
        raise BadRowError(
            "bad_message",
            f"history {number} is neither a pair [user, bot] of strings nor an object with a role "
            "or with both sides",
        )
    return _turn_pair(*(text if text is None else unix_lines(text) for text in entry))


def _read_alpaca(row: Object) -> list[Message]:
    missing = [key for key in ("instruction", "output") if key not in row]
    if missing:
        raise BadRowError("other_shape", f"no column {missing[0]!r}")
    return _read_prompt_response(row)


def _read_prompt_response(row: Object) -> list[Message]:
    if row.get("history"):
        raise BadRowError(
            "other_shape", "a 'history', which would be lost; read it as the shape 'history'"
        )
    return _last_pair(row)


def _last_pair(
    row: Object, questions: Sequence[str] = _QUESTIONS, answers: Sequence[str] = _ANSWERS
) -> list[Message]:
    """The question, a blank line and the context if there is one; then the answer. A null stays
    null, for `chat` to drop by name."""
    for names in (questions, answers):
        if row.keys().isdisjoint(names):
            raise BadRowError("other_shape", f"no column {' or '.join(map(repr, names))}")
    question, context = one_of(row, questions), one_of(row, _CONTEXTS)
    if question is not None and context is not None and context.strip():
        question = f"{question}\n\n{context}" if question else context
    return _turn_pair(question, one_of(row, answers))


def _turn_pair(question: str | None, answer: str | None) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_text, pair))


Reader = Callable[[Object, str, ReadRules, int | None], Iterable[Conversation | Drop | TreeRow]]
"""Of a row, its id, the caller's rules, and the `row` of a `Drop`."""


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """One way to write conversations down."""

    name: str
    keys: str  # for an error
    signs: tuple[str, ...]  # a row with none of these keys has another shape
    claims: Callable[[Object], bool]  # does a row look like it?
    read: Reader
    is_part_of_tree: bool = False  # whether several rows make a tree
    has_roles: bool = False  # whether its turns name who speaks

    def __reduce__(self) -> tuple[Callable[[str], ConversationShape], tuple[str]]:
        return shape_named, (self.name,)


def _one(read: Callable[[Object], list[Message]]) -> Reader:
    """A reader of rows that hold one conversation each."""

    def read_one(
        row: Object, row_id: str, rules: ReadRules, number: int | None
    ) -> Iterable[Conversation | Drop]:
        own = own_id(row)
        try:
            messages = with_system(row, read(row))
            if rules.split_think:
                messages = list(map(with_split_think, messages))
        except Dropped as why:
            return (Drop(id=own or row_id, reason=str(why), row=None if own else number),)
        return (
            Conversation(
                messages=messages,
                tools=tools_of(row),
                id=own or row_id,
                row=None if own else number,
                group=group_of(row),
            ),
        )

    return read_one


_SHAPES = (
    ConversationShape(
        "oasst-messages",
        "message_id, parent_id, role, text",
        ("message_id",),
        is_oasst_message,
        lambda row, row_id, rules, _: (read_tree_row(row, row_id, rules),),
        is_part_of_tree=True,
    ),
    ConversationShape(
        "oasst-tree",
        "prompt: {role, text, replies: [...]}",
        ("prompt",),
        is_oasst_tree,
        read_tree,
    ),
    ConversationShape(
        "preference",
        "chosen, rejected[, prompt|conversations][, system, tools]; or prompt, "
        "completions|responses, scores|ratings|rank",
        ("chosen", "completions", "responses"),
        is_preference,
        read_preference,
    ),
    ConversationShape(
        "kto",
        "prompt, completion|response, label: true|false; or messages, label",
        ("label",),
        is_kto,
        read_kto,
    ),
    ConversationShape(
        "messages",
        "messages: [{role, content}, ...][, tools]",
        _MESSAGES_KEYS,
        partial(_has_turns, keys=_MESSAGES_KEYS, speaker="role"),
        _one(_read_messages),
        has_roles=True,
    ),
    ConversationShape(
        "sharegpt",
        "conversations: [{from, value}, ...][, system, tools]",
        _SHAREGPT_KEYS,
        partial(_has_turns, keys=_SHAREGPT_KEYS, speaker="from"),
        _one(_read_sharegpt),
        has_roles=True,
    ),
    ConversationShape(
        "history",
        "history: [[user, bot], ...] or [{user, assistant}, ...] or [{role, content}, ...]"
        "[, and the columns of prompt-response]",
        ("history",),
        _is_history,
        _one(_read_history),
        has_roles=True,
    ),
    ConversationShape(
        "alpaca",
        "instruction[, input], output[, system]",
        ("output",),
        _is_alpaca,
        _one(_read_alpaca),
    ),
    ConversationShape(
        "prompt-response",
        "prompt|question|instruction|query[, context|input], "
        "response|answer|output|completion[, system]",
        _ANSWERS,
        _is_prompt_response,
        _one(_read_prompt_response),
    ),
)
SHAPES = {shape.name: shape for shape in _SHAPES}
"""The shapes by name, in the order in which they claim a row."""


def shape_named(name: str) -> ConversationShape:
    if name not in SHAPES:
        near = nearest(name, SHAPES)
        guess = f"did you mean {near!r}? " if near else ""
        raise OptionError(f"{{shape}}: {guess}wanted one of\n{list_shapes()}", shape=name)
    return SHAPES[name]


def shape_of(row: Object) -> ConversationShape | None:
    """The first shape that claims a row; None when none does."""
    return next((shape for shape in _SHAPES if shape.claims(row)), None)


def check_best(row: Object, shape: ConversationShape) -> None:
    """Refuse a row that an earlier shape claims: read as `shape` it would lose turns."""
    for earlier in _SHAPES:
        if earlier is shape:
            return
        if not row.keys().isdisjoint(earlier.signs) and earlier.claims(row):
            raise BadRowError(
                "other_shape", f"this row is {earlier.name!r}, the first one {shape.name!r}"
            )


def list_shapes() -> str:
    return "\n".join(f"  {shape.name}: {shape.keys}" for shape in _SHAPES)


_OFTEN_READ = (
    *("id", "conversation_id", "dialogue_id", "dialog_id", "chat_id", "uuid"),
    *("system", "system_prompt", "group", "tools"),
)
_COLUMNS = {
    "messages": _MESSAGES_KEYS,
    "sharegpt": _SHAREGPT_KEYS,
    "history": ("history", *_QUESTIONS, *_ANSWERS, *_CONTEXTS),
    "alpaca": (*_QUESTIONS, *_ANSWERS, *_CONTEXTS),
    "prompt-response": (*_QUESTIONS, *_ANSWERS, *_CONTEXTS),
}


def columns_read(shape: ConversationShape) -> tuple[str, ...] | None:
    """The columns that a shape may read; None where it is not known."""
    known = _COLUMNS.get(shape.name)
    return None if known is None else (*known, *_OFTEN_READ)
