"""Records that hold their turns in a list: `messages` and `sharegpt`.

In: one record and the id of its conversation.  Out: one `Conversation`, or a `Misfit`.
Promise: roles of `messages` stay as written; the from-words that ShareGPT defines become roles,
others stay. CR LF in what is said becomes LF. A message's null keys are as if absent, but for
"content": null, which stays. Nothing else changes.
Not here: whether roles and contents make sense; `chat` judges that.

Records that hold their texts in columns: `history`, `alpaca`, `prompt-response`.

In: one record and the id of its conversation.  Out: one `Conversation`, or a `Misfit`.
Promise: the question is what the one question column says; a context that is more than white space
follows it after a blank line, with no words of ours. A null text stays null, for `chat` to drop by
name. CR LF becomes LF. Two filled columns that mean the same are a `Misfit`, never a choice.
Not here: recipes with their own wording around a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmill.records import Conversation
from shardmill.sources.chats.json_records import Misfit, Record, decode_value, is_text, kind_of

MESSAGES_KEYS = ("messages", "conversations", "conversation")
SHAREGPT_KEYS = ("conversations", "conversation", "messages")
SYSTEM_KEYS = ("system", "system_prompt")

Message = dict[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_SHAREGPT_ROLES |= {
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_KEPT = ("name", "train", "reasoning_content", "tool_calls", "tool_call_id")
"""What a ShareGPT turn may hold beside from and value, as in `messages`."""


def is_messages(record: Record) -> bool:
    return _turns_with(record, MESSAGES_KEYS, "role", empty_key="messages")


def is_sharegpt(record: Record) -> bool:
    return _turns_with(record, SHAREGPT_KEYS, "from", empty_key="conversations")


def read_messages(record: Record, name: str) -> Conversation:
    turns = _turns(record, MESSAGES_KEYS, "role")
    messages = [tidied(turn) for turn in turns]
    return Conversation(messages=with_system(record, messages), tools=tools_of(record), id=name)


def read_sharegpt(record: Record, name: str) -> Conversation:
    turns = _turns(record, SHAREGPT_KEYS, "from")
    messages = [_from_sharegpt(turn, number) for number, turn in enumerate(turns)]
    return Conversation(messages=with_system(record, messages), tools=tools_of(record), id=name)


def clean_text(text: str) -> str:
    """The rule for everything that is said."""
    return text.replace("\r\n", "\n") if "\r" in text else text


_SYSTEM_ROLES = ("system", "developer")


def with_system(record: Record, messages: list[Message]) -> list[Message]:
    """Put a system column, when it says something, in front of the turns."""
    text = one_of(record, SYSTEM_KEYS)
    if not text:
        return messages
    if any(str(message.get("role")).lower() in _SYSTEM_ROLES for message in messages):
        raise Misfit("two_systems", "a system column beside a system turn; keep one of them")
    return [{"role": "system", "content": text}, *messages]


def one_of(record: Record, names: Sequence[str]) -> str | None:
    """The text of the one column among `names` that is filled; "" or None when none is."""
    filled = [name for name in names if record.get(name)]
    if len(filled) > 1:
        first, second = filled[:2]
        raise Misfit("two_columns", f"{first!r} and {second!r} are both filled; keep one of them")
    present = filled or [name for name in names if record.get(name) is not None]
    if not present:
        return None
    value = record[present[0]]
    if not isinstance(value, str):
        raise Misfit("not_a_string", f"{present[0]!r} holds {kind_of(value)}, no string")
    return clean_text(value)


def tools_of(record: Record) -> list[dict[str, Any]] | None:
    """The tools: a list of objects, perhaps written as JSON in a string; None for none."""
    if record.get("functions"):
        raise Misfit("bad_tools", "'functions' would be lost; rename the column to 'tools'")
    tools = record.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = decode_value(tools)
        tools = [tools] if isinstance(tools, dict) else tools
        if tools is None and record["tools"].strip() != "null":
            raise Misfit("bad_tools", f"'tools' is no JSON: {record['tools'][:60]!r}")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Misfit("bad_tools", f"'tools' holds {kind_of(tools)}, wanted a list of objects")
    return tools or None


def _turns_with(record: Record, keys: Sequence[str], speaker: str, *, empty_key: str) -> bool:
    for key in keys:
        turns = record.get(key)
        if isinstance(turns, list):
            if turns and isinstance(turns[0], dict) and speaker in turns[0]:
                return True
            if not turns and key == empty_key:
                return True
    return False


def _turns(record: Record, keys: Sequence[str], speaker: str) -> list[Message]:
    """The list of turns: that whose first turn names a speaker, else the first there is."""
    lists = [record[key] for key in keys if isinstance(record.get(key), list)]
    if not lists:
        raise Misfit("other_shape", f"no list under {' or '.join(map(repr, keys))}")
    filled = [
        turns for turns in lists if turns and isinstance(turns[0], dict) and speaker in turns[0]
    ]
    turns: list[Message] = filled[0] if filled else lists[0]
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise Misfit("bad_message", f"turn {number} is {kind_of(turn)}, wanted an object")
        if speaker not in turn:
            raise Misfit("bad_message", f"turn {number} has no {speaker!r}")
    return turns


def tidied(turn: Message) -> Message:
    """The turn itself when nothing is to be done, as nearly always."""
    content, reasoning = turn.get("content"), turn.get("reasoning_content")
    is_plain = isinstance(content, str) and "\r" not in content
    if is_plain and reasoning is None and len(turn) == 2:
        return turn
    tidy = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if content is not None:
        tidy["content"] = _clean_content(content)
    if isinstance(reasoning, str):
        tidy["reasoning_content"] = clean_text(reasoning)
    return tidy


def _clean_content(content: object) -> object:
    if isinstance(content, str):
        return clean_text(content)
    if isinstance(content, list):
        return [
            {**part, "text": clean_text(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content


def _from_sharegpt(turn: Message, number: int) -> Message:
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str):
        raise Misfit("bad_message", f"turn {number}: 'from' is {kind_of(speaker)}, no string")
    if not is_text(value):
        raise Misfit("not_a_string", f"turn {number}: 'value' is {kind_of(value)}, no string")
    role = _SHAREGPT_ROLES.get(speaker.lower(), speaker)
    message: Message = {"role": role, "content": None if value is None else clean_text(value)}
    message |= {key: turn[key] for key in _KEPT if turn.get(key) is not None}
    if speaker.lower() == "function_call" and isinstance(value, str):
        calls = _calls(value)
        if calls:
            message |= {"content": None, "tool_calls": calls}
    return message


def _calls(value: str) -> list[dict[str, Any]]:
    """The calls in JSON, one or a list of them; none when it is anything else, which stays text."""
    found = decode_value(value)
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [{"type": "function", "function": call} for call in calls]


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
