"""Rows of preferences: a prompt with answers that are ranked, or one answer with a label.

Each row is one record: the messages that all its answers share (the prompt), and each answer as a
`Branch`, a whole conversation that ends with the assistant. A prompt is a string, a list of
messages or turns, or implicit: the answers are whole conversations that share a beginning. Ranks
count from 0, the best; equal scores are equal ranks. Labels are 1 (good) and 0. Flags of messages
say nothing here: the last answer of a branch is trained, and only that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from shardmill.messages import Dropped, normal_role
from shardmill.protocols import ConversationSource
from shardmill.records import Branch, Conversation, Drop, PreferenceKind
from shardmill.sources.batches import unix_lines
from shardmill.sources.columns import from_sharegpt, group_of, one_of, own_id, tools_of, with_system
from shardmill.sources.formats.jsonl import Object, kind_of
from shardmill.sources.message_trees import Message
from shardmill.sources.source import BadRowError
from shardmill.sources.turns import ReadRules, tidied, with_split_think

PREFERENCE_REASONS = {
    "bad_answer": "an answer is neither a string, a message nor a list of messages",
    "bad_ranks": "the scores or ranks are not one finite number for each of two or more answers",
    "bad_label": "the label is neither true nor false",
    "two_prompts": "the answers hold a conversation that the prompt is not part of",
    "no_prompt": "nothing comes before the answer",
    "no_answer": "an answer does not end with the assistant",
    "no_preference": "all answers have the same score, so none is better",
    "prompts_differ": "the answers do not follow the same tokens",
    "same_answers": "two answers of different rank are the same tokens",
}
"""Reasons of the drops that only records of preferences have."""

KINDS: dict[str, PreferenceKind] = {"preference": "ranks", "kto": "labels"}
"""By the name of the shape."""

_PROMPTS = ("prompt", "question", "instruction", "query")
_CONTEXTS = ("context", "input")
_TURNS = ("conversations", "conversation", "messages")
_LISTS = ("completions", "responses")
_ANSWERS = ("completion", "response", "answer", "output")
_SCORES = ("scores", "ratings")  # the highest is the best
_RANKS = ("rank", "ranks")  # the lowest is the best


def preference_kind(source: ConversationSource) -> PreferenceKind | None:
    """What the answers of a source have; None: it gives conversations alone. Finds the shape."""
    return KINDS.get(str(source.describe().get("shape")))


def is_preference(row: Object) -> bool:
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return True
    lists = any(isinstance(row.get(name), list) for name in _LISTS)
    return lists and any(isinstance(row.get(name), list) for name in (*_SCORES, *_RANKS))


def is_kto(row: Object) -> bool:
    """A prompt, an answer and a label. Of whole conversations a label may say anything, so there
    the shape must be named."""
    answers = any(row.get(name) is not None for name in _ANSWERS)
    turns = any(isinstance(row.get(name), list) for name in _TURNS)
    return isinstance(row.get("label"), bool) and answers and not turns


def read_preference(
    row: Object, row_id: str, rules: ReadRules, number: int | None
) -> Iterable[Conversation | Drop]:
    """Chosen and rejected, or a ranked list."""
    if "chosen" in row or "rejected" in row:
        missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
        if missing:
            raise BadRowError("other_shape", f"no answer in the column {missing[0]!r}")
        given = [(row["chosen"], "chosen"), (row["rejected"], "rejected")]
        values = [0, 1]
    else:
        given, values = _ranked(row)
    return _record(row, row_id, rules, number, given=given, values=values)


def read_kto(
    row: Object, row_id: str, rules: ReadRules, number: int | None
) -> Iterable[Conversation | Drop]:
    """One answer, or a whole conversation, with a label."""
    label = row.get("label")
    if not isinstance(label, int) or label not in (0, 1):
        raise BadRowError(
            "bad_label", f"'label' holds {kind_of(label)}, wanted true or false (or 1 or 0)"
        )
    filled = [name for name in _ANSWERS if row.get(name) is not None]
    if len(filled) > 1:
        raise BadRowError("two_columns", f"{filled[0]!r} and {filled[1]!r} are both filled")
    turns = [name for name in _TURNS if isinstance(row.get(name), list)]
    if not filled and not turns:
        raise BadRowError("other_shape", f"no column {' or '.join(map(repr, _ANSWERS))}")
    name = (filled or turns)[0]
    answer = row[name]
    if not filled:
        if len(turns) > 1:
            raise BadRowError("two_columns", f"{turns[0]!r} and {turns[1]!r} are both filled")
        row = {key: value for key, value in row.items() if key != name}
    return _record(row, row_id, rules, number, given=[(answer, name)], values=[int(label)])


def _ranked(row: Object) -> tuple[list[tuple[object, str]], list[int]]:
    """The answers of a list, best first, with their ranks."""
    names = [name for name in _LISTS if row.get(name) is not None]
    orders = [name for name in (*_SCORES, *_RANKS) if row.get(name) is not None]
    for found, wanted in ((names, _LISTS), (orders, (*_SCORES, *_RANKS))):
        if len(found) > 1:
            raise BadRowError("two_columns", f"{found[0]!r} and {found[1]!r} are both filled")
        if not found:
            raise BadRowError("other_shape", f"no column {' or '.join(map(repr, wanted))}")
    answers, order = row[names[0]], row[orders[0]]
    if not isinstance(answers, list):
        raise BadRowError("bad_answer", f"{names[0]!r} holds {kind_of(answers)}, wanted a list")
    if not isinstance(order, list) or len(order) != len(answers) or len(order) < 2:
        raise BadRowError(
            "bad_ranks",
            f"{orders[0]!r} holds {kind_of(order)}, wanted one number for each of the "
            f"{len(answers):,} answers, at least two",
        )
    for one in order:
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise BadRowError("bad_ranks", f"{orders[0]!r} holds {one!r:.40}, wanted a number")
    best_first = sorted(set(order), reverse=orders[0] in _SCORES)
    ranks = [best_first.index(one) for one in order]
    numbers = sorted(range(len(order)), key=ranks.__getitem__)  # equal ranks stay in order
    return [(answers[n], names[0]) for n in numbers], [ranks[n] for n in numbers]


def _record(
    row: Object,
    row_id: str,
    rules: ReadRules,
    number: int | None,
    *,
    given: Sequence[tuple[object, str]],
    values: Sequence[int],
) -> Iterable[Conversation | Drop]:
    own = own_id(row)
    try:
        if len(set(values)) < 2 and len(values) > 1:
            raise Dropped("no_preference")
        asked = _prompt_of(row)
        wholes = [with_system(row, _whole(asked, _turns_of(one, name))) for one, name in given]
        wholes = [[_without_flag(message) for message in whole] for whole in wholes]
        if rules.split_think:
            wholes = [list(map(with_split_think, whole)) for whole in wholes]
        prompt = wholes[0][: _num_shared(wholes)]
    except Dropped as why:
        return (Drop(id=own or row_id, reason=str(why), row=None if own else number),)
    branches = zip(wholes, values, strict=True)
    return (
        Conversation(
            messages=prompt,
            tools=tools_of(row),
            id=own or row_id,
            row=None if own else number,
            group=group_of(row),
            branches=tuple(Branch(messages=whole, value=value) for whole, value in branches),
        ),
    )


def _prompt_of(row: Object) -> list[Message]:
    """The messages of the prompt's column; none: the answers hold it."""
    if row.get("history"):
        raise BadRowError("other_shape", "a 'history', which would be lost; use 'conversations'")
    turns = [name for name in _TURNS if isinstance(row.get(name), list) and row[name]]
    asked = [name for name in _PROMPTS if isinstance(row.get(name), list)]
    if len(asked) > 1 or (asked and any(row.get(name) for name in _PROMPTS if name not in asked)):
        raise BadRowError("two_columns", f"{asked[0]!r} and another prompt are both filled")
    if asked:
        messages = _turns_of(row[asked[0]], asked[0])
    elif text := one_of(row, _PROMPTS):
        context = one_of(row, _CONTEXTS)
        more = f"\n\n{context}" if context is not None and context.strip() else ""
        messages = [{"role": "user", "content": text + more}]
    elif len(turns) > 1:
        raise BadRowError("two_columns", f"{turns[0]!r} and {turns[1]!r} are both filled")
    else:
        return _turns_of(row[turns[0]], turns[0]) if turns else []
    for name in turns:  # some files repeat the prompt, or a whole conversation, in another column
        repeated = _turns_of(row[name], name)
        if not all(message in repeated for message in messages):
            raise BadRowError("two_columns", f"the prompt and {name!r} are both filled, and differ")
    return messages


def _turns_of(value: object, name: str) -> list[Message]:
    """A string is what the assistant says."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": unix_lines(value)}]
    turns: Any = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise BadRowError(
            "bad_answer",
            f"{name!r} holds {kind_of(value)}, wanted a string, a message or a list of messages",
        )
    return [_message(turn, at, name) for at, turn in enumerate(turns)]


def _message(turn: object, at: int, name: str) -> Message:
    if isinstance(turn, dict) and "role" in turn:
        return tidied(turn)
    if isinstance(turn, dict) and "from" in turn:
        return from_sharegpt(turn, at)
    raise BadRowError("bad_message", f"{name!r}: turn {at} has neither 'role' nor 'from'")


def _whole(asked: list[Message], answer: list[Message]) -> list[Message]:
    """The conversation that ends with an answer, which may repeat its prompt."""
    if normal_role(answer[-1].get("role")) != "assistant":
        raise Dropped("no_answer")
    if all(message in answer[:-1] for message in asked):
        return answer
    if normal_role(answer[0].get("role")) in ("user", "system"):
        raise BadRowError(
            "two_prompts", "the answers are whole conversations, which the prompt is not part of"
        )
    return [*asked, *answer]


def _without_flag(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "train"}


def _num_shared(wholes: Sequence[Sequence[Message]]) -> int:
    """How many messages all begin with; the last of each is never shared."""
    pairs = zip(*(whole[:-1] for whole in wholes), strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: all(m == pair[0] for m in pair), pairs))
    if not num_shared:
        raise Dropped("no_prompt" if min(map(len, wholes)) == 1 else "prompts_differ")
    return num_shared
