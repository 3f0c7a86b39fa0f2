"""Values that record what a template does with them.

A template gets a `TracedText` for each text of a conversation, and a `TracedList` or `TracedDict`
for each list and object inside a message or tool. They behave like str, list and dict, and record
two things as Python source, over `m` (the messages) and `t` (the tools):

- where a piece of output came from: `m[1]['content'].strip()`;
- every question whose answer could change the output: `'</think>' in m[1]['content']` was False.

Another conversation of the same shape (`shape_of`) for which all questions have the same answers is
written the same way, so its output follows from the recorded sources without running the template.

    {{ '<|user|>' + message.content | trim }}   writes  '<|user|>' + m[0]['content'].strip()
    {% if message.content %}                    asks    bool(m[0]['content'])

Whatever cannot be recorded in such detail is pinned: the question is whether the value is equal to
this one. Names of attributes start with an underscore, which no template can reach.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardmill.errors import TemplateError, missing_extra

try:
    from markupsafe import Markup
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing

PLACEHOLDER = "\ue000"
"""What every text of a trace with `blind=True` consists of."""


MAX_ASKED = 2**22
"""Characters of all questions of a trace. A text that grows with each message is asked about whole:
2,000 messages can make 100 million characters of questions."""
MAX_WORK = 2**30


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` of transformers: no escapes for HTML, in the order of the object."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _ENCODER.encode(value)  # json.dumps would make one each time
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_ENCODER = json.JSONEncoder(ensure_ascii=False)

NAMES: dict[str, Any] = {
    "__builtins__": {},
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "json": to_json,
    "len": len,
    "list": list,
    "repr": repr,
    "tuple": tuple,
    "type": type,
}
"""What recorded sources may use besides `m` and `t`."""


class Trace:
    """What one or more renderings of a conversation asked about its texts.

    blind: texts hold placeholders, and lists and objects nothing, while every recorded question is
    answered truthfully. A blind rendering that writes and asks the same as a seeing one has read
    them in recorded ways only.
    """

    def __init__(self, *, blind: bool = False) -> None:
        self.blind = blind
        self.guards: dict[str, None] = {}  # sources that are true, in the order of asking
        self.size = 0  # characters asked; from MAX_ASKED on, nothing is kept
        self.work = 0  # the same, with what was asked again

    def _note(self, guard: str) -> None:
        self.work += len(guard)
        if self.work > MAX_WORK:
            raise TemplateError("the template asks too much about a text that it made of many")
        if guard not in self.guards and self.size < MAX_ASKED:
            self.size += len(guard)
            self.guards[guard] = None

    def ask(self, source: str, answer: bool) -> bool:
        self._note(source if answer else f"not ({source})")
        return answer

    def pin(self, source: str, value: Any) -> None:
        """The value is this one. 1, 1.0 and True are equal, as are objects in another order, and
        each is written in its own way; so are 0.0 and -0.0."""
        if isinstance(value, str) or type(value) is int:
            self._note(f"({source}) == {literal(value)}")
        else:
            self._note(f"repr({source}) == {repr(value)!r}")

    def text(self, source: str, said: str, origin: str | None = None) -> TracedText:
        """A text that came from `source`. origin: the field that it is, perhaps stripped."""
        return TracedText(self, source, said, origin=origin)

    def child(self, source: str, value: Any) -> Any:
        """A value inside a message or tool, traced."""
        if type(value) is str:
            self._note(f"type({source}) is type('')")
            return self.text(source, value, source)
        if type(value) is dict:
            self._note(f"type({source}) is dict")
            return TracedDict(self, source, value)
        if type(value) is list:
            self._note(f"type({source}) is list")
            return TracedList(self, source, value)
        if value is None or type(value) is bool:
            self._note(f"({source}) is {value!r}")
        elif type(value) in (int, float):
            self._note(f"type({source}) is {type(value).__name__}")
            self.pin(source, value)
        else:
            # No TypeError: for that, `a.b` is undefined.
            raise ValueError(f"a {type(value).__name__} in a message or tool: wanted plain JSON")
        return value


class Message(dict[str, Any]):
    """A message as the template sees it. Keys, roles and values that are no text, list or object
    belong to the shape of the conversation, so reading them asks nothing."""

    __slots__ = ("_index",)
    _index: int

    def __eq__(self, other: object) -> bool:
        # dict.__eq__ would look into an object behind its back.
        return (
            bool(plain(self) == plain(other))
            if isinstance(other, TracedDict)
            else dict.__eq__(self, other)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


class Mark(str):
    """Nothing, written where the template starts with a message in a loop."""

    __slots__ = ("_index", "_trace")
    _index: int
    _trace: Trace

    def __str__(self) -> str:
        return self


class Edge(str):
    """Nothing, written where a generation block opens or closes."""

    __slots__ = ("_opens", "_trace")
    _opens: bool
    _trace: Trace

    def __str__(self) -> str:
        return self


def mark(trace: Trace, index: int) -> Mark:
    found = Mark()
    found._trace, found._index = trace, index
    return found


def edge(trace: Trace, opens: bool) -> Edge:
    found = Edge()
    found._trace, found._opens = trace, opens
    return found


Part: TypeAlias = "str | TracedText | Mark | Edge"


class TracedText(str):
    """A text of the conversation, or one made from some.

    Joined from several, it keeps them as parts. What a str holds in C is the text itself, or
    placeholders in a blind trace; every method answers from `_said`.
    """

    __slots__ = ("_origin", "_own_source", "_parts", "_said", "_trace")
    _trace: Trace
    _own_source: str | None  # None: that of the parts, made when it is asked for
    _said: str
    _origin: str | None
    _parts: tuple[Part, ...] | None

    def __new__(
        cls,
        trace: Trace,
        source: str | None,
        said: str,
        *,
        origin: str | None = None,
        parts: tuple[Part, ...] | None = None,
    ) -> TracedText:
        # One more than the text has: a text may be empty, or look like placeholders itself.
        found = super().__new__(cls, PLACEHOLDER * (len(said) + 1) if trace.blind else said)
        found._trace, found._own_source, found._said = trace, source, said
        found._origin, found._parts = origin, parts
        return found

    @property
    def _source(self) -> str:
        if self._own_source is None:
            parts = (part for part in self._parts or () if not isinstance(part, Mark | Edge))
            self._own_source = f"({' + '.join(map(source_of, parts))})"
            if self._own_source == "()":
                self._own_source = "''"
        return self._own_source

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(plain(self))

    def __hash__(self) -> int:
        return hash(plain(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return self._trace.ask(f"{self._source} == {source_of(other)}", self._said == said(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self._trace.ask(f"{self._source} < {source_of(other)}", self._said < said(other))

    def __le__(self, other: str) -> bool:
        return self._trace.ask(f"{self._source} <= {source_of(other)}", self._said <= said(other))

    def __gt__(self, other: str) -> bool:
        return not self <= other

    def __ge__(self, other: str) -> bool:
        return not self < other

    def __bool__(self) -> bool:
        return self._trace.ask(f"bool({self._source})", bool(self._said))

    def __len__(self) -> int:
        return len(self._said)  # asks nothing: for budgets; the `length` filter asks

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, str):
            raise TypeError(f"'in <string>' requires string, not {type(item).__name__}")
        return self._trace.ask(f"{source_of(item)} in {self._source}", said(item) in self._said)

    def __iter__(self) -> Iterator[str]:
        return iter(plain(self))

    def __reversed__(self) -> Iterator[str]:
        return iter(plain(self)[::-1])

    def __getitem__(self, at: Any) -> str:
        if isinstance(at, slice):
            edges = [plain(one) for one in (at.start, at.stop, at.step)]
            written = ":".join("" if one is None else repr(one) for one in edges)
            return self._trace.text(f"{self._source}[{written}]", self._said[slice(*edges)])
        at = plain(at)
        _ask_if_outside(self._trace, self._source, len(self._said), at)
        return self._trace.text(f"{self._source}[{at!r}]", self._said[at])

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> str:
        return plain(self) * times  # type: ignore[no-any-return]

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return plain(self) % plain(values)  # type: ignore[no-any-return]

    def __rmod__(self, other: str) -> str:
        return other % plain(self)  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def strip(self, chars: str | None = None) -> str:
        return _stripped(_stripped(self, "lstrip", chars), "rstrip", chars)

    def lstrip(self, chars: str | None = None) -> str:
        return _stripped(self, "lstrip", chars)

    def rstrip(self, chars: str | None = None) -> str:
        return _stripped(self, "rstrip", chars)

    def split(self, sep: Any = None, maxsplit: Any = -1) -> Any:
        return _pieces(self, "split", sep, maxsplit)

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> Any:
        return _pieces(self, "rsplit", sep, maxsplit)

    def splitlines(self, keepends: Any = False) -> Any:
        return _pieces(self, "splitlines", keepends)

    def partition(self, sep: str) -> Any:
        return _thirds(self, "partition", sep)

    def rpartition(self, sep: str) -> Any:
        return _thirds(self, "rpartition", sep)

    def join(self, values: Iterable[Any]) -> str:
        parts: list[str] = []
        for number, value in enumerate(values):
            parts += [self, value] if number else [value]
        return joined(parts)

    def format(self, *values: Any, **named: Any) -> str:
        return plain(self).format(*plain(values), **plain(named))  # type: ignore[no-any-return]


class SafeText(TracedText):
    """A text of the conversation after the `safe` filter. As Jinja's Markup it is an ordinary text
    where it is written, and changes what is added to it; the sandbox pins it for anything else."""

    __slots__ = ()


def safe_text(text: TracedText) -> SafeText:
    parts = text._parts or (text,)
    return SafeText(text._trace, text._source, text._said, origin=text._origin, parts=parts)


def unsafe(value: Any) -> Any:
    """Markup for what only stands for one."""
    return plain(value) if isinstance(value, SafeText) else value


def _ask_if_outside(trace: Trace, source: str, size: int, at: object) -> None:
    """Whether there is no such item, which a template can see."""
    if isinstance(at, int) and not -size <= at < size:
        trace.ask(f"len({source}) <= {at!r}" if at >= 0 else f"len({source}) < {-at!r}", True)


def _changed(name: str) -> Callable[..., str]:
    """A method that makes another text."""

    def method(self: TracedText, *values: Any) -> str:
        written = ", ".join(map(source_of, values))
        made = getattr(self._said, name)(*map(said, values))
        return self._trace.text(f"{self._source}.{name}({written})", made)

    return method


def _asked(name: str) -> Callable[..., bool]:
    """A method that answers yes or no."""

    def method(self: TracedText, *values: Any) -> bool:
        written = ", ".join(map(source_of, values))
        answer = getattr(self._said, name)(*map(said, values))
        return self._trace.ask(f"{self._source}.{name}({written})", answer)

    return method


def _counted(name: str) -> Callable[..., int]:
    """A method that answers with a number."""

    def method(self: TracedText, *values: Any) -> int:
        written = ", ".join(map(source_of, values))
        answer: int = getattr(self._said, name)(*map(said, values))
        self._trace.pin(f"{self._source}.{name}({written})", answer)
        return answer

    return method


for _name in (
    "capitalize",
    "casefold",
    "center",
    "expandtabs",
    "ljust",
    "lower",
    "removeprefix",
    "removesuffix",
    "replace",
    "rjust",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
):
    setattr(TracedText, _name, _changed(_name))
for _name in (
    "endswith",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "startswith",
):
    setattr(TracedText, _name, _asked(_name))
for _name in ("count", "find", "index", "rfind", "rindex"):
    setattr(TracedText, _name, _counted(_name))


def _stripped(text: str, name: str, chars: str | None) -> str:
    """Without the characters at one end. Parts that disappear are asked about."""
    if not isinstance(text, TracedText):
        return str(getattr(text, name)(said(chars) if chars is not None else None))
    written = "" if chars is None else source_of(chars)
    chars = None if chars is None else said(chars)
    if text._parts is None:
        made = getattr(text._said, name)(chars)
        origin = None if chars and chars.strip() else text._origin  # more than blanks is words
        return text._trace.text(f"{text._source}.{name}({written})", made, origin)
    left = list(text._parts[::-1] if name == "lstrip" else text._parts)  # the last one goes first
    done: list[Part] = []
    while left:
        part = left.pop()
        if isinstance(part, Mark | Edge):
            done.append(part)
            continue
        kept = _stripped(part, name, chars)
        if kept:  # asks, if it is a text of the conversation
            done.append(kept)
            break
    left += reversed(done)
    return joined(left[::-1] if name == "lstrip" else left)


def _pieces(text: TracedText, name: str, *values: Any) -> Any:
    written = ", ".join(map(source_of, values))
    made = list(getattr(text._said, name)(*map(said, values)))
    return TracedList(text._trace, f"list({text._source}.{name}({written}))", made)


def _thirds(text: TracedText, name: str, sep: str) -> Any:
    source = f"{text._source}.{name}({source_of(sep)})"
    made = getattr(text._said, name)(said(sep))
    return tuple(text._trace.text(f"{source}[{at}]", part) for at, part in enumerate(made))


def joined(values: Iterable[str]) -> str:
    """The values as one text that keeps its parts."""
    parts = parts_of(values)
    if len(parts) == 1 and isinstance(parts[0], TracedText):
        return parts[0]
    traces = [part._trace for part in parts if isinstance(part, TracedText | Mark | Edge)]
    if not traces:
        return "".join(parts)
    return TracedText(traces[-1], None, "".join(map(said, parts)), parts=tuple(parts))


def parts_of(values: Iterable[str]) -> list[Part]:
    """The parts of the values. Literals next to each other become one."""
    parts: list[Part] = []
    for value in values:
        for part in (value._parts or (value,)) if isinstance(value, TracedText) else (value,):
            if isinstance(part, TracedText | Mark | Edge):
                parts.append(part)
            elif parts and type(parts[-1]) is str:
                parts[-1] += str.__str__(part)
            elif part:
                parts.append(str.__str__(part))
    return parts


class TracedList(list[Any]):
    """A list of the conversation, such as tool calls, or one that was made from a text."""

    __slots__ = ("_raw", "_source", "_trace")

    def __init__(self, trace: Trace, source: str, values: Sequence[Any]) -> None:
        super().__init__(() if trace.blind else values)
        self._trace, self._source, self._raw = trace, source, list(values)

    def _item(self, at: int) -> Any:
        _ask_if_outside(self._trace, self._source, len(self._raw), at)
        return self._trace.child(f"{self._source}[{at}]", self._raw[at])

    def __getitem__(self, at: Any) -> Any:
        at = plain(at)
        if isinstance(at, slice):
            return [self._item(one) for one in range(len(self))[at]]
        return self._item(at)

    def __len__(self) -> int:
        size = len(self._raw)
        self._trace.pin(f"len({self._source})", size)
        return size

    def __bool__(self) -> bool:
        return self._trace.ask(f"bool({self._source})", len(self._raw) > 0)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return map(self._item, reversed(range(len(self))))

    def __contains__(self, item: object) -> bool:
        return any(item == one for one in self)

    def __eq__(self, other: object) -> bool:
        return bool(plain(self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    def __mul__(self, times: Any) -> Any:
        return list(self) * times

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return repr(plain(self))

    __str__ = __repr__

    def index(self, item: object, *limits: Any) -> int:
        return list(self).index(item, *limits)

    def count(self, item: object) -> int:
        return list(self).count(item)

    def copy(self) -> Any:
        return list(self)


class TracedDict(dict[str, Any]):
    """An object of the conversation, such as the arguments of a tool call."""

    __slots__ = ("_raw", "_source", "_trace")

    def __init__(self, trace: Trace, source: str, values: Mapping[str, Any]) -> None:
        super().__init__({} if trace.blind else values)
        self._trace, self._source, self._raw = trace, source, dict(values)

    def __contains__(self, key: object) -> bool:
        key = plain(key)
        return self._trace.ask(f"{source_of(key)} in {self._source}", key in self._raw)

    def __getitem__(self, key: Any) -> Any:
        key = plain(key)
        if key not in self:
            raise KeyError(key)
        return self._trace.child(f"{self._source}[{source_of(key)}]", self._raw[key])

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - `in` asks

    def __iter__(self) -> Iterator[str]:
        keys = list(self._raw)
        self._trace.pin(f"tuple({self._source})", tuple(keys))
        return iter(keys)

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def copy(self) -> Any:
        return {key: self[key] for key in self}

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def __len__(self) -> int:
        size = len(self._raw)
        self._trace.pin(f"len({self._source})", size)
        return size

    def __bool__(self) -> bool:
        return self._trace.ask(f"bool({self._source})", len(self._raw) > 0)

    def __eq__(self, other: object) -> bool:
        return bool(plain(self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return {**self.copy(), **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self.copy()}

    def __repr__(self) -> str:
        return repr(plain(self))

    __str__ = __repr__


class Count:
    """The length of a text: comparing it asks the comparison; anything else pins it."""

    __slots__ = ("_source", "_trace", "_value")

    def __init__(self, trace: Trace, source: str, value: int) -> None:
        self._trace, self._source, self._value = trace, source, value

    def __bool__(self) -> bool:
        return self._trace.ask(f"bool({self._source})", bool(self._value))

    def __index__(self) -> int:
        return int(plain(self))

    __int__ = __hash__ = __index__

    def __str__(self) -> str:
        return str(plain(self))

    __repr__ = __str__


def _compared(name: str, sign: str) -> Callable[[Count, Any], bool]:
    def method(self: Count, other: Any) -> bool:
        other = plain(other) if isinstance(other, Count) else other
        answer = getattr(self._value, name)(other)
        if answer is NotImplemented:
            return answer  # type: ignore[no-any-return]
        return self._trace.ask(f"{self._source} {sign} {literal(other)}", answer)

    return method


def _computed(name: str) -> Callable[[Count, Any], Any]:
    return lambda self, *others: getattr(plain(self), name)(*plain(others))


for _name, _sign in (
    ("eq", "=="),
    ("ne", "!="),
    ("lt", "<"),
    ("le", "<="),
    ("gt", ">"),
    ("ge", ">="),
):
    setattr(Count, f"__{_name}__", _compared(f"__{_name}__", _sign))
for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "floordiv",
    "rfloordiv",
    "truediv",
    "rtruediv",
    "mod",
    "rmod",
    "pow",
    "rpow",
    "neg",
    "pos",
    "abs",
    "float",
    "round",
):
    setattr(Count, f"__{_name}__", _computed(f"__{_name}__"))


TRACED = (TracedText, Count, TracedList, TracedDict)


def length(value: Any) -> Any:
    """The `length` filter."""
    if isinstance(value, TracedText):
        return Count(value._trace, f"len({value._source})", len(value._said))
    return len(value)


def plain(value: Any) -> Any:
    """The value without traces; a traced one is pinned."""
    return _unwrapped(value, _pinned, {})


def _pinned(value: Any) -> Any:
    if isinstance(value, TracedText):
        value._trace.pin(value._source, value._said)
        return Markup(value._said) if isinstance(value, SafeText) else value._said
    if isinstance(value, Count):
        value._trace.pin(value._source, value._value)
        return value._value
    value._trace.pin(value._source, value._raw)
    return value._raw.copy()


def _unwrapped(value: Any, unwrap: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """The value with each traced part unwrapped. What is shared stays shared: forty steps of
    `[x, x]` are 2**40 parts."""
    if isinstance(value, TRACED):
        return unwrap(value)
    if not isinstance(value, list | tuple | dict):
        return value
    found = done.get(id(value))
    if found is None:
        parts = (_unwrapped(part, unwrap, done) for part in value)
        if isinstance(value, dict):
            of_keys = (_unwrapped(part, unwrap, done) for part in value.values())
            found = dict(zip(parts, of_keys, strict=True))
        else:
            found = tuple(parts) if isinstance(value, tuple) else list(parts)
        done[id(value)] = found
    return found


def said(value: Any) -> Any:
    """The value itself; nothing is asked, so the caller records its source."""
    if isinstance(value, TracedText):
        return value._said
    if isinstance(value, TracedList | TracedDict):
        return value._raw
    return value._value if isinstance(value, Count) else value


def raw_of(value: Any) -> Any:
    """Any value without its traces; nothing is asked."""
    return _unwrapped(value, said, {})


def literal(value: Any) -> str:
    """Python that makes a text or number again."""
    if isinstance(value, str):
        return repr(str.__str__(value))  # Markup is a text like any other where it is read
    if type(value) is float and not math.isfinite(value):
        return f"float({repr(value)!r})"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    raise ValueError(f"a {type(value).__name__} beside texts of the conversation")


def source_of(value: Any) -> str:
    """Python that makes the value again."""
    if isinstance(value, TRACED):
        source: str = value._source
        return source
    if isinstance(value, Message):
        return f"m[{value._index}]"
    if type(value) is list:
        return f"[{', '.join(map(source_of, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(source_of, value))},)" if value else "()"
    if isinstance(value, dict):
        pairs = (f"{source_of(key)}: {source_of(part)}" for key, part in value.items())
        return f"{{{', '.join(pairs)}}}"
    return literal(value)


def trace_of(value: Any) -> Trace | None:
    """The trace of anything traced inside a value."""
    left, seen = [value], set()
    while left:
        part = left.pop()
        if isinstance(part, TRACED):
            trace: Trace = part._trace
            return trace
        if isinstance(part, list | tuple | dict) and id(part) not in seen:
            seen.add(id(part))
            left += part.values() if isinstance(part, dict) else part
    return None


def traced_json(value: Any, made: str, options: Mapping[str, Any]) -> str:
    """What `tojson` made of a value with traces. A text or object is not looked into."""
    trace = trace_of(value)
    assert trace is not None
    written = "".join(f", {name}={source_of(option)}" for name, option in options.items())
    origin = value._origin if isinstance(value, TracedText) else None
    return trace.text(f"json({source_of(value)}{written})", made, origin)


# What a template is given.


def traced_messages(trace: Trace, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as the template sees them."""
    found = []
    for index, message in enumerate(messages):
        values = {}
        for key, value in message.items():
            is_traced = key != "role" and type(value) in (str, list, dict)
            values[key] = _field(trace, f"m[{index}][{key!r}]", value) if is_traced else value
        one = Message(values)
        one._index = index
        found.append(one)
    return found


def _field(trace: Trace, source: str, value: Any) -> Any:
    """A value whose type belongs to the shape, so that nothing is asked about it."""
    if type(value) is str:
        return trace.text(source, value, source)
    kind = TracedDict if type(value) is dict else TracedList
    return kind(trace, source, value)


def traced_tools(trace: Trace, tools: Sequence[Mapping[str, Any]] | None) -> Any:
    return None if tools is None else TracedList(trace, "t", list(tools))


def shape_of(messages: Sequence[Mapping[str, Any]], tools: object) -> tuple[object, ...]:
    """What must be equal for the recorded answers to mean anything: roles, keys, and types; and
    values that are neither texts nor lists nor objects."""
    shape: list[object] = [tools is None]
    for message in messages:
        if len(message) == 2 and type(message["content"]) is str and next(iter(message)) == "role":
            shape.append(message["role"])
        else:
            shape.append(tuple(_field_shape(*field) for field in message.items()))
    return tuple(shape)


def _field_shape(key: str, value: Any) -> tuple[object, ...]:
    if key != "role" and type(value) in (str, list, dict):
        return (key, type(value))
    return (key, type(value), repr(value) if type(value) is float else value)  # 0.0 is not -0.0
