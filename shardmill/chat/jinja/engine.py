"""One Jinja template with its tokenizer: what it writes for messages, and how it writes in general.

`JinjaEngine.written` runs the template here, on values that record what becomes of them; `text` and
`encode` run it as transformers does, which the former is checked against. Any error inside a
template becomes a `TemplateError` with its line. The clock is never read.

`find_facts` tries harmless messages, and refuses a template that cannot write a question and its
answer, or whose answer does not follow its generation prompt. This is no proof: the mask proof and
the checks of `layout.py` follow.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from shardmill.chat.jinja.layout import (
    Items,
    Written,
    common_end,
    end_of,
    find_turns,
    text_of,
    written_of,
)
from shardmill.chat.jinja.library import FILTERS, Function
from shardmill.chat.jinja.sandbox import Program, TemplateSandbox
from shardmill.chat.jinja.values import (
    TRACED,
    Count,
    Message,
    SafeText,
    Trace,
    TracedList,
    TracedText,
    edge,
    joined,
    length,
    literal,
    mark,
    plain,
    raw_of,
    safe_text,
    trace_of,
    traced_json,
    traced_messages,
    traced_tools,
    unsafe,
)
from shardmill.chat.policy import CheckedMessage, Dropped, is_object, is_plain_message
from shardmill.errors import ShardmillError, TemplateError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import JSON, ROLES, IntArray, Ragged

try:
    from jinja2 import TemplateError as JinjaError
    from jinja2 import pass_environment
    from markupsafe import Markup
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing


def is_own_refusal(problem: TemplateError) -> bool:
    """Whether the template itself refused, with `raise_exception`."""
    return type(problem.__cause__) is JinjaError


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_NOT_THE_TEMPLATE = (ShardmillError, ImportError, OSError)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


_DATES = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1""")


class JinjaTokenizer(Protocol):
    """What a tokenizer needs; those of transformers have it."""

    chat_template: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]
    special_tokens_map: Mapping[str, Any]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


# The sandbox on values that record what becomes of them.

_TRACING_FILTERS = frozenset(
    (
        *("capitalize", "d", "default", "dictsort", "first", "items", "join", "last", "list"),
        *("lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select"),
        *("selectattr", "string", "trim", "upper"),
    )
)
"""Filters that use a value only in ways that it records. Others get it without traces."""
_TRACING_TESTS = frozenset(
    (
        *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt"),
        *("greaterthan", ">=", "ge", "boolean", "defined", "false", "float", "in", "integer"),
        *("lower", "mapping", "none", "number", "sameas", "string", "true", "undefined", "upper"),
    )
)


def _is_iterable(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) or hasattr(type(value), "__iter__")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) or hasattr(type(value), "__getitem__")


class TracedSandbox(TemplateSandbox):
    """The sandbox, for values that record what becomes of them (`values.py`)."""

    def __init__(self, *, now: datetime | None) -> None:
        super().__init__(now=now)
        self.trace = Trace()
        for table, tracing in ((self.filters, _TRACING_FILTERS), (self.tests, _TRACING_TESTS)):
            table.update({n: _pinning(run) for n, run in table.items() if n not in tracing})
        for name in ("replace", "trim"):
            self.filters[name] = _pinning_others(self.filters[name])
        for name in ("capitalize", "lower", "replace", "string", "trim", "upper"):
            self.filters[name] = _with_markup(self.filters[name])
        self.filters.update(count=length, length=length, safe=_safe, tojson=_tojson)
        for name in ("boolean", "float", "integer", "number"):
            self.tests[name] = _of_raw(self.tests[name])
        self.tests.update(iterable=_is_iterable, sequence=_is_sequence, sameas=_is_same_as)

    def enter_loop(self, value: object) -> str:
        return mark(self.trace, value._index) if isinstance(value, Message) else ""

    def generated(self, text: str) -> str:
        return joined((edge(self.trace, True), text, edge(self.trace, False)))

    def checked(self, value: Any) -> Any:
        # The pieces of a text are made, and nobody asked how many they are.
        super().checked(value._raw if isinstance(value, TracedList) else value)
        return self.recorded(value)

    def recorded(self, value: Any) -> Any:
        """The value, once it was paid for what is recorded of a text: it grows with each change,
        also of a text that is empty."""
        if isinstance(value, TracedText):
            self.spend(len(value._parts or ()) + (len(value._own_source or "") >> 4))
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(unsafe(obj), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(unsafe(obj), argument)

    def weigh(self, value: object, *, to_write: bool = False, to_hash: bool = False) -> int:
        return super().weigh(raw_of(value), to_write=to_write, to_hash=to_hash)

    def text_of(self, value: Any) -> str:
        return super().text_of(plain(value) if isinstance(value, Count) else self.recorded(value))

    def concat(self, pieces: Iterable[str]) -> str:
        found = list(pieces)
        self.room(sum(map(str.__len__, found)))
        text: str = self.recorded(joined(found))
        return text

    def add(self, context: object, *operands: Any) -> Any:
        if all(isinstance(o, str) and not isinstance(o, (Markup, SafeText)) for o in operands):
            return self.concat(operands)
        return super().add(context, *operands)

    def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:
        left, right = _operand(left), _operand(right)
        if operator == "%" or isinstance(left, Markup) or isinstance(right, Markup):
            left, right = plain(left), plain(right)  # they read texts in C
        return super().call_binop(context, operator, left, right)

    def contains(self, item: Any, container: Any) -> bool:
        if (
            isinstance(item, TracedText)
            and isinstance(container, str)
            and not isinstance(container, TracedText)
        ):
            self.spend(len(container) >> 4)
            source = f"{item._source} in {literal(container)}"
            return item._trace.ask(source, item._said in container)
        return super().contains(item, container)

    def call(self, context: object, function: Any, /, *args: Any, **options: Any) -> Any:
        if isinstance(function, Function) and function.name not in _TRACING_FUNCTIONS:
            # A method of a text of the template's own would read others in C.
            self.weigh((args, options))
            args, options = plain(args), plain(options)
            if function.name == "format":
                function = Function("format", function.run, *plain(function.bound))
        return super().call(context, function, *args, **options)


def _operand(value: Any) -> Any:
    return plain(value) if isinstance(value, (Count, SafeText)) else value


_TRACING_FUNCTIONS = frozenset(("dict", "get", "join", "namespace", "raise_exception"))


def _pinning(run: Any) -> Callable[..., Any]:
    """A filter or test that gets values without traces."""

    @pass_environment
    def pinned(environment: TracedSandbox, *values: Any, **named: Any) -> Any:
        environment.weigh((values, named))
        given = [environment] if hasattr(run, "jinja_pass_arg") else []
        return run(*given, *plain(values), **plain(named))

    return pinned


def _pinning_others(run: Any) -> Callable[..., Any]:
    """A filter of a text with others. One of the template's own would read the others in C."""

    @pass_environment
    def pinned(environment: TracedSandbox, value: Any, *others: Any, **named: Any) -> Any:
        if not isinstance(value, TracedText):
            others, named = plain(others), plain(named)
        return run(environment, value, *others, **named)

    return pinned


def _with_markup(run: Any) -> Callable[..., Any]:
    """A filter that makes Markup of Markup."""
    if not hasattr(run, "jinja_pass_arg"):
        return lambda value, *others, **named: run(unsafe(value), *others, **named)

    @pass_environment
    def marked(environment: TracedSandbox, value: Any, *others: Any, **named: Any) -> Any:
        return run(environment, unsafe(value), *others, **named)

    return marked


@pass_environment
def _safe(environment: TracedSandbox, value: Any) -> str:
    if isinstance(value, TracedText):
        return safe_text(value)
    made: str = FILTERS["safe"](environment, plain(value))
    return made


def _of_raw(run: Any) -> Callable[..., Any]:
    """A test that looks at the type only."""
    return lambda value: run(raw_of(value) if isinstance(value, Count) else value)


def _is_same_as(value: Any, other: Any) -> bool:
    if not isinstance(value, TRACED) and not isinstance(other, TRACED):
        return value is other
    if value is None or other is None or isinstance(value, bool) or isinstance(other, bool):
        return False
    raise ValueError("sameas asks where in memory a text is: use ==")


@pass_environment
def _tojson(environment: TracedSandbox, value: Any, *args: Any, **options: Any) -> str:
    if trace_of(value) is None:
        made: str = FILTERS["tojson"](environment, value, *plain(args), **plain(options))
        return made
    names = ("ensure_ascii", "indent", "separators", "sort_keys")
    options = {**dict(zip(names, args, strict=False)), **options}
    made = FILTERS["tojson"](environment, raw_of(value), **plain(options))
    return traced_json(value, made, plain(options))


class JinjaEngine:
    """The template `source` with its variables, for the vocabulary of `tokenizer`."""

    def __init__(
        self,
        tokenizer: JinjaTokenizer,
        source: str,
        variables: Mapping[str, JSON],
        *,
        now: datetime | None = None,
        any_prompt: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.variables = dict(variables)
        self.now = now
        self.any_prompt = any_prompt
        self.has_blocks = _GENERATION.search(source) is not None

    @cached_property
    def _sandbox(self) -> TracedSandbox:
        return TracedSandbox(now=self.now)

    @cached_property
    def _program(self) -> Program:
        return self._sandbox.program(self.source)

    @cached_property
    def _dated_source(self) -> str:
        """The source with a macro that gives the date as `now` has it: transformers has only the
        clock."""
        if self.now is None or "strftime_now" not in self.source:
            return self.source
        dates = {form: self.now.strftime(form) for _, form in _DATES.findall(self.source)}
        return (
            f"{{%- macro strftime_now(form) -%}}{{%- set dates = {dates!r} -%}}"
            "{{ dates[form] if form in dates else raise_exception('a date that was computed') }}"
            "{%- endmacro -%}"
            f"{self.source}"
        )

    @cached_property
    def encodes_apart(self) -> bool:
        """Whether the tokenizer splits text at added tokens and encodes the parts by themselves,
        whatever is in them: none of these tokens takes blanks away or looks beside itself."""
        added = self.tokenizer.added_tokens_decoder.values()
        return bool(getattr(self.tokenizer, "is_fast", False)) and not any(
            token.lstrip or token.rstrip or token.single_word for token in added
        )

    def __getstate__(self) -> dict[str, Any]:
        compiled = ("_program", "_sandbox")
        return {key: value for key, value in self.__dict__.items() if key not in compiled}

    def written(
        self, trace: Trace, messages: Messages, tools: Tools = None, *, prompt: bool = False
    ) -> Written:
        """What the template writes, piece by piece; the trace records what it asked."""
        context = {
            **self.tokenizer.special_tokens_map,
            **self.variables,
            "messages": traced_messages(trace, messages),
            "tools": traced_tools(trace, tools),
            "documents": None,
            "add_generation_prompt": prompt,
        }
        size = sum(len(v) for m in messages for v in m.values() if isinstance(v, str))
        run = self._sandbox.started(size, len(messages))
        run.trace = trace
        return written_of(self._program.pieces(context, input_size=size, sandbox=run))

    def text(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str:
        """What the template writes."""
        return text_of(self.written(Trace(), with_aliases(messages), tools, prompt=prompt))

    def text_or_none(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False
    ) -> str | None:
        """What the template writes; None if it refuses these messages."""
        try:
            return self.text(messages, tools, prompt=prompt)
        except TemplateError:
            return None

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each text with nothing added, as `apply_chat_template` encodes its output."""
        listed = list(texts)
        if not listed:
            return Ragged.from_sequences([])
        found = self.tokenizer(
            listed, add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        return Ragged.from_sequences(found["input_ids"])

    def of_transformers(self, messages: Messages, tools: Tools = None) -> IntArray:
        """The ids that `apply_chat_template` of transformers gives."""
        try:
            found = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._dated_source,
                tokenize=True,
                return_dict=False,
                **self.variables,
            )
        except _NOT_THE_TEMPLATE:
            raise
        except Exception as problem:  # a template can raise anything that Python can
            raise TemplateError(
                f"apply_chat_template raised {type(problem).__name__}: "
                f"{' '.join(str(problem).split())[:300]}"
            ) from problem
        return np.asarray(found, np.int64)


# Messages as templates want them.


def as_messages(
    messages: Messages, checked: Sequence[CheckedMessage], arguments: str
) -> list[dict[str, Any]]:
    """The messages as a template wants them: every key but "train", with the standard name of the
    role, the content as one text, and reasoning under the names that templates read.

    arguments: "as-given", or the form of a call's arguments that the template can write: "object"
    or "text".
    """
    found: list[dict[str, Any]] = []
    for message, sound in zip(messages, checked, strict=True):
        if is_plain_message(message):
            found.append(message)
            continue
        plain = {
            key: value if type(value) in _JSON_TYPES else _as_json(value)
            for key, value in message.items()
            if key != "train"
        }
        if any(type(key) is not str for key in plain):
            raise Dropped("bad_message")
        plain["role"], plain["content"] = ROLES[sound.role], sound.text
        if sound.calls:
            plain["tool_calls"] = [_with_arguments(call, arguments) for call in plain["tool_calls"]]
        found.append(plain)
    return with_aliases(found)


_JSON_TYPES = frozenset((str, int, float, bool, type(None), list, dict))


def _as_json(value: object) -> Any:
    """Tuples as lists, and other mappings as objects."""
    try:
        return json.loads(json.dumps(value, default=_as_dict))
    except (TypeError, ValueError, RecursionError):
        raise Dropped("bad_message") from None


def _as_dict(value: object) -> dict[str, object]:
    if is_object(value):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def with_aliases(messages: Messages) -> list[dict[str, Any]]:
    """Reasoning is also called `thinking`, as transformers calls it."""
    return [
        {"thinking": reasoning, **message}
        if (reasoning := message.get("reasoning_content")) is not None
        else (message if type(message) is dict else dict(message))
        for message in messages
    ]


def _with_arguments(call: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The call in the shape transformers documents, {"type", "function": {"name", "arguments"}}."""
    function = dict(call.get("function", call))
    around = dict(call) if "function" in call else {"id": function.pop("id", None)}
    given = function["arguments"]
    if form == "object" and isinstance(given, str):
        function["arguments"] = json.loads(given)
    if form == "text" and not isinstance(given, str):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    outer = {key: value for key, value in around.items() if value is not None}
    return {"type": "function", **outer, "function": function}


# What harmless messages show.

QUESTION = {"role": "user", "content": "asked"}
ANSWER = {"role": "assistant", "content": "answered"}
_NEXT_QUESTION = {"role": "user", "content": "again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What renderings of harmless messages show."""

    bos: str  # what opens every conversation
    opening: str  # what the generation prompt adds
    arguments: str  # how a call's arguments can be written: as-given, object, text or none
    markers: dict[str, int]  # literal -> id: ids that only structure may have
    end_ids: frozenset[int]  # the special tokens among them: one of these ends a turn
    closing: tuple[int, ...]  # the special tokens that end an assistant's turn
    literals: re.Pattern[str]  # finds texts that become a marker, as its one group
    overlaps: bool  # whether a text and a marker beside it could make another marker


def find_facts(engine: JinjaEngine) -> TemplateFacts:
    """Try the template; TemplateError if it cannot be trained with."""
    trace = Trace()
    asked, prompt, answered = (
        engine.written(trace, messages, prompt=prompt)
        for messages, prompt in (
            ([QUESTION], False),
            ([QUESTION], True),
            ([QUESTION, ANSWER], False),
        )
    )
    if engine.has_blocks:
        if not answered.edges:
            raise TemplateError(
                "it has {% generation %} in its text, but no answer is inside such a block; put "
                "the block around the assistant's words and their end, or remove it"
            )
    elif not engine.any_prompt:
        _check_prompt(*map(text_of, (asked, prompt, answered)))
    specials = _special_tokens(engine)
    written = [text_of(one) for one in (asked, prompt, answered)]
    markers = _structure_tokens(engine, specials, written)
    ends = frozenset(number for text, number in markers.items() if text in specials)
    literals = sorted({*specials, *markers}, key=lambda text: (-len(text), text))  # longest first
    pattern = re.compile("(" + ("|".join(map(re.escape, literals)) or "(?!)") + ")")
    markers = {**specials, **markers}
    bos = getattr(engine.tokenizer, "bos_token", None) or ""
    start = common_end(asked, prompt)
    opening = written[1][len(written[0]) :] if written[1].startswith(written[0]) else ""
    if not opening and start[0] < len(prompt.pieces):
        opening = "".join([prompt.pieces[start[0]][start[1] :], *prompt.pieces[start[0] + 1 :]])
    if engine.any_prompt:
        answer = written[2][len(written[1]) - len(opening) :]
        opening = os.path.commonprefix([opening, answer])  # noqa: RUF071 - texts, not paths
    return TemplateFacts(
        bos=bos if written[2].startswith(bos) and bos not in opening else "",
        opening=opening,
        arguments=_arguments_form(engine),
        markers=markers,
        end_ids=ends,
        closing=_closing(engine, pattern, markers, ends),
        literals=pattern,
        overlaps=_overlap(literals),
    )


def _overlap(literals: Sequence[str]) -> bool:
    """Whether one literal goes on as another begins, holds another, or begins with one."""
    starts = {one[:size] for one in literals for size in range(1, len(one) + 1)}
    sizes = set(map(len, literals))
    known = set(literals)
    for one in literals:
        for at in range(len(one)):
            inside = any(one[at : at + size] in known for size in sizes if size < len(one))
            if inside or (at and one[at:] in starts):
                return True
    return False


def _check_prompt(asked: str, prompt: str, answered: str) -> None:
    """An answer must follow its prompt, or nothing could be trained."""
    if not answered.startswith(prompt):
        raise TemplateError(
            f"for a question with the generation prompt it writes {prompt!r}, and for the question "
            f"and its answer {answered!r}: they do not begin alike, so what is trained would "
            "follow other text than what is generated. Look for a variable that changes it "
            "({template_vars}), or accept that with {any_prompt}",
            template_vars={"enable_thinking": False},
            any_prompt=True,
        )
    before, answer, _ = answered[len(prompt) :].partition(str(ANSWER["content"]))
    if prompt == asked and before.strip():
        raise TemplateError(
            "for a question it writes the same with and without the generation prompt, and then "
            f"{before!r} before the answer: it must write the assistant's opening when "
            "add_generation_prompt is true"
        )
    if not answer:
        raise TemplateError(
            f"after the generation prompt {prompt!r} it writes {answered[len(prompt) :]!r}, "
            f"without the answer {ANSWER['content']!r}"
        )


def _closing(
    engine: JinjaEngine,
    literals: re.Pattern[str],
    markers: Mapping[str, int],
    ends: frozenset[int],
) -> tuple[int, ...]:
    """The special tokens that end an answer, of one with a question after it if possible."""
    messages = [QUESTION, ANSWER, _NEXT_QUESTION]
    try:
        found = engine.written(Trace(), messages)
        (turn,) = [turn for turn in find_turns(found, [1, 2, 1], "") if 2 in turn.messages]
        stop = turn.start
    except (TemplateError, Dropped, ValueError):
        found = engine.written(Trace(), messages[:2])
        stop = end_of(found)
    items = Items(found, literals, markers)
    position = items.position(stop).item
    closing: list[int] = []
    for item in reversed(items.items[:position]):
        if isinstance(item, int) and item in ends:
            closing.insert(0, item)
        elif closing:
            break
    return tuple(closing)


def _special_tokens(engine: JinjaEngine) -> dict[str, int]:
    """Literal -> id of every special token."""
    tokenizer = engine.tokenizer
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            found[str(token.content)] = int(number)
    return {text: number for text, number in found.items() if text}


def _structure_tokens(
    engine: JinjaEngine, specials: dict[str, int], written: list[str]
) -> dict[str, int]:
    """The special tokens, and other added tokens that the template itself writes.

    Added tokens that no template writes (runs of blanks, HTML tags) are ordinary text. The unknown
    token is text too, unless it is also used as BOS, EOS or the like.
    """
    found = dict(specials)
    unknown = getattr(engine.tokenizer, "unk_token", None)
    jobs = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token")
    used = {getattr(engine.tokenizer, job, None) for job in jobs}
    if unknown in found and unknown not in engine.source and unknown not in used:
        del found[unknown]
    seen = engine.source + "\0" + "\0".join(written)
    for number, token in engine.tokenizer.added_tokens_decoder.items():
        text = str(token.content)
        if text.strip() and text in seen and (text != unknown or text in found):
            found[text] = int(number)
    return found


def _arguments_form(engine: JinjaEngine) -> str:
    """How the template can write a call's arguments, by trying: as-given, object, text or none.

    Many templates turn arguments that are JSON text into a quoted string, others write an object
    the way Python does; both without an error.
    """
    given = '{"quarry": "marble"}'

    def write(arguments: object) -> str:
        function = {"name": "lookup", "arguments": arguments}
        call: dict[str, Any] = {"id": "call00001", "type": "function", "function": function}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = engine.text_or_none([QUESTION, calling])
        return found or engine.text_or_none([QUESTION, {**calling, "content": ""}]) or ""

    as_object, as_text = write(json.loads(given)), write(given)
    object_ok = all(word in as_object for word in ("lookup", "quarry", "marble"))
    object_ok = object_ok and "'quarry'" not in as_object
    text_ok = "lookup" in as_text and given in as_text
    if object_ok and text_ok:
        return "as-given"
    return "object" if object_ok else "text" if text_ok else "none"
