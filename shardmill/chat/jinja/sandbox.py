"""Run a chat template from a stranger: exactly as transformers runs it, but within a budget.

A template is a program. Here it reaches only what chat templates use (FILTERS, TESTS, METHODS, and
the globals), and pays in steps for what it does before it does it. Steps are counted and nothing is
timed, so equal input gives an equal result on every machine. A step takes about a microsecond. It
pays for one loop iteration, call or item looked at, for 8 items or 16 characters copied, and for 4
nodes of the syntax tree each time a loop or macro runs them. Whatever goes wrong is a
`TemplateError` with the template's line.

A subclass can override `enter_loop`, `generated`, `concat`, `contains`, `call_binop`, `getattr`,
`getitem`, `call` and `text_of` to see where each piece of the output comes from. Its values are
subclasses of str; a piece that is one comes out as it is.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from datetime import datetime
from operator import length_hint
from types import MappingProxyType
from typing import Any, Self

from shardmill.chat.jinja.compiling import (
    MAX_NESTING,
    Generation,
    SandboxCode,
    check_tree,
    computed_ahead,
    pay_for_bodies,
)
from shardmill.chat.jinja.library import (
    DICT_NAMES,
    FILTERS,
    GLOBALS,
    LOOP_VARIABLES,
    TESTS,
    ClosedList,
    Function,
    LimitError,
    check_percent,
    methods_of,
    refuse,
)
from shardmill.errors import ShardmillError, TemplateError, missing_extra

try:
    from jinja2 import Template, TemplateSyntaxError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import loopcontrols
    from jinja2.runtime import LoopContext, Macro, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have 20,000
MAX_STEPS, STEPS_PER_CHARACTER = 500_000, 4  # per character of the messages
STEPS_PER_PAIR = 2  # of messages: some published templates compare each with each
MAX_TEXT, TEXT_PER_CHARACTER = 2**20, 64  # characters of the output, and of any other text
MAX_ITEMS = 100_000  # of a list or range, plus one for each character of the messages
MAX_NUMBER_BITS = 2048
MAX_KEY_BITS = 60  # from 2**61 - 1 on, numbers can be chosen whose hashes are all the same
MAX_CALLS = 60  # macros and recursive loops inside each other

_NOT_THE_TEMPLATE = (ShardmillError, ImportError, OSError)
"""Nothing in a template can raise these: they come from the code around it."""
_MISSING = object()
_OPERANDS = (str, int, float, list, tuple, dict, type(None), Undefined)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates, and gives each rendering its own copy with a full budget.

    now: what `strftime_now` formats, always; None if a template may not ask for the date.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset("+-")

    def __init__(self, *, now: datetime | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants too are computed when a budget exists
            extensions=[Generation, loopcontrols],
        )
        self.code_generator_class = SandboxCode
        self.filters: Any = ClosedList("filter", FILTERS)
        self.tests: Any = ClosedList("test", TESTS)
        self.globals = {name: Function(name, run) for name, run in GLOBALS.items()}
        self.now = now
        self.steps = self.max_steps = self.max_text = self.max_items = self.calls = 0

    def program(self, source: str) -> Program:
        """The template, compiled; TemplateError if that is not possible."""
        return Program(self, source)

    def started(self, input_size: int, num_messages: int = 0) -> Self:
        """A copy with a full budget, for one rendering of messages of so many characters."""
        fresh = object.__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        fresh.max_steps = MAX_STEPS + STEPS_PER_CHARACTER * input_size
        fresh.max_steps += STEPS_PER_PAIR * num_messages**2
        fresh.steps = fresh.max_steps
        fresh.max_text = MAX_TEXT + TEXT_PER_CHARACTER * input_size
        fresh.max_items = MAX_ITEMS + input_size
        return fresh

    # The budget.

    def spend(self, steps: int) -> bool:
        self.steps -= steps
        if self.steps < 0:
            raise LimitError(
                f"more than {self.max_steps:,} steps for these messages: loops, calls and texts "
                "must grow no faster than the conversation"
            )
        return True

    def room(self, characters: int) -> None:
        """Pay for a text before it is made."""
        if characters > self.max_text:
            raise LimitError(
                f"a text of {characters:,} characters: at most {self.max_text:,} for these messages"
            )
        self.spend(max(characters, 0) >> 4)

    def hold(self, items: int) -> None:
        """Pay for a list before it is made."""
        if items > self.max_items:
            raise LimitError(
                f"a list of {items:,} items: at most {self.max_items:,} for these messages"
            )
        self.spend(max(items, 0) >> 3)

    def checked(self, value: Any) -> Any:
        """Pay for a value that was just made from others of about its size."""
        if isinstance(value, str):
            self.room(len(value))
        elif isinstance(value, (list, tuple)):
            self.hold(len(value))
        elif isinstance(value, int):
            self._number(value.bit_length())
        return value

    def _number(self, bits: int) -> None:
        if bits > MAX_NUMBER_BITS:
            raise LimitError(f"a number of {bits:,} bits: at most {MAX_NUMBER_BITS:,}")

    def weigh(self, value: object, *, to_write: bool = False, to_hash: bool = False) -> int:
        """Pay for walking through a value; its size in items and characters.

        Lists can share their parts: forty steps of `[x, x]` are 2**40 parts to write, compare or
        hash. Each is paid for as often as it is met, and before it is.
        """
        if isinstance(value, str):
            self.spend(len(value) >> 4)
            return len(value)
        size, level = 0, [value]
        for _ in range(MAX_NESTING):
            deeper: list[object] = []
            for part in level:
                more = 1
                if isinstance(part, str):
                    more += len(part)
                    self.spend(len(part) >> 4)
                elif to_hash and isinstance(part, int) and part.bit_length() > MAX_KEY_BITS:
                    raise LimitError(f"a key with a number of more than {MAX_KEY_BITS} bits")
                elif part is None or isinstance(part, (int, float, Undefined, range)):
                    pass
                elif isinstance(part, dict):
                    self.spend(2 * len(part) + 1)
                    deeper += part
                    deeper += part.values()
                elif isinstance(part, (list, tuple, KeysView, ValuesView, ItemsView)):
                    self.spend(len(part) + 1)
                    deeper += part
                elif to_write:
                    raise SecurityError(f"a {type(part).__name__} cannot be written as text")
                size += more
            if not deeper:
                return size
            level = deeper
        raise LimitError(f"a value with more than {MAX_NESTING} lists inside each other")

    def weighed(self, value: Any) -> Any:
        """The value, once it was paid for that something compares or hashes it."""
        if not (value is None or isinstance(value, (int, float))):
            self.weigh(value)
        return value

    def key(self, value: Any) -> Any:
        """The value, once it was paid for that something keeps it as a key."""
        if type(value) is not str:
            self.weigh(value, to_hash=True)
        return value

    def looped(self, values: Any) -> Any:
        """What a loop runs over. Not over another's `loop`: a thousand of them inside each other
        would take a thousand calls for each item."""
        if isinstance(values, LoopContext):
            raise SecurityError("a loop over `loop` is not supported")
        return values

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """The items as a list, each paid for."""
        self.spend(length_hint(values))
        return list(values)

    # What templates do; a subclass may do it its own way.

    def enter_loop(self, value: object) -> str:  # noqa: ARG002
        """What is written at the start of each loop body.

        value: what the loop runs over now, if it gives it one name; else None.
        """
        return ""

    def generated(self, text: str) -> str:
        """What is written for the text of a generation block."""
        return text

    def generation(self, caller: Callable[[], str]) -> str:
        return self.generated(caller())

    def text_of(self, value: Any) -> str:
        """The value as `{{ }}` writes it."""
        if isinstance(value, str) or value is None or isinstance(value, (int, float, Undefined)):
            return str(value)
        self.weigh(value, to_write=True)
        text = str(value)
        self.room(len(text))
        return text

    def written(self, value: Any) -> str:
        return value if type(value) is str else self.text_of(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """The pieces as one text: of a macro, a block, a join or `~`."""
        found = [piece for piece in pieces if piece]
        if len(found) == 1:
            return found[0]
        self.room(sum(map(len, found)))
        return "".join(found)

    def concat_operands(self, values: Iterable[Any]) -> str:
        """`a ~ b ~ c`"""
        return self.concat([self.text_of(value) for value in values])

    def contains(self, item: Any, container: Any) -> bool:
        """`item in container`"""
        if isinstance(container, str):
            self.spend(len(container) >> 4)
        elif isinstance(container, dict):
            self.weighed(item)
        else:
            each = 1 + (self.weigh(item) >> 4 if isinstance(item, (str, list, tuple, dict)) else 0)
            self.spend(each * length_hint(container))
        return bool(item in container)

    def add(self, context: object, *operands: Any) -> Any:
        """`a + b + c`: texts at once, all else two by two."""
        for operand in operands:
            if type(operand) is not str:
                break
        else:
            size = sum(map(len, operands))
            self.steps -= size >> 4
            if self.steps < 0 or size > self.max_text:
                self.room(size)
            return "".join(operands)
        total, *others = operands
        for operand in others:
            total = self.call_binop(context, "+", total, operand)
        return total

    def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        if operator == "%" and isinstance(left, str):
            check_percent(self, left, right)
        elif not (isinstance(left, _OPERANDS) and isinstance(right, _OPERANDS)):
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            raise TypeError(f"unsupported operand types for {operator}: {kinds}")
        elif operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.room(len(left) + len(right))
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                self.hold(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, str):
                    self.room(len(many) * times)
                elif isinstance(times, int) and isinstance(many, (list, tuple)):
                    self.hold(len(many) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() * right)
        return self.checked(self.binop_table[operator](left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`: a method if the type has one of this name, else the item."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        found = self._attribute(obj, kind, attribute)
        if found is not _MISSING:
            return found
        try:
            return obj[attribute]
        except (TypeError, LookupError):
            return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`: the item, else the attribute; `argument` may be a slice."""
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        if type(argument) is slice:
            return self.checked(obj[argument])
        if not isinstance(argument, (str, int)):
            self.weighed(argument)
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                found = self._attribute(obj, type(obj), str(argument))
                if found is not _MISSING:
                    return found
        return self.undefined(obj=obj, name=argument)

    def _attribute(self, obj: Any, kind: type[Any], name: str) -> Any:
        if kind is LoopContext and name in LOOP_VARIABLES:
            return getattr(obj, name)
        if issubclass(kind, Namespace) and not name.startswith("_"):
            return getattr(obj, name, _MISSING)
        if issubclass(kind, Undefined):
            return obj._fail_with_undefined_error()
        methods = methods_of(kind)  # type: ignore[arg-type] # every type can be hashed
        if name in methods:
            return Function(name, methods[name], obj)
        if kind is Function or name.startswith("__") or hasattr(obj, name):
            refuse(f"{kind.__name__} attribute", name, methods)
        return _MISSING

    def call(self, context: object, function: Any, /, *args: Any, **options: Any) -> Any:  # noqa: ARG002
        self.spend(1 + len(args) + len(options))
        kind = type(function)
        if kind is Function:
            return function.run(self, *function.bound, *args, **options)
        if kind is Macro or kind is LoopContext:
            # Counted, because how deep Python can go depends on who calls us.
            if self.calls >= MAX_CALLS:
                raise LimitError(f"more than {MAX_CALLS} macros or loops that call each other")
            if kind is LoopContext:
                args = tuple(map(self.looped, args))
            self.calls += 1
            try:
                return function(*args, **options)
            finally:
                self.calls -= 1
        if isinstance(function, Undefined):
            return function()  # its own error says what is undefined
        raise SecurityError(f"a {kind.__name__} cannot be called in a chat template")


class Program:
    """One compiled template."""

    def __init__(self, sandbox: TemplateSandbox, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"the template has {len(source):,} characters: wanted at most {MAX_SOURCE:,}"
            )
        try:
            tree = sandbox.parse(source)
            check_tree(tree)
            # transformers has no budget when it compiles: what it computes then is tried here.
            ahead: list[nodes.Expr] = []
            computed_ahead(tree, ahead)
            tree.body[:0] = [nodes.ExprStmt(one).set_lineno(one.lineno) for one in ahead]
            follows = type(sandbox).enter_loop is not TemplateSandbox.enter_loop
            self._cost = pay_for_bodies(tree, tell_loops=follows)
            tree.set_environment(sandbox)
            code = sandbox.compile(tree)
            self._template = Template.from_code(sandbox, code, {})
        except _NOT_THE_TEMPLATE:
            raise
        except Exception as problem:  # of Jinja's parser, or of Python's
            line = getattr(problem, "lineno", None) if _is_jinja(problem) else None
            raise _as_template_error(problem, line) from problem
        self.sandbox = sandbox

    def pieces(
        self,
        context: Mapping[str, Any],
        input_size: int,
        *,
        sandbox: TemplateSandbox | None = None,
    ) -> list[str]:
        """What the template writes, in order. Every call has a full budget.

        context: the variables; `context_of` makes those of transformers.
        input_size: the characters of the messages, which the budget grows with.
        sandbox: a `started` copy to use, for whoever wants to read what it collected.
        """
        messages = context.get("messages")
        run = sandbox or self.sandbox.started(
            input_size, len(messages) if isinstance(messages, list) else 0
        )
        written: list[str] = []
        size = 0
        try:
            run.spend(1 + (self._cost >> 2))
            names = run.context_class(run, {**run.globals, **context}, None, {})
            for piece in self._template.root_render_func(names, environment=run):  # type: ignore[call-arg]
                size += len(piece)
                if size > run.max_text:
                    raise LimitError(f"it writes more than {run.max_text:,} characters")
                written.append(piece)
        except _NOT_THE_TEMPLATE:
            raise
        except Exception as problem:  # a template can raise anything that Python can
            raise _as_template_error(problem, self._line_of(problem)) from problem
        return written

    def _line_of(self, problem: Exception) -> int | None:
        """The innermost line of the template that ran."""
        found, trace = None, problem.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__jinja_template__") is self._template:
                found = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return found


def context_of(
    messages: Iterable[Mapping[str, Any]],
    tools: object = None,
    *,
    prompt: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The variables that transformers gives a template. Reasoning has all the names it goes by."""
    named = []
    for message in messages:
        names = ("reasoning_content", "thinking", "reasoning")
        thoughts = next((message[name] for name in names if message.get(name) is not None), None)
        own = dict(message)
        if thoughts is not None:
            own = {"thinking": thoughts, **own, "reasoning_content": thoughts}
        named.append(own)
    given = {"messages": named, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    return {**given, **variables}


def _is_jinja(problem: Exception) -> bool:
    return isinstance(problem, TemplateSyntaxError)


def _as_template_error(problem: Exception, line: int | None) -> TemplateError:
    where = "" if line is None else f", line {line}"
    message = " ".join(str(problem)[:2000].split())[:300] or "no message"
    if isinstance(problem, RecursionError):
        message = "it is nested too deeply, or calls itself without end"
    return TemplateError(
        f"the template raised {type(problem).__name__}{where}: {message}", template_date=...
    )
