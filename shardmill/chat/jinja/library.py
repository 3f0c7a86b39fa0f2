"""What a chat template can use: filters, tests, functions and methods, as closed lists.

They do what Jinja's and transformers' do, and pay the sandbox for their work before they do it. A
name that is not here is a `SecurityError` that lists those that are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from shardmill.errors import missing_extra

try:
    from jinja2 import TemplateError, TemplateRuntimeError, filters, tests
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import LoopContext, Undefined
    from jinja2.sandbox import SandboxedFormatter
    from jinja2.utils import Namespace, pass_context, pass_environment
    from markupsafe import Markup
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing

if TYPE_CHECKING:
    from shardmill.chat.jinja.sandbox import TemplateSandbox

MAX_SPACING = 100  # characters that indent or separate JSON, or name what to sort by

Run = Callable[..., Any]
JINJA_FILTERS: dict[str, Any] = filters.FILTERS
JINJA_TESTS: dict[str, Any] = tests.TESTS


class LimitError(TemplateRuntimeError):
    """A template that would take more than its budget."""


class Function:
    """What a template can call: a global, or a method with the value it is a method of."""

    __slots__ = ("bound", "name", "run")

    def __init__(self, name: str, run: Run, *bound: Any) -> None:
        self.name, self.run, self.bound = name, run, bound

    def __eq__(self, other: object) -> NoReturn:
        # Those of Python are equal when their names are: a template could tell where it runs.
        raise SecurityError(f"the function {self.name!r} cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class ClosedList(dict[str, Run]):
    """Filters or tests. An unknown one is an error when it runs, as Jinja has it inside an `if`."""

    def __init__(self, what: str, known: Mapping[str, Run]) -> None:
        super().__init__(known)
        self.what = what

    def __missing__(self, name: object) -> Run:
        def run(*_: object, **__: object) -> NoReturn:
            refuse(self.what, name, self)

        return run

    def get(self, name: object, default: object = None) -> Run:  # noqa: ARG002
        return self[name] if isinstance(name, str) else self.__missing__(type(name).__name__)


def refuse(what: str, name: object, supported: Iterable[str]) -> NoReturn:
    names = ", ".join(sorted(supported)) or "none"
    raise SecurityError(f"{what} {str(name)[:50]!r} is not supported; supported: {names}")


# Ways to pay.


def _linear(run: Run, *, times: int = 1) -> Run:
    """A filter whose time and result are proportional to what it is given."""

    @pass_environment
    def paid(environment: TemplateSandbox, value: Any, *args: Any, **options: Any) -> Any:
        for operand in (value, *args, *options.values()):
            environment.spend(environment.weigh(operand, to_write=True) * times >> 4)
        return environment.checked(run(value, *args, **options))

    return paid


def _per_item(value: Iterable[Any]) -> int:
    """What arguments add to the steps of each item: names such as "a.b.c" are looked up."""
    return sum(len(part) for part in value if isinstance(part, str)) >> 2


def _each(name: str) -> Run:
    """A filter that looks at the items one by one: map, select and their like. Unlike Jinja's it
    has done so when it returns; what it returns can be read only once, like Jinja's."""

    @pass_context
    def paid(context: Any, value: Any, *args: Any, **options: Any) -> Iterator[Any]:
        environment: TemplateSandbox = context.environment
        items = environment.listed(value) if value else []
        environment.spend(len(items) * (1 + _per_item((*args, *options.values()))))
        return iter(list(JINJA_FILTERS[name](context, items, *args, **options)))

    return paid


def _ordered(name: str) -> Run:
    """A filter that compares or hashes the items."""

    @pass_environment
    def paid(environment: TemplateSandbox, value: Any, *args: Any, **options: Any) -> Any:
        items = environment.listed(value)
        size = environment.weigh(items, to_hash=name == "unique")
        for part in (*args, *options.values()):
            if isinstance(part, str):  # names to compare by, such as "a.b,c"
                if len(part) > MAX_SPACING:
                    raise LimitError(f"{name}: wanted an attribute of at most {MAX_SPACING}")
                size *= 1 + len(part)
        environment.spend((size >> 2) * len(items).bit_length())
        result = JINJA_FILTERS[name](environment, items, *args, **options)
        return iter(list(result)) if name == "unique" else result

    return paid


def _compare(name: str) -> Run:
    @pass_environment
    def paid(environment: TemplateSandbox, value: Any, other: Any) -> Any:
        return JINJA_TESTS[name](environment.weighed(value), other)

    return paid


def _text(name: str) -> Run:
    """A method of str that reads the text a few times at most."""

    def run(environment: TemplateSandbox, text: str, *args: Any) -> Any:
        environment.spend(len(text) >> 4)
        for arg in args:
            environment.weighed(arg)
        return environment.checked(getattr(text, name)(*args))

    return run


def _from_right(name: str) -> Run:
    """Python searches from the right in time len(text) * len(searched)."""

    def run(environment: TemplateSandbox, text: str, searched: Any, *args: Any) -> Any:
        longest = len(searched) if isinstance(searched, str) else 1
        environment.spend(len(text) * max(longest, 1) >> 4)
        return environment.checked(getattr(text, name)(searched, *args))

    return run


def _strip(name: str) -> Run:
    """Each character of the text is looked up in `chars`."""

    def run(environment: TemplateSandbox, text: str, chars: Any = None, /) -> Any:
        longest = len(chars) if isinstance(chars, str) else 1
        environment.spend(len(text) * longest >> 4)
        return environment.checked(getattr(text, name)(chars))

    return run


def _split(name: str) -> Run:
    def run(environment: TemplateSandbox, text: str, sep: Any = None, maxsplit: int = -1) -> Any:
        longest = len(sep) if isinstance(sep, str) and name == "rsplit" else 1
        environment.spend(len(text) * max(longest, 1) >> 4)
        pieces = str.count(text, sep) if isinstance(sep, str) and sep else len(text) >> 1
        environment.spend(min(pieces, maxsplit) if maxsplit >= 0 else pieces)
        return environment.checked(getattr(text, name)(sep, maxsplit))

    return run


def _splitlines(environment: TemplateSandbox, text: str, keepends: bool = False) -> Any:
    environment.spend(len(text))
    return environment.checked(text.splitlines(keepends))


def _pad(name: str) -> Run:
    def run(environment: TemplateSandbox, text: str, width: int, *fill: str) -> Any:
        environment.room(max(len(text), width))
        return environment.checked(getattr(text, name)(width, *fill))

    return run


def _replace(
    environment: TemplateSandbox, text: str, old: str, new: str, count: int | None = -1, /
) -> str:
    times = str.count(text, old)  # C's own: not what the template asks
    times = min(times, count) if count is not None and count >= 0 else times
    environment.room(len(text) + len(old) + times * len(new))
    return str(environment.checked(text.replace(old, new, -1 if count is None else count)))


def _join_texts(environment: TemplateSandbox, separator: str, texts: list[str]) -> str:
    """Through `concat`, so that a sandbox that follows pieces sees them."""
    pieces = [separator] * max(2 * len(texts) - 1, 0)
    pieces[::2] = texts
    return environment.concat(pieces)


def _join_method(environment: TemplateSandbox, separator: str, values: Iterable[Any]) -> str:
    texts = environment.listed(values)
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"sequence item {at}: expected str instance, {_kind(text)} found")
    if isinstance(separator, Markup):
        environment.room(sum(map(len, texts)) + len(texts) * len(separator))
        return str(environment.checked(separator.join(texts)))
    return _join_texts(environment, separator, texts)


def _kind(value: object) -> str:
    return type(value).__name__


def check_percent(environment: TemplateSandbox, text: str, args: object) -> None:
    """Pay for `text % args`. Every number in the text may be a width."""
    if re.search(r"%[-+ #0]*(?:\*|\d*\.\*)", text):
        raise SecurityError("a width of '*' is not supported in '%' formats: write it as a number")
    size = environment.weigh(args, to_write=True)
    environment.room(len(text) + _widths(text) + text.count("%") * size)


def _widths(text: str) -> int:
    """The sum of all numbers in a text; any of more than 12 digits is too large anyway."""
    return sum(int(digits[:13]) for digits in re.findall(r"\d+", text))


class _Formatter(SandboxedFormatter):
    """str.format with attributes and items as the sandbox gives them."""

    def __init__(self, environment: TemplateSandbox) -> None:
        super().__init__(environment)
        self.environment = environment
        self.size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            self.environment.room(_widths(format_spec))
            text = format(value, format_spec)
        else:
            text = self.environment.text_of(value)
        self.size += len(text)
        self.environment.room(self.size)
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            self.environment.weigh(value, to_write=True)
        return super().convert_field(value, conversion)


def _format_method(environment: TemplateSandbox, text: str, /, *args: Any, **options: Any) -> str:
    if isinstance(text, Markup):
        refuse("Markup attribute", "format", ())
    environment.spend(2 * len(text))
    return str(environment.checked(_Formatter(environment).vformat(text, args, options)))


def _counted(name: str) -> Run:
    """index and count of a list: every item is compared."""

    def run(environment: TemplateSandbox, items: Any, wanted: Any, *args: Any) -> Any:
        environment.spend(len(items) * (1 + (environment.weigh(wanted) >> 4)))
        return getattr(items, name)(wanted, *args)

    return run


# Filters.


@pass_environment
def _string(environment: TemplateSandbox, value: Any) -> str:
    return value if isinstance(value, str) else environment.text_of(value)


@pass_environment
def _safe(environment: TemplateSandbox, value: Any) -> str:
    # A text of a class of its own stays what it is; Markup is what Jinja makes of all others.
    if isinstance(value, str) and type(value) is not str:
        return value
    return Markup(environment.text_of(value))


@pass_environment
def _trim(environment: TemplateSandbox, value: Any, chars: str | None = None) -> Any:
    return _STRIP(environment, _string(environment, value), chars)


@pass_environment
def _join(
    environment: TemplateSandbox, value: Any, d: Any = "", attribute: str | int | None = None
) -> str:
    items = environment.listed(value)
    if attribute is not None:
        environment.spend(len(items) * (1 + _per_item([attribute])))
        items = list(map(filters.make_attrgetter(environment, attribute), items))
    texts = [environment.text_of(item) for item in items]
    return _join_texts(environment, environment.text_of(d), texts)


@pass_environment
def _replace_filter(
    environment: TemplateSandbox, s: Any, old: Any, new: Any, count: int | None = None
) -> str:
    text, old, new = map(environment.text_of, (s, old, new))
    return _replace(environment, text, old, new, count)


@pass_environment
def _format_filter(environment: TemplateSandbox, value: Any, *args: Any, **options: Any) -> Any:
    if args and options:
        raise TypeError("format: wanted positional or named values, not both")
    return environment.call_binop(None, "%", _string(environment, value), options or args)


@pass_environment
def _indent(
    environment: TemplateSandbox,
    s: str,
    width: int | str = 4,
    first: bool = False,
    blank: bool = False,
) -> str:
    environment.spend(len(s))  # lines
    indention = len(width) if isinstance(width, str) else width
    environment.room(len(s) + (len(s.splitlines()) + 1) * indention)
    return str(JINJA_FILTERS["indent"](s, width, first, blank))


@pass_environment
def _center(environment: TemplateSandbox, value: Any, width: int = 80) -> Any:
    return _PAD_CENTER(environment, _string(environment, value), width)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if not -300 <= precision <= 300:
        raise LimitError(f"round to {precision:,} places: wanted at most 300")
    return JINJA_FILTERS["round"](value, precision, method)


@pass_environment
def _reverse(environment: TemplateSandbox, value: Any) -> Any:
    if isinstance(value, str):
        return environment.checked(value[::-1])
    return reversed(environment.listed(value))


@pass_environment
def _sum(
    environment: TemplateSandbox,
    iterable: Any,
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    if isinstance(start, str):
        raise TypeError("sum() cannot add texts: use join")
    items = environment.listed(iterable)
    environment.spend(len(items) * (1 + _per_item([attribute])))
    getter = filters.make_attrgetter(environment, attribute)
    for item in items:
        start = environment.call_binop(None, "+", start, getter(item))
    return start


@pass_environment
def _items(environment: TemplateSandbox, value: Any) -> Iterator[Any]:
    if isinstance(value, Undefined):
        return iter(())
    if not isinstance(value, Mapping):
        raise TypeError(f"items: wanted a mapping, got a {_kind(value)}")
    return iter(environment.listed(value.items()))


@pass_environment
def _dictsort(environment: TemplateSandbox, value: Any, *args: Any, **options: Any) -> Any:
    size = environment.weigh(value)
    environment.spend((size >> 2) * len(value).bit_length())
    return JINJA_FILTERS["dictsort"](value, *args, **options)


@pass_environment
def _listed(environment: TemplateSandbox, value: Any) -> list[Any]:
    items = environment.listed(value)
    environment.hold(len(items))
    return items


@pass_environment
def _tojson(
    environment: TemplateSandbox,
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    size = environment.weigh(x)
    if indent is None and separators is None:
        environment.spend(4 + (size >> 4))
        text = json.dumps(x, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        environment.room(len(text))
        return text
    spaces = indent if isinstance(indent, int) else len(indent or "")
    if max(spaces, *map(len, separators or ("", ""))) > MAX_SPACING:
        raise LimitError(f"tojson: wanted an indent and separators of at most {MAX_SPACING}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks: list[str] = []
    size = 0
    for chunk in encoder.iterencode(x):
        environment.spend(4)
        size += len(chunk)
        environment.room(len(chunk))
        if size > environment.max_text:
            environment.room(size)
        chunks.append(chunk)
    return "".join(chunks)


# Functions.


def _range(environment: TemplateSandbox, *args: int) -> range:
    found = range(*args)
    if len(found) > environment.max_items:
        environment.hold(len(found))
    return found


def _dict(environment: TemplateSandbox, /, *args: Any, **options: Any) -> dict[Any, Any]:
    if len(args) > 1:
        raise TypeError(f"dict expected at most 1 argument, got {len(args)}")
    found: dict[Any, Any] = {}
    for arg in args:
        pairs = arg.items() if isinstance(arg, dict) else arg
        for pair in environment.listed(pairs):
            key, value = environment.listed(pair)
            found[environment.key(key)] = value
    return found | options


class PublicNamespace(Namespace):
    """A namespace without names that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no name {name[:50]!r}: remove the underscore")
        super().__setitem__(name, value)


def _namespace(environment: TemplateSandbox, /, *args: Any, **options: Any) -> PublicNamespace:
    found = PublicNamespace()
    for name, value in _dict(environment, *args, **options).items():
        if not isinstance(name, str):
            raise TypeError(f"a namespace's names are texts, not a {_kind(name)}")
        found[name] = value
    return found


def _raise_exception(environment: TemplateSandbox, message: Any) -> NoReturn:
    raise TemplateError(environment.text_of(message)[:1000])


def _strftime_now(environment: TemplateSandbox, format: str) -> str:
    if environment.now is None:
        raise SecurityError(
            "it asks for today's date (strftime_now), and equal input must give equal tokens: say "
            "which day it is with {template_date}"
        )
    if len(format) > 200:
        raise LimitError(f"strftime_now: a format of {len(format):,} characters: at most 200")
    return str(environment.checked(environment.now.strftime(format)))


def _changed(environment: TemplateSandbox, loop: LoopContext, *values: Any) -> bool:
    environment.weigh(values)
    return loop.changed(*values)


def _refused(name: str) -> Run:
    def run(*_: object, **__: object) -> NoReturn:
        refuse("function", name, _FUNCTIONS)

    return run


def _get(environment: TemplateSandbox, items: dict[Any, Any], key: Any, default: Any = None) -> Any:
    return items.get(environment.weighed(key), default)


# The lists.

_STRIP = _strip("strip")
_PAD_CENTER = _pad("center")

FILTERS: dict[str, Run] = {
    **{
        name: JINJA_FILTERS[name]
        for name in ("abs", "count", "d", "default", "first", "last", "length")
    },
    **{
        name: _linear(JINJA_FILTERS[name])
        for name in ("capitalize", "e", "escape", "float", "int", "lower", "upper")
    },
    "title": _linear(JINJA_FILTERS["title"], times=16),
    "wordcount": _linear(JINJA_FILTERS["wordcount"], times=4),
    **{name: _each(name) for name in ("map", "reject", "rejectattr", "select", "selectattr")},
    **{name: _ordered(name) for name in ("max", "min", "sort", "unique")},
    "center": _center,
    "dictsort": _dictsort,
    "format": _format_filter,
    "indent": _indent,
    "items": _items,
    "join": _join,
    "list": _listed,
    "replace": _replace_filter,
    "reverse": _reverse,
    "round": _round,
    "safe": _safe,
    "string": _string,
    "sum": _sum,
    "tojson": _tojson,
    "trim": _trim,
}


@pass_environment
def _in(environment: TemplateSandbox, value: Any, seq: Any) -> bool:
    return environment.contains(value, seq)


def _remainder(remainder: int) -> Run:
    @pass_environment
    def run(environment: TemplateSandbox, value: Any) -> bool:
        return bool(environment.call_binop(None, "%", value, 2) == remainder)

    return run


@pass_environment
def _divisibleby(environment: TemplateSandbox, value: Any, num: Any) -> bool:
    return bool(environment.call_binop(None, "%", value, num) == 0)


_PLAIN_TESTS = (
    *("boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number"),
    *("sameas", "sequence", "string", "true", "undefined"),
)
_COMPARISONS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"),
    *(">", "gt", "greaterthan", ">=", "ge"),
)
TESTS: dict[str, Run] = {
    **{name: JINJA_TESTS[name] for name in _PLAIN_TESTS},
    **{name: _compare(name) for name in _COMPARISONS},
    **{name: _linear(JINJA_TESTS[name]) for name in ("lower", "upper")},
    "divisibleby": _divisibleby,
    "even": _remainder(0),
    "in": _in,
    "odd": _remainder(1),
}

GLOBALS: dict[str, Run] = {
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}
_FUNCTIONS = tuple(GLOBALS)
for _name in ("cycler", "joiner", "lipsum"):  # of Jinja; so that the error says what there is
    GLOBALS[_name] = _refused(_name)

_TEXT_METHODS = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
    *("isspace", "istitle", "isupper", "lower", "partition", "removeprefix", "removesuffix"),
    *("startswith", "swapcase", "title", "upper"),
)


def _plain(name: str) -> Run:
    def run(environment: TemplateSandbox, value: Any, *args: Any) -> Any:  # noqa: ARG001
        return getattr(value, name)(*args)

    return run


def _cycle(environment: TemplateSandbox, loop: LoopContext, *values: Any) -> Any:  # noqa: ARG001
    return loop.cycle(*values)


METHODS: dict[type, dict[str, Run]] = {
    str: {
        **{name: _text(name) for name in _TEXT_METHODS},
        **{name: _from_right(name) for name in ("rfind", "rindex", "rpartition")},
        **{name: _strip(name) for name in ("strip", "lstrip", "rstrip")},
        **{name: _split(name) for name in ("split", "rsplit")},
        **{name: _pad(name) for name in ("center", "ljust", "rjust", "zfill")},
        "format": _format_method,
        "join": _join_method,
        "replace": _replace,
        "splitlines": _splitlines,
    },
    dict: {"get": _get, **{name: _plain(name) for name in ("items", "keys", "values")}},
    list: {name: _counted(name) for name in ("count", "index")},
    tuple: {name: _counted(name) for name in ("count", "index")},
    float: {"is_integer": _plain("is_integer")},
    LoopContext: {"changed": _changed, "cycle": _cycle},
}


@lru_cache(maxsize=128)
def methods_of(kind: type) -> Mapping[str, Run]:
    """The methods that a template can call on values of this type."""
    return next((METHODS[base] for base in METHODS if issubclass(kind, base)), {})


LOOP_VARIABLES = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0")
) | {"previtem", "nextitem"}
DICT_NAMES = frozenset(dir(dict))
