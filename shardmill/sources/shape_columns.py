"""Records that hold their texts in columns: `history`, `alpaca`, `prompt-response`.

In: one record and the id of its conversation.  Out: one `Conversation`, or a `Misfit`.
Promise: the question is what the one question column says; a context that is more than white space
follows it after a blank line, with no words of ours. A null text stays null, for `chat` to drop by
name. CR LF becomes LF. Two filled columns that mean the same are a `Misfit`, never a choice.
Not here: recipes with their own wording around a context.
"""

from __future__ import annotations

from shardmill.records import Conversation
from shardmill.sources.record import Misfit, Record, is_text, kind_of
from shardmill.sources.shape_turns import Message, clean_text, one_of, tools_of, with_system

QUESTIONS = ("prompt", "question", "instruction", "query")
ANSWERS = ("response", "answer", "output", "completion")
CONTEXTS = ("context", "input")


def is_history(record: Record) -> bool:
    """A list of pairs; or null in a column, where other rows have pairs."""
    history = record.get("history", "")
    if history is None or history == []:
        return is_prompt_response(record)
    return isinstance(history, list) and _is_pair(history[0])


def is_alpaca(record: Record) -> bool:
    texts = record.get("instruction", 0), record.get("input"), record.get("output", 0)
    return all(map(is_text, texts)) and not any(
        record.get(name) for name in QUESTIONS + ANSWERS if name not in ("instruction", "output")
    )


def is_prompt_response(record: Record) -> bool:
    questions = [record[name] for name in QUESTIONS if name in record]
    answers = [record[name] for name in ANSWERS if name in record]
    return bool(questions and answers) and all(map(is_text, questions + answers))


def read_history(record: Record, name: str) -> Conversation:
    """Pairs first, then the last question and answer, when there are such columns."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise Misfit("other_shape", f"'history' holds {kind_of(history)}, wanted a list of pairs")
    messages: list[Message] = []
    for number, pair in enumerate(history):
        if not _is_pair(pair):
            raise Misfit("bad_message", f"history {number} is not a pair [user, bot] of strings")
        messages += _turn_pair(*(text if text is None else clean_text(text) for text in pair))
    if not messages or not record.keys().isdisjoint(QUESTIONS + ANSWERS):
        messages += _last_pair(record)
    return Conversation(messages=with_system(record, messages), tools=tools_of(record), id=name)


def read_alpaca(record: Record, name: str) -> Conversation:
    missing = [key for key in ("instruction", "output") if key not in record]
    if missing:
        raise Misfit("other_shape", f"no column {missing[0]!r}")
    return read_prompt_response(record, name)


def read_prompt_response(record: Record, name: str) -> Conversation:
    if record.get("history"):
        raise Misfit("other_shape", "a 'history', which would be lost; name shape='history'")
    messages = _last_pair(record)
    return Conversation(messages=with_system(record, messages), tools=tools_of(record), id=name)


def _last_pair(record: Record) -> list[Message]:
    for names in (QUESTIONS, ANSWERS):
        if record.keys().isdisjoint(names):
            raise Misfit("other_shape", f"no column {' or '.join(map(repr, names))}")
    question, context = one_of(record, QUESTIONS), one_of(record, CONTEXTS)
    if question is not None and context is not None and context.strip():
        question = f"{question}\n\n{context}" if question else context
    return _turn_pair(question, one_of(record, ANSWERS))


def _turn_pair(question: str | None, answer: str | None) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_text, pair))
