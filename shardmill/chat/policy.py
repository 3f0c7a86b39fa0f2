"""What holds for every chat template: which messages are well-formed, and which turns are trained.

A conversation becomes checked messages, or is dropped with one of `REASONS`. Nothing is trimmed,
merged or invented. What passes has known roles, text that can be written in UTF-8, and boolean
train flags. Other ways to write a message (reasoning or calls as parts of the content, ...) are
those of files, and a source reads them. Tool calls and tool definitions become JSON text: a call is
{"name": ..., "arguments": ...} for both usual shapes (bare, or inside "function"), and arguments
that came as JSON text stay unchanged. Ids and types of calls are left out, since no template made
of tokens writes them.

`TRAIN_ON` holds the mask policies: to add one, write a function of roles and bounds and add it
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard

import numpy as np

from shardmill.errors import OptionError
from shardmill.messages import MESSAGE_REASONS, read_part
from shardmill.messages import ROLE_NAMES as ROLE_NAMES
from shardmill.messages import Dropped as Dropped
from shardmill.messages import normal_role as normal_role
from shardmill.records import (
    JSON,
    ROLES,
    BoolArray,
    ChatExamples,
    Conversation,
    Drop,
    IntArray,
    OffsetArray,
    Ragged,
)

SYSTEM, USER, ASSISTANT, TOOL = (
    ROLES.index(role) for role in ("system", "user", "assistant", "tool")
)

REASONS = MESSAGE_REASONS | {
    "not_a_list": "the conversation is not a list of messages",
    "no_messages": "the list is empty",
    "bad_message": "a message is not an object with role and content",
    "unknown_role": "a role is not system, user, assistant or tool, nor a known name for one; say "
    "what it means with role_map (--role-map)",
    "content_not_text": "a content is neither text nor null beside tool calls",
    "not_the_assistants": "tool calls or reasoning in a message that is not the assistant's",
    "bad_tools": "the tools are not a list of JSON objects",
    "unread_key": "a message has a key that no template writes: a weight that is not 1 (use "
    "train); or, in a conversation that no source read, function_call (use tool_calls), reasoning "
    "or thinking (use reasoning_content)",
    "bad_train_flag": 'a "train" is neither true nor false',
    "invalid_unicode": "a text holds a lone surrogate, which UTF-8 cannot write",
    "no_assistant": "no message is the assistant's, so nothing could be trained",
    "nothing_trained": "the policy and the train flags leave no token to train",
    "special_in_text": "the tokenizer turned text into a marker of the template",
    "no_place_for_system": "the template has no system messages",
    "system_not_first": "the template puts a system message into the user turn after it, so it "
    "must come first and a user must follow",
    "mixed_train": "messages that the template writes as one turn, one trained and one not",
    "no_place_for_tool_results": "the template has no tool turns",
    "no_place_for_tool_calls": "the template has no tool calls",
    "no_place_for_tools": "the template has no tool definitions",
    "no_place_for_reasoning": "the template has no reasoning",
    "template_refuses": "the template raised an error on this conversation, or wrote far too much",
    "prefix_changes": "the template writes earlier turns differently when later ones follow",
    "prompt_changes": "the answer does not follow the template's own generation prompt",
    "tokens_merge": "one token spans the border of two turns, or of a prompt and its answer",
    "content_changed": "the template wrote something other than the message says",
    "mask_disagrees": "the generation blocks do not hold all of the assistant's words",
    "trains_others": "the trained part of a turn holds text of other turns or of the tools",
    "no_turns": "the template does not go through the messages in order, so turns have no start",
    "not_reproduced": "the template, run here, gave other tokens than apply_chat_template",
    "no_end": "the turn has no special token at its end, so its end cannot be left untrained",
}
"""Reason code -> sentence: what is wrong with the messages, what no template or this one writes,
and what a Jinja template did with them."""


def is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a value is a JSON object of any class; fast for a dict."""
    return type(value) is dict or isinstance(value, Mapping)


def has_bytes(text: str) -> bool:
    """Whether a text can be written in UTF-8; a lone surrogate cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_tools(tools: object) -> tuple[str, ...]:
    """One JSON text per definition, in order; None means no tools."""
    texts = tuple(_json(tool, "bad_tools") for tool in _listed(tools or (), "bad_tools"))
    _check_unicode(texts)
    return texts


def _check_unicode(texts: Iterable[str]) -> None:
    if not all(map(has_bytes, texts)):
        raise Dropped("invalid_unicode")


def _listed(values: object, reason: str) -> Sequence[object]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise Dropped(reason)
    return values


def _json(value: object, reason: str) -> str:
    """A JSON object as text."""
    if not is_object(value):
        raise Dropped(reason)
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        raise Dropped(reason) from None


def _call_text(call: object) -> str:
    inner = call.get("function", call) if is_object(call) else None
    name, arguments = (
        (inner.get("name"), inner.get("arguments")) if is_object(inner) else (None, None)
    )
    if not isinstance(name, str) or not name:
        raise Dropped("bad_tool_call")
    if isinstance(arguments, str):
        try:
            decoded = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict):
            raise Dropped("bad_tool_call")
        written = arguments.strip()
    else:
        written = _json(arguments, "bad_tool_call")
    return f'{{"name": {_ENCODER.encode(name)}, "arguments": {written}}}'


def _as_dict(value: object) -> dict[object, object]:
    """For mappings that are not dicts, as some readers give them."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Made once: they are used for every call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_as_dict)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """One well-formed message."""

    role: int  # a position in ROLES
    text: str | None  # the content, its parts joined; None only if there are calls
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # JSON texts
    train: bool | None = None  # its own flag; None leaves it to the policy


def check_messages(messages: object) -> list[CheckedMessage]:
    """The messages of a conversation; Dropped with the first thing wrong with it."""
    listed = _listed(messages, "not_a_list")
    if not listed:
        raise Dropped("no_messages")
    return list(map(_check_message, listed))


_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_UNREAD = ("function_call", "reasoning", "thinking")


def is_plain_message(message: object) -> TypeGuard[dict[str, str]]:
    """Whether a message is the standard name of a role and a sound text, as nearly all are."""
    if type(message) is not dict or len(message) != 2:
        return False
    text, role = message.get("content"), message.get("role")
    if type(text) is not str or type(role) is not str or role not in _ROLE_NUMBERS:
        return False
    return text.isascii() or has_bytes(text)


def _check_message(message: object) -> CheckedMessage:
    if is_plain_message(message):
        return CheckedMessage(_ROLE_NUMBERS[message["role"]], message["content"])
    if not is_object(message) or "role" not in message:
        raise Dropped("bad_message")
    content, calls = message.get("content"), message.get("tool_calls")
    if any(map(message.get, _UNREAD)) or message.get("weight", 1) not in (1, None):
        raise Dropped("unread_key")
    if "content" not in message and not calls:
        raise Dropped("bad_message")
    role = normal_role(message["role"])
    if role is None:
        raise Dropped("unknown_role")
    if isinstance(content, (list, tuple)):
        content = "".join(map(_part_text, content))
    if isinstance(content, str):
        content = str.__str__(content)  # one of numpy's, for one: what is no plain str is no text
    elif content is not None or not calls:
        raise Dropped("content_not_text")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise Dropped("reasoning_not_text")
    written = tuple(map(_call_text, _listed(calls or (), "bad_tool_call")))
    _check_unicode((content or "", reasoning or "", *written))
    if (calls or reasoning) and role != "assistant":
        raise Dropped("not_the_assistants")
    train = message.get("train")
    if "train" in message and not isinstance(train, bool):
        raise Dropped("bad_train_flag")
    flag = train if isinstance(train, bool) else None
    return CheckedMessage(ROLES.index(role), content, reasoning or "", written, flag)


def _part_text(part: object) -> str:
    kind, text = read_part(part)
    if kind != "text":  # a source puts the others into keys of their own
        raise Dropped("content_part_not_text")
    return str(text)


# Which turns are trained.


def _last_assistant_turns(roles: IntArray, bounds: IntArray) -> BoolArray:
    trained: BoolArray = roles == ASSISTANT
    turns = np.flatnonzero(trained)
    owner = np.searchsorted(bounds, turns, side="right")
    trained[turns[:-1][owner[:-1] == owner[1:]]] = False
    return trained


TrainOn = Literal["assistant", "last-assistant", "all"]
TRAIN_ON: dict[TrainOn, Callable[[IntArray, IntArray], BoolArray]] = {
    "assistant": lambda roles, _: roles == ASSISTANT,
    "last-assistant": _last_assistant_turns,
    "all": lambda roles, _: np.ones(len(roles), np.bool_),
}
"""Mask policies: (roles, bounds) as in `trained_turns` -> which turns are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPolicy:
    """Which turns are trained. A message's own "train": true or false takes precedence."""

    train_on: TrainOn = "assistant"
    train_on_eot: bool = True  # a trained turn also trains its end

    def __post_init__(self) -> None:
        if self.train_on not in TRAIN_ON:
            raise OptionError(
                f"{{train_on}}: wanted one of {', '.join(TRAIN_ON)}", train_on=self.train_on
            )
        if not isinstance(self.train_on_eot, bool):
            raise OptionError(
                "{train_on_eot}: wanted True or False", train_on_eot=self.train_on_eot
            )

    def __str__(self) -> str:
        return f"train_on={self.train_on}, train_on_eot={str(self.train_on_eot).lower()}"


def trained_turns(
    roles: IntArray, bounds: IntArray, flags: Sequence[tuple[int, bool]], policy: TrainPolicy
) -> BoolArray:
    """True for each turn that is trained.

    roles: (turns,) positions in ROLES.  bounds: (n + 1,) conversation c is turns
    bounds[c]..bounds[c + 1].  flags: (turn, its own "train") where a message has one.
    """
    trained = TRAIN_ON[policy.train_on](roles, bounds)
    for turn, wanted in flags:
        trained[turn] = wanted
    return trained


def trained_messages(checked: Sequence[CheckedMessage], policy: TrainPolicy) -> BoolArray:
    """Which messages of one conversation are trained, by the policy and their own flags."""
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(at, m.train) for at, m in enumerate(checked) if m.train is not None]
    return trained_turns(roles, np.array([0, len(roles)]), flags, policy)


def special_in_text(texts: Ragged, special_ids: Iterable[int]) -> OffsetArray:
    """Which texts encode to a special id, ascending.

    No tokenizer of this library does that, but a user's own may. Such text would act as structure.
    """
    special = sorted(special_ids)
    if not special:
        return np.empty(0, np.int64)
    values = texts.values
    # Markers are close together in most vocabularies, with hardly any text ids between them.
    between = (values >= special[0]) & (values <= special[-1])
    if not between.any():
        return np.empty(0, np.int64)
    near = np.flatnonzero(between)
    found = near[np.isin(values[near], special)]
    return np.unique(np.searchsorted(texts.offsets, found, side="right") - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What a template made of some conversations."""

    examples: ChatExamples
    kept: OffsetArray  # (len(examples.ids),) position of each in the input, ascending
    drops: tuple[Drop, ...]  # the others, in order


class ChatTemplate(Protocol):
    """Conversations to tokens with a loss mask, bound to one tokenizer.

    Ids and mask come out of one pass over the conversation, never out of a search in ids or text.
    A conversation is rendered whole or dropped with a reason; every example trains at least one
    token; text never becomes structure.
    """

    @property
    def name(self) -> str: ...

    @property
    def marker_ids(self) -> frozenset[int]:
        """Every id that only structure may have: no content encodes to one of them."""

    def describe(self) -> dict[str, JSON]:
        """What identifies the template, for the manifest: kind, name, and a "sha256" over
        everything that decides ids or mask apart from the tokenizer."""

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered: ...


def assistant_mask(ids: IntArray, *, open_id: int, end_id: int) -> BoolArray:
    """Which tokens the assistant said, for ids that come without turns; the shape of `ids`.

    True exactly after an assistant's opening token, up to and including the next end token.
    ids: (n,) one conversation, or (rows, n), each row its own conversation.
    """
    if open_id == end_id:
        raise OptionError(f"the assistant's opening id and the end id are both {open_id}")
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise OptionError(f"ids of shape {ids.shape}: wanted (n,) or (rows, n)")
    begins = np.arange(len(ids)) * ids.shape[-1] if ids.ndim == 2 else np.empty(0, np.int64)
    # Runs between markers, each spoken if the marker before it opens.
    #     open = 7, end = 9:  ids    5  7  4  4  9  4
    #                         runs   .  .| x  x  x| .
    # A row begins with a run that is not spoken; sorted last among equals, it wins over a marker's.
    flat = ids.reshape(-1)
    is_open = flat == open_id
    markers = np.flatnonzero(is_open | (flat == end_id))
    opens = is_open[markers]
    edges = np.concatenate(([0], markers + 1, begins))
    spoken = np.concatenate(([False], opens, np.zeros(len(begins), np.bool_)))
    order = np.argsort(edges, kind="stable")
    mask: BoolArray = np.repeat(spoken[order], np.diff(edges[order], append=len(flat)))
    mask[markers[opens]] = False
    return mask.reshape(ids.shape)
