"""A chat template from a stranger: the text that transformers writes, or a TemplateError soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.jinja.sandbox import MAX_TEXT, Program, TemplateSandbox, context_of
from shardmill.errors import TemplateError
from tests.chat.sandbox_kit import CHATS, CLOCK, HOSTILE, LANGUAGE, LINES, WEATHER, Chat, said

transformers = pytest.importorskip("transformers.utils.chat_template_utils")

DATA = os.environ.get("SHARDMILL_REAL_DATA")
needs_templates = pytest.mark.skipif(DATA is None, reason="SHARDMILL_REAL_DATA is not set")
TEMPLATES = sorted(Path(DATA, "templates").glob("*/*.jinja")) if DATA else []
NOW = datetime(2024, 7, 26, 9, 30)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
REPOSITORY = Path(__file__).parent.parent.parent


class FixedDatetime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def _the_date_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "datetime", FixedDatetime)


def size(value: Any) -> int:
    """The characters of messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(size(key) + size(part) for key, part in value.items())
    return sum(map(size, value)) if isinstance(value, list) else 0


def by_transformers(source: str, chat: Chat, prompt: bool, **variables: Any) -> str | None:
    """What transformers renders; None if the template fails."""
    messages, tools = chat
    try:
        texts, _ = transformers.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            **variables,
        )
    except Exception:  # noqa: BLE001 - a template can raise anything
        return None
    assert isinstance(texts[0], str)
    return texts[0]


def by_sandbox(program: Program, chat: Chat, prompt: bool, **variables: Any) -> str | None:
    messages, tools = chat
    context = context_of(messages, tools, prompt=prompt, variables=variables)
    try:
        return "".join(program.pieces(context, size(messages)))
    except TemplateError:
        return None


def write(source: str, **context: Any) -> str:
    return "".join(TemplateSandbox(now=NOW).program(source).pieces(context, 100))


def refusal(source: str, **context: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        write(source, **context)
    return str(caught.value)


# The same text.


@needs_templates
def test_published_templates_are_there() -> None:
    assert len(TEMPLATES) >= 56


@needs_templates
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_published_template_writes_what_transformers_writes(path: Path) -> None:
    source = path.read_text()
    program = TemplateSandbox(now=NOW).program(source)
    cases = [(name, prompt) for name in CHATS for prompt in (False, True)]
    ours = {case: by_sandbox(program, CHATS[case[0]], case[1], **VARIABLES) for case in cases}
    theirs = {case: by_transformers(source, CHATS[case[0]], case[1], **VARIABLES) for case in cases}
    assert ours == theirs
    assert ours["answered", False] is not None


class Spans(TemplateSandbox):
    """Notes what is in generation blocks."""

    blocks: list[str]

    def started(self, input_size: int, num_messages: int = 0) -> Spans:
        fresh = super().started(input_size, num_messages)
        fresh.blocks = []
        return fresh

    def generated(self, text: str) -> str:
        self.blocks.append(text)
        return text


@needs_templates
@pytest.mark.parametrize(
    "path", [path for path in TEMPLATES if "training" in path.stem], ids=lambda path: path.stem
)
def test_generation_blocks_are_those_of_transformers(path: Path) -> None:
    source = path.read_text()
    sandbox = Spans(now=NOW)
    messages = CHATS["turns"][0]
    texts, spans = transformers.render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=True, **VARIABLES
    )
    run = sandbox.started(1000)
    context = context_of(messages, variables=VARIABLES)
    assert "".join(sandbox.program(source).pieces(context, 1000, sandbox=run)) == texts[0]
    assert run.blocks == [texts[0][start:stop] for start, stop in spans[0]]
    assert len(run.blocks) == 4


@pytest.mark.parametrize("line", range(len(LINES)), ids=lambda at: LINES[at][:30])
def test_the_language_is_that_of_transformers(line: int) -> None:
    program = TemplateSandbox(now=NOW).program(LINES[line])
    for chat in (CHATS["system"], CHATS["tools"]):
        for prompt in (False, True):
            theirs = by_transformers(LINES[line], chat, prompt, **VARIABLES)
            assert theirs is not None
            assert by_sandbox(program, chat, prompt, **VARIABLES) == theirs


FILTERS = (
    *("trim", "upper", "lower", "length", "string", "list", "first", "last", "tojson", "int"),
    *("float", "join", "sort", "unique", "reverse", "safe", "title", "capitalize", "abs"),
    *("sum", "max", "min", "items", "dictsort", "default('d')", "replace('a','<')", "e"),
    *("map('upper')", "select", "reject", "map(attribute='role')", "indent(2)", "center(5)"),
    *("round", "wordcount", "default('d',true)", "join(',')", "format(1)", "tojson(indent=1)"),
    *("sort(reverse=true)"),
)
METHODS = (
    *("strip()", "upper()", "split()", "split(',')", "items()", "keys()", "get('a')"),
    *("get('role','z')", "index('a')", "title()", "a", "role", "replace('a','b')"),
    *("startswith('a')", "join(['p','q'])", "splitlines()", "format(1)", "lstrip('<')"),
    *("rsplit('a',1)", "partition('a')", "count('a')", "find('a')", "isdigit()", "zfill(4)"),
)
TESTS = (
    *("defined", "string", "mapping", "sequence", "iterable", "none", "number", "odd", "even"),
    *("true", "lower", "in('ab')", "eq('a')", "boolean", "integer", "float", "undefined"),
    *("divisibleby(2)", "lt(2)"),
)
BINARY = ("+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", "in", "not in", "and", "or")


# Variables, since Jinja computes constants ahead, by other rules.
VALUES: dict[str, Any] = dict(
    zip(
        "abcdefghijklopqrs",
        (
            *("a<", " <b> ", "x,y\n", "", "%s", "role", 1, 0, -2, 2.5, None, True),
            *([], [3, 1], ["b", "a", "B"], {"a": 1}, {"b": "x", "A": []}),
        ),
        strict=True,
    )
)


def _expressions() -> st.SearchStrategy[str]:
    names = st.sampled_from([*VALUES, "messages", "messages[0]", "nothing", "n.x", "(a|safe)"])
    filters, methods, tests, binary = map(st.sampled_from, (FILTERS, METHODS, TESTS, BINARY))

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, filters).map(lambda parts: f"({parts[0]})|{parts[1]}"),
            st.tuples(inner, methods).map(lambda parts: f"({parts[0]}).{parts[1]}"),
            st.tuples(inner, tests).map(lambda parts: f"({parts[0]}) is {parts[1]}"),
            st.tuples(inner, binary, inner).map(lambda parts: f"({' '.join(parts)})"),
            st.tuples(inner, inner).map(lambda parts: f"[{parts[0]}, {parts[1]}]"),
            st.tuples(inner, st.sampled_from(["0", "-1", "'a'", "1:", ":-1", "::-1"])).map(
                lambda parts: f"({parts[0]})[{parts[1]}]"
            ),
            st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        )

    return st.recursive(names, grow, max_leaves=6)


@settings(max_examples=300)
@given(expression=_expressions(), loop=_expressions())
def test_any_expression_gives_what_transformers_gives(expression: str, loop: str) -> None:
    source = (
        "{% set n = namespace(x='q') %}{% for v in [1, " + loop + "] %}{% set n.x = v %}"
        "{{ " + expression + " }}{% endfor %}{% set b %}{{ " + expression + " }}{% endset %}{{ b }}"
    )
    theirs = by_transformers(source, CHATS["system"], False, **VALUES)
    context = context_of(CHATS["system"][0], variables=VALUES)
    ours, problem = None, ""
    try:
        ours = "".join(TemplateSandbox().program(source).pieces(context, 100))
    except TemplateError as error:
        problem = str(error)
    # Where an object is in memory is no text to train on; and what Jinja computes late may be an
    # error that it never meets.
    late = any(f"|{name}" in source for name in ("map", "select", "reject", "unique", "items"))
    assert ours == theirs or (ours is None and (late or "cannot be written as text" in problem))


# Hooks.


class Traced(str):
    """A text that says so."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


@pytest.mark.parametrize(
    "source",
    [
        "{{ x }}",
        "{{ x|string }}",
        "{{ x|safe }}",
        "{{ [x]|join }}",
        "{{ [x]|join(', ') }}",
        "{{ x|default('d') }}",
        "{% set y %}{{ x }}{% endset %}{{ y }}",
        "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(x) }}",
        "{% generation %}{{ x }}{% endgeneration %}",
        "{{ '' ~ x ~ '' }}",
        "{{ {'a': x}.a }}",
        "{{ {'a': x}.get('a') }}",
        "{{ [x][0] }}",
        "{{ [x]|first }}",
        "{{ [{'a': x}]|map(attribute='a')|join }}",
        "{% for y in [x] %}{{ y }}{% endfor %}",
    ],
)
def test_a_text_of_another_class_comes_through_as_it_is(source: str) -> None:
    text = Traced("words")
    pieces = [piece for piece in TemplateSandbox().program(source).pieces({"x": text}, 5) if piece]
    assert pieces == ["words"]
    assert pieces[0] is text


class Hooked(TemplateSandbox):
    """Writes down every call of a hook."""

    def enter_loop(self, value: object) -> str:
        return f"<{value}>"

    def generated(self, text: str) -> str:
        return f"[{text}]"

    def contains(self, item: Any, container: Any) -> bool:
        return not super().contains(item, container)

    def concat_operands(self, values: Any) -> str:
        return super().concat_operands([*values, "~"])

    def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:
        return super().call_binop(context, operator, left, right) if operator == "+" else operator


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{% for a in 'xy' %}{{ a }}{% endfor %}", "<x>x<y>y"),
        ("{% for a, b in ['xy'] %}{{ a }}{% endfor %}", "<None>x"),
        ("{% for a in [1, 2] if a > 1 %}{% else %}e{% endfor %}", "<2>"),
        ("{% set s %}{% for a in 'xy' %}{% endfor %}{% endset %}{{ s|upper }}", "<X><Y>"),
        (
            "{% macro m() %}{% for a in 'x' %}{% endfor %}{% endmacro %}{{ m()|length }}",
            "3",
        ),
        ("{% generation %}{% for a in 'x' %}{{ a }}{% endfor %}{% endgeneration %}", "[<x>x]"),
        ("{% for a in 'x' %}{% for a in 'y' %}{{ loop.index }}{% endfor %}{% endfor %}", "<x><y>1"),
        ("{{ 1 in [] }}{{ 1 not in [] }}", "TrueFalse"),
        ("{{ 'a' ~ 'b' }}", "ab~"),
        (
            "{{ 1 + 2 }}{{ 1 - 2 }}{{ 1 * 2 }}{{ 1 / 2 }}{{ 1 // 2 }}{{ 1 % 2 }}{{ 1 ** 2 }}",
            "3-*///%**",
        ),
    ],
)
def test_a_subclass_sees_what_a_template_does(source: str, written: str) -> None:
    assert "".join(Hooked().program(source).pieces({}, 10)) == written


def test_errors_of_the_code_around_a_template_pass_through() -> None:
    class Broken(TemplateSandbox):
        def generated(self, text: str) -> str:
            raise FileNotFoundError(text)

    program = Broken().program("{% generation %}a{% endgeneration %}")
    with pytest.raises(FileNotFoundError, match=r"^a$"):
        program.pieces({}, 0)


# Errors.


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ a.b.c }}", "the template raised UndefinedError, line 2: 'a' is undefined"),
        (
            "{{ raise_exception('No\n  such') }}",
            "the template raised TemplateError, line 1: No such",
        ),
        ("\n\n{% if %}", "the template raised TemplateSyntaxError, line 3: Expected an expression"),
        (
            "{% macro m() %}\n{{ 1 + 'a' }}{% endmacro %}\n{{ m() }}",
            "the template raised TypeError, line 2: unsupported operand type(s) for +: 'int' and "
            "'str'",
        ),
        (
            "{% set n = namespace(_a=1) %}",
            "the template raised SecurityError, line 1: a namespace has no name '_a': remove the "
            "underscore",
        ),
        (
            "{{ [1].append(2) }}",
            "the template raised SecurityError, line 1: list attribute 'append' is not supported; "
            "supported: count, index",
        ),
        (
            "{{ lipsum() }}",
            "the template raised SecurityError, line 1: function 'lipsum' is not supported; "
            "supported: dict, namespace, raise_exception, range, strftime_now",
        ),
        (
            "{% include 'a' %}",
            "the template raised TemplateSyntaxError, line 1: {% include %} is not supported: a "
            "chat template is one file, without blocks",
        ),
        (
            "{{ range(100101) }}",
            "the template raised LimitError, line 1: a list of 100,101 items: at most 100,100 for "
            "these messages",
        ),
    ],
)
def test_an_error_says_what_and_where(source: str, message: str) -> None:
    assert refusal(source).startswith(message)


def test_a_filter_that_is_not_supported_is_an_error_only_where_it_runs() -> None:
    unknown = "{{ x|urlize }}{{ 'a'|nothing }}{{ 'a' is callable }}"
    assert write(f"{{% if false %}}{unknown}{{% endif %}}b") == "b"
    assert "filter 'urlize' is not supported; supported: abs, capitalize" in refusal(
        "{{ 'a'|urlize }}"
    )


def test_the_date_is_the_one_given_or_an_error_that_says_how_to_give_one() -> None:
    source = "{{ strftime_now('%d %B %Y') if strftime_now is defined }}"
    assert write(source) == "26 July 2024"
    with pytest.raises(TemplateError, match="which day it is with template_date"):
        TemplateSandbox().program(source).pieces({}, 0)


# Budgets.

CHILD = """
import gc, json, resource, sys, time
from datetime import datetime
from shardmill.chat.jinja.engine import TracedSandbox
from shardmill.chat.jinja.sandbox import context_of
from shardmill.chat.jinja.values import traced_messages
from tests.chat.sandbox_kit import HOSTILE
names = json.loads(sys.stdin.read())
pages = int(open("/proc/self/statm").read().split()[0])
more = pages * resource.getpagesize() + 200 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (more, more))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
sandbox = TracedSandbox(now=datetime(2024, 7, 26))
context = context_of([{"role": "user", "content": "Hi"}])
context["messages"] = traced_messages(sandbox.trace, context["messages"])
for name in names:
    started = time.process_time()
    try:
        "".join(sandbox.program(HOSTILE[name]).pieces(context, 6))
        found, message = "nothing", ""
    except BaseException as problem:
        found, message = type(problem).__name__, str(problem)
        del problem
    seconds = time.process_time() - started
    gc.collect()
    print(json.dumps([name, found, message, seconds, (peak() - before) / 1024]), flush=True)
"""


def run_hostile(names: list[str], seed: str = "0") -> dict[str, tuple[str, str, float, float]]:
    """Name -> class and message of the error, CPU seconds, MiB that the process has grown by."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = map(json.loads, done.stdout.splitlines())
    return {name: (found, message, seconds, grown) for name, found, message, seconds, grown in rows}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("group", range(3))
def test_a_hostile_template_ends_as_a_template_error_in_little_memory(group: int) -> None:
    names = list(HOSTILE)[group::3]
    found = run_hostile(names)
    assert {name: row[0] for name, row in found.items()} == dict.fromkeys(names, "TemplateError")
    assert "MemoryError" not in " ".join(row[1] for row in found.values())
    assert max(row[3] for row in found.values()) < 150
    if "SHARDMILL_SHOW" in os.environ:
        for name, row in found.items():
            print(f"{row[2]:5.2f} s {row[3]:4.0f} MiB {name}: {row[1][:90]}")


COUNTED = ("macro doubles", "shared, written", "kept texts", "map", "tojson twice", "sort texts")


def test_budgets_are_counted_so_every_process_stops_at_the_same_point() -> None:
    names = list(COUNTED)
    first, second = run_hostile(names, seed="1"), run_hostile(names, seed="2")
    assert {name: row[:2] for name, row in first.items()} == {
        name: row[:2] for name, row in second.items()
    }


def steps_of(sandbox: TemplateSandbox, source: str, context: dict[str, Any]) -> int:
    run = sandbox.started(1000)
    sandbox.program(source).pieces(context, 1000, sandbox=run)
    return run.max_steps - run.steps


def test_a_budget_depends_on_nothing_but_template_and_input() -> None:
    source = LANGUAGE
    context = context_of(CHATS["system"][0], variables=VARIABLES)
    sandbox = TemplateSandbox(now=NOW)

    def deep(levels: int) -> int:
        return deep(levels - 1) if levels else steps_of(sandbox, source, context)

    assert steps_of(sandbox, source, context) == deep(200) > 500
    assert steps_of(TemplateSandbox(now=NOW), source, context) == deep(1)


def test_every_rendering_has_a_full_budget() -> None:
    program = TemplateSandbox().program("{% for i in range(90000) %}{% endfor %}{{ x }}")
    for number in range(30):
        assert program.pieces({"x": number}, 0)[-1] == str(number)


def test_output_has_room_for_64_times_the_messages() -> None:
    program = TemplateSandbox().program("{{ x }}" * 65)
    text = "a" * (MAX_TEXT // 64)
    assert "".join(program.pieces({"x": text}, len(text))) == text * 65
    with pytest.raises(TemplateError, match="it writes more than 1,048,576 characters"):
        program.pieces({"x": text}, 0)


def test_calls_go_sixty_deep_and_no_deeper() -> None:
    source = "{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(N) }}"
    assert write(source.replace("N", "59")).endswith("3210")
    assert "more than 60 macros or loops that call each other" in refusal(source.replace("N", "60"))


@needs_templates
@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_two_thousand_messages_with_tools_pass(path: Path) -> None:
    function = {"name": "get_weather", "arguments": {"city": "B"}}
    calling = {"id": "call00001", "type": "function", "function": function}
    turn = [
        *said(("user", "Hi")),
        {"role": "assistant", "content": "", "tool_calls": [calling]},
        {"role": "tool", "content": "1", "tool_call_id": "call00001", "name": "get_weather"},
        *said(("assistant", "Ok")),
    ]
    program = TemplateSandbox(now=NOW).program(path.read_text())
    plain = said(("user", "a"), ("assistant", "b")) * 1000
    cases: list[Chat] = [(turn * 500, [WEATHER, CLOCK]), (plain, None)]
    for chat in cases:
        # A template may refuse tools: then it must refuse the first few too.
        few = (chat[0][:8], chat[1])
        assert (by_sandbox(program, chat, False, **VARIABLES) is None) == (
            by_sandbox(program, few, False, **VARIABLES) is None
        )
