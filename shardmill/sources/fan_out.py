"""One conversation for each answer, with everything before it.

For templates that write earlier turns differently once later ones exist (reasoning is left out of
the past): trained with the policy "last-assistant", every answer is seen as it will be generated.

    user, answer, user, answer   ->   user, answer   and   user, answer, user, answer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardmill.messages import normal_role
from shardmill.records import Conversation, ConversationBatch


def fanned_out(batch: ConversationBatch) -> ConversationBatch:
    """The same rows; each conversation of the result counts as one that was read."""
    conversations = tuple(one for whole in batch.conversations for one in _answers(whole))
    more = len(conversations) - len(batch.conversations)
    return replace(batch, conversations=conversations, num_read=batch.num_read + more)


def _answers(whole: Conversation) -> Iterator[Conversation]:
    """A conversation that is not well-formed, or has no answer to train, stays for the template to
    drop. Flags choose the answers; inside a conversation they say nothing."""
    messages = whole.messages
    answers = []
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, Mapping):
            break
        is_wanted = message.get("train") is not False
        if normal_role(message.get("role")) == "assistant" and is_wanted:
            answers.append(number)
    else:
        plain = [
            {key: value for key, value in message.items() if key != "train"}
            if "train" in message
            else message
            for message in messages
        ]
        for number in answers:
            yield replace(
                whole,
                messages=plain[: number + 1],
                id=f"{whole.id}#{number}",
                part_of=whole,
            )
        if answers:
            return
    yield whole


def times_as_long(conversations: Sequence[Conversation]) -> float:
    """How many times their characters all the conversations made of them have."""
    given = sum(map(_num_characters, conversations))
    made = sum(_num_characters(one) for whole in conversations for one in _answers(whole))
    return made / given if given else 1.0


def _num_characters(conversation: Conversation) -> int:
    messages = conversation.messages
    return sum(
        len(str(message[key]))
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping)
        for key in ("content", "reasoning_content", "tool_calls")
        if message.get(key)
    )
